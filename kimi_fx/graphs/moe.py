"""The expert block: sigmoid router with a selection bias, INT4 experts, one shared expert (DeepSeek-V3, 2.1.2)."""

from torch import Tensor

from ..config import TargetModel
from ..ops import Ops
from .axis import Axis
from .layers import add_linear
from .params import MoE


def mix_experts(
    p: MoE,
    m: TargetModel,
    ops: Ops,
    x: Tensor,  # [T, D]
    squares: Tensor,  # [T, pieces] f32, their sum is that of x's squares
    norm: Tensor,  # [D]
    valid: Tensor,  # [T] bool; padding loads no expert
    counters: Tensor,  # i32 zero, `counters_of` them
    axis: Axis | None,
) -> Tensor:
    """x plus the weighted sum of the K routed experts plus the shared one, [T, D].

    Each rank has columns of every expert.
    """
    h, shared, _, weights, order, offsets = ops.norm_route(
        x, squares, counters, norm, p.router, p.bias, p.shared.gate_up, valid, m.K, m.routed_scale, m.norm_eps
    )
    e = p.experts
    routed = ops.marlin_moe(h, e.w13, e.s13, e.w2, e.s2, weights, order, offsets, counters)
    return add_linear(ops, shared, p.shared.down, x, routed, axis)
