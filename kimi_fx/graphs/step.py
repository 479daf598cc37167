"""The round: draft a block, build the tree, verify every node at once, walk, commit.

Both functions are closed over a static `Shape` and `Model` and are pure but for `commit`, their last operator, which
advances pool and state in place (what donation is in JAX): the state they return is the one they were given. Plain
decoding is one node, a chain is a tree of width one.
DFlash drafts (arXiv:2602.06036), DDTree arranges them (arXiv:2604.12989).
"""

import torch
from torch import Tensor

from . import drafter, sampling, target
from .params import Params
from .state import Emitted, KVPool, Model, Shape, StepState, Tree


def ddtree_step(
    params: Params, pool: KVPool, state: StepState, shape: Shape, model: Model
) -> tuple[StepState, Tree, Emitted]:
    """One round of decoding for every active slot. Lossless: the drafts decide only how many tokens come out."""
    tree = build_tree(state, shape, model, draft(params, pool, state, shape, model))
    positions = state.length.unsqueeze(1) + tree.depth
    valid = tree.valid & state.active.unsqueeze(1)
    hidden, rows, features = verify(params, pool, state, model, tree.token, positions, valid, tree.ancestors)
    emitted = walk(params, state, shape, model, tree, hidden, state.length.long(), state.active)
    commit(params, pool, state, model, rows, features, emitted.path, emitted.count, emitted, state.active)
    return state, tree, emitted


def prefill_step(
    params: Params,
    pool: KVPool,
    state: StepState,  # of one slot
    tokens: Tensor,  # [1, C] i64
    count: Tensor,  # [1] i64: how many of them are real
    final: Tensor,  # [1] bool: the prompt ends here, draw the anchor
    model: Model,
) -> tuple[StepState, Emitted]:
    """One causal chunk of one request's prompt; its last emits the request's first token."""
    place = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
    positions = state.length.unsqueeze(1) + place
    valid = place < count.unsqueeze(1)
    hidden, rows, features = verify(params, pool, state, model, tokens, positions, valid, None)
    last = (count - 1).view(1, 1, 1).expand(1, 1, hidden.shape[-1])
    root = build_tree(state, ROOT, model, draft(params, pool, state, ROOT, model))
    emitted = walk(params, state, ROOT, model, root, hidden.gather(1, last), state.length + count - 1, final)
    commit(params, pool, state, model, rows, features, place, count, emitted, final)
    return state, emitted


ROOT = Shape(batch=1, nodes=1, block=1, width=1)


def draft(params: Params, pool: KVPool, state: StepState, shape: Shape, model: Model) -> Tensor:  # [B, S - 1, V]
    """The drafter's marginals of the places after the anchor; none for a lone root."""
    if params.drafter is None or model.drafter is None or shape.nodes == 1:
        return params.target.lm_head.new_zeros(shape.batch, 0, model.target.V)
    return drafter.draft(params.drafter, params.target, model.drafter, model.ops, pool, state, shape.block, model.axis)


def build_tree(
    state: StepState,
    shape: Shape,
    model: Model,
    marginals: Tensor,  # [B, S - 1, V]
) -> Tree:
    """The most probable prefixes under the marginals, the anchor their root; of an inactive slot the root alone."""
    budget = state.budget * state.active
    return Tree(*model.ops.build_tree(marginals, state.anchor, budget, state.width, shape.nodes, shape.width))


def verify(
    params: Params,
    pool: KVPool,
    state: StepState,
    model: Model,
    tokens: Tensor,  # [B, N] i64
    positions: Tensor,  # [B, N] i64
    valid: Tensor,  # [B, N] bool
    ancestors: Tensor | None,  # [B, N, 2] i64; None: causal
) -> tuple[Tensor, Tensor, Tensor]:
    """The target over all nodes at once: hidden states, pool rows, features."""
    return target.forward(
        params.target, model.target, model.ops, tokens, positions, valid,
        pool.target, state.page_table, state.length, ancestors, model.taps, model.axis,
    )  # fmt: skip


def walk(
    params: Params,
    state: StepState,
    shape: Shape,
    model: Model,
    tree: Tree,
    hidden: Tensor,  # [B, N, D]
    position: Tensor,  # [B] i64 of the root in the sequence
    active: Tensor,  # [B] bool
) -> Emitted:
    """Draw along the tree from the root for as long as the drawn token is a child."""
    if model.axis is not None:
        columns = target.logits(params.target, model.target, model.ops, hidden, wide=False)
        return sampling.sample_and_walk(
            model, model.axis, params.target.rank, columns, state, tree, position, active, shape.depth + 1
        )
    logits, s = target.logits(params.target, model.target, model.ops, hidden), state.sampling
    tokens, count, path, finish, logprob, top_ids, top_logprobs = model.ops.sample_and_walk(
        logits, tree.token, tree.parent, position, active, shape.depth + 1,
        s.temperature, s.top_k, s.top_p, s.min_p, s.presence, s.frequency, s.repetition, s.bias, s.counts, s.seen,
        s.seed, s.sample, s.logprobs, s.stop_ids, s.remaining, s.min_remaining,
    )  # fmt: skip
    nodes = tree.valid.sum(1)
    return Emitted(tokens, count, path, finish, logprob, top_ids, top_logprobs, nodes)


def commit(
    params: Params,
    pool: KVPool,
    state: StepState,
    model: Model,
    rows: Tensor,  # [layers, B, N, L + R]
    features: Tensor,  # [B, N, taps * D]
    path: Tensor,  # [B, A] i64 nodes in sequence order
    kept: Tensor,  # [B] i64 how many of them enter the pool
    emitted: Emitted,
    running: Tensor,  # [B] bool
) -> None:
    """Write the accepted rows to the pages, target and drafter, and advance the state, in place."""
    if params.drafter is None or model.drafter is None:
        k = v = pool.draft_k.new_zeros(0, *path.shape, *pool.draft_k.shape[3:])
    else:
        accepted = features.gather(1, path.unsqueeze(-1).expand(-1, -1, features.shape[-1]))
        positions = state.length.unsqueeze(1) + torch.arange(path.shape[1], device=path.device)
        k, v = drafter.context_kv(params.drafter, model.drafter, model.ops, accepted, positions, model.axis)
    s = state.sampling
    model.ops.commit(
        pool.target, pool.draft_k, pool.draft_v,
        state.anchor, state.length, state.active, s.counts, s.seen, s.remaining, s.min_remaining,
        state.page_table, rows, k, v, path, kept, emitted.tokens, emitted.count, emitted.finish, running,
    )  # fmt: skip
