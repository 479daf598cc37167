"""Which shapes a configuration compiles, and where a step runs."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kimi_fx.admit import plan
from kimi_fx.compose import load_config
from kimi_fx.graphs.state import Model, Shape
from kimi_fx.runtime.buckets import Bucket, Chunk, batches, buckets, fit, name, tokens
from kimi_fx.runtime.load import Loaded


def built(loaded: Loaded, *overrides: str) -> tuple[Bucket, ...]:
    config = load_config([*overrides, "device=cpu"])
    model = loaded.model if config.drafter.path else Model(loaded.model.target, None, loaded.model.ops)
    return buckets(config, model, plan(config, model, config.step.mode, config.step.budget))


def test_what_is_compiled(loaded: Loaded) -> None:
    assert set(built(loaded)) == {
        *(Shape(b, 1, 1, 1) for b in (1, 2, 4)), *(Shape(b, 16, 8, 15) for b in (1, 2, 4)), Chunk(64), Chunk(512),
    }  # fmt: skip
    assert set(built(loaded, "run.batch=1", "step=chain", "run.chunk=32")) == {
        Shape(1, 1, 1, 1), Shape(1, 8, 8, 1), Chunk(32),
    }  # fmt: skip
    assert set(built(loaded, "run.batch=1", "step=plain", "run.nodes=[1,64]", "step.block=4")) == {
        Shape(1, 1, 1, 1), Shape(1, 64, 4, 63), Chunk(64), Chunk(512),
    }  # fmt: skip


def test_the_largest_come_first_and_names_differ(loaded: Loaded) -> None:
    all_of_them = built(loaded, "run.batch=64", "run.nodes=[1,8,16,32,64,128]")
    sizes = [tokens(bucket) for bucket in all_of_them]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] == 64 * 128
    assert len({name(bucket) for bucket in all_of_them}) == len(all_of_them) == 7 * 6 + 2


def test_batches() -> None:
    assert [batches(n) for n in (1, 2, 3, 5, 64)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 5], [1, 2, 4, 8, 16, 32, 64]]


def test_what_cannot_be_compiled(loaded: Loaded) -> None:
    with pytest.raises(ValueError, match="run.nodes has 9: nodes are compiled for 1, 8, 16, 32, 64, 128"):
        built(loaded, "run.nodes=[8,9]")
    with pytest.raises(ValueError, match="run.nodes has 8, but without a drafter every round has 1 node"):
        built(loaded, "drafter=none", "run.nodes=[8]")


SHAPES = st.builds(Shape, st.integers(1, 4), st.sampled_from([1, 8, 16]), st.just(8), st.sampled_from([1, 7, 15]))


@given(SHAPES, st.lists(SHAPES, max_size=8))
def test_a_step_runs_in_the_least_bucket_that_holds_it(wanted: Shape, others: list[Shape]) -> None:
    found = fit(wanted, [*others, Chunk(16)])
    holding = [
        b for b in others
        if b.batch >= wanted.batch and b.nodes >= wanted.nodes and b.width >= wanted.width
    ]  # fmt: skip
    assert (found is None) == (not holding)
    if found:
        assert found in holding and tokens(found) == min(tokens(b) for b in holding)


def test_a_chunk_runs_in_the_least_that_holds_it() -> None:
    some = (Chunk(512), Shape(64, 128, 8, 127), Chunk(64))
    assert [fit(Chunk(n), some) for n in (1, 64, 65, 512, 513)] == [Chunk(64)] * 2 + [Chunk(512)] * 2 + [None]


def test_names_are_file_names() -> None:
    for bucket in (Shape(4, 16, 8, 15), Chunk(512)):
        assert Path(name(bucket)).name == name(bucket)
