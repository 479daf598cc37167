"""The small layers that target and drafter share: embedding, RMSNorm, sums over ranks, rotary embedding with YaRN."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import Rope
from ..ops import Ops
from .axis import Axis, psum


def embed(
    tokens: Tensor,  # [B, N] i64
    weight: Tensor,  # [V / ranks, D] this rank's
    rank: Tensor,  # [1] i64
    axis: Axis | None,
) -> Tensor:
    """Each token's row, [B, N, D]; one rank has it, the others add zeros."""
    if axis is None:
        return F.embedding(tokens, weight)
    row = tokens - rank * weight.shape[0]
    foreign = (row < 0) | (row >= weight.shape[0])
    x = F.embedding(row.clamp(0, weight.shape[0] - 1), weight)
    return psum(x.masked_fill(foreign.unsqueeze(-1), 0), axis)


def rms_norm(
    x: Tensor,  # [..., D]
    weight: Tensor,  # [D]
    eps: float,
) -> Tensor:
    """x / rms(x) * weight, in fp32 up to the result's rounding."""
    return F.rms_norm(x, weight.shape, weight, eps)


def add_linear(
    ops: Ops,
    x: Tensor,  # [T, in] with several ranks this one's columns
    weight: Tensor,  # [D, in]
    residual: Tensor,  # [T, D]
    other: Tensor | None,  # [T, D] with several ranks this one's part of a sum
    axis: Axis | None,
) -> Tensor:
    """residual + other + x @ weight.T, [T, D]."""
    if axis is None:
        return ops.linear_add(x, weight, residual, other)
    return residual + psum(ops.linear_add(x, weight, None, other), axis)


def inverse_frequencies(rope: Rope, width: int) -> Tensor:
    """YaRN's angle per position of each rotated pair, [width / 2] f32 (arXiv:2309.00071, as DeepSeek-V3 has it)."""
    powers = rope.theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    plain = 1.0 / powers
    if rope.factor == 1.0:
        return plain

    def turns(n: float) -> float:  # the pair that makes n turns over the original context
        return width * math.log(rope.original_max_position / (2 * math.pi * n)) / (2 * math.log(rope.theta))

    low = max(math.floor(turns(rope.beta_fast)), 0)
    high = min(math.ceil(turns(rope.beta_slow)), width - 1)
    span = high - low if high != low else 0.001
    ramp = ((torch.arange(width // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    keep = 1 - ramp
    return 1.0 / (rope.factor * powers) * (1 - keep) + plain * keep


def angles(
    positions: Tensor,  # [B, N] i64
    inv_freq: Tensor,  # [R / 2] f32
    amplitude: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """cos and sin [B, N, 1, R / 2] f32 of the fp32 product, as the reference models compute it; 1 is for heads."""
    phase = positions[..., None, None] * inv_freq
    return phase.cos() * amplitude, phase.sin() * amplitude


def pair_angles(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """cos and signed sin [B, N, 1, R] for `q_up_absorb`: element 2i and its partner 2i + 1 share an angle."""
    return torch.stack((cos, cos), -1).flatten(-2), torch.stack((-sin, sin), -1).flatten(-2)


def half_angles(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """cos and signed sin [B, N, 1, R] for `rotate_halves`: element i and its partner i + R / 2 share an angle."""
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def rotate_halves(
    x: Tensor,  # [B, N, H, R]
    cos: Tensor,  # [B, N, 1, R] f32, from `half_angles`
    sin: Tensor,
) -> Tensor:
    """Rotate first half against second (NeoX order), as the drafter does."""
    partner = x.roll(x.shape[-1] // 2, -1)
    return torch.addcmul(x * cos, partner, sin).to(x.dtype)
