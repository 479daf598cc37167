"""DFlash (arXiv:2602.06036): one bidirectional block that reads the target's features as context.

`context_kv` turns features of committed tokens into every layer's keys and values, once; `draft` runs the block
[anchor, mask, mask, …] over them. Context and block go through the same key and value weights: `kv` holds those of all
layers. A mask slot predicts the token of its own place. It shares the target's embedding and head.
"""

import torch
from einops import rearrange
from torch import Tensor

from ..config import DrafterModel
from ..ops import Ops
from .axis import Axis, gather_columns, psum
from .layers import add_linear, angles, embed, half_angles, rms_norm, rotate_halves
from .params import DrafterLayer, DrafterParams, TargetParams
from .state import KVPool, StepState


def context_kv(
    p: DrafterParams,
    m: DrafterModel,
    ops: Ops,
    features: Tensor,  # [B, A, taps * D]
    positions: Tensor,  # [B, A] i64
    axis: Axis | None = None,
) -> tuple[Tensor, Tensor]:
    """Keys (after norm and rotation) and values of all layers, each [layers, B, A, KV, head]."""
    if axis is not None:  # `fc` takes this rank's columns of the features
        width = p.fc.shape[1]
        features = features.index_select(-1, p.rank * width + torch.arange(width, device=p.rank.device))
    x = psum(ops.linear_add(features.flatten(0, 1), p.fc, None, None), axis)
    kv = ops.norm_linear(x, p.feature_norm, p.kv.flatten(0, 3), m.norm_eps, False)
    kv = kv.unflatten(0, features.shape[:2]).unflatten(-1, p.kv.shape[:4])
    k, v = rearrange(kv, "B A layers two KV head -> two layers B A KV head")
    cos, sin = _angles(p, m, positions)
    k = torch.stack([_key(k[i], p.k_norm[i], m, cos, sin) for i in range(m.layers)])
    return k, v


def draft(
    p: DrafterParams,
    target: TargetParams,
    m: DrafterModel,
    ops: Ops,
    pool: KVPool,
    state: StepState,
    block: int,  # S
    axis: Axis | None = None,
) -> Tensor:
    """Logits [B, S - 1, V] f32; row d is the marginal of the token d + 1 places after the anchor."""
    B = state.anchor.shape[0]
    tokens = torch.cat((state.anchor.unsqueeze(1), state.anchor.new_full((B, block - 1), m.mask_id)), 1)
    positions = state.length.long().unsqueeze(1) + torch.arange(block, device=tokens.device)
    cos, sin = _angles(p, m, positions)
    x = embed(tokens, target.embed, target.rank, axis).flatten(0, 1)
    for i, layer in enumerate(p.layers):
        x = _attend(layer, p, m, ops, i, x, pool, state, cos, sin, axis)
        inner = ops.norm_gate_up(x, layer.mlp_norm, layer.mlp.gate_up, m.norm_eps)
        x = add_linear(ops, inner, layer.mlp.down, x, None, axis)
    slots = x.unflatten(0, tokens.shape)[:, 1:].flatten(0, 1)
    columns = ops.norm_linear(slots, p.norm, target.lm_head, m.norm_eps, axis is None)
    return gather_columns(columns, axis).float().unflatten(0, (B, block - 1))  # few rows: each rank ranks them all


def _attend(
    layer: DrafterLayer,
    p: DrafterParams,
    m: DrafterModel,
    ops: Ops,
    i: int,
    x: Tensor,  # [B * S, D]
    pool: KVPool,
    state: StepState,
    cos: Tensor,  # [B, S, 1, head]
    sin: Tensor,
    axis: Axis | None,
) -> Tensor:
    """x plus what attention adds to it."""
    shape = (*cos.shape[:2], -1, m.head)
    q = ops.norm_linear(x, layer.attention_norm, layer.q.flatten(0, 1), m.norm_eps, False).view(shape)
    q = rotate_halves(rms_norm(q, layer.q_norm, m.norm_eps), cos, sin)
    kv = ops.norm_linear(x, layer.attention_norm, p.kv[i].flatten(0, 2), m.norm_eps, False)
    k, v = kv.view(shape).chunk(2, 2)
    k = _key(k, p.k_norm[i], m, cos, sin)
    o = ops.draft_attention(
        q, pool.draft_k[i], pool.draft_v[i], state.page_table, state.length, k, v, m.scale, m.windows[i], m.causal[i]
    )
    return add_linear(ops, o.flatten(2).flatten(0, 1), layer.o.flatten(1), x, None, axis)


def _key(k: Tensor, norm: Tensor, m: DrafterModel, cos: Tensor, sin: Tensor) -> Tensor:
    return rotate_halves(rms_norm(k, norm, m.norm_eps), cos, sin)


def _angles(p: DrafterParams, m: DrafterModel, positions: Tensor) -> tuple[Tensor, Tensor]:
    return half_angles(*angles(positions, p.inv_freq, m.rope.amplitude))
