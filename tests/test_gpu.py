"""The engine on a CUDA device: fp32 gives Hugging Face's ids, bf16 repeats bit-equal and strays only at near ties."""

import pytest
import torch

from kimi_fx.compose import load_config
from kimi_fx.engine import Engine
from kimi_fx.runtime.load import load
from kimi_fx.validate import judge

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=["auto", "reference"])
def engine(request) -> Engine:
    config = load_config(["device=cuda", "dtype=float32", f"ops={request.param}"])
    return Engine(config, load(config, progress=False))


@pytest.mark.parametrize(("mode", "budget"), [("plain", None), ("chain", None), ("tree", 15)])
def test_every_id_is_hugging_faces(engine, golden, mode, budget):
    torch.backends.cuda.matmul.allow_tf32 = False
    prompts = [g["prompt"].tolist() for g in golden[:6]]
    results = engine.generate(prompts, max_tokens=48, temperature=0, ignore_eos=True, mode=mode, budget=budget)
    for g, result in zip(golden, results, strict=False):
        assert list(result.outputs[0].token_ids) == g["greedy"][:48].tolist()


def test_seeded_draws_do_not_depend_on_the_mode(engine, golden):
    prompts = [g["prompt"].tolist() for g in golden[:4]]
    runs = [engine.generate(prompts, max_tokens=32, temperature=1, seed=5, mode=m) for m in ("plain", "chain", "tree")]
    ids = [[r.outputs[0].token_ids for r in run] for run in runs]
    assert ids[0] == ids[1] == ids[2]


def test_bf16_repeats_and_strays_only_at_near_ties(golden):
    config = load_config(["device=cuda"])
    engine = Engine(config, load(config, progress=False))
    prompts = [g["prompt"].tolist() for g in golden]
    how = {"max_tokens": 48, "temperature": 0, "logprobs": 2, "ignore_eos": True}
    plain, tree, again = (engine.generate(prompts, mode=m, **how) for m in ("plain", "tree", "tree"))
    assert [r.outputs[0].token_ids for r in tree] == [r.outputs[0].token_ids for r in again]
    assert all(verdict.good for verdict in judge("tree", plain, tree, exact=False))
