"""What comes back besides text: usage, statistics, traces, plain data."""

import json
import resource
import signal
from collections import deque
from dataclasses import fields

import numpy as np
import pytest

from kimi_fx import SamplingParams
from oracles.toys import ahead, counter, engine_of, scripted, toy

HOW = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def engine(make_engine):
    return make_engine("cache.max_len=512")


@pytest.mark.parametrize(("mode", "budget"), [("plain", None), ("chain", None), ("chain", 4), ("tree", 15)])
def test_statistics_add_up(engine, held_out, mode, budget):
    """Counted again from the deltas: one prefill token, then what each step emitted."""
    prompt = held_out[14][:50]
    deltas = list(engine.generate(prompt, max_tokens=40, mode=mode, budget=budget, stream=True, **HOW))
    first, *steps = [len(d.token_ids) for d in deltas]
    stats, usage = deltas[-1].stats, deltas[-1].usage
    assert first == 1 and first + sum(steps) == usage.completion_tokens == 40
    assert (usage.prompt_tokens, usage.total_tokens, stats.kv_tokens) == (50, 90, 89)
    assert (stats.steps, stats.mode) == (len(steps), mode)
    assert stats.acceptance_length == pytest.approx(np.mean(steps))
    depths = max(steps) - 1
    assert stats.acceptance_by_depth == pytest.approx([np.mean([n > d for n in steps]) for d in range(1, depths + 1)])
    assert stats.accepted == sum(steps) - len(steps)
    nodes = {"plain": 1, "chain": 1 + (budget or 7), "tree": 16}[mode]
    assert stats.nodes_per_step == nodes and stats.drafted == (nodes - 1) * len(steps)
    times = {f.name: getattr(stats, f.name) for f in fields(stats) if "time" in f.name or "second" in f.name}
    assert len(times) == 5 and all(0 < t < 1e9 for t in times.values())
    assert stats.time_to_first_token + 39 * stats.time_per_output_token == pytest.approx(stats.total_time, rel=1e-3)
    assert stats.eager_steps == stats.steps and stats.backend == "cpu reference"


def test_statistics_of_nothing_are_zero(make_engine, held_out):
    engine = make_engine("run.chunk=16", "run.batch=1")
    none, one = (engine.generate(held_out[0][:50], max_tokens=n, **HOW).stats for n in (0, 1))
    assert none.kv_tokens == none.prompt_tokens_per_second == none.time_per_output_token == none.tokens_per_second == 0
    assert one.kv_tokens == 50 and one.prompt_tokens_per_second > 0
    assert one.time_per_output_token == one.tokens_per_second == 0
    request = engine.add(held_out[0][:50], {"max_tokens": 4})
    engine.inbox[request] = (deltas := deque())
    engine.step()
    engine.cancel(request)
    assert deltas[-1].stats.kv_tokens == 16 and deltas[-1].stats.prompt_tokens_per_second > 0


def test_poor_drafts_are_visible(monkeypatch):
    """Nothing accepted: one token a step, the statistics say so, and in the end drafting stops."""
    scripted(monkeypatch, ahead(3))
    engine = engine_of(toy(counter()), "step.give_up=20", "run.batch=3")
    for mode in ("chain", "tree"):
        early, late = (engine.generate([1], max_tokens=n, mode=mode, **HOW) for n in (20, 31))
        shown = (early.stats.acceptance_length, early.stats.acceptance_by_depth, early.stats.accepted)
        assert shown == (1.0, (), 0)
        assert (early.stats.steps, early.stats.drafted, early.stats.gave_up) == (19, 19 * 7, None)
        assert (late.stats.steps, late.stats.drafted, late.stats.gave_up) == (30, 20 * 7, 20)
        assert late.stats.mode == mode and late.outputs[0].token_ids == tuple(range(2, 33))
    scripted(monkeypatch, lambda anchor, d: [(anchor + 1) % 48] if anchor % 10 == 0 else [0])
    seldom = engine.generate([1], max_tokens=46, mode="tree", **HOW).stats
    assert seldom.gave_up is None and 1 < seldom.acceptance_length < 1.2


def test_results_are_plain_data(engine):
    result = engine.generate("def f(", max_tokens=4, logprobs=2, n=2, temperature=1.0)
    read = json.loads(json.dumps(result.to_dict()))
    prompt = len(result.prompt_token_ids)
    assert read["usage"] == {"prompt_tokens": prompt, "completion_tokens": 8, "total_tokens": prompt + 8}
    assert [o["text"] for o in read["outputs"]] == [c.text for c in result.outputs]
    assert read["outputs"][0]["logprobs"][0]["token_id"] == result.outputs[0].token_ids[0]
    assert read["stats"]["acceptance_length"] == result.stats.acceptance_length
    *_, last = engine.generate("def f(", max_tokens=4, stream=True)
    read = json.loads(json.dumps(last.to_dict()))
    assert read["finished"] and read["usage"]["total_tokens"] == last.usage.total_tokens


def test_trace(make_engine, held_out, tmp_path):
    """One line a request and round, a tree and a path in it, and the lines add up to the results."""
    file = tmp_path / "trace.jsonl"
    engine = make_engine("cache.max_len=256", f"run.trace={file}")
    prompts = [held_out[15][:30], held_out[16][:40]]
    requests = [engine.add(p, SamplingParams(max_tokens=30, **HOW), "tree", 12) for p in prompts]
    texts = {request: [] for request in requests}
    while engine.busy:
        for delta in engine.step():
            texts[delta.request] += delta.token_ids
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for request in requests:
        own = [line for line in lines if line["request"] == request]
        assert [line["round"] for line in own] == list(range(1, len(own) + 1))
        assert [t for line in own for t in line["emitted"]] == texts[request][1:]
        place = 1
        for line in own:
            tokens, parents, depths, scores = (line[k] for k in ("tokens", "parents", "depths", "scores"))
            assert len(tokens) == len(parents) == len(depths) == len(scores) == 13
            assert (tokens[0], parents[0], depths[0], scores[0]) == (texts[request][place - 1], -1, 0, 0.0)
            assert all(p < i and depths[i] == depths[p] + 1 for i, p in enumerate(parents) if i)
            assert scores == sorted(scores, reverse=True)
            assert len(set(zip(parents, tokens, strict=True))) == 13
            path, emitted = line["path"], line["emitted"]
            assert path[0] == 0 and len(path) == len(emitted)
            assert all(parents[b] == a for a, b in zip(path, path[1:], strict=False))
            assert [tokens[node] for node in path[1:]] == emitted[:-1]
            last = [tokens[i] for i, p in enumerate(parents) if p == path[-1]]
            assert emitted[-1] not in last or place + len(emitted) == 30
            place += len(emitted)
    assert {line["request"] for line in lines} == set(requests)


def test_a_trace_ends_once_the_disk_is_full(make_engine, held_out, tmp_path, capsys):
    """With one word, its last line whole, and no request disturbed."""
    file = tmp_path / "trace.jsonl"
    engine = make_engine("cache.max_len=256", f"run.trace={file}")
    engine.add(held_out[15][:30], SamplingParams(max_tokens=20, **HOW), "plain")
    engine.step(), engine.step()
    whole, limits = file.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 50, limits[1]))
        while engine.busy:
            assert all(delta.finish_reason != "error" for delta in engine.step())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, previous)
    assert file.read_bytes() == whole and whole.endswith(b"\n")
    assert capsys.readouterr().err == f"run.trace={file} ends here, it cannot be written: File too large\n"


def test_trace_that_cannot_be_written(make_engine, tmp_path):
    with pytest.raises(ValueError, match="run.trace=.*/absent/t.jsonl cannot be written: No such file or directory"):
        make_engine(f"run.trace={tmp_path}/absent/t.jsonl")
