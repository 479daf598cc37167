"""The target: embedding, layers, logits, for the nodes of a tree or the tokens of a prefill chunk alike."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import TargetModel
from ..ops import Ops
from .axis import Axis, psum
from .layers import angles, embed, pair_angles, rms_norm, swiglu
from .mla import attend
from .moe import mix_experts
from .params import MoE, TargetParams
from .state import Context


def forward(
    p: TargetParams,
    m: TargetModel,
    ops: Ops,
    tokens: Tensor,  # [B, N] i64
    positions: Tensor,  # [B, N] i64
    valid: Tensor,  # [B, N] bool
    pool: Tensor,  # [layers, P, 64, L + R]
    page_table: Tensor,  # [B, pages] i32
    length: Tensor,  # [B] i32
    ancestors: Tensor | None,  # [B, N, 2] i64; None: causal among the N
    taps: tuple[int, ...] = (),
    axis: Axis | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Last hidden states [B, N, D] before the final norm, new pool rows [layers, B, N, L + R], and the outputs of
    the tapped layers [B, N, taps * D] in the order they are named."""
    cos, sin = pair_angles(*angles(positions, p.inv_freq, m.rope.amplitude))
    schedule = ops.mla_schedule(length, tokens.shape[1], p.layers[0].attention.q_b.shape[0])
    context = Context(page_table, length, ancestors, schedule, cos, sin)
    x = embed(tokens, p.embed, p.rank, axis)
    rows, tapped = [], {}
    for i, (layer, layer_pool) in enumerate(zip(p.layers, pool.unbind(), strict=True)):
        attended, row = attend(layer.attention, m, ops, x, layer_pool, context, axis)
        x = x + attended
        h = rms_norm(x, layer.norm, m.norm_eps)
        if isinstance(layer.mlp, MoE):
            mixed = mix_experts(layer.mlp, m, ops, h, valid)
        else:
            mixed = swiglu(h, layer.mlp.gate_up, layer.mlp.down)
        x = x + psum(mixed, axis)
        rows.append(row)
        if i in taps:
            tapped[i] = x
    features = torch.cat([tapped[i] for i in taps], -1) if taps else x[..., :0]
    return x, torch.stack(rows), features


def logits(
    p: TargetParams,
    m: TargetModel,
    x: Tensor,  # [..., D] last hidden states
) -> Tensor:
    """[..., V] f32; of a rank its columns."""
    return columns(p, m, x).float()


def columns(
    p: TargetParams,
    m: TargetModel,
    x: Tensor,  # [..., D] last hidden states
) -> Tensor:
    """Logits of this rank's part of the vocabulary, as computed: [..., V / ranks]."""
    return F.linear(rms_norm(x, p.norm, m.norm_eps), p.lm_head)
