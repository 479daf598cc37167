"""Sampling and the walk with the vocabulary spread over ranks.

Each rank gets whole rows for its share of the nodes and draws from each as if it were a request of a single token, by
the same operator that walks a tree on one rank: what a walk would have drawn so far is the node's path. What all drew
is gathered, and the walk is then the longest path of nodes whose parents drew them.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.mla_tree_verify import visible
from ..ops.sample_and_walk import NON_FINITE, RUNS
from .axis import Axis, gather, rows_each, rows_of_columns
from .pytree import tree_map
from .state import Emitted, Model, Sampling, StepState, Tree


def sample_and_walk(
    model: Model,
    axis: Axis,
    rank: Tensor,  # [1] i64
    columns: Tensor,  # [B, N, V / ranks] logits
    state: StepState,
    tree: Tree,
    position: Tensor,  # [B] i64 of the root in the sequence
    active: Tensor,  # [B] bool
    rows: int,  # A
) -> Emitted:
    """What `ops.sample_and_walk` emits for the whole logits, the same on every rank."""
    N = columns.shape[1]
    whole = rows_of_columns(columns.flatten(0, 1), axis).float()  # [R, V]
    seen = visible(tree.ancestors, N)  # [B, N, N]
    drawn = _draw(model, axis, rank, whole, state.sampling, tree, seen, position, active)
    return _walk(tree, seen, active, rows, *drawn)


def _draw(
    model: Model,
    axis: Axis,
    rank: Tensor,  # [1] i64
    logits: Tensor,  # [R, V] f32 this rank's
    sampling: Sampling,
    tree: Tree,
    seen: Tensor,  # [B, N, N] bool
    position: Tensor,  # [B] i64
    active: Tensor,  # [B] bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Of every node token, finish, log-probability [B, N], and the alternatives' ids and their own [B, N, 20]."""
    B, N = tree.token.shape
    R = rows_each(B * N, axis)
    mine = rank * R + torch.arange(R, device=rank.device)
    node = mine.clamp(max=B * N - 1)
    b, depth = node // N, tree.depth.flatten()[node]
    taking_part = (mine < B * N) & tree.valid.flatten()[node] & active[b]
    s = tree_map(lambda leaf: leaf[b], sampling)
    behind = seen.flatten(0, 1)[node][:, 1:].to(s.counts.dtype)  # the path without the root: drawn before this node
    counts = s.counts.scatter_add(1, tree.token[b][:, 1:], behind)
    tokens, count, _, finish, logprob, top_ids, top_logprobs = model.ops.sample_and_walk(
        logits.unsqueeze(1), tree.token.flatten()[node].unsqueeze(1), torch.full_like(node, -1).unsqueeze(1),
        position[b] + depth, taking_part, 1,
        s.temperature, s.top_k, s.top_p, s.min_p, s.presence, s.frequency, s.repetition, s.bias, counts,
        s.seen | (counts != s.counts), s.seed, s.sample, s.logprobs, s.stop_ids,
        (s.remaining - depth).clamp(min=1), (s.min_remaining - depth).clamp(min=0),
    )  # fmt: skip
    ids = torch.cat((tokens, finish.unsqueeze(1), top_ids.flatten(1)), 1).int()
    numbers = torch.cat((logprob, top_logprobs.flatten(1)), 1).view(torch.int32)  # all in one exchange
    every = gather(torch.cat((ids, numbers), 1), axis)[: B * N].unflatten(0, (B, N))
    kinds = (1, 1, top_ids.shape[-1], 1, top_ids.shape[-1])
    token, finish, top_ids, logprob, top_logprobs = every.split(kinds, -1)
    f32 = torch.float32
    return (
        token.squeeze(-1).long(), finish.squeeze(-1).long(), logprob.contiguous().view(f32).squeeze(-1),
        top_ids.long(), top_logprobs.contiguous().view(f32),
    )  # fmt: skip


def _walk(
    tree: Tree,
    seen: Tensor,  # [B, N, N] bool
    active: Tensor,  # [B] bool
    rows: int,
    token: Tensor,  # [B, N] i64; -1: nothing was drawn
    finish: Tensor,  # [B, N] i64
    logprob: Tensor,  # [B, N] f32
    top_ids: Tensor,  # [B, N, 20] i64
    top_logprobs: Tensor,  # [B, N, 20] f32
) -> Emitted:
    above = tree.parent.clamp(min=0)
    root = torch.arange(tree.token.shape[1], device=above.device) == 0
    follows = tree.valid & active.unsqueeze(1)
    follows &= root | (token.gather(1, above) == tree.token) & (finish.gather(1, above) == RUNS)
    reached = ~(seen & ~follows.unsqueeze(1)).any(-1)
    emits = reached & (finish != NON_FINITE)
    count = emits.sum(1)
    place = tree.depth.where(emits, rows)  # what is not emitted lands behind the last row
    nodes = torch.arange(tree.token.shape[1], device=place.device).expand_as(place)
    path = F.pad(torch.zeros_like(place[:, :1]), (0, rows)).scatter(1, place, nodes)[:, :rows]
    emitted = torch.arange(rows, device=place.device) < count.unsqueeze(1)
    wide = emitted.unsqueeze(-1)
    at = path.unsqueeze(-1).expand(-1, -1, top_ids.shape[-1])
    return Emitted(
        tokens=token.gather(1, path).where(emitted, -1),
        count=count,
        path=path,
        finish=(finish * reached).amax(1),
        logprob=logprob.gather(1, path).where(emitted, 0.0),
        top_ids=top_ids.gather(1, at) * wide,
        top_logprobs=top_logprobs.gather(1, at).where(wide, 0.0),
        nodes=tree.valid.sum(1),
    )
