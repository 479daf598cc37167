"""What the expert block reads: the normed hidden states, the router's choice, the first half of the shared expert.

RMSNorm, then router and shared gate | up as one product of the same input. The router's sums are fp32 of the rounded
input and of weights as stored, and what follows is `moe_route`. On CUDA in bf16 with at most 128 rows and 32 of 1024
experts the kernel of csrc/layer does all of it in one launch; more rows are PyTorch's products and `moe_route`.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from . import moe_route
from .linear import few_rows

Routed = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def reference(
    x: Tensor,  # [T, D]
    squares: Tensor,  # [T, pieces] f32 that add up to the sum of x's squares, from `v_up_o`
    counters: Tensor,  # [2] i32 zero, and left so: the kernel's blocks count in it
    norm: Tensor,  # [D]
    router: Tensor,  # [E, D]
    bias: Tensor,  # [E] f32
    gate_up: Tensor,  # [2, I, D] of the shared expert
    valid: Tensor,  # [T] bool; False: padding, visits no expert
    k: int,
    scale: float,
    eps: float,
) -> Routed:
    """h = rms_norm(x) [T, D], silu(gate) * up of h [T, I], and ids, weights, order, offsets as `moe_route` has them."""
    return _route(moe_route.reference, x, squares, norm, router, bias, gate_up, valid, k, scale, eps)


def _route(
    choose: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]],
    x: Tensor,
    squares: Tensor,
    norm: Tensor,
    router: Tensor,
    bias: Tensor,
    gate_up: Tensor,
    valid: Tensor,
    k: int,
    scale: float,
    eps: float,
) -> Routed:
    inverse = (squares.sum(1, keepdim=True) / x.shape[1] + eps).rsqrt()
    h = (x.float() * inverse * norm.float()).to(x.dtype)
    gate, up = F.linear(h, gate_up.flatten(0, 1)).chunk(2, -1)
    logits = F.linear(h.float(), router.float())
    return h, F.silu(gate) * up, *choose(logits, bias, valid, k, scale)


norm_route = torch.library.custom_op("kimi_fx::norm_route", reference, mutates_args=())


@norm_route.register_fake
def _(
    x: Tensor,
    squares: Tensor,
    counters: Tensor,
    norm: Tensor,
    router: Tensor,
    bias: Tensor,
    gate_up: Tensor,
    valid: Tensor,
    k: int,
    scale: float,
    eps: float,
) -> Routed:
    tokens, experts = x.shape[0], router.shape[0]
    ids, order = (x.new_empty(shape, dtype=torch.int32) for shape in ((tokens, k), (tokens * k,)))
    weights = x.new_empty((tokens, k), dtype=torch.float32)
    offsets = x.new_empty((experts + 1,), dtype=torch.int32)
    return torch.empty_like(x), x.new_empty(tokens, gate_up.shape[1]), ids, weights, order, offsets


@norm_route.register_kernel("cuda")
def _(
    x: Tensor,
    squares: Tensor,
    counters: Tensor,
    norm: Tensor,
    router: Tensor,
    bias: Tensor,
    gate_up: Tensor,
    valid: Tensor,
    k: int,
    scale: float,
    eps: float,
) -> Routed:
    loaded = few_rows(x, norm, router, gate_up)
    if loaded is None or k > 32 or router.shape[0] > 1024:
        return _route(moe_route.moe_route, x, squares, norm, router, bias, gate_up, valid, k, scale, eps)
    whole = x.contiguous(), squares.contiguous()
    return loaded.norm_route(*whole, counters, norm, router, bias, gate_up, valid.contiguous(), k, scale, eps)
