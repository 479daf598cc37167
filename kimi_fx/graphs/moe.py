"""The expert block: sigmoid router with a selection bias, INT4 experts, one shared expert (DeepSeek-V3, 2.1.2)."""

import torch.nn.functional as F
from torch import Tensor

from ..config import TargetModel
from ..ops import Ops
from .layers import swiglu
from .params import MoE


def mix_experts(
    p: MoE,
    m: TargetModel,
    ops: Ops,
    h: Tensor,  # [B, N, D] normalised
    valid: Tensor,  # [B, N] bool; padding loads no expert
) -> Tensor:
    """Weighted sum of the K routed experts plus the shared one, [B, N, D]; each rank has columns of every expert, and
    this is its part of the sum."""
    x = h.flatten(0, 1)
    logits = F.linear(x.float(), p.router)
    _, weights, order, offsets = ops.moe_route(logits, p.bias, valid.flatten(), m.K, m.routed_scale)
    e = p.experts
    routed = ops.marlin_moe(x, e.w13, e.s13, e.w2, e.s2, weights, order, offsets)
    return routed.view_as(h) + swiglu(h, p.shared.gate_up, p.shared.down)
