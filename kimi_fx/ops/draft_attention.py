"""Grouped-query attention of a drafter's block over [paged context | the block's own keys and values].

Slot s sits at position length + s. It sees every context token, and the whole block (or, `causal`, the slots up to
itself); with a window W only positions nearer than W, itself counted (DFlash, arXiv:2602.06036; layer kinds as its
checkpoints' `layer_types` have them). Committed context only: the block's keys never enter the pool.
On CUDA in bf16 with heads of 64 or 128 columns the kernels of csrc/round do it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import PAGE
from .library import kernels
from .shapes import Given, agree, require


def check(
    q: Tensor,
    pool_k: Tensor,
    pool_v: Tensor,
    page_table: Tensor,
    length: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
) -> None:
    wanted: dict[str, Given] = {
        "q": (q, "B S H head", None),
        "pool_k": (pool_k, f"P {PAGE} KV head", q.dtype),
        "pool_v": (pool_v, f"P {PAGE} KV head", q.dtype),
        "page_table": (page_table, "B pages", torch.int32),
        "length": (length, "B", torch.int32),
        "k": (k, "B S KV head", q.dtype),
        "v": (v, "B S KV head", q.dtype),
    }
    s = agree("draft_attention", wanted)
    H, KV = s["H"], s["KV"]
    require("draft_attention", KV > 0 and H % KV == 0, "as many heads of q for each of k", f"{H} and {KV}")
    require("draft_attention", window >= 0, "a window of 0 or more", window)


def reference(
    q: Tensor,  # [B, S, H, head]
    pool_k: Tensor,  # [P, 64, KV, head]
    pool_v: Tensor,  # [P, 64, KV, head]
    page_table: Tensor,  # [B, pages] i32
    length: Tensor,  # [B] i32
    k: Tensor,  # [B, S, KV, head]
    v: Tensor,  # [B, S, KV, head]
    scale: float,
    window: int,  # 0: none
    causal: bool,
) -> Tensor:  # [B, S, H, head]
    check(q, pool_k, pool_v, page_table, length, k, v, window)
    out = torch.empty_like(q)
    for b, n in enumerate(length.tolist()):
        first = max(n - window + 1, 0) // PAGE if window else 0  # the first page any slot sees
        pages = page_table[b, first : -(-n // PAGE)]
        keys = torch.cat((pool_k[pages].flatten(0, 1)[: n - first * PAGE], k[b]))
        values = torch.cat((pool_v[pages].flatten(0, 1)[: n - first * PAGE], v[b]))
        seen = None
        if window or causal:
            at = torch.arange(first * PAGE, n + q.shape[1], device=q.device)
            ahead = at - at[-q.shape[1] :].unsqueeze(1)  # [S, keys] how far a key lies after the slot
            seen = ahead.abs() < (window or ahead.shape[1] + 1)
            seen = seen & (ahead <= 0) if causal else seen
        o = F.scaled_dot_product_attention(
            q[b].transpose(0, 1), keys.transpose(0, 1), values.transpose(0, 1), seen, scale=scale, enable_gqa=True
        )
        out[b] = o.transpose(0, 1)
    return out


draft_attention = torch.library.custom_op("kimi_fx::draft_attention", reference, mutates_args=())


@draft_attention.register_fake
def _(
    q: Tensor,
    pool_k: Tensor,
    pool_v: Tensor,
    page_table: Tensor,
    length: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int,
    causal: bool,
) -> Tensor:
    check(q, pool_k, pool_v, page_table, length, k, v, window)
    return torch.empty_like(q)


@draft_attention.register_kernel("cuda")
def _(
    q: Tensor,
    pool_k: Tensor,
    pool_v: Tensor,
    page_table: Tensor,
    length: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int,
    causal: bool,
) -> Tensor:
    check(q, pool_k, pool_v, page_table, length, k, v, window)
    loaded = kernels()
    if loaded is None or q.dtype != torch.bfloat16 or q.shape[3] not in (64, 128) or q.shape[1] > 64:
        return reference(q, pool_k, pool_v, page_table, length, k, v, scale, window, causal)
    evenly = v.stride(0) == v.shape[1] * v.stride(1) and v.stride()[2:] == (v.shape[3], 1) and v.stride(1) % 8 == 0
    whole = (x.contiguous() for x in (q, pool_k, pool_v, page_table, length, k))
    return loaded.draft_attention(*whole, v if evenly else v.contiguous(), scale, window, causal)
