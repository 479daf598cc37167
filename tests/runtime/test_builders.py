"""Buckets built in processes of their own, whose weights have no memory: what comes computes as the traced function."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kimi_fx.bench.rank import seat_all
from kimi_fx.compose import load_config
from kimi_fx.engine import Engine
from kimi_fx.graphs.pytree import tree_map
from kimi_fx.graphs.state import Shape, slots
from kimi_fx.graphs.step import ddtree_step
from kimi_fx.runtime import builders
from kimi_fx.runtime.buckets import name
from kimi_fx.runtime.compiled import short_messages
from oracles.toys import random_pair

PLAIN = Shape(1, 1, 1, 1)


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setenv("KIMI_FX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TORCHINDUCTOR_VEC_ISA_OK", "0")
    loaded = random_pair(tmp_path, V=64, layers=2, block=4)
    return Engine(load_config(["run.compile=true", "run.batch=1", "cache.max_len=128"]), loaded)


def test_a_tensor_without_memory() -> None:
    given = torch.zeros(3, 4, dtype=torch.bfloat16).t()
    hollow = builders.hollow(builders.form(given))
    assert hollow.untyped_storage().nbytes() == 0
    assert (hollow.shape, hollow.stride(), hollow.dtype) == (given.shape, given.stride(), given.dtype)


def test_what_another_process_built(engine: Engine, capsys: Any) -> None:
    rounds, params = engine.rounds, engine.loaded.params
    assert rounds is not None
    with torch.no_grad():
        ((bucket, entry),) = builders.in_parallel(rounds, params, [PLAIN], 1)
        assert bucket == PLAIN and entry == rounds.store.entry(name(PLAIN))
        assert f"compiling {name(PLAIN)}, 1 at once" in capsys.readouterr().err
        assert not list(rounds.store.folder.glob("build-*"))
        assert list(builders.in_parallel(rounds, params, [PLAIN], 1)) == [(PLAIN, entry)]  # not again
        engine.pool.target.normal_()
        seat_all(engine.state, 1, 60, 1, torch.tensor([1, 0]).int())
        pool, state = tree_map(torch.clone, (engine.pool, slots(engine.state, 1)))
        emitted = rounds.call(PLAIN, params, engine.pool, engine.state)()[2]
        eager = ddtree_step(params, pool, state, PLAIN, rounds.model)[2]
    assert torch.equal(emitted.tokens, eager.tokens) and emitted.count.item() == 1
    torch.testing.assert_close(engine.pool.target, pool.target, rtol=0, atol=1e-5)


def test_a_build_that_fails_says_so(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first error ends it, and the store is left as it was."""
    rounds = engine.rounds
    assert rounds is not None

    def flat(leaf: Tensor) -> builders.Form:
        return builders.Form((2,), (1,), leaf.dtype, leaf.device)

    monkeypatch.setattr(builders, "form", flat)
    with torch.no_grad(), pytest.raises(Exception, match="[Ss]hape|size|dimension"):
        list(builders.in_parallel(rounds, engine.loaded.params, [PLAIN], 1))
    assert rounds.store.entry(name(PLAIN)) is None and not list(rounds.store.folder.glob("build-*"))


def test_operands_are_not_spelled_out_while_compiling() -> None:
    from torch._inductor.exc import OperatorIssue

    class Deep:
        def __str__(self) -> str:
            raise AssertionError("spelled out")

    with short_messages():
        assert OperatorIssue.operator_str("kimi_fx::linear_add", [Deep()], {}) == "kimi_fx::linear_add"
    with pytest.raises(AssertionError):
        OperatorIssue.operator_str("kimi_fx::linear_add", [Deep()], {})
