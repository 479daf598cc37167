"""Latent attention of a tree's nodes over [paged prefix | the tree's own rows].

Scores are q . row over L + R columns, values are the row's first L. Every node sees the whole prefix, and of the
tree's rows those under its ancestor bits; without bits the rows are causal among themselves (a prefill chunk).
Rows that are not committed live in `rows` only. fp32 softmax. Absorbed MLA: arXiv:2405.04434, section 2.1.
On CUDA in bf16 with 512 + 64 columns the kernels of csrc/mla do it, once `runtime/build.py` has loaded them. They give
the same bits for the same batch; where they cut a request's context, and so the rounding of its result, depends on the
lengths of all requests beside it.
"""

import torch
from torch import Tensor

from ..config import PAGE
from .library import kernels
from .shapes import Given, agree, require

TREE = 128  # nodes, a bit each
SCHEDULE = 4 * 256 + 2 * 524_288 // 64  # of as many rows as the kernels take


def schedule_reference(
    length: Tensor,  # [B] i32 committed tokens
    nodes: int,
    heads: int,
) -> Tensor:  # i32
    """The work list every layer of a pass shares, see csrc/mla/schedule.h. The reference needs none: zeros."""
    return length.new_zeros(scheduled(length, nodes, heads))


def scheduled(length: Tensor, nodes: int, heads: int) -> int:
    """Numbers in the schedule of these requests. ValueError for lengths of another shape or dtype."""
    return schedule_size(agree("mla_schedule", {"length": (length, "B", torch.int32)})["B"], nodes, heads)


def schedule_size(requests: int, nodes: int, heads: int) -> int:
    """A record of 4 for each of 256 blocks at most, 2 for each row tile. ValueError for no nodes or no heads."""
    if nodes < 1 or heads < 1:
        raise ValueError(f"a schedule is for one or more nodes and heads, found {nodes} and {heads}.")
    rows = nodes * heads
    tile = 16 if rows <= 16 else 32 if rows <= 32 else 64
    return 4 * 256 + 2 * requests * ((rows + tile - 1) // tile)


def verify_reference(
    q: Tensor,  # [B, N, H, L + R]
    pool: Tensor,  # [P, 64, L + R]
    page_table: Tensor,  # [B, pages] i32
    length: Tensor,  # [B] i32
    rows: Tensor,  # [B, N, L + R]
    ancestors: Tensor | None,  # [B, N, 2] i64, 128 bits, self included; None: causal
    schedule: Tensor,  # i32, from `mla_schedule`
    latent: int,  # L
    scale: float,
) -> Tensor:  # [B, N, H, L]
    check(q, pool, page_table, length, rows, ancestors, schedule, latent)
    N = q.shape[1]
    hidden = ~visible(ancestors, N) if ancestors is not None else q.new_ones(1, N, N, dtype=torch.bool).triu(1)
    hidden = hidden.unsqueeze(2).expand(q.shape[0], N, 1, N)
    out = q.new_empty(*q.shape[:3], latent)
    for b, tokens in enumerate(length.tolist()):
        prefix = (pool[page] for page in page_table[b, : (tokens + PAGE - 1) // PAGE].tolist())
        keys = torch.cat((rows[b], *prefix))[: N + tokens]  # the last page's tail is cut off
        scores = (q[b] @ keys.T).float() * scale  # [N, H, N + tokens]
        scores[..., :N].masked_fill_(hidden[b], -torch.inf)
        out[b] = scores.softmax(-1).to(q.dtype) @ keys[:, :latent]
    return out


def check(
    q: Tensor,
    pool: Tensor,
    page_table: Tensor,
    length: Tensor,
    rows: Tensor,
    ancestors: Tensor | None,
    schedule: Tensor,
    latent: int,
) -> None:
    wanted: dict[str, Given] = {
        "q": (q, "B N H L+R", None),
        "pool": (pool, f"P {PAGE} L+R", q.dtype),
        "page_table": (page_table, "B pages", torch.int32),
        "length": (length, "B", torch.int32),
        "rows": (rows, "B N L+R", q.dtype),
        "ancestors": (ancestors, "B N 2", torch.int64),
        "schedule": (schedule, "size", torch.int32),
    }
    s = agree("mla_tree_verify", wanted)
    N, width = s["N"], s["L+R"]
    require("mla_tree_verify", ancestors is None or N <= TREE, f"a tree of at most {TREE} nodes", N)
    require("mla_tree_verify", 0 < latent <= width, f"1 to {width} latent columns", latent)
    size = schedule_size(s["B"], N, s["H"])
    agree("mla_tree_verify", {"schedule": wanted["schedule"]}, size=size)


def visible(
    ancestors: Tensor,  # [B, N, 2] i64
    nodes: int,
) -> Tensor:  # [B, N, N] bool
    """Bit j of node i's two words: i sees j."""
    bits = ancestors.unsqueeze(-1) >> torch.arange(64, device=ancestors.device) & 1
    return bits.flatten(2)[..., :nodes].bool()


mla_schedule = torch.library.custom_op("kimi_fx::mla_schedule", schedule_reference, mutates_args=())
mla_tree_verify = torch.library.custom_op("kimi_fx::mla_tree_verify", verify_reference, mutates_args=())


@mla_schedule.register_fake
def _(length: Tensor, nodes: int, heads: int) -> Tensor:
    return length.new_empty(scheduled(length, nodes, heads))


@mla_tree_verify.register_fake
def _(
    q: Tensor,
    pool: Tensor,
    page_table: Tensor,
    length: Tensor,
    rows: Tensor,
    ancestors: Tensor | None,
    schedule: Tensor,
    latent: int,
    scale: float,
) -> Tensor:
    check(q, pool, page_table, length, rows, ancestors, schedule, latent)
    return q.new_empty(*q.shape[:3], latent)


@mla_schedule.register_kernel("cuda")
def _(length: Tensor, nodes: int, heads: int) -> Tensor:
    loaded = kernels()
    if loaded is None or not 0 < scheduled(length, nodes, heads) <= SCHEDULE:
        return schedule_reference(length, nodes, heads)
    return loaded.mla_schedule(length.contiguous(), nodes, heads)


@mla_tree_verify.register_kernel("cuda")
def _(
    q: Tensor,
    pool: Tensor,
    page_table: Tensor,
    length: Tensor,
    rows: Tensor,
    ancestors: Tensor | None,
    schedule: Tensor,
    latent: int,
    scale: float,
) -> Tensor:
    check(q, pool, page_table, length, rows, ancestors, schedule, latent)
    loaded = kernels()
    if loaded is None or q.dtype != torch.bfloat16 or (latent, q.shape[3]) != (512, 576):
        return verify_reference(q, pool, page_table, length, rows, ancestors, schedule, latent, scale)
    (B, N, H), most = q.shape[:3], TREE if ancestors is not None else 4096
    if not (1 <= B <= 64 and N <= most and H <= 128 and schedule_size(B, N, H) <= SCHEDULE):
        raise ValueError(
            f"q is {list(q.shape)}: the kernels take 1 to 64 requests, {most} nodes each, 128 heads, 524288 rows."
        )
    whole = (x if x is None else x.contiguous() for x in (q, pool, page_table, length, rows, ancestors))
    return loaded.mla_tree_verify(*whole, schedule, scale)
