"""What a prompt and a call may be: every form that is read, and a sentence for every one that is not."""

import numpy as np
import pytest
import torch

from kimi_fx import SamplingParams
from kimi_fx.compose import load_config
from kimi_fx.engine import Engine
from oracles.toys import random_pair


@pytest.fixture(scope="module")
def engine(make_engine):
    return make_engine("cache.max_len=512")


def test_prompt_forms(engine):
    text = "def f(x):"
    ids = engine.loaded.text.tokenizer.encode(text)
    with_bos = [engine.loaded.text.tokenizer.bos, *ids]

    def prompts(*args, **kwargs):
        results = engine.generate(*args, max_tokens=0, **kwargs)
        several = isinstance(results, list)
        return [list(r.prompt_token_ids) for r in results] if several else list(results.prompt_token_ids)

    assert prompts(text) == with_bos
    assert prompts([text, text]) == [with_bos] * 2 and prompts((text,)) == [with_bos]
    for form in (list, tuple, torch.tensor, np.array):
        assert prompts(form(ids)) == ids
        assert prompts([form(ids), form(ids[:2]), text]) == [ids, ids[:2], with_bos]
    assert prompts(torch.tensor([ids, ids])) == [ids, ids] and prompts(np.array([ids])) == [ids]
    chat = [{"role": "user", "content": "<|im_end|>"}]
    end = engine.loaded.text.tokenizer.control_id("<|im_end|>")
    assert prompts(messages=chat).count(end) == 1 and prompts(chat) == prompts(messages=chat)
    assert prompts(messages=[chat, chat]) == [prompts(chat)] * 2
    assert prompts(ids, {"stop": "x"}) == prompts(ids, SamplingParams(stop="x")) == ids


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (None, "either prompts .* or messages"), ([], "give a text, a list of ids, a chat"), (7, "give a text"),
        ([[]], "prompt is empty"), ([[1], []], "prompt is empty"), ([1, 4096], "4096.* ids are 0 to 4095"),
        ([1, -1], "-1"), ([1, 2.5], "2.5, which is no token id"), ([True, 2], "True, which is no token id"),
        ([1, "a"], "mixes prompts with bare ids"), ([1] * 513, "prompt has 513 tokens and the context holds 512"),
        (torch.zeros(2, 0).long(), "prompt is empty"), ([[{"role": "user"}]], "no content"), ({1: 2}, "give a"),
    ],
)  # fmt: skip
def test_bad_prompts(engine, prompt, message):
    with pytest.raises(ValueError, match=message):
        engine.generate(prompt, max_tokens=1)
    assert not engine.busy


def test_bad_calls(engine):
    calls = [
        (([[1], [2]], [{}]), {}, "1 entries for 2 prompts"), (([1], 5), {}, "give a SamplingParams or a dict"),
        (([1],), {"messages": [{"role": "user", "content": "a"}]}, "one of the two"),
        (([1],), {"mode": "forest"}, "plain, chain or tree"), (([1],), {"budget": 128}, "0 to 127"),
        (([1],), {"mode": "plain", "budget": 3}, "drafts nothing"), (([1],), {"budget": -1}, "0 to 127"),
        (([1],), {"mode": "chain", "budget": 8}, "8 slots drafts 7"), (([1],), {"budget": True}, "0 to 127"),
        ((), {"messages": "hello"}, "must be a list of"), ((), {"messages": [1, 2]}, "must be an object"),
    ]  # fmt: skip
    for args, kwargs, message in calls:
        with pytest.raises(ValueError, match=message):
            engine.generate(*args, max_tokens=1, **kwargs)
    with pytest.raises(ValueError, match="prompt is empty"):
        engine.add([])
    assert not engine.busy


def test_ids_without_a_tokenizer(tmp_path):
    engine = Engine(load_config(["cache.max_len=64"]), random_pair(tmp_path, V=64, layers=1, block=4))
    done = engine.generate([5, 6], max_tokens=9, temperature=0, ignore_eos=True, logprobs=2).outputs[0]
    assert (len(done.token_ids), done.text, done.logprobs[0].text) == (9, "", "")
    assert engine.loaded.text.stop_ids == (62,)
    for call in ({"prompts": "text"}, {"messages": [{"role": "user", "content": "a"}]}):
        with pytest.raises(ValueError, match="no tiktoken.model, so a text cannot be read: give token ids"):
            engine.generate(max_tokens=1, **call)
    with pytest.raises(ValueError, match="no tiktoken.model, so a stop string cannot be found"):
        engine.generate([5], stop="x", max_tokens=1)
