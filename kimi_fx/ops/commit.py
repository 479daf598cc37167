"""The one write of a round: accepted rows to their pages, target and drafter, and the state one step on.

Everything it changes is declared as mutated. Request b keeps the first `kept[b]` nodes of its path, at positions
length[b], length[b] + 1, …; padding keeps none and touches no page. A request that finished becomes inactive.
On CUDA the kernels of csrc/round do it, for rows of whole 16 bytes.
"""

import torch
from torch import Tensor

from ..config import PAGE
from .library import kernels
from .shapes import Given, agree

TAKES = {
    "pool": (f"layers P {PAGE} L+R", None),
    "draft_k": (f"drafter_layers P {PAGE} KV head", None),
    "draft_v": (f"drafter_layers P {PAGE} KV head", None),
    "anchor": ("B", torch.int64),
    "length": ("B", torch.int32),
    "active": ("B", torch.bool),
    "counts": ("B V", torch.int32),
    "seen": ("B V", torch.bool),
    "remaining": ("B", torch.int64),
    "min_remaining": ("B", torch.int64),
    "page_table": ("B pages", torch.int32),
    "rows": ("layers B N L+R", None),
    "k": ("drafter_layers B A KV head", None),
    "v": ("drafter_layers B A KV head", None),
    "path": ("B A", torch.int64),
    "kept": ("B", torch.int64),
    "tokens": ("B emitted", torch.int64),
    "count": ("B", torch.int64),
    "finish": ("B", torch.int64),
    "running": ("B", torch.bool),
}


def check(*arguments: Tensor) -> None:
    """Before anything is written; pools and what enters them are of one dtype."""
    dtype = arguments[0].dtype
    given = zip(TAKES.items(), arguments, strict=True)
    wanted: dict[str, Given] = {n: (x, letters, exact or dtype) for (n, (letters, exact)), x in given}
    agree("commit", wanted)


def reference(
    pool: Tensor,  # [layers, P, 64, L + R]
    draft_k: Tensor,  # [drafter layers, P, 64, KV, head]
    draft_v: Tensor,
    anchor: Tensor,  # [B] i64
    length: Tensor,  # [B] i32
    active: Tensor,  # [B] bool
    counts: Tensor,  # [B, V] i32
    seen: Tensor,  # [B, V] bool
    remaining: Tensor,  # [B] i64
    min_remaining: Tensor,  # [B] i64
    page_table: Tensor,  # [B, pages] i32
    rows: Tensor,  # [layers, B, N, L + R] in node order
    k: Tensor,  # [drafter layers, B, A, KV, head] in path order
    v: Tensor,
    path: Tensor,  # [B, A] i64
    kept: Tensor,  # [B] i64
    tokens: Tensor,  # [B, ·] i64 emitted
    count: Tensor,  # [B] i64 how many
    finish: Tensor,  # [B] i64; 0: runs on
    running: Tensor,  # [B] bool before this step
) -> None:
    check(
        pool, draft_k, draft_v, anchor, length, active, counts, seen, remaining, min_remaining, page_table, rows, k, v,
        path, kept, tokens, count, finish, running,
    )  # fmt: skip
    for b, (n, start, emitted) in enumerate(zip(kept.tolist(), length.tolist(), count.tolist(), strict=True)):
        if n:
            at = torch.arange(start, start + n, device=rows.device)
            page, slot = page_table[b, at // PAGE].long(), at % PAGE
            pool[:, page, slot] = rows[:, b, path[b, :n]]
            draft_k[:, page, slot] = k[:, b, :n]
            draft_v[:, page, slot] = v[:, b, :n]
        if emitted:
            new = tokens[b, :emitted]
            counts[b].index_add_(0, new, counts.new_ones(emitted))
            seen[b, new] = True
            anchor[b] = new[-1]
    length.add_(kept)
    remaining.sub_(count)
    min_remaining.sub_(count).clamp_(min=0)
    active.copy_(running & (finish == 0))


commit = torch.library.custom_op(
    "kimi_fx::commit",
    reference,
    mutates_args=(
        "pool", "draft_k", "draft_v", "anchor", "length", "active", "counts", "seen", "remaining", "min_remaining",
    ),
)  # fmt: skip


@commit.register_fake
def _(*arguments: Tensor) -> None:
    check(*arguments)


@commit.register_kernel("cuda")
def _(
    pool: Tensor, draft_k: Tensor, draft_v: Tensor, anchor: Tensor, length: Tensor, active: Tensor, counts: Tensor,
    seen: Tensor, remaining: Tensor, min_remaining: Tensor, page_table: Tensor, rows: Tensor, k: Tensor, v: Tensor,
    path: Tensor, kept: Tensor, tokens: Tensor, count: Tensor, finish: Tensor, running: Tensor,
) -> None:  # fmt: skip
    mutated = (pool, draft_k, draft_v, anchor, length, active, counts, seen, remaining, min_remaining)
    check(*mutated, page_table, rows, k, v, path, kept, tokens, count, finish, running)
    copied = [pieces(x) for x in (rows, k.flatten(3), v.flatten(3))]
    read = [x.contiguous() for x in (path, kept, tokens, count, finish, running)]
    loaded = kernels()
    if loaded is None or any(x.shape[3] * x.itemsize % 16 for x in copied if len(x)):
        reference(*mutated, page_table, rows, k, v, *read)
    else:
        loaded.commit(*mutated, page_table.contiguous(), *copied, *read)


def pieces(
    rows: Tensor,  # [layers, B, n, width]
) -> Tensor:
    """The rows, copied unless every one of them lies in one piece that begins at a multiple of 16 bytes."""
    aligned = all(stride * rows.itemsize % 16 == 0 for stride in rows.stride()[:3])
    return rows if rows.stride(3) == 1 and aligned else rows.contiguous()
