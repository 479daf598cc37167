"""The shipped pair reproduces Hugging Face's ids and logits in fp32, whatever the mode, budget and batch."""

import pytest
import torch

from kimi_fx.graphs import target
from kimi_fx.graphs.state import empty_pool

MODES = [("plain", None), ("chain", None), ("tree", 1), ("tree", 3), ("tree", 15), ("tree", 63)]


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize(("mode", "budget"), MODES)
def test_every_id_is_hugging_faces(make_engine, golden, mode, budget, batch):
    engine = make_engine(f"run.batch={batch}")
    prompts = [g["prompt"].tolist() for g in golden]
    results = engine.generate(prompts, max_tokens=96, temperature=0, ignore_eos=True, mode=mode, budget=budget)
    for g, result in zip(golden, results, strict=True):
        assert list(result.outputs[0].token_ids) == g["greedy"].tolist()


def test_last_logits_are_hugging_faces(loaded, golden):
    m = loaded.model
    for g in golden:
        tokens = g["prompt"].long()[None]
        place = torch.arange(tokens.shape[1])[None]
        pool = empty_pool(m, 1, loaded.dtype, loaded.device)
        table, length = torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        hidden, _, _ = target.forward(
            loaded.params.target, m.target, m.ops, tokens, place, place >= 0, pool.target, table, length, None
        )
        logits = target.logits(loaded.params.target, m.target, hidden[0, -1])
        assert (logits - g["last_logits"]).abs().max() < 1e-4
