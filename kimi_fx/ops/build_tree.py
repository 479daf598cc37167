"""The best-first draft tree from per-depth marginals (DDTree, arXiv 2604.12989).

A node at depth d is a choice of one token for each depth down to d, and its score is the sum of their
log-probabilities. The paper pops the best nodes from a heap. Here every depth keeps its best and one sort
merges the depths: the same nodes in the same order, (score descending, depth, parent, rank), with fixed
shapes and without a look at the data. Sampling parameters play no part: a tree decides speed, not output.
"""

import torch
from torch import Tensor

from .draw import best


def ranked(
    logits: Tensor,  # [B, S-1, V] f32
    width: Tensor,  # [B] i64
    k: int,
) -> tuple[Tensor, Tensor]:
    """The k best tokens of every depth and their log-probabilities, [B, S-1, k] each, in the order of `best`.

    At most 0, else rounding could put a child before its parent. Out of bounds, at -inf: ranks from `width`
    on, impossible tokens, and all of a request that has NaN or +inf among its logits.
    """
    value, token = best(logits, k)
    total = logits.logsumexp(-1, keepdim=True)
    sound = (total < torch.inf).all(1, keepdim=True)
    within = torch.arange(k, device=logits.device) < width[:, None, None]
    log_prob = (value - total).clamp(max=0)
    return token, log_prob.masked_fill(~(within & sound & (value > -torch.inf)), -torch.inf)


def ancestor_bits(
    parent: Tensor,  # [B, N] i64; root and padding: themselves
    steps: int,
) -> Tensor:
    """128 bits a node, [B, N, 2] i64: itself and its ancestors up to 2^steps - 1 levels above."""
    node = torch.arange(parent.shape[1], device=parent.device)
    own = (node[:, None] // 64 == torch.arange(2, device=parent.device)).long() << node[:, None] % 64
    bits = own.repeat(parent.shape[0], 1, 1)
    for _ in range(steps):  # at step s the bits cover 2^s nodes of a path and `parent` leads 2^s up
        bits = bits | bits.gather(1, parent[..., None].expand_as(bits))
        parent = parent.gather(1, parent)
    return bits


def grow(
    log_prob: Tensor,  # [B, D, K] f32, descending in K
    nodes: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The `nodes` best of every depth, best first, at -inf where there are no more; depth 0 is only the root.

    Returns scores [B, D + 1, nodes] and, without depth 0, every node's parent, as a place in the depth above,
    and rank, [B, D, nodes]. Candidates stand by (parent, rank) and the sort is stable: so ties fall.
    """
    place = torch.arange(nodes, device=log_prob.device)
    # The child of rank r of the i-th best node has (i + 1)(r + 1) - 1 better ones beside it.
    above, rank = ((place[:, None] + 1) * (place[: log_prob.shape[2]] + 1) <= nodes).nonzero().T.contiguous()
    root = torch.where(above + rank == 0, 0.0, -torch.inf).expand(log_prob.shape[0], -1)
    scores, picks = [root], [torch.zeros_like(root, dtype=torch.long)]
    for gain in log_prob.index_select(2, rank).unbind(1):
        score, pick = (scores[-1].index_select(1, above) + gain).sort(dim=1, descending=True, stable=True)
        scores.append(score)
        picks.append(pick)
    pick = torch.stack(picks, 1)[:, 1:, :nodes]
    return torch.stack(scores, 1)[..., :nodes], above[pick], rank[pick]


def reference(
    logits: Tensor,  # [B, S-1, V] any float; row d: the drafter's marginal of tokens d + 1 below the root
    anchor: Tensor,  # [B] i64
    budget: Tensor,  # [B] i64 nodes at most, root excluded
    width: Tensor,  # [B] i64 best tokens of a depth used
    nodes: int,
    max_width: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Every request's tree as (token, parent, depth, score, ancestors, valid), the fields of `Tree` in
    `graphs/state.py`: [B, N] with N = `nodes`, ancestors [B, N, 2]; i64, but score f32 and valid bool.

    Where no more nodes are possible, fewer than the budget come out; of a request with NaN or +inf among its
    logits, the root alone.
    """
    logits = logits[:, : nodes - 1]  # no node is deeper
    depths = logits.shape[1]
    token, log_prob = ranked(logits.float(), width, min(max_width, nodes, logits.shape[2]))
    score, above, rank = grow(log_prob, nodes)
    above = above + nodes * torch.arange(depths, device=logits.device)[:, None]  # place among all depths

    score, order = score.flatten(1).sort(dim=1, descending=True, stable=True)
    index = torch.arange(order.shape[1], device=logits.device)
    number = torch.empty_like(order).scatter_(1, order, index.expand_as(order))
    score, order, index = score[:, :nodes], order[:, :nodes], index[:nodes]
    valid = (index <= budget[:, None]) & (score > -torch.inf)
    drafted = valid & (index > 0)

    def chosen(x: Tensor) -> Tensor:  # [B, depths, nodes] -> [B, N]
        return torch.nn.functional.pad(x.flatten(1), (nodes, 0)).gather(1, order)

    parent = torch.where(drafted, number.gather(1, chosen(above)), index)
    ancestors = ancestor_bits(parent, depths.bit_length())
    token = chosen(token.gather(2, rank)) * drafted
    token[:, 0] = anchor
    depth = (order // nodes) * valid
    score = score.masked_fill(~valid, -torch.inf)
    return token, parent.masked_fill(~drafted, -1), depth, score, ancestors, valid


def fake(
    logits: Tensor, anchor: Tensor, budget: Tensor, width: Tensor, nodes: int, max_width: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    whole = anchor.new_empty(logits.shape[0], nodes)
    return (
        whole,
        torch.empty_like(whole),
        torch.empty_like(whole),
        torch.empty_like(whole, dtype=torch.float32),
        anchor.new_empty(logits.shape[0], nodes, 2),
        torch.empty_like(whole, dtype=torch.bool),
    )


build_tree = torch.library.custom_op("kimi_fx::build_tree", reference, mutates_args=())
build_tree.register_fake(fake)
