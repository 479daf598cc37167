"""The routed experts of one layer: gather, gate | up, SiLU-mul, down, weighted sum over a token's experts.

Routing comes from `norm_route`; the shared expert and the residual are the caller's. Weights are INT4 in the
layout of `marlin.py` or, without scales, plain floating matrices, which suit a CPU. Under tensor parallelism
the result is one rank's partial sum. On CUDA in bf16 the kernels of csrc/moe do it where both widths are multiples
of 64 and an expert's at most 2048; where tokens are few they scale the sums of a group, so that weights are not rounded
to bf16.
"""

import torch
from torch import Tensor
from torch.nn.functional import silu

from .library import kernels
from .marlin import GROUP, TILE_IN, dequantise, marlin_unpack, marlin_unpack_scales
from .norm_route import counters_of
from .shapes import Given, agree, require


def check(
    x: Tensor,
    w13: Tensor,
    s13: Tensor | None,
    w2: Tensor,
    s2: Tensor | None,
    weights: Tensor,
    order: Tensor,
    offsets: Tensor,
    counters: Tensor,
) -> None:
    gate_up: Given = (w13, "E D/16 4I", torch.int32) if s13 is not None else (w13, "E D 2I", x.dtype)
    down: Given = (w2, "E I/16 2D", torch.int32) if s2 is not None else (w2, "E I D", x.dtype)
    s = agree("marlin_moe", {"x": (x, "T D", None), "weights": (weights, "T k", torch.float32), "w2": down})
    E, D, inner = s["E"], s["D"], s["I"] if s2 is None else TILE_IN * s["I/16"]
    halves = {"I": inner, "2I": 2 * inner, "4I": 4 * inner, "2D": 2 * D, "I/16": inner // TILE_IN}
    tiles = {"D/16": D // TILE_IN, "D/32": D // GROUP, "I/32": inner // GROUP}
    rest: dict[str, Given] = {
        "w13": gate_up,
        "s13": (s13, "E D/32 2I", torch.bfloat16),
        "w2": down,
        "s2": (s2, "E I/32 D", torch.bfloat16),
        "order": (order, "T*k", torch.int32),
        "offsets": (offsets, "E+1", torch.int32),
        "counters": (counters, "counters", torch.int32),
    }
    found = agree("marlin_moe", rest, **(s | halves | tiles | {"T*k": s["T"] * s["k"], "E+1": E + 1}))["counters"]
    least = counters_of(s["T"], E, s["k"])
    require("marlin_moe", found >= least, f"{least} counters or more", found)


def reference(
    x: Tensor,  # [T, D] any float
    w13: Tensor,  # [E, D/16, 2*2I] i32, gate columns then up columns; without scales [E, D, 2I] of x's dtype
    s13: Tensor | None,  # [E, D/32, 2I] bf16
    w2: Tensor,  # [E, I/16, 2*D] i32; without scales [E, I, D] of x's dtype
    s2: Tensor | None,  # [E, I/32, D] bf16
    weights: Tensor,  # [T, k] f32, 0 for padding
    order: Tensor,  # [T*k] i32 pairs (token * k + slot) by expert, padding last
    offsets: Tensor,  # [E+1] i32
    counters: Tensor,  # [counters_of(T, E, k)] i32 zero, and left so: the kernel's blocks count in it
) -> Tensor:
    """out[t] = sum over slots of weight * (silu(gate) * up) @ w2[e], (gate, up) = x[t] @ w13[e]; [T, D] as x.

    The sum runs in slot order in fp32. INT4 weights mean bf16(q * scale). Padding tokens get zeros.
    """
    check(x, w13, s13, w2, s2, weights, order, offsets, counters)
    tokens, k = weights.shape
    counts = offsets.diff().tolist()
    hit = [e for e, count in enumerate(counts) if count]
    runs = [counts[e] for e in hit]
    runs.append(tokens * k - sum(runs))  # padding pairs, which no expert takes
    gate, up = _grouped(x[order // k], runs, hit, w13, s13).chunk(2, dim=1)
    rows = _grouped(silu(gate) * up, runs, hit, w2, s2)
    pairs = torch.empty_like(rows)
    pairs[order] = rows
    return (weights.unsqueeze(2) * pairs.view(tokens, k, x.shape[1])).sum(1).to(x.dtype)


def _grouped(rows: Tensor, runs: list[int], hit: list[int], w: Tensor, scales: Tensor | None) -> Tensor:
    """Each run of rows times its own expert's matrix; zeros for the run that is left over."""
    out = rows.new_zeros(rows.shape[0], (w if scales is None else scales).shape[2])
    for e, run, result in zip(hit, rows.split(runs), out.split(runs), strict=False):
        torch.mm(run, _matrix(w, scales, e, rows.dtype), out=result)
    return out


def _matrix(w: Tensor, scales: Tensor | None, e: int, dtype: torch.dtype) -> Tensor:
    """Expert e as [in, out]."""
    if scales is None:
        return w[e]
    words, groups = marlin_unpack(w[e : e + 1]), marlin_unpack_scales(scales[e : e + 1])
    return dequantise(words, groups)[0].t().contiguous().to(dtype)


def fake(
    x: Tensor,
    w13: Tensor,
    s13: Tensor | None,
    w2: Tensor,
    s2: Tensor | None,
    weights: Tensor,
    order: Tensor,
    offsets: Tensor,
    counters: Tensor,
) -> Tensor:
    check(x, w13, s13, w2, s2, weights, order, offsets, counters)
    return x.new_empty(x.shape)


marlin_moe = torch.library.custom_op("kimi_fx::marlin_moe", reference, mutates_args=())
marlin_moe.register_fake(fake)


@marlin_moe.register_kernel("cuda")
def _(
    x: Tensor,
    w13: Tensor,
    s13: Tensor | None,
    w2: Tensor,
    s2: Tensor | None,
    weights: Tensor,
    order: Tensor,
    offsets: Tensor,
    counters: Tensor,
) -> Tensor:
    check(x, w13, s13, w2, s2, weights, order, offsets, counters)
    loaded = kernels()
    (experts, _, words), width = w13.shape, x.shape[1]
    fits = x.dtype == torch.bfloat16 and width % 64 == 0 and words % 256 == 0 and words <= 4 * 2048 and experts <= 1024
    if loaded is None or s13 is None or s2 is None or not fits:
        return reference(x, w13, s13, w2, s2, weights, order, offsets, counters)
    return loaded.marlin_moe(x.contiguous(), w13, s13, w2, s2, weights.contiguous(), order, offsets, counters)
