"""The engine as a whole: requests that share it, its pages and slots, streams, modes, limits.

What a request says alone is what it must say in any company; that alone is right is for the other files. Long because
the engine's parts are only whole together.
"""

import gc
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

import kimi_fx.engine
from kimi_fx import SamplingParams
from kimi_fx.compose import load_config
from kimi_fx.engine import Engine
from kimi_fx.graphs.params import Params
from kimi_fx.graphs.pytree import tree_leaves
from kimi_fx.results import Usage
from kimi_fx.runtime.load import Loaded
from oracles.toys import counter, engine_of, random_pair, toy

HOW = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Loaded:
    """A random pair that takes a millisecond a step."""
    return random_pair(tmp_path_factory.mktemp("small"), V=64, layers=2, block=16)


@pytest.fixture(scope="module")
def small_engine(small):
    def make(*overrides: str) -> Engine:
        return Engine(load_config(["cache.max_len=256", *overrides]), small)

    return make


@pytest.fixture(scope="module")
def engine(make_engine) -> Engine:
    return make_engine("cache.max_len=512")


def ids_of(results) -> list[tuple[int, ...]]:
    return [c.token_ids for result in results for c in result.outputs]


def assert_idle(engine: Engine) -> None:
    """Every page is back, once, and no slot is taken or active."""
    assert sorted(engine.pages.free) == list(range(engine.pages.count))
    assert not engine.busy and not engine.seated and not engine.inbox and not engine.state.active.any()


# ---- one text, whatever the draft


def test_block_and_budget_do_not_change_the_ids(make_engine, held_out):
    """The trained pair in fp32, 200 tokens, a block shorter than trained."""
    engine = make_engine("step.block=5", "cache.max_len=512", "run.batch=1")
    plain, tree = (engine.generate(held_out[1][:64], max_tokens=200, mode=m, **HOW) for m in ("plain", "tree"))
    assert ids_of([tree]) == ids_of([plain]) and tree.stats.steps < 100 and len(tree.outputs[0].token_ids) == 200


@pytest.mark.parametrize(("block", "tokens"), [(1, 30), (2, 30), (5, 30), (8, 30), (13, 200), (16, 30)])
def test_every_block_and_budget_share_a_batch(small_engine, block, tokens):
    """Random weights, budgets 0 to 127, beyond what a block can hold; half of the requests are sampled."""
    engine = small_engine(f"step.block={block}", "run.batch=16")
    prompt, budgets = [3, 1, 4, 1, 5], [0, 1, 2, 3, 6, 7, 8, 12, 15, 16, 30, 31, 32, 63, 64, 127]
    budgets = budgets if tokens < 100 else [2, 15, 64]
    params = {"max_tokens": tokens, "ignore_eos": True, "seed": 8}
    plain = {t: engine.generate(prompt, params, temperature=t, mode="plain").outputs[0].token_ids for t in (0, 1.0)}
    streams = {b: engine.add(prompt, SamplingParams(temperature=b % 2, **params), "tree", b) for b in budgets}
    texts = run(engine)
    for budget, request in streams.items():
        assert tuple(texts[request]) == plain[budget % 2]
    assert_idle(engine)


def run(engine: Engine) -> dict[int, list[int]]:
    """Step until nothing is left; ids of each request."""
    texts: dict[int, list[int]] = {}
    for _ in range(1000):
        for delta in engine.step():
            texts.setdefault(delta.request, []).extend(delta.token_ids)
        if not engine.busy:
            return texts
    raise AssertionError("still busy after 1000 steps")


# ---- company


def test_requests_join_and_leave(small_engine):
    """Requests of every kind come over 100 steps, some are cancelled: each is as alone."""
    engine, solo = small_engine("run.batch=6", "run.chunk=16"), small_engine("run.batch=1")
    rng = np.random.default_rng(0)
    asked, texts, cancelled = {}, {}, set()
    steps = 0
    while steps < 100 or engine.busy:
        if steps < 100 and rng.random() < 0.6:
            prompt = rng.integers(0, 60, rng.integers(1, 50)).tolist()
            mode = str(rng.choice(["plain", "chain", "tree"]))
            params = SamplingParams(
                max_tokens=int(rng.integers(0, 20)), seed=steps, temperature=float(rng.choice([0, 1.0])),
                presence_penalty=float(rng.choice([0, 0.7])), stop_token_ids=(int(rng.integers(0, 60)),),
            )  # fmt: skip
            how = (prompt, params, mode, int(rng.integers(0, 12)) if mode == "tree" else None)
            asked[engine.add(*how)] = how
        if engine.seated and rng.random() < 0.1:
            victim = engine.seated[rng.integers(len(engine.seated))].id
            cancelled.add(victim)
            engine.cancel(victim)
        for delta in engine.step():
            assert delta.request not in cancelled
            texts.setdefault(delta.request, []).extend(delta.token_ids)
        steps += 1
        assert steps < 1000
    assert_idle(engine)
    assert len(asked) > 40 and len(cancelled) > 3
    for request, how in asked.items():
        solo.add(*how)
        (alone,) = run(solo).values()
        ours = texts.get(request, [])
        assert ours == (alone[: len(ours)] if request in cancelled else alone)


def test_greedy_and_sampled_in_one_batch(engine, held_out):
    prompts = [p[:40] for p in held_out[:4]]
    params = [{"temperature": 0}, {"temperature": 1.0, "seed": 3}] * 2
    together = engine.generate(prompts, params, max_tokens=20, mode="tree", budget=15)
    alone = [engine.generate(p, s, max_tokens=20, mode="tree", budget=15) for p, s in zip(prompts, params, strict=True)]
    assert ids_of(together) == ids_of(alone)
    assert all(result.stats.accepted >= 0 for result in together)


def test_modes_and_budgets_share_a_batch(engine, held_out):
    """One call each, streams interleaved step by step: every stream is as its solo run, tree sizes included."""
    prompt = held_out[11][:40]
    hows = [{"mode": "plain"}] + [{"mode": m, "budget": n} for m, n in (("chain", 3), ("tree", 5), ("tree", 20))]
    alone = [engine.generate(prompt, max_tokens=16, **HOW, **how) for how in hows]
    streams = [engine.generate(prompt, max_tokens=16, stream=True, **HOW, **how) for how in hows]
    deltas = [[] for _ in hows]
    together = 0
    while any(streams):
        for i, stream in enumerate(streams):
            delta = next(stream, None) if stream else None
            streams[i] = stream if delta else None
            deltas[i] += [delta] if delta else []
            together = max(together, len(engine.seated))
    assert together == 4
    for got, expected, how in zip(deltas, alone, hows, strict=True):
        done = expected.outputs[0]
        assert tuple(t for d in got for t in d.token_ids) == done.token_ids
        assert "".join(d.text for d in got) == done.text
        stats = got[-1].stats
        same = ("mode", "budget", "steps", "drafted", "accepted", "acceptance_by_depth", "nodes_per_step", "kv_tokens")
        assert {f: getattr(stats, f) for f in same} == {f: getattr(done.stats, f) for f in same}
        assert stats.mode == how["mode"] and stats.nodes_per_step == 1 + how.get("budget", 0)
    assert_idle(engine)


def test_mode_and_budget_of_a_call(small_engine):
    """What the call says, else what the configuration says of that mode, else the mode's own."""
    engine = small_engine("step=tree", "step.budget=9", "step.block=6")

    def plan(**how) -> tuple[str, int]:
        stats = engine.generate([1], max_tokens=2, **HOW, **how).stats
        return stats.mode, stats.budget

    assert plan() == plan(mode="tree") == ("tree", 9) and plan(budget=4) == ("tree", 4)
    assert plan(mode="chain") == ("chain", 5) and plan(mode="chain", budget=2) == ("chain", 2)
    assert plan(mode="plain") == ("plain", 0) and plan(budget=0) == ("tree", 0)
    assert small_engine("step=plain").generate([1], max_tokens=2, mode="tree", **HOW).stats.budget == 15


def test_stream_equals_results(engine, held_out):
    """Deltas of several prompts and samples, joined, are the results; usage and stats come last."""
    prompts, params = [held_out[12][:30], held_out[13][:30]], [{"n": 2, "temperature": 0.8}, {"temperature": 0}]
    how = {"max_tokens": 20, "seed": 1, "logprobs": 1, "stop": "def"}
    results = engine.generate(prompts, params, **how)
    deltas = list(engine.generate(prompts, params, stream=True, **how))
    assert {(d.prompt, d.index) for d in deltas} == {(0, 0), (0, 1), (1, 0)}
    for place, result in enumerate(results):
        for done in result.outputs:
            own = [d for d in deltas if (d.prompt, d.index) == (place, done.index)]
            assert "".join(d.text for d in own) == done.text
            assert tuple(t for d in own for t in d.token_ids) == done.token_ids
            assert tuple(entry for d in own for entry in d.logprobs) == done.logprobs
            *others, last = own
            assert not any(d.finished or d.finish_reason or d.usage or d.stats for d in others)
            assert (last.finish_reason, last.stop_reason) == (done.finish_reason, done.stop_reason)
            assert last.finished and last.usage == Usage(30, len(done.token_ids))
            assert last.stats.steps == done.stats.steps
        assert result.usage == Usage(30, sum(len(c.token_ids) for c in result.outputs))


def test_a_stream_may_be_opened_and_left(small_engine):
    """Opening runs nothing; closing, at any time, frees pages and slots; the others go on."""
    engine = small_engine("run.batch=2")
    alone = engine.generate([7, 8], max_tokens=30, **HOW).outputs[0].token_ids
    never = engine.generate([1], max_tokens=30, stream=True, **HOW)
    first = engine.generate([[1], [2], [3]], max_tokens=30, stream=True, **HOW)
    second = engine.generate([7, 8], max_tokens=30, stream=True, **HOW)
    assert not engine.busy
    next(first)
    assert len(engine.seated) == 2 and len(engine.waiting) == 1
    tokens = []
    first.close()
    assert_idle(engine)
    tokens += next(second).token_ids
    third = engine.generate([[1], [2]], max_tokens=30, stream=True, **HOW)
    next(third)
    del third
    gc.collect()
    assert len(engine.seated) == 1
    tokens += [t for delta in second for t in delta.token_ids]
    assert tuple(tokens) == alone
    never.close()
    assert_idle(engine)


def test_cancel(small_engine):
    """A running, a waiting and an unknown request; a stream hears of it."""
    engine = small_engine("run.batch=1")
    stream = engine.generate([[1], [2], [3]], max_tokens=10, stream=True, **HOW)
    running = next(stream).request
    waiting = engine.waiting[0].id
    for request in (running, waiting, 12345):
        engine.cancel(request)
    rest = list(stream)
    ends = {d.prompt: d.finish_reason for d in rest if d.finished}
    assert ends == {0: "abort", 1: "abort", 2: "length"}
    assert sum(len(d.token_ids) for d in rest if d.prompt == 2) == 10
    assert_idle(engine)


def test_a_request_that_cannot_be_seated_ends(small_engine, monkeypatch):
    """So do those that run, as with any step that raises; nothing is lost or kept."""
    engine, seat = small_engine("run.batch=2"), kimi_fx.engine.seat
    alone = engine.generate([7, 8], max_tokens=9, **HOW).outputs[0].token_ids
    running = engine.generate([1], max_tokens=30, stream=True, **HOW)
    next(running)

    def full(*args) -> None:
        monkeypatch.setattr(kimi_fx.engine, "seat", seat)
        raise MemoryError("no room")

    monkeypatch.setattr(kimi_fx.engine, "seat", full)
    unlucky = engine.generate([[2], [3]], max_tokens=9, stream=True, **HOW)
    with pytest.raises(MemoryError):
        next(unlucky)
    assert [delta.finish_reason for delta in running][-1] == "error"
    assert_idle(engine)
    assert engine.generate([7, 8], max_tokens=9, **HOW).outputs[0].token_ids == alone


# ---- pages


def test_waiting_for_pages(small_engine):
    """Three requests of two pages in a pool of four: two run, one waits, all are as alone."""
    engine = small_engine("run.batch=4", "cache.tokens=256")
    prompts = [[i] * 60 for i in (1, 2, 3)]
    alone = [ids_of([engine.generate(p, max_tokens=30, **HOW)])[0] for p in prompts]
    requests = [engine.add(p, SamplingParams(max_tokens=30, **HOW)) for p in prompts]
    first = engine.step()
    assert (len(engine.seated), len(engine.waiting), len(engine.pages.free)) == (2, 1, 0)
    texts = run(engine)
    texts[requests[0]] = [t for delta in first for t in delta.token_ids] + texts[requests[0]]
    assert [tuple(texts[r]) for r in requests] == alone
    assert_idle(engine)


def test_refused_for_lack_of_pages(small_engine):
    engine = small_engine("cache.tokens=128")
    assert engine.pool.target.shape[1] == engine.pool.draft_k.shape[1] == 2
    with pytest.raises(
        ValueError, match=r"max_tokens=29 after a prompt of 100 .* pool \(cache.tokens\) of 128: at most 28"
    ):
        engine.add([1] * 100, SamplingParams(max_tokens=29))
    with pytest.raises(ValueError, match=r"The prompt has 128 tokens and the pool \(cache.tokens\) holds 128: shorten"):
        engine.add([1] * 128)
    for params in ({"max_tokens": 28}, {}):
        assert len(engine.generate([1] * 100, params, **HOW).outputs[0].token_ids) == 28
    assert_idle(engine)


def test_memory_is_constant_over_300_steps():
    engine = engine_of(toy(counter()), "step=plain")
    engine.add([1], SamplingParams(max_tokens=400, **HOW))
    storage = [leaf.data_ptr() for leaf in tree_leaves((engine.pool, engine.state))]

    def usage() -> tuple[int, int]:
        for _ in range(150):
            engine.step()
        gc.collect()
        return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects()), sys.getallocatedblocks()

    (tensors, before), (later, after) = usage(), usage()
    assert engine.busy and later == tensors and after - before < 1000  # Python objects: 300 numbers and some more
    assert [leaf.data_ptr() for leaf in tree_leaves((engine.pool, engine.state))] == storage


# ---- what an engine refuses to be


def without_drafter(loaded: Loaded) -> Loaded:
    return replace(loaded, params=Params(loaded.params.target, None), model=replace(loaded.model, drafter=None))


def test_no_drafter(loaded, engine, held_out):
    alone = without_drafter(loaded)
    for mode in ("chain", "tree"):
        with pytest.raises(ValueError, match=f"mode={mode} needs a drafter and none is loaded"):
            Engine(load_config([f"step.mode={mode}"]), alone)
    plain = Engine(load_config(["step=plain"]), alone)
    with pytest.raises(ValueError, match="mode=tree needs a drafter"):
        plain.generate([1], mode="tree")
    prompt = held_out[0][:20]
    ours, theirs = (e.generate(prompt, max_tokens=9, **HOW) for e in (plain, engine))
    assert ids_of([ours]) == ids_of([theirs])


def test_limits_of_the_models(small, loaded):
    with pytest.raises(ValueError, match="step.block=17 is more than the 16 slots"):
        Engine(load_config(["step.block=17"]), small)
    with pytest.raises(ValueError, match="budget=9 is more than a chain can hold: a block of 4 slots drafts 3"):
        Engine(load_config(["step=chain", "step.block=4", "step.budget=9"]), small)
    with pytest.raises(ValueError, match="cache.max_len=513 is more than the 512 positions the target was made for"):
        Engine(load_config(["cache.max_len=513"]), small)
    short = replace(small, model=replace(small.model, drafter=replace(small.model.drafter, max_position=100)))
    with pytest.raises(ValueError, match="cache.max_len=101 is more than the 100 positions the drafter was made for"):
        Engine(load_config(["cache.max_len=101"]), short)
    engine = Engine(load_config([]), short)
    assert len(engine.generate([1] * 90, max_tokens=10, **HOW).outputs[0].token_ids) == 10
    with pytest.raises(ValueError, match="prompt has 100 tokens and the context holds 100"):
        engine.generate([1] * 100)


# ---- numbers that are none


def test_non_finite_logits_end_their_own_request(loaded, held_out):
    """One id's embedding is NaN: requests that read it end with "error", at the prompt or on the way."""
    bad = 77
    embed = loaded.params.target.embed.clone()
    embed[bad] = torch.nan
    poisoned = replace(loaded, params=replace(loaded.params, target=replace(loaded.params.target, embed=embed)))
    config = load_config(["cache.max_len=128", "run.batch=3", "cache.tokens=384"])
    prompt = [t for t in held_out[0][:40] if t != bad]
    for mode in ("plain", "tree"):
        good = Engine(config, loaded).generate(prompt, max_tokens=12, mode=mode, **HOW).outputs[0]
        assert bad not in good.token_ids
        engine = Engine(config, poisoned)
        params = [{}, {}, {"logit_bias": {bad: 1000.0}}, {}, {}]
        prompts = [prompt, [5, bad, 6], prompt, prompt, prompt]
        outputs = [r.outputs[0] for r in engine.generate(prompts, params, max_tokens=12, mode=mode, **HOW)]
        assert [c.finish_reason for c in outputs] == ["length", "error", "error", "length", "length"]
        assert [c.token_ids for c in outputs] == [good.token_ids, (), (bad,), good.token_ids, good.token_ids]
        assert_idle(engine)
