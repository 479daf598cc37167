"""Planted faults: each makes the named check fail, and the sound engine passes it.

    fault                                                            caught by
    features of the layers after the taps (tap + 1)                  check_acceptance, check_draft
    positions of drafted nodes one too far (depth + 1)               check_node_logits
    a node sees the node before it (a sibling)                       check_node_logits
    the drafter's context in node order, not along the path          check_pool, check_draft
    context keys one position too far                                check_draft
    p/q acceptance of drafts that were not drawn from q              check_distribution
    a page table of the request that had the slot before             check_pool
    a pool row left as the page's last owner wrote it                check_pool
    rotation of half against half in place of pairs                  check_last_logits, check_ids
    the router's bias in the experts' weights                        check_last_logits

A fault takes the sound engine and returns one with it; whatever it patches is undone after the test.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kimi_fx.engine
from checks import (
    Ask,
    Golden,
    check_acceptance,
    check_distribution,
    check_draft,
    check_ids,
    check_last_logits,
    check_node_logits,
    check_pool,
    small_vocabulary,
)
from kimi_fx.bench.huggingface import huggingface
from kimi_fx.engine import Engine
from kimi_fx.graphs import drafter, target
from kimi_fx.graphs.state import Shape
from oracles.dflash import DFlash, rounds
from oracles.rounds import few_tokens, with_ops

Patch = pytest.MonkeyPatch
Check = Callable[[Engine], None]
Fault = Callable[[Engine, Patch], Engine]
NANO = Path(kimi_fx.engine.__file__).parent / "nano"
PROMPTS, TOKENS, BUDGET = 4, 128, 15


# ---- faults


def tap_plus_one(engine: Engine, patch: Patch) -> Engine:
    d = engine.model.drafter
    model = replace(engine.model, drafter=replace(d, taps=tuple(tap + 1 for tap in d.taps)))
    return Engine(engine.config, replace(engine.loaded, model=model))


def depth_plus_one(engine: Engine, patch: Patch) -> Engine:
    def build_tree(*args: Any) -> Any:
        token, parent, depth, *rest = engine.model.ops.build_tree(*args)
        return token, parent, depth + (parent >= 0), *rest

    return with_ops(engine, build_tree=build_tree)


def sibling_visible(engine: Engine, patch: Patch) -> Engine:
    """The second child of the root sees the first."""

    def build_tree(*args: Any) -> Any:
        token, parent, depth, score, ancestors, valid = engine.model.ops.build_tree(*args)
        for b, parents in enumerate(parent.tolist()):
            if parents.count(0) > 1:
                first = parents.index(0)
                ancestors[b, parents.index(0, first + 1), 0] |= 1 << first
        return token, parent, depth, score, ancestors, valid

    return with_ops(engine, build_tree=build_tree)


def features_in_node_order(engine: Engine, patch: Patch) -> Engine:
    forward, context_kv, last = target.forward, drafter.context_kv, []

    def keep(*args: Any) -> Any:
        out = forward(*args)
        last[:] = [out[2]]
        return out

    def first_nodes(p: Any, m: Any, ops: Any, features: Tensor, *rest: Any) -> Any:
        return context_kv(p, m, ops, last[0][:, : features.shape[1]], *rest)

    patch.setattr(target, "forward", keep)
    patch.setattr(drafter, "context_kv", first_nodes)
    return engine


def context_plus_one(engine: Engine, patch: Patch) -> Engine:
    context_kv = drafter.context_kv

    def shifted(p: Any, m: Any, ops: Any, features: Tensor, positions: Tensor, *rest: Any) -> Any:
        return context_kv(p, m, ops, features, positions + 1, *rest)

    patch.setattr(drafter, "context_kv", shifted)
    return engine


def p_over_q(engine: Engine, patch: Patch) -> Engine:
    """The root's best draft is kept with p/q, else a token of max(p - q, 0) comes: right only if q had drawn it."""
    ops, q, generator = engine.model.ops, [], torch.Generator().manual_seed(0)

    def build_tree(marginals: Tensor, *rest: Any) -> Any:
        q[:] = [marginals[:, 0].softmax(-1)] if marginals.shape[1] else []
        return ops.build_tree(marginals, *rest)

    def sample_and_walk(logits: Tensor, token: Tensor, *rest: Any) -> Any:
        parent, *others = rest
        tokens, count, *more = ops.sample_and_walk(logits[:, :1], token[:, :1], parent[:, :1], *others)
        if q:
            p, row, draft = logits[:, 0].softmax(-1), torch.arange(len(tokens)), token[:, 1]
            keep = torch.rand(len(tokens), generator=generator) < p[row, draft] / q[0][row, draft]
            rest_of_p = torch.multinomial((p - q[0]).clamp(min=1e-9), 1, generator=generator)[:, 0]
            tokens[:, 0] = torch.where(count > 0, torch.where(keep, draft, rest_of_p), -1)
        return tokens, count, *more

    return with_ops(engine, build_tree=build_tree, sample_and_walk=sample_and_walk)


def stale_table(engine: Engine, patch: Patch) -> Engine:
    """A request that moves to another slot finds the page table of the one that was there."""
    move = kimi_fx.engine.move

    def forgets(state: Any, source: int, to: int) -> None:
        table = state.page_table[to].clone()
        move(state, source, to)
        state.page_table[to] = table

    patch.setattr(kimi_fx.engine, "move", forgets)
    return engine


def stale_row(engine: Engine, patch: Patch) -> Engine:
    """The first row of a page, of the drafter's values alone, is never written."""

    def commit(pool: Tensor, draft_k: Tensor, draft_v: Tensor, *rest: Any) -> None:
        before = draft_v[:, :, 0].clone()
        engine.model.ops.commit(pool, draft_k, draft_v, *rest)
        draft_v[:, :, 0] = before

    return with_ops(engine, commit=commit)


def half_split(engine: Engine, patch: Patch) -> Engine:
    """Queries and keys are rotated as halves."""

    def q_up_absorb(qkv: Tensor, q_norm: Tensor, kv_norm: Tensor, q_b: Tensor, w_uk: Tensor, *rest: Any) -> Any:
        R, nope = rest[0].shape[1], w_uk.shape[1]
        places = torch.arange(R).view(2, -1).T.flatten()  # pairs as the operator takes them
        key, query = (torch.cat((torch.arange(n), n + places)) for n in (qkv.shape[1] - R, nope))
        q, rows = engine.model.ops.q_up_absorb(qkv[:, key], q_norm, kv_norm, q_b[:, query], w_uk, *rest)
        return q, rows

    return with_ops(engine, q_up_absorb=q_up_absorb)


def bias_as_weight(engine: Engine, patch: Patch) -> Engine:
    def norm_route(*args: Any) -> Any:
        _, _, _, _, router, bias, _, valid, _, scale, _ = args
        h, shared, ids, _, order, offsets = engine.model.ops.norm_route(*args)
        scores = (h.float() @ router.float().T).sigmoid() + bias
        weights = scores.gather(1, ids.clamp(min=0).long()) * valid[:, None]
        return h, shared, ids, scale * weights / (weights.sum(1, keepdim=True) + 1e-20), order, offsets

    return with_ops(engine, norm_route=norm_route)


# ---- checks, with what they look at


@pytest.fixture(scope="module")
def engine(make_engine: Any) -> Engine:
    return make_engine("cache.max_len=320")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return small_vocabulary(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def dflash(engine: Engine) -> DFlash:
    return DFlash(NANO / "kimi-nano-dflash", engine.loaded.params.target.embed, engine.loaded.params.target.lm_head)


@pytest.fixture(scope="module")
def expected(engine: Engine, dflash: DFlash, held_out: list[list[int]]) -> float:
    """Acceptance counted offline: Hugging Face's features of its own greedy text, and the dense drafter."""
    results = engine.generate(held_out[:PROMPTS], max_tokens=TOKENS, temperature=0, ignore_eos=True)
    texts = torch.tensor([[*r.prompt_token_ids, *r.outputs[0].token_ids] for r in results])
    with torch.no_grad():
        said = huggingface(NANO / "kimi-nano")(texts, output_hidden_states=True)
    prompt = len(held_out[0])
    assert torch.equal(said.logits[:, prompt - 1 : -1].argmax(-1), texts[:, prompt:])
    features = torch.cat([said.hidden_states[tap + 1] for tap in dflash.taps], -1)
    counts = [rounds(dflash, f, text, prompt, BUDGET) for f, text in zip(features, texts.tolist(), strict=True)]
    assert all(sum(c) == TOKENS - 1 for c in counts)
    return sum(map(sum, counts)) / sum(map(len, counts))


@pytest.fixture
def checks(request: pytest.FixtureRequest, golden: Golden, held_out: list[list[int]]) -> dict[str, Check]:
    """Each check bound to its data; what is slow to prepare is prepared when it runs."""
    use, (first, second, third) = request.getfixturevalue, held_out[:3]
    asked = [Ask(first[:40], 6, "plain"), Ask(second[:60], 30, "tree", 15), Ask(third[:70], 20, "chain")]
    return {
        "acceptance": lambda e: check_acceptance(e, held_out[:PROMPTS], use("expected"), TOKENS, "tree", BUDGET),
        "draft": lambda e: check_draft(e, use("dflash"), held_out[0][:70]),
        "node logits": lambda e: check_node_logits(e, held_out[0][:30], 16, 15, few_tokens(e, 1, 3, seed=0)),
        "pool": lambda e: check_pool(e, asked),
        "distribution": lambda e: check_distribution(e, Shape(batch=600, nodes=4, block=4, width=1)),
        "last logits": lambda e: check_last_logits(e, golden[:4]),
        "ids": lambda e: check_ids(e, golden[:2], "plain"),
    }


FAULTS = [
    (tap_plus_one, "acceptance"),
    (tap_plus_one, "draft"),
    (depth_plus_one, "node logits"),
    (sibling_visible, "node logits"),
    (features_in_node_order, "pool"),
    (features_in_node_order, "draft"),
    (context_plus_one, "draft"),
    (p_over_q, "distribution"),
    (stale_table, "pool"),
    (stale_row, "pool"),
    (half_split, "last logits"),
    (half_split, "ids"),
    (bias_as_weight, "last logits"),
]


def sound(request: pytest.FixtureRequest, check: str) -> Engine:
    return request.getfixturevalue("small" if check == "distribution" else "engine")


@pytest.mark.parametrize("check", dict.fromkeys(check for _, check in FAULTS))
def test_sound_engine_passes(request: pytest.FixtureRequest, checks: dict[str, Check], check: str) -> None:
    checks[check](sound(request, check))


@pytest.mark.parametrize(("fault", "check"), FAULTS, ids=[f"{fault.__name__}-{check}" for fault, check in FAULTS])
def test_fault_is_caught(
    request: pytest.FixtureRequest, monkeypatch: Patch, checks: dict[str, Check], fault: Fault, check: str
) -> None:
    engine = sound(request, check)
    if check == "acceptance":
        request.getfixturevalue("expected")  # counted before anything is patched
    engine = fault(Engine(engine.config, engine.loaded), monkeypatch)
    with pytest.raises(AssertionError):
        checks[check](engine)
