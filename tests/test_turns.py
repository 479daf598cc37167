"""An engine is one thread's at a time: another one is refused at once, and what it holds is harmless."""

import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

import kimi_fx.engine
from kimi_fx.compose import load_config
from kimi_fx.engine import Engine
from oracles.toys import random_pair

HOW = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def engine(tmp_path) -> Engine:
    return Engine(load_config(["cache.max_len=128"]), random_pair(tmp_path, V=64, layers=1, block=8))


def text(engine: Engine, prompt: list[int]) -> tuple[int, ...]:
    return engine.generate(prompt, **HOW).outputs[0].token_ids


def elsewhere(call: Callable[[], Any]) -> Any:
    """What another thread gets."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result(10)


def inside_a_round(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """In the first round something happens."""
    step, acts = kimi_fx.engine.ddtree_step, [act]

    def round_(*args: Any) -> Any:
        while acts:
            acts.pop()()
        return step(*args)

    monkeypatch.setattr(kimi_fx.engine, "ddtree_step", round_)


CALLS: dict[str, Callable[[Engine, Any], object]] = {
    "add": lambda engine, stream: engine.add([1]),
    "step": lambda engine, stream: engine.step(),
    "cancel": lambda engine, stream: engine.cancel(1),
    "generate": lambda engine, stream: engine.generate([1], **HOW),
    "stream": lambda engine, stream: next(engine.generate([1], stream=True, **HOW)),
    "next": lambda engine, stream: next(stream),
    "close": lambda engine, stream: stream.close(),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_second_thread_is_refused_and_the_first_unharmed(engine, monkeypatch, name):
    expected = [text(engine, prompt) for prompt in ([1, 2], [3, 4])]
    stream = engine.generate([3, 4], stream=True, **HOW)
    begun = next(stream).token_ids

    def refused() -> None:
        with pytest.raises(RuntimeError, match="The engine is at work in another thread: "):
            elsewhere(partial(CALLS[name], engine, stream))

    inside_a_round(monkeypatch, refused)
    assert text(engine, [1, 2]) == expected[0]
    assert begun + tuple(t for delta in stream for t in delta.token_ids) == expected[1]
    assert not engine.busy and not engine.inbox and len(engine.pages.free) == engine.pages.count


def test_a_stream_dropped_in_another_thread_ends(engine, monkeypatch):
    expected = text(engine, [1, 2])
    streams = [engine.generate([3, 4], stream=True, **HOW)]
    next(streams[0])

    def drop() -> None:
        streams.clear()
        gc.collect()

    inside_a_round(monkeypatch, partial(elsewhere, drop))
    assert text(engine, [1, 2]) == expected
    assert not engine.busy and not engine.inbox and len(engine.pages.free) == engine.pages.count


def test_threads_may_follow_one_another(engine):
    expected = text(engine, [1, 2])
    assert elsewhere(partial(text, engine, [1, 2])) == expected
    stream, ids = engine.generate([1, 2], stream=True, **HOW), ()
    while delta := elsewhere(partial(next, stream, None)):
        ids += delta.token_ids
    assert ids == expected


def test_threads_at_once(engine):
    """Whoever is not refused gets the right text."""
    prompts = [[i, i + 1] for i in range(6)]
    expected = [text(engine, prompt) for prompt in prompts]

    def attempt(prompt: list[int]) -> tuple[int, ...] | None:
        try:
            return text(engine, prompt)
        except RuntimeError:
            return None

    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(attempt, prompts, timeout=60))
    assert any(found) and all(ids in (None, right) for ids, right in zip(found, expected, strict=True))
    assert not engine.busy and text(engine, prompts[0]) == expected[0]
