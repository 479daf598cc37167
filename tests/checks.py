"""What must hold of an engine, one function each: ordinary tests call them, `test_faults.py` shows what they catch.

A check takes an engine and raises AssertionError. What is right comes from outside the thing checked: Hugging Face's
ids and logits, one plain forward over whole sequences, exact distributions, another drafter's count of acceptance.
"""

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from scipy.stats import chisquare
from torch import Tensor

from kimi_fx.bench.acceptance import pool as pooled
from kimi_fx.config import Mode, SamplingParams
from kimi_fx.engine import Engine
from kimi_fx.graphs.pytree import tree_leaves, tree_map
from kimi_fx.graphs.state import KVPool, Shape
from kimi_fx.request import Request
from oracles.dflash import DFlash
from oracles.rounds import (
    drafting,
    forward,
    live_rows,
    one_round,
    path,
    plain_logits,
    plain_rows,
    prefill,
    prefilled,
    shape,
    unseated,
)
from oracles.toys import engine_of, random_pair

Golden = list[dict[str, Tensor]]
LOGITS = 1e-4  # fp32 logits of two ways to compute them; the trained pair's lie within 3e-5
ROWS = {"rtol": 1e-4, "atol": 1e-4}  # likewise for pool rows


class Ask(NamedTuple):
    """One request of a batch."""

    prompt: Sequence[int]
    tokens: int
    mode: Mode
    budget: int | None = None


def check_ids(engine: Engine, golden: Golden, mode: Mode, budget: int | None = None) -> None:
    """Greedy ids are Hugging Face's."""
    prompts = [g["prompt"].tolist() for g in golden]
    results = engine.generate(prompts, max_tokens=96, temperature=0, ignore_eos=True, mode=mode, budget=budget)
    for g, result in zip(golden, results, strict=True):
        assert list(result.outputs[0].token_ids) == g["greedy"].tolist()


def check_last_logits(engine: Engine, golden: Golden) -> None:
    """The logits after a prompt are Hugging Face's."""
    for g in golden:
        prompt = g["prompt"].tolist()
        logits = plain_logits(engine, [prompt], len(prompt) - 1)[0, -1]
        assert (logits - g["last_logits"]).abs().max() < LOGITS


def check_acceptance(
    engine: Engine, prompts: list[list[int]], expected: float, tokens: int, mode: Mode, budget: int | None = None
) -> None:
    """Tokens a verify step, pooled over all steps, are within 3 % of an independent count."""
    results = engine.generate(prompts, max_tokens=tokens, temperature=0, ignore_eos=True, mode=mode, budget=budget)
    found = pooled(results)["acceptance"]
    assert abs(found / expected - 1) < 0.03, f"{found:.3f} tokens a step, {expected:.3f} expected"


def check_pool(engine: Engine, asked: Sequence[Ask]) -> None:
    """After every commit a request's pages hold what a plain prefill of its committed tokens writes."""
    for prompt, tokens, mode, budget in asked:
        engine.add(prompt, SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True), mode, budget)
    requests: dict[int, Request] = {}
    looks: list[tuple[int, KVPool]] = []
    while engine.busy:
        before = engine.seated[:]  # the pages of one that ends in this step are as it left them until the next
        engine.step()
        running = {r.id: r for r in before + engine.seated}
        requests |= running
        for request in running.values():
            committed = len(request.prompt) + len(request.ids) - 1 if request.ids else request.prefilled
            if request in engine.seated:
                assert engine.state.length[engine.seated.index(request)] == committed
            looks.append((request.id, live_rows(engine.pool, request.pages, committed)))
    assert len(requests) == len(asked)
    expected = {r.id: plain_rows(engine, [*r.prompt, *r.ids]) for r in requests.values()}
    for owner, rows in looks:
        assert_rows(rows, expected[owner])


def assert_rows(rows: KVPool, expected: KVPool) -> None:
    """The first rows of `expected`, leaf by leaf."""
    for ours, theirs in zip(tree_leaves(rows), tree_leaves(expected), strict=True):
        torch.testing.assert_close(ours, theirs[:, : ours.shape[1]], **ROWS)


def check_node_logits(
    engine: Engine, prompt: Sequence[int], nodes: int, budget: int, marginals: Tensor | None = None
) -> None:
    """Every node's verify logits are those of a plain forward over the prompt and the node's path."""
    pool, state = prefilled(engine, [prompt], [budget])
    drafted = {} if marginals is None else {"build_tree": drafting(engine, marginals)}
    tree, _, logits = one_round(engine, pool, state, shape(engine, nodes), **drafted)
    count = int(tree.valid.sum())
    assert count == budget + 1
    paths = [path(tree, 0, node) for node in range(count)]
    plain = plain_logits(engine, [[*prompt, *tree.token[0, p].tolist()] for p in paths], len(prompt))
    expected = torch.stack([plain[node, len(p) - 1] for node, p in enumerate(paths)])
    error = (logits[0, :count] - expected).abs().amax(-1)
    assert error.max() < LOGITS, f"nodes {(error >= LOGITS).nonzero().flatten().tolist()} of {tree.parent.tolist()}"


def check_distribution(engine: Engine, form: Shape) -> None:
    """Three tokens sampled at temperature 1 over a small vocabulary come as often as the target says."""
    V = engine.model.target.V
    code = sampled(engine, form) @ torch.tensor([V * V, V, 1])
    observed, expected = torch.bincount(code, minlength=V**3).double(), exact(engine) * form.batch
    rare = expected < 5
    cells = [torch.cat((counts[~rare], counts[rare].sum(0, keepdim=True))) for counts in (observed, expected)]
    assert expected[rare].sum() > 5
    assert chisquare(*(c.numpy() for c in cells)).pvalue > 1e-3


def small_vocabulary(folder: Path) -> Engine:
    """A random pair over five tokens."""
    return engine_of(random_pair(folder, V=5, layers=2, block=4))


def one_page(engine: Engine) -> list[int]:
    """A prompt that fills a page, so that its followers can share it."""
    return torch.randint(engine.model.target.V - 1, (64,), generator=torch.Generator().manual_seed(1)).tolist()


def sampled(engine: Engine, form: Shape) -> Tensor:
    """The three tokens after the anchor, [B, 3], of requests with seeds 0, 1, … side by side."""
    B = form.batch
    pool, state = unseated(engine, 1, B + 1)
    prefill(engine, pool, state, 0, one_page(engine))
    pages = state.page_table[0]
    state = tree_map(lambda leaf: leaf.expand(B, *leaf.shape[1:]).clone(), state)
    state.page_table[:, 1] = pages[1:]
    state.sampling.temperature.fill_(1)
    state.sampling.seed[:, 0] = torch.arange(B)
    state.sampling.remaining.fill_(3)
    state.budget.fill_(form.nodes - 1)
    state.width.fill_(form.width)
    drawn: list[list[int]] = [[] for _ in range(B)]
    while state.active.any():
        _, emitted, _ = one_round(engine, pool, state, form)
        for b, (tokens, count) in enumerate(zip(emitted.tokens.tolist(), emitted.count.tolist(), strict=True)):
            drawn[b] += tokens[:count]
    return torch.tensor(drawn)


def exact(engine: Engine) -> Tensor:
    """Probabilities of the three tokens after the anchor, [V^3] f64."""
    prompt, V = one_page(engine), engine.model.target.V
    anchor = int(plain_logits(engine, [prompt], len(prompt) - 1).argmax())
    pairs = [[*prompt, anchor, a, b] for a, b in product(range(V), repeat=2)]
    p = plain_logits(engine, pairs, len(prompt)).double().softmax(-1).view(V, V, 3, V)
    return (p[0, 0, 0, :, None, None] * p[:, 0, 1, :, None] * p[:, :, 2, :]).flatten()


def check_draft(engine: Engine, dflash: DFlash, prompt: Sequence[int], rounds: int = 3) -> None:
    """Round after round the drafter's marginals are those of an independent, dense drafter over the whole text."""
    pool, state = prefilled(engine, [prompt], [15])
    committed, seen = list(prompt), []

    def build_tree(marginals: Tensor, *rest: Any) -> Any:
        seen.append(marginals[0])
        return engine.model.ops.build_tree(marginals, *rest)

    for _ in range(rounds):
        anchor = int(state.anchor)
        _, emitted, _ = one_round(engine, pool, state, shape(engine, 16), build_tree=build_tree)
        _, _, features = forward(engine, [committed], dflash.taps)
        assert (seen[-1] - dflash(features[0], anchor)).abs().max() < LOGITS
        committed += [anchor, *emitted.tokens[0, : int(emitted.count) - 1].tolist()]
        assert len(committed) == state.length
