"""The target: embedding, layers, logits, for the nodes of a tree or the tokens of a prefill chunk alike."""

import torch
from torch import Tensor

from ..config import TargetModel
from ..ops import Ops
from ..ops.norm_route import counters_of
from .axis import Axis
from .layers import add_linear, angles, embed, pair_angles
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
    counters = torch.zeros(counters_of(tokens.numel(), m.E, m.K), dtype=torch.int32, device=tokens.device)
    context = Context(page_table, length, ancestors, schedule, cos.flatten(0, 2), sin.flatten(0, 2), counters)
    x = embed(tokens, p.embed, p.rank, axis).flatten(0, 1)
    rows, tapped = [], {}
    for i, (layer, layer_pool) in enumerate(zip(p.layers, pool.unbind(), strict=True)):
        x, squares, row = attend(layer.attention, m, ops, x, layer_pool, context, axis)
        if isinstance(layer.mlp, MoE):
            x = mix_experts(layer.mlp, m, ops, x, squares, layer.norm, valid.flatten(), counters, axis)
        else:
            inner = ops.norm_gate_up(x, layer.norm, layer.mlp.gate_up, m.norm_eps)
            x = add_linear(ops, inner, layer.mlp.down, x, None, axis)
        rows.append(row)
        if i in taps:
            tapped[i] = x
    features = torch.cat([tapped[i] for i in taps], -1) if taps else x[..., :0]
    shape = tokens.shape
    return x.unflatten(0, shape), torch.stack(rows).unflatten(1, shape), features.unflatten(0, shape)


def logits(
    p: TargetParams,
    m: TargetModel,
    ops: Ops,
    x: Tensor,  # [B, N, D] last hidden states
    wide: bool = True,
) -> Tensor:
    """[B, N, V] f32, or as the weights unless `wide`; of a rank its columns."""
    return ops.norm_linear(x.flatten(0, 1), p.norm, p.lm_head, m.norm_eps, wide).unflatten(0, x.shape[:2])
