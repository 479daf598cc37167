"""Sampling with drafts is sampling without: exact distributions, and the same tokens for the same seed.

The target's exact probabilities of three tokens come from Hugging Face on all prefixes of a small vocabulary. Tens
of thousands of requests are drawn side by side, round by round; the engine must give the same tokens.
"""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from kimi_fx.bench.huggingface import huggingface
from kimi_fx.compose import load_config
from kimi_fx.engine import Engine
from kimi_fx.graphs.pytree import tree_map
from kimi_fx.graphs.state import Shape, empty_pool, empty_state
from kimi_fx.graphs.step import ddtree_step, prefill_step
from kimi_fx.runtime.load import Loaded
from oracles.toys import random_pair

V, BLOCK, BUDGET = 8, 3, 7
DRAWS, BATCH = 20_000, 1000
PROMPT = [5, 1, 0, 4, 2, 3]
MODES = {
    "plain": Shape(BATCH, 1, 1, 1),
    "chain": Shape(BATCH, BLOCK, BLOCK, 1),
    "tree": Shape(BATCH, BUDGET + 1, BLOCK, BUDGET),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("lossless")


@pytest.fixture(scope="module")
def loaded(folder) -> Loaded:
    return random_pair(folder, V, layers=1, block=BLOCK)


@torch.inference_mode()
def draw(loaded: Loaded, shape: Shape, seeds: Tensor) -> Tensor:
    """One prefill of the prompt but its last token, copied to every request; then rounds until all have three."""
    params, model, B = loaded.params, loaded.model, len(seeds)
    pool, state = empty_pool(model, 1, torch.float32, loaded.device), empty_state(1, 1, V, loaded.device)
    body = torch.tensor([PROMPT[:-1]])
    prefill_step(params, pool, state, body, torch.tensor([body.shape[1]]), torch.tensor([False]), model)
    pool = tree_map(lambda leaf: leaf.repeat_interleave(B, 1), pool)
    state = tree_map(lambda leaf: leaf.repeat_interleave(B, 0), state)
    s = state.sampling
    values = {state.anchor: PROMPT[-1], state.active: True, state.budget: shape.nodes - 1, state.width: shape.width}
    values |= {s.temperature: 1.0, s.top_k: V, s.top_p: 1.0, s.repetition: 1.0, s.logprobs: -1, s.stop_ids: -1}
    values |= {s.remaining: 3}
    for leaf, value in values.items():
        leaf.fill_(value)
    state.page_table[:, 0] = torch.arange(B)
    s.seed[:, 0] = seeds
    tokens: list[list[int]] = [[] for _ in range(B)]
    alive = torch.arange(B)
    while len(alive):
        _, _, emitted = ddtree_step(params, pool, state, replace(shape, batch=len(alive)), model)
        for row, new, n in zip(alive.tolist(), emitted.tokens.tolist(), emitted.count.tolist(), strict=True):
            tokens[row] += new[:n]
        keep = state.active.nonzero()[:, 0]
        alive, state = alive[keep], tree_map(lambda leaf, keep=keep: leaf[keep], state)
    return torch.tensor(tokens)


@pytest.fixture(scope="module")
def exact(folder) -> np.ndarray:
    """Probabilities of every three tokens, [V^3]."""
    peer = huggingface(folder / "target")
    texts = torch.tensor([[*PROMPT, a, b] for a, b in product(range(V), repeat=2)])
    with torch.inference_mode():
        p = peer(texts).logits[:, len(PROMPT) - 1 :].double().softmax(-1).view(V, V, 3, V)
    return (p[0, 0, 0, :, None, None] * p[:, 0, 1, :, None] * p[:, :, 2]).flatten().numpy()


@pytest.mark.parametrize("mode", MODES)
def test_three_tokens_come_as_often_as_the_target_says(loaded, exact, mode):
    tokens = torch.cat([draw(loaded, MODES[mode], seeds) for seeds in torch.arange(DRAWS).split(BATCH)])
    observed = np.bincount(tokens @ torch.tensor([V * V, V, 1]), minlength=V**3)
    expected = exact * DRAWS
    rare = expected < 5
    assert observed.sum() == DRAWS and rare.mean() < 0.5
    pooled = [np.append(counts[~rare], counts[rare].sum()) for counts in (observed, expected)]
    assert chisquare(*pooled).pvalue > 1e-3


def test_same_tokens_in_every_mode(loaded):
    plain, chain, tree = (draw(loaded, shape, torch.arange(BATCH)) for shape in MODES.values())
    assert torch.equal(plain, chain) and torch.equal(plain, tree)


@pytest.mark.parametrize("mode", MODES)
def test_engine_draws_the_same(loaded, mode):
    """64 requests at once, seeds as above, greedy and unseeded ones among them."""
    engine = Engine(load_config(["cache.max_len=64", "run.batch=64"]), loaded)
    n, budget = 48, BUDGET if mode == "tree" else None
    params = [{"seed": i} for i in range(n)] + [{"temperature": 0}, {}] * 8
    how = {"max_tokens": 3, "ignore_eos": True, "mode": mode, "budget": budget}
    results = engine.generate([PROMPT] * len(params), params, **how)
    expected = draw(loaded, MODES["plain"], torch.arange(n))
    assert [list(r.outputs[0].token_ids) for r in results[:n]] == expected.tolist()
    greedy, unseeded = ({r.outputs[0].token_ids for r in results[start::2]} for start in (n, n + 1))
    assert len(greedy) == 1 < len(unseeded)
