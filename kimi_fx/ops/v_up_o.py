"""From attended latents to the residual stream: the value's up-projection, the output projection, the addition.

Absorbed attention's values leave the latent here (arXiv:2405.04434, section 2.1). Beside the sum come sums of squares
of its rows, which the norm after it (`norm_route`) would otherwise read the whole row for. One of several ranks has a
part of the sum: it adds no residual, and the squares are of no use. On CUDA in bf16 with at most 128 rows the kernels
of csrc/layer do it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .linear import few_rows
from .shapes import Given, agree, require

PIECE = 32  # columns whose squares are summed


def check(o: Tensor, w_uv: Tensor, weight: Tensor, residual: Tensor | None, counters: Tensor) -> None:
    sizes = agree("v_up_o", {"o": (o, "T H L", None), "w_uv": (w_uv, "H value L", o.dtype)})
    rest: dict[str, Given] = {
        "weight": (weight, "D H*value", o.dtype),
        "residual": (residual, "T D", o.dtype),
        "counters": (counters, "counters", torch.int32),
    }
    found = agree("v_up_o", rest, **sizes, **{"H*value": sizes["H"] * sizes["value"]})["counters"]
    require("v_up_o", found >= 4, "4 counters or more", found)


def reference(
    o: Tensor,  # [T, H, L]
    w_uv: Tensor,  # [H, value, L]
    weight: Tensor,  # [D, H * value]
    residual: Tensor | None,  # [T, D]
    counters: Tensor,  # [4, up] i32 zero, and left so: the kernel's blocks count in it
) -> tuple[Tensor, Tensor]:
    """x [T, D], and squares [T, D / 32, up] f32 whose sum over a row is that of x's squares."""
    check(o, w_uv, weight, residual, counters)
    v = torch.bmm(o.transpose(0, 1), w_uv.mT).transpose(0, 1).flatten(1)
    x = F.linear(v, weight)
    x = x if residual is None else x + residual
    whole = F.pad(x.float(), (0, -x.shape[1] % PIECE))
    return x, whole.unflatten(1, (-1, PIECE)).square().sum(2)


v_up_o = torch.library.custom_op("kimi_fx::v_up_o", reference, mutates_args=())


@v_up_o.register_fake
def _(o: Tensor, w_uv: Tensor, weight: Tensor, residual: Tensor | None, counters: Tensor) -> tuple[Tensor, Tensor]:
    check(o, w_uv, weight, residual, counters)
    tokens, width = o.shape[0], weight.shape[0]
    return o.new_empty(tokens, width), o.new_empty(tokens, -(-width // PIECE), dtype=torch.float32)


@v_up_o.register_kernel("cuda")
def _(o: Tensor, w_uv: Tensor, weight: Tensor, residual: Tensor | None, counters: Tensor) -> tuple[Tensor, Tensor]:
    check(o, w_uv, weight, residual, counters)
    loaded = few_rows(o, w_uv, weight)
    if loaded is None:
        return reference(o, w_uv, weight, residual, counters)
    whole = residual if residual is None else residual.contiguous()
    return loaded.v_up_o(o.contiguous(), w_uv, weight, whole, counters)
