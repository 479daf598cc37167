"""Sampling parameters through the whole engine: one meaning in plain decoding, chain and tree, alone and in company."""

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from kimi_fx import SamplingParams
from kimi_fx.bench.huggingface import huggingface
from kimi_fx.config import package_path
from oracles.toys import engine_of, same_after_all, scripted, toy

MODES = [("plain", None), ("chain", None), ("tree", 15)]
every_mode = pytest.mark.parametrize(("mode", "budget"), MODES)


@pytest.fixture(scope="module")
def engine(make_engine):
    return make_engine("run.batch=8", "cache.max_len=512")


def ids_of(results) -> list[tuple[int, ...]]:
    return [c.token_ids for result in results for c in result.outputs]


def test_what_the_caller_does_with_lists_and_maps_later_changes_nothing(engine):
    """A request has what it was given, queued or running."""
    how, bias, stop, ids = {"max_tokens": 4, "temperature": 0, "ignore_eos": True, "stream": True}, {}, ["def"], [5]
    streams = []
    for token in (50, 60, 70):
        bias.clear()
        bias[token] = 1000.0
        params = SamplingParams(logit_bias=bias, stop=stop, stop_token_ids=ids)
        streams += [engine.generate([3840, token], params, **how), engine.generate([3840, 1], logit_bias=bias, **how)]
    next(streams[0])
    bias[9999999], stop[0], ids[:] = 1.0, "", range(100)
    found = [[t for delta in stream for t in delta.token_ids] for stream in streams]
    assert found == [[50] * 3] + [[token] * 4 for token in (50, 60, 60, 70, 70)]


# ---- distributions, on tokens that are independent of all before


DISTRIBUTIONS = [
    ({}, [0.5, 0.3, 0.15, 0.05]),
    ({"top_p": 0.75}, [0.625, 0.375, 0, 0]),
    ({"temperature": 0.5}, [0.6849, 0.2466, 0.0616, 0.0069]),
    ({"top_k": 3}, [0.5263, 0.3158, 0.1579, 0]),
    ({"min_p": 0.2}, [0.5263, 0.3158, 0.1579, 0]),
    ({"logit_bias": {3: 2.302585}}, [0.3448, 0.2069, 0.1035, 0.3448]),
]


@every_mode
def test_distribution(monkeypatch, mode, budget):
    """Whatever the drafts, here the best token and the last, the tokens have the target's distribution."""
    scripted(monkeypatch, lambda anchor, d: [0, 3])
    engine = engine_of(toy(same_after_all([0.5, 0.3, 0.15, 0.05]), [0]), "run.batch=12")
    params = [{"temperature": 1.0, "seed": 3} | changed for changed, _ in DISTRIBUTIONS]
    how = {"max_tokens": 200, "n": 2, "ignore_eos": True, "mode": mode, "budget": budget}
    results = engine.generate([[1]] * len(params), params, **how)
    for (_, expected), result in zip(DISTRIBUTIONS, results, strict=True):
        seen = sum(np.bincount(c.token_ids, minlength=4) for c in result.outputs)
        p = np.array(expected) / sum(expected)
        assert seen.sum() == 400 and not seen[p == 0].any()
        assert chisquare(seen[p > 0], p[p > 0] * 400).pvalue > 1e-3


def test_always_drafting_one_token(monkeypatch):
    """Target (.5, .3, .2), draft always token 0: accepted half the time, output (.5, .3, .2) all the same."""
    scripted(monkeypatch, lambda anchor, d: [0])
    engine = engine_of(toy(same_after_all([0.5, 0.3, 0.2]), [0]), "cache.max_len=1024")
    how = {"temperature": 1.0, "seed": 1, "max_tokens": 1000, "ignore_eos": True, "mode": "chain", "budget": 1}
    done = engine.generate([1], **how).outputs[0]
    assert chisquare(np.bincount(done.token_ids), np.array([500, 300, 200])).pvalue > 1e-3
    assert done.stats.acceptance_by_depth[0] == pytest.approx(0.5, abs=4 * (0.25 / done.stats.steps) ** 0.5)


# ---- one seed, one text


SETTINGS = {
    "greedy": {"temperature": 0},
    "almost greedy": {"temperature": 1e-6},
    "temperature": {"temperature": 0.8},
    "filters": {"temperature": 1.1, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
    "penalties": {"temperature": 0.7, "presence_penalty": 0.8, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
    "greedy penalties": {"temperature": 0, "frequency_penalty": 1.5, "repetition_penalty": 1.3},
    "bias": {"temperature": 0.9, "logit_bias": {10: 6.0, 32: -100.0, 201: 4.0}},
    "min_tokens": {"temperature": 1.0, "min_tokens": 12, "stop_token_ids": [10, 201, 309]},
}


def test_same_ids_in_every_mode(engine, held_out):
    """All settings in one batch: each is the same text in plain, chain and tree, and no two are equal."""
    params = [SamplingParams(max_tokens=18, seed=i, **p) for i, p in enumerate(SETTINGS.values())]
    prompts = [held_out[0][:30]] * len(params)
    plain, *others = (ids_of(engine.generate(prompts, params, mode=m, budget=b)) for m, b in MODES)
    for other in others:
        assert dict(zip(SETTINGS, other, strict=True)) == dict(zip(SETTINGS, plain, strict=True))
    assert plain[0] == plain[1] and len(set(plain)) == len(plain) - 1
    assert 32 not in plain[6] and 10 in plain[6]
    assert len(plain[7]) > 12 and not {10, 201, 309} & set(plain[7][:12])


def test_repeated_tokens_by_their_penalties(monkeypatch):
    """Logits a = 10, b = 9.5, presence 1: a, b, a, a, a. Frequency 1: a and b in turn."""
    table = torch.tensor([10.0, 9.5, 0.0]).repeat(3, 1)
    scripted(monkeypatch, lambda anchor, d: [0, 1])
    engine = engine_of(toy(table, [2]))
    for mode, budget in MODES:
        how = {"temperature": 0, "max_tokens": 6, "mode": mode, "budget": budget}

        def text(how=how, **params):
            return "".join("abc"[t] for t in engine.generate([1], params, **how).outputs[0].token_ids)

        assert text() == "aaaaaa"
        assert text(presence_penalty=1) == "abaaaa"
        assert text(frequency_penalty=1) == "ababab"
        assert text(repetition_penalty=1.06) == "aaaaaa"  # b is in the prompt: 9.43 against 8.96, as before
        assert text(logit_bias={0: -2}) == "bbbbbb"
        assert text(logit_bias={2: 11}) == "c"


def test_seed_alone_and_in_company(engine, held_out):
    """A seeded request draws the same ids in batches of 1 to 4, first or last, beside unseeded ones."""
    prompt, seeded = held_out[3][:40], {"seed": 11}
    how = {"temperature": 1.0, "max_tokens": 10, "ignore_eos": True, "mode": "tree", "budget": 7}
    alone = engine.generate(prompt, seeded, **how).outputs[0].token_ids
    unseeded = set()
    for company in (1, 2, 3):
        results = engine.generate([prompt] * (company + 1), [{}] * company + [seeded], **how)
        *rest, last = ids_of(results)
        first, *more = ids_of(engine.generate([prompt] * (company + 1), [seeded] + [{}] * company, **how))
        assert first == last == alone
        unseeded.update(rest, more)
    assert len(unseeded) > 6  # twelve texts: some may coincide


def test_samples_differ_and_repeat(engine, held_out):
    prompt = held_out[4][:40]
    how = {"temperature": 1.0, "max_tokens": 12, "seed": 2**64 - 1}
    three = engine.generate(prompt, n=3, **how)
    assert [c.index for c in three.outputs] == [0, 1, 2]
    assert len(set(ids_of([three]))) == 3
    assert three.usage.completion_tokens == sum(len(c.token_ids) for c in three.outputs)
    assert ids_of([engine.generate(prompt, n=3, **how)]) == ids_of([three])
    assert ids_of([engine.generate(prompt, n=2, mode="plain", **how)]) == ids_of([three])[:2]
    assert ids_of([engine.generate(prompt, how | {"seed": -1})]) == ids_of([three])[:1]  # the same 64 bits
    assert len(set(ids_of([engine.generate(prompt, n=2, max_tokens=12, temperature=0)]))) == 1
    two, one = engine.generate([prompt, prompt], [{"n": 2}, {}], **how)
    assert ids_of([two]) == ids_of([three])[:2] and ids_of([one]) == ids_of([three])[:1]


# ---- log-probabilities


@pytest.fixture(scope="module")
def peer():
    return huggingface(package_path("kimi_fx:nano/kimi-nano"))


@every_mode
def test_logprobs_are_hugging_faces(engine, peer, held_out, mode, budget):
    """One entry an id, of the raw logits after the text before it: accepted, corrected and bonus tokens alike."""
    prompt = held_out[5][:50]
    params = [{"logprobs": 5, "temperature": 0}, {"logprobs": 20, "temperature": 0.9, "top_p": 0.8, "seed": 4}]
    params += [{"logprobs": 0, "temperature": 0.5, "presence_penalty": 1, "logit_bias": {10: 3.0}, "seed": 4}, {}]
    results = engine.generate([prompt] * 4, params, max_tokens=30, ignore_eos=True, mode=mode, budget=budget)
    for given, result in zip(params[:3], results, strict=False):
        (done,) = result.outputs
        if mode != "plain":
            assert 1 < done.stats.acceptance_length < 1 + 7  # some drafts were accepted, some corrected
        with torch.inference_mode():
            logits = peer(torch.tensor([[*prompt, *done.token_ids]])).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1)
        assert [entry.token_id for entry in done.logprobs] == list(done.token_ids)
        for row, entry in zip(expected, done.logprobs, strict=True):
            assert entry.logprob == pytest.approx(row[entry.token_id].item(), abs=2e-4)
            values, ids = row.topk(given["logprobs"])
            assert [value for _, value in entry.top] == pytest.approx(values.tolist(), abs=2e-4)
            assert [id for id, _ in entry.top] == ids.tolist() or (values.diff() > -4e-4).any()
        assert done.cumulative_logprob == pytest.approx(sum(entry.logprob for entry in done.logprobs))
    assert results[3].outputs[0].logprobs is None and results[3].outputs[0].cumulative_logprob is None


def test_logprobs_of_a_cut_text(engine, held_out):
    """Ids that a stop string cuts off have no entry either."""
    text = engine.generate(held_out[0][:60], temperature=0, max_tokens=40).outputs[0].text
    how = {"temperature": 0, "max_tokens": 40, "logprobs": 1, "stop": text[9:12], "mode": "tree", "budget": 15}
    done = engine.generate(held_out[0][:60], **how).outputs[0]
    assert done.finish_reason == "stop" and text.startswith(done.text)
    assert [entry.token_id for entry in done.logprobs] == list(done.token_ids)
    joined = "".join(entry.text for entry in done.logprobs)
    assert joined.startswith(done.text + text[9:12])


# ---- honoured or refused


BAD = [
    ({"temperature": float("nan")}, "temperature"), ({"temperature": -1}, "temperature"), ({"top_p": 2.0}, "top_p"),
    ({"top_p": 0}, "top_p"), ({"top_k": -2}, "top_k"), ({"min_p": float("inf")}, "min_p"), ({"n": 0}, "n"),
    ({"max_tokens": "9"}, "max_tokens"), ({"max_tokens": -1}, "max_tokens"), ({"repetition_penalty": 0}, "repetition"),
    ({"max_tokens": 3, "max_new_tokens": 4}, "max_new_tokens"), ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ({"seed": 1.5}, "seed"), ({"stop": ""}, "empty string"), ({"logprobs": 21}, "logprobs"),
    ({"grammar": "x"}, "grammar"), ({"prompt_logprobs": 1}, "prompt_logprobs"), ({"tools": "[]"}, "tools"),
    ({"temprature": 1}, "temperature"),
    ({"logit_bias": {4096: 1.0}}, "4096: ids are 0 to 4095"), ({"stop_token_ids": [5000]}, "5000: ids are 0 to 4095"),
    ({"max_tokens": 600}, "max_tokens=600 .* at most"),
]  # fmt: skip


def test_refused_parameters_harm_nothing(engine, held_out):
    """Every bad request is refused at the call, by name, while another one is running; that one never notices."""
    prompt, how = held_out[6][:40], {"temperature": 0, "max_tokens": len(BAD) + 5}
    expected = engine.generate(prompt, **how).outputs[0].token_ids
    running = engine.generate(prompt, mode="plain", stream=True, **how)
    tokens = [*next(running).token_ids]
    for params, message in BAD:
        with pytest.raises(ValueError, match=message):
            engine.generate([prompt, prompt], [{}, params])
        tokens += next(running).token_ids
    tokens += [t for delta in running for t in delta.token_ids]
    assert tuple(tokens) == expected and not engine.busy
