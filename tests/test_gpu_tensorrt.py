"""TensorRT engines of the drafter's dense parts on a CUDA device: against fp64, captured, and from the store."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from kimi_fx import SamplingParams
from kimi_fx.bench.acceptance import pool as pooled
from kimi_fx.compose import load_config
from kimi_fx.engine import Engine
from kimi_fx.runtime import rounds, tensorrt
from kimi_fx.runtime.builders import build_all
from kimi_fx.runtime.load import Loaded, load
from kimi_fx.runtime.rounds import eager

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("torch_tensorrt") is None, reason="needs torch_tensorrt"),
    pytest.mark.filterwarnings("ignore"),  # of the package, when it is imported
]
WORDS = ["device=cuda", "dtype=bfloat16", "run.batch=4", "run.nodes=[16]", "run.chunk=64", "cache.max_len=512"]
ASKED = [*WORDS, "drafter.backend=tensorrt", "run.compile=true"]


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    return load(load_config(WORDS), progress=False)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KIMI_FX_CACHE", str(folder := tmp_path_factory.mktemp("cache")))
        yield folder


@pytest.fixture(scope="module")
def engine(loaded: Loaded, cache: Path) -> Engine:
    """Its rounds built, loaded and captured."""
    made = Engine(load_config(ASKED), loaded)
    with torch.no_grad():
        build_all(made.rounds, loaded.params)
        made.rounds.load_all(loaded.params, made.pool, made.state)
    assert tensorrt.ENGINES and made.rounds.graphs
    return made


@pytest.mark.parametrize("batch", [1, 5])
def test_parts_against_fp64(tmp_path: Path, batch: int) -> None:
    """A drafter's layer of 512 columns; what an engine does not write stays NaN."""
    D, H, KV, head, inner, block, bf16 = 512, 4, 2, 64, 768, 8, torch.bfloat16
    torch.manual_seed(batch)

    def normal(*size: int, dtype: torch.dtype = bf16) -> torch.Tensor:
        return (torch.randn(*size, device="cuda") * (size[-1] ** -0.5 if len(size) > 1 else 1)).to(dtype)

    x, angle = torch.randn(batch * block, D, device="cuda").to(bf16), torch.rand(batch, block, 1, head, device="cuda")
    heads = normal(H * head, D), normal(2 * KV * head, D), normal(head), normal(2, head)[1]  # one not aligned
    given: dict[str, tuple[Any, ...]] = {
        "project": (x, normal(D), *heads, angle.cos(), angle.sin(), 1e-5),
        "finish": (x, x[:, : H * head].contiguous(), normal(D, H * head), normal(D), normal(2, inner, D),
                   normal(D, inner), 1e-5),
    }  # fmt: skip
    for part, inputs in given.items():
        (file := tmp_path / part).write_bytes(tensorrt.build(part, inputs))
        ready = tensorrt.load(file, len(inputs) - 1)
        exact = tensorrt.PARTS[part](*(t.double() if isinstance(t, torch.Tensor) else t for t in inputs))
        first, again = ready(*inputs[:-1]), ready(*inputs[:-1])
        for ours, twice, right in zip(first, again, exact if part == "project" else [exact], strict=True):
            assert torch.equal(ours, twice) and ours.shape == right.shape
            assert (ours.double() - right).norm() < 8e-3 * right.norm(), part


def test_acceptance_is_that_of_our_kernels(engine: Engine, loaded: Loaded, held_out: list[list[int]]) -> None:
    how = {"max_tokens": 96, "temperature": 0, "ignore_eos": True}
    plain = Engine(eager(load_config(WORDS)), loaded)
    ours, theirs = (pooled(e.generate([p[:64] for p in held_out[:32]], **how))["acceptance"] for e in (plain, engine))
    assert theirs == pytest.approx(ours, rel=0.03)


def test_a_round_is_one_launch(engine: Engine, held_out: list[list[int]]) -> None:
    for prompt in held_out[:3]:
        engine.add(prompt[:40], SamplingParams(max_tokens=200, temperature=0, ignore_eos=True))
    for _ in range(8):
        engine.step()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        for _ in range(5):
            engine.step()
    for request in [*engine.seated]:
        engine.cancel(request.id)
    called = [event.name for event in trace.events()]
    assert called.count("cudaGraphLaunch") == 5
    assert not {"cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx"} & set(called)


def test_a_second_start_builds_nothing(
    engine: Engine, loaded: Loaded, held_out: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines come from the store as functions do; the ids are the same."""
    for module, name in ((tensorrt, "build"), (rounds, "compile_step")):
        monkeypatch.setattr(module, name, lambda *_, name=name: pytest.fail(f"{name} was called"))
    monkeypatch.setattr(tensorrt, "ENGINES", {})
    again = Engine(load_config([*ASKED, "run.require_warm=true"]), loaded)
    with torch.no_grad():
        again.rounds.load_all(loaded.params, again.pool, again.state)
    assert len(tensorrt.ENGINES) == 2 * 3  # parts, batches
    ids = [
        [r.outputs[0].token_ids for r in e.generate([p[:50] for p in held_out[:4]], max_tokens=40, temperature=0)]
        for e in (engine, again)
    ]
    assert ids[0] == ids[1]
