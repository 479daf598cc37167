"""DFlash (arXiv:2602.06036): one bidirectional block that reads the target's features as context.

`context_kv` turns features of committed tokens into every layer's keys and values, once; `draft` runs the block
[anchor, mask, mask, …] over them. Context and block go through the same key and value weights: `kv` holds those of all
layers. A mask slot predicts the token of its own place. It shares the target's embedding and head.
"""

from functools import partial

import torch
from einops import rearrange
from torch import Tensor

from ..config import DrafterModel
from ..ops import Ops
from .axis import Axis, gather_columns, psum
from .layers import add_linear, angles, embed, half_angles, rms_norm, rotate_halves
from .params import DrafterParams, TargetParams
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
    k = torch.stack([_rotated(k[i], p.k_norm[i], cos, sin, m.norm_eps) for i in range(m.layers)])
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
    before = ops.draft_project or partial(project, ops)
    after = ops.draft_finish or partial(finish, ops, axis)
    x = embed(tokens, target.embed, target.rank, axis).flatten(0, 1)
    for i, layer in enumerate(p.layers):
        heads = layer.q.flatten(0, 1), p.kv[i].flatten(0, 2), layer.q_norm, p.k_norm[i]
        q, k, v = before(x, layer.attention_norm, *heads, cos, sin, m.norm_eps)
        context = pool.draft_k[i], pool.draft_v[i], state.page_table, state.length
        o = ops.draft_attention(q, *context, k, v, m.scale, m.windows[i], m.causal[i])
        mlp = layer.mlp_norm, layer.mlp.gate_up, layer.mlp.down
        x = after(x, o.flatten(2).flatten(0, 1), layer.o.flatten(1), *mlp, m.norm_eps)
    slots = x.unflatten(0, tokens.shape)[:, 1:].flatten(0, 1)
    columns = ops.norm_linear(slots, p.norm, target.lm_head, m.norm_eps, axis is None)
    return gather_columns(columns, axis).float().unflatten(0, (B, block - 1))  # few rows: each rank ranks them all


def project(
    ops: Ops,
    x: Tensor,  # [B * S, D]
    norm: Tensor,  # [D]
    q: Tensor,  # [H * head, D]
    kv: Tensor,  # [2 * KV * head, D]
    q_norm: Tensor,  # [head]
    k_norm: Tensor,  # [head]
    cos: Tensor,  # [B, S, 1, head] f32
    sin: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [B, S, H, head], keys and values [B, S, KV, head] of the block's slots: a layer up to its attention."""
    shape = (*cos.shape[:2], -1, cos.shape[-1])
    queries = ops.norm_linear(x, norm, q, eps, False).view(shape)
    queries = _rotated(queries, q_norm, cos, sin, eps)
    keys, values = ops.norm_linear(x, norm, kv, eps, False).view(shape).chunk(2, 2)
    return queries, _rotated(keys, k_norm, cos, sin, eps), values


def finish(
    ops: Ops,
    axis: Axis | None,
    x: Tensor,  # [B * S, D]
    o: Tensor,  # [B * S, H * head] what attention gives
    out: Tensor,  # [D, H * head]
    norm: Tensor,  # [D]
    gate_up: Tensor,  # [2, inner, D]
    down: Tensor,  # [D, inner]
    eps: float,
) -> Tensor:
    """x plus what attention and the MLP add to it, [B * S, D]: a layer from its attention on."""
    x = add_linear(ops, o, out, x, None, axis)
    return add_linear(ops, ops.norm_gate_up(x, norm, gate_up, eps), down, x, None, axis)


def _rotated(x: Tensor, norm: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    return rotate_halves(rms_norm(x, norm, eps), cos, sin)


def _angles(p: DrafterParams, m: DrafterModel, positions: Tensor) -> tuple[Tensor, Tensor]:
    return half_angles(*angles(positions, p.inv_freq, m.rope.amplitude))
