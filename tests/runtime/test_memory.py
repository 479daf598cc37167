"""The memory plan: published byte counts, tensors that are really made, and settings that just fit."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves as parts

from kimi_fx.admit import longest, plan
from kimi_fx.checkpoint.configs import read_drafter, read_target
from kimi_fx.compose import load_config
from kimi_fx.engine import Engine
from kimi_fx.graphs import step
from kimi_fx.graphs.axis import Axis
from kimi_fx.graphs.params import Experts, Params, drafter_plan, target_plan
from kimi_fx.graphs.pytree import tree_leaves, tree_map
from kimi_fx.graphs.state import Model, Shape, empty_state
from kimi_fx.ops import KERNELS
from kimi_fx.runtime.buckets import Bucket, Chunk
from kimi_fx.runtime.compiled import example
from kimi_fx.runtime.load import prepare
from kimi_fx.runtime.memory import Ask, available, check_memory, largest, memory, workspace
from kimi_fx.runtime.pages import Pages

CONF = Path(__file__).parents[2] / "conf"
BF16, CUDA = torch.bfloat16, torch.device("cuda")
K2_6 = ["target=kimi_k2_6", "drafter=kimi_k2_6_dflash", "step=tree", "mesh.tp=8"]


@pytest.fixture(scope="module")
def kimi() -> Model:
    target = read_target(CONF / "target" / "kimi_k2_6", None)
    drafter = read_drafter(CONF / "drafter" / "kimi_k2_6_dflash", target, 4096, None)
    return Model(target, drafter, KERNELS, Axis("0", 8))


def asked(model: Model, *words: str) -> Ask:
    config = load_config([*K2_6, *words])
    return Ask(config, plan(config, model, config.step.mode, config.step.budget), longest(config, model))


def test_a_rank_of_kimi_k2_6(kimi: Model) -> None:
    """Published bytes."""
    found = memory(asked(kimi), kimi, BF16, CUDA)
    assert found.target.stored == 76_182_593_536
    rank_and_frequencies = 8 + 32 * 4
    assert found.target.held == found.target.stored + rank_and_frequencies
    assert found.row == 70_272 and found.pool == 4 * 262_144
    assert found.draft_row == 6 * 2 * 128 * 2  # one key/value head of 8
    for drafted in ("fc", "kv"):
        assert getattr(drafter_plan(kimi.drafter, 8), drafted).axes.count("tp") == 1
    assert 0.85e9 < found.drafter.stored < 0.9e9


def test_the_longest_context(kimi: Model) -> None:
    """262,144 tokens of one request fit eight ranks of 139 GB; what a chunk of a prompt computes in does not grow with
    what lies before it, so that 200,000 tokens are prefilled in the memory of 512."""
    ask = asked(kimi, "run.batch=1")
    found, short = (
        check_memory(ask, kimi, BF16, CUDA, 139e9),
        memory(asked(kimi, "cache.max_len=1024"), kimi, BF16, CUDA),
    )
    assert ask.max_len == found.pool == 262_144 and found.kv == 262_144 * (70_272 + 6 * 2 * 128 * 2)
    chunks = [{name: size for name, size in m.steps if name.startswith("prefill")} for m in (found, short)]
    assert chunks[0] == chunks[1] and max(chunks[0].values()) < 1.1e9
    state = empty_state(1, 4096, kimi.target.V, torch.device("meta"))
    assert state.page_table.shape == (1, 262_144 // 64)
    assert found.state == sum(leaf.nbytes for leaf in tree_leaves(state))
    pages = Pages(found.pool // 64)
    held = pages.take(200_000 + 256)
    assert held is not None and len(held) == 3129 and pages.take(262_144 - 3129 * 64 + 1) is None


def test_a_loaded_pair_takes_what_was_planned(loaded, make_engine) -> None:
    engine = make_engine("cache.max_len=200", "run.batch=3")
    found = memory(Ask(engine.config, engine.plan, engine.max_len), loaded.model, loaded.dtype, loaded.device)
    leaves = [leaf for leaf in tree_leaves(loaded.params) if leaf is not None]
    assert found.weights == sum(leaf.nbytes for leaf in leaves)
    assert found.kv == sum(leaf.nbytes for leaf in tree_leaves(engine.pool))
    assert found.state == sum(leaf.nbytes for leaf in tree_leaves(engine.state))


@pytest.mark.parametrize("more", [[], ["run.batch=9"], ["cache.tokens=2000000"], ["run.batch=64", "step.budget=127"]])
def test_settings_that_just_fit(kimi: Model, more: list[str]) -> None:
    """Each of those named in a refusal fits alone, and one more of it does not."""
    room = 139e9
    with pytest.raises(ValueError, match="a rank has 139.0 GB and needs .*: use cache") as error:
        check_memory(asked(kimi, *more), kimi, BF16, CUDA, room)
    ways = [way.split("=") for way in str(error.value).rpartition("use ")[2].rstrip(".").split(" or ")]
    for key, value in ways:
        unit = 64 if key.startswith("cache") else 1
        check_memory(asked(kimi, *more, f"{key}={value}"), kimi, BF16, CUDA, room)
        with pytest.raises(ValueError):
            check_memory(asked(kimi, *more, f"{key}={int(value) + unit}"), kimi, BF16, CUDA, room)
    pooled = "cache.tokens" if more and "tokens" in more[0] else "cache.max_len"
    assert ways[0][0] == pooled and (len(ways) > 1) == (pooled == "cache.max_len")


def test_a_smaller_budget_is_named_where_it_would_do(kimi: Model) -> None:
    ask = asked(kimi, "step.budget=127", "run.batch=32", "cache.tokens=640000")
    least = memory(asked(kimi, "step.budget=31", "run.batch=32", "cache.tokens=640000"), kimi, BF16, CUDA).total
    with pytest.raises(ValueError, match=r"step\.budget=31\."):
        check_memory(ask, kimi, BF16, CUDA, least)


def test_weights_alone_are_too_much(kimi: Model) -> None:
    with pytest.raises(ValueError, match=r"no context, batch or budget is small enough, raise mesh\.tp"):
        check_memory(asked(kimi), kimi, BF16, CUDA, 60e9)


def test_the_engine_refuses_before_it_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    ready = load_config(["device=cpu", "dtype=float32"])
    monkeypatch.setattr("kimi_fx.engine.available", lambda *_: (1e6, ""))
    with pytest.raises(ValueError, match=r"a rank has 1\.0 MB and its weights take 100\.6 MB: use a machine"):
        Engine(ready, prepare(ready))


def test_largest() -> None:
    assert [largest(9, lambda n, most=most: n <= most) for most in range(12)] == [*range(10), 9, 9]
    assert largest(-1, lambda n: True) == 0


def test_what_this_machine_has() -> None:
    free, what = available(torch.device("cpu"), 2)
    assert free is not None and free > 1e6 and what == "available, one of 2 parts"


class Live(TorchDispatchMode):
    """Counts the bytes of results while they are alive, but those in `given`."""

    def __init__(self, given: list[torch.Tensor]) -> None:
        super().__init__()
        self.given = {StorageWeakRef(x.untyped_storage()).cdata for x in given}
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.alive = {key: held for key, held in self.alive.items() if not held[0].expired()}
        for tensor in parts(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                held = StorageWeakRef(storage)
                if held.cdata not in self.given:
                    self.alive[held.cdata] = (held, storage.nbytes())
        self.most = max(self.most, sum(size for _, size in self.alive.values()))
        return out


@pytest.mark.parametrize("bucket", [Shape(1, 1, 1, 1), Shape(4, 16, 8, 15), Shape(2, 128, 8, 127), Chunk(512)])
def test_a_step_takes_no_more_than_estimated(kimi: Model, bucket: Bucket) -> None:
    """Against a step of true widths over tensors without data, which sees all but the insides of operators."""
    assert kimi.drafter is not None
    t, d = replace(kimi.target, layers=3, E=16), replace(kimi.drafter, taps=(0, 1, 2), layers=2)
    model = Model(t, d, KERNELS)

    def node(part):
        if not isinstance(part, Experts):
            return torch.empty(part.shape, dtype=part.dtype or BF16)
        words = (torch.empty(t.E, n // 16, 2 * m, dtype=torch.int32) for n, m in ((t.D, 2 * t.I), (t.I, t.D)))
        scales = (torch.empty(t.E, n // 32, m, dtype=BF16) for n, m in ((t.D, 2 * t.I), (t.I, t.D)))
        w13, w2, s13, s2 = *words, *scales
        return Experts(w13, s13, w2, s2)

    with FakeTensorMode(), torch.no_grad():
        plans = Params(target_plan(t), drafter_plan(d))
        params = tree_map(node, plans, is_leaf=lambda part: isinstance(part, Experts))
        arguments = example(bucket, params, model)
        with Live([leaf for leaf in tree_leaves(arguments[:3]) if leaf is not None]) as live:
            (step.prefill_step if isinstance(bucket, Chunk) else step.ddtree_step)(*arguments)
    estimate = workspace(bucket, model, BF16, on_cuda=True, context=64)
    assert live.most <= estimate <= 9 * live.most
