"""What once went wrong and stays right: mixed budgets, failing steps, odd values, odd files."""

import json

import pytest
import torch

import kimi_fx.engine
from kimi_fx import SamplingParams
from kimi_fx.checkpoint.configs import read_target
from kimi_fx.checkpoint.files import CheckpointError
from kimi_fx.cli import main
from kimi_fx.compose import load_config
from kimi_fx.engine import Engine
from kimi_fx.inputs import read_prompts
from kimi_fx.runtime.load import prepare
from oracles.toys import random_pair
from oracles.write_checkpoint import target_config

HOW = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small")
    return folder, random_pair(folder, V=64, layers=1, block=8)


@pytest.fixture
def engine(small) -> Engine:
    return Engine(load_config(["cache.max_len=128", "run.chunk=8"]), small[1])


def idle(engine: Engine) -> bool:
    return len(engine.pages.free) == engine.pages.count and not engine.busy and not engine.inbox


def test_a_larger_budget_may_still_be_prefilling(engine):
    prompts = {7: [1, 2, 3], 63: [5] * 60}
    alone = {b: engine.generate(p, max_tokens=20, budget=b, **HOW).outputs[0].token_ids for b, p in prompts.items()}
    together = {engine.add(p, SamplingParams(max_tokens=20, **HOW), "tree", b): b for b, p in prompts.items()}
    texts: dict[int, tuple[int, ...]] = {}
    while engine.busy:
        for delta in engine.step():
            texts[delta.request] = texts.get(delta.request, ()) + delta.token_ids
    assert {together[request]: ids for request, ids in texts.items()} == alone


@pytest.mark.parametrize("failing", ["prefill_step", "ddtree_step"])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_step_that_fails_ends_its_requests_and_no_more(engine, monkeypatch, failing, error):
    expected = engine.generate([4, 5], max_tokens=9, **HOW).outputs[0].token_ids
    stream = engine.generate([1, 2], max_tokens=30, stream=True, **HOW)
    next(stream)

    def fail(*_):
        raise error("planted")

    with monkeypatch.context() as patch:
        patch.setattr(kimi_fx.engine, failing, fail)
        with pytest.raises(error, match="planted"):
            engine.generate([4, 5], max_tokens=9, **HOW)
    last = list(stream)[-1]
    assert (last.finish_reason, last.stop_reason) == ("error", "a step failed")
    assert idle(engine) and engine.generate([4, 5], max_tokens=9, **HOW).outputs[0].token_ids == expected


def test_a_stream_dropped_inside_a_step_waits_for_its_end(engine, monkeypatch):
    """Closing moves rows, and must not do so while a round has them."""
    prompts = ([1, 2], [3, 4])
    alone = [engine.generate(p, max_tokens=20, **HOW).outputs[0].token_ids for p in prompts]
    dropped, kept = (engine.generate(p, max_tokens=20, stream=True, **HOW) for p in prompts)
    next(dropped)
    ids = list(next(kept).token_ids)
    request, step = engine.seated[0].id, kimi_fx.engine.ddtree_step

    def close_meanwhile(*args):
        engine.cancel(request)
        return step(*args)

    with monkeypatch.context() as patch:
        patch.setattr(kimi_fx.engine, "ddtree_step", close_meanwhile)
        ids += next(kept).token_ids
    ids += [t for delta in kept for t in delta.token_ids]
    assert tuple(ids) == alone[1]
    dropped.close()
    assert idle(engine)


@pytest.mark.parametrize("fields", [{"top_k": 2**63}, {"temperature": 2**63}, {"logit_bias": {3: 10**9}}])
def test_huge_numbers_leave_no_page_behind(engine, fields):
    assert len(engine.generate([1], {"max_tokens": 2, "ignore_eos": True, **fields}).outputs[0].token_ids) == 2
    assert idle(engine)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda e: e.add([1], SamplingParams(n=3)), "n=3: add queues one sample"),
        (lambda e: e.add("text"), "add takes a list of token ids"),
        (lambda e: e.add(5), "add takes a list of token ids"),
        (lambda e: e.add([1], {"max_tokens": -1}), "max_tokens=-1"),
        (lambda e: e.generate([1], {1: 2}), "1: no such sampling parameter"),
        (lambda e: e.generate([1], max_tokens=4, mode=""), "mode='' is unknown"),
        (lambda e: e.generate([1] * 100, min_tokens=100), "min_tokens=100 is more than the 28 tokens"),
        (lambda e: e.generate([1], n=2**20), "n=1048576"),
        (lambda e: e.generate([1], top_p=1e-46), "top_p=1e-46"),
    ],
)
def test_refused_in_a_sentence(engine, call, words):
    with pytest.raises(ValueError, match=words.replace("(", r"\(")):
        call(engine)
    assert idle(engine)


def test_loading_in_inference_mode(small):
    with torch.inference_mode():
        engine = Engine(load_config(["cache.max_len=64"]), small[1])
    assert len(engine.generate([1], max_tokens=3, **HOW).outputs[0].token_ids) == 3


@pytest.mark.parametrize(
    "change",
    [{"text_config": None}, {"text_config": "x"}, {"model_type": ["x"]}, {"rope_scaling": 5}, {"hidden_size": 10**400}],
)
def test_config_values_of_a_strange_kind(tmp_path, change):
    (tmp_path / "config.json").write_text(json.dumps(target_config() | change))
    with pytest.raises(CheckpointError, match="config.json"):
        read_target(tmp_path, None)


def test_everything_is_refused_before_the_weights_are_read(small, capsys):
    folder, _ = small
    names = [f"target={folder / 'target'}", f"drafter={folder / 'drafter'}"]
    for wrong in ("ids=[64]", "ids=[1] sampling.max_tokens=99999", "ids=[1] step.block=9", "ids=[1] run.trace=/no/t"):
        assert main(["generate", *names, *wrong.split()]) == 2
        out, err = capsys.readouterr()
        assert not out and "loaded" not in err and "Traceback" not in err
    assert prepare(load_config(names)).params is None


def test_prompt_lines_as_json_has_them(tmp_path):
    """A byte order mark, a line separator inside a string, keys of logit_bias, null."""
    file = tmp_path / "p.jsonl"
    line = {"prompt": "a\u2028b", "logit_bias": {"5": -5}, "stop": None, "max_tokens": 3}
    file.write_text("\ufeff" + json.dumps(line, ensure_ascii=False) + "\n", encoding="utf-8")
    assert read_prompts(load_config([f"prompts={file}"])) == [
        ("a\u2028b", {"logit_bias": {5: -5}, "max_tokens": 3}, f"{file}, line 1"),
    ]
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=f"prompts={file}: not a text in UTF-8"):
        read_prompts(load_config([f"prompts={file}"]))


@pytest.mark.parametrize(
    "override", ["step.budget=${", 'sampling.stop=["${", "x"]', "cache.tokens=" + "9" * 24, "ids=" + "[" * 999]
)
def test_overrides_that_yaml_or_interpolation_chokes_on(override, capsys):
    code = main(["config", override])
    assert code in (0, 2) and "Traceback" not in capsys.readouterr().err
