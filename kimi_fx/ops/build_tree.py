"""The best-first draft tree from per-depth marginals (DDTree, arXiv 2604.12989).

A node at depth d is a choice of one token for each depth down to d, and its score is the sum of their
log-probabilities. The heap is the paper's, two pushes a pop, and pops by (score descending, depth, parent,
rank), so the tree is unique. Sampling parameters play no part: a tree decides speed, not output. On CUDA the
kernels of csrc/round do it; their log-sum-exp may differ in its last bits, all else is exact.
"""

from ctypes import c_float
from heapq import heappop, heappush

import torch
from torch import Tensor

from .draw import best
from .library import kernels
from .shapes import Given, agree, require

NODES = 128  # at most: an ancestor bit each


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


def best_first(
    log_prob: list[list[float]],  # per depth, descending
    budget: int,
) -> list[tuple[float, int, int, int]]:
    """(score, depth, parent, rank) of the root and at most `budget` nodes, in the order of the pops."""
    tree = [(0.0, 0, -1, 0)]
    heap: list[tuple[float, int, int, int]] = []

    def push(parent: int, rank: int) -> None:
        score, depth, _, _ = tree[parent]
        if depth < len(log_prob) and rank < len(log_prob[depth]) and log_prob[depth][rank] > -torch.inf:
            score = c_float(score + log_prob[depth][rank]).value  # rounded to fp32, as every device adds it
            heappush(heap, (-score, depth + 1, parent, rank))

    push(0, 0)
    while heap and len(tree) <= budget:
        cost, depth, parent, rank = heappop(heap)
        tree.append((-cost, depth, parent, rank))
        push(parent, rank + 1)
        push(len(tree) - 1, 0)
    return tree


def check(logits: Tensor, anchor: Tensor, budget: Tensor, width: Tensor, nodes: int, max_width: int) -> None:
    whole = {"anchor": anchor, "budget": budget, "width": width}
    of_requests: dict[str, Given] = {name: (x, "B", torch.int64) for name, x in whole.items()}
    agree("build_tree", {"logits": (logits, "B S-1 V", None), **of_requests})
    require("build_tree", 1 <= nodes <= NODES, f"1 to {NODES} nodes", nodes)
    require("build_tree", max_width >= 1, "a max_width of 1 or more", max_width)


def reference(
    logits: Tensor,  # [B, S-1, V] any float; row d: the drafter's marginal of tokens d + 1 below the root
    anchor: Tensor,  # [B] i64
    budget: Tensor,  # [B] i64 nodes at most, root excluded; below 0 as 0
    width: Tensor,  # [B] i64 best tokens of a depth used
    nodes: int,
    max_width: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Every request's tree as (token, parent, depth, score, ancestors, valid), the fields of `Tree` in
    `graphs/state.py`: [B, N] with N = `nodes`, ancestors [B, N, 2]; i64, but score f32 and valid bool.

    Where no more nodes are possible, fewer than the budget come out; of a request with NaN or +inf among its
    logits, the root alone.
    """
    check(logits, anchor, budget, width, nodes, max_width)
    if not len(logits):
        return fake(logits, anchor, budget, width, nodes, max_width)
    tokens, log_prob = ranked(logits.float(), width, min(max_width, nodes, logits.shape[2]))
    batch = len(logits)
    token, parent, depth = ([[padding] * nodes for _ in range(batch)] for padding in (0, -1, 0))
    score = [[-torch.inf] * nodes for _ in range(batch)]
    ancestors = bytearray()
    for b, (root, most, ids, gains) in enumerate(
        zip(anchor.tolist(), budget.tolist(), tokens.tolist(), log_prob.tolist(), strict=True)
    ):
        bits = [1 << i for i in range(nodes)]
        for i, (s, d, above, rank) in enumerate(best_first(gains, min(most, nodes - 1))):
            score[b][i], depth[b][i], parent[b][i] = s, d, above
            token[b][i] = ids[d - 1][rank] if i else root
            bits[i] |= bits[above] if i else 0
        ancestors += b"".join(x.to_bytes(16, "little") for x in bits)
    words = torch.frombuffer(ancestors, dtype=torch.long).view(batch, nodes, 2)
    fields: list[Tensor] = [torch.tensor(x, device=logits.device) for x in (token, parent, depth, score)]
    return fields[0], fields[1], fields[2], fields[3], words.to(logits.device), fields[3] > -torch.inf


def fake(
    logits: Tensor, anchor: Tensor, budget: Tensor, width: Tensor, nodes: int, max_width: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    check(logits, anchor, budget, width, nodes, max_width)
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


@build_tree.register_kernel("cuda")
def _(
    logits: Tensor, anchor: Tensor, budget: Tensor, width: Tensor, nodes: int, max_width: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    check(logits, anchor, budget, width, nodes, max_width)
    loaded = kernels()
    _, depths, vocabulary = logits.shape
    if loaded is None or depths > 16 or not 1 <= vocabulary <= 32 * 8192:
        return reference(logits, anchor, budget, width, nodes, max_width)
    whole = (x.contiguous() for x in (logits.float(), anchor, budget, width))
    return loaded.build_tree(*whole, nodes, max_width)
