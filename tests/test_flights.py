"""The host reads a round while the next one runs: what requests get does not depend on when it reads.

On a CPU nothing runs behind the host's back, so the reading is delayed by hand.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

import kimi_fx.engine
from kimi_fx import SamplingParams
from kimi_fx.compose import load_config
from kimi_fx.engine import Engine
from kimi_fx.graphs.pytree import tree_leaves
from kimi_fx.graphs.state import Emitted
from kimi_fx.runtime.flight import in_one_piece
from kimi_fx.runtime.load import Loaded
from oracles.toys import byte_tokenizer, engine_of, random_pair, scripted, story, toy

HOW = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return random_pair(tmp_path_factory.mktemp("small"), V=64, layers=2, block=8)


@pytest.fixture(autouse=True)
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kimi_fx.engine, "copied", lambda flight: flight)


def behind(engine: Engine) -> Engine:
    """The engine, reading one step behind."""
    engine.lag = 1
    return engine


def assert_idle(engine: Engine) -> None:
    assert sorted(engine.pages.free) == list(range(engine.pages.count))
    assert not (engine.busy or engine.flights or engine.inbox)
    assert not engine.state.active.any() and not engine.state.length.any()


@pytest.mark.parametrize(("B", "A"), [(1, 1), (1, 8), (3, 5)])
def test_what_is_emitted_lies_in_one_piece(B: int, A: int) -> None:
    ids, floats = (lambda *shape: torch.randint(99, shape)), torch.rand
    emitted = Emitted(
        ids(B, A), ids(B), ids(B, A), ids(B), floats(B, A), ids(B, A, 20), floats(B, A, 20), ids(B)
    )  # fmt: skip
    found = in_one_piece(emitted)
    for leaf, piece in zip(tree_leaves(emitted), tree_leaves(found), strict=True):
        assert torch.equal(leaf, piece) and leaf.dtype == piece.dtype
    assert len({piece.untyped_storage().data_ptr() for piece in tree_leaves(found)}) == 1


def test_requests_that_join_leave_and_are_cancelled(small: Loaded) -> None:
    config = load_config(["cache.max_len=128", "run.batch=4", "run.chunk=16", "step.give_up=3"])
    engine, solo = behind(Engine(config, small)), Engine(config, small)
    rng = np.random.default_rng(1)
    asked, texts, ended, cancelled = {}, {}, set(), set()
    steps = 0
    while steps < 80 or engine.busy:
        if steps < 80 and rng.random() < 0.7:
            params = SamplingParams(
                max_tokens=int(rng.integers(0, 16)), seed=steps, temperature=float(rng.choice([0, 1.0])),
                stop_token_ids=(int(rng.integers(0, 60)),),
            )  # fmt: skip
            how = (rng.integers(0, 60, rng.integers(1, 40)).tolist(), params, str(rng.choice(["plain", "tree"])))
            asked[engine.add(*how)] = how
        if engine.seated and rng.random() < 0.1:
            victim = engine.seated[rng.integers(len(engine.seated))].id
            cancelled.add(victim)
            engine.cancel(victim)
        for delta in engine.step():
            assert delta.request not in cancelled | ended
            ended |= {delta.request} if delta.finished else set()
            texts.setdefault(delta.request, []).extend(delta.token_ids)
        steps += 1
        assert steps < 1000
    assert_idle(engine)
    assert len(asked) > 40 and len(cancelled) > 3 and ended == asked.keys() - cancelled
    for request, how in asked.items():
        alone: list[int] = []
        solo.add(*how)
        while solo.busy:
            alone += [t for delta in solo.step() for t in delta.token_ids]
        ours = texts.get(request, [])
        assert ours == (alone[: len(ours)] if request in cancelled else alone)


def test_a_stop_string_discards_the_round_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_tokenizer(tmp_path)
    ids = tokenizer.encode("abcdefghijklmnop")
    table = story(ids, tokenizer.size)
    scripted(monkeypatch, lambda anchor, d: [anchor])
    for at in (0, 1):
        engine = engine_of(toy(table, tokenizer=tokenizer))
        engine.lag = at
        result = engine.generate(ids[:2], max_tokens=10, stop="fg", **HOW)
        assert (result.outputs[0].text, result.outputs[0].finish_reason) == ("cde", "stop")
        assert_idle(engine)


def test_statistics_do_not_count_rounds_that_were_discarded(small: Loaded) -> None:
    config = load_config(["cache.max_len=128"])
    now, late = Engine(config, small), behind(Engine(config, small))
    for fields in ({"max_tokens": 1}, {"max_tokens": 20}, {"max_tokens": 20, "stop_token_ids": list(range(7))}):
        ours, theirs = (e.generate([1, 2, 3], logprobs=3, **HOW | fields) for e in (late, now))
        assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids
        assert ours.outputs[0].logprobs == theirs.outputs[0].logprobs
        assert (ours.stats.steps, ours.stats.drafted) == (theirs.stats.steps, theirs.stats.drafted)


def test_a_failing_step_leaves_no_flight_behind(small: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = behind(Engine(load_config(["cache.max_len=128"]), small))
    expected = engine.generate([4, 5], max_tokens=9, **HOW).outputs[0].token_ids
    stream = engine.generate([1, 2], max_tokens=30, stream=True, **HOW)
    next(stream)

    def fail(*_: object) -> None:
        raise RuntimeError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(kimi_fx.engine, "ddtree_step", fail)
        with pytest.raises(RuntimeError, match="planted"):
            engine.generate([4, 5], max_tokens=9, **HOW)
    assert list(stream)[-1].finish_reason == "error" and not engine.flights
    assert engine.generate([4, 5], max_tokens=9, **HOW).outputs[0].token_ids == expected
    assert_idle(engine)
