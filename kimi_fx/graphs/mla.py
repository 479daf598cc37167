"""Multi-head latent attention in its absorbed form (DeepSeek-V2, arXiv:2405.04434, section 2.1).

One latent row a token serves every head as key and value. The layer reads the pool and returns the new rows; it
writes nothing.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import TargetModel
from ..ops import Ops
from .axis import Axis, psum
from .layers import per_head, rms_norm, rotate_pairs
from .params import Attention
from .state import Context


def attend(
    p: Attention,
    m: TargetModel,
    ops: Ops,
    x: Tensor,  # [B, N, D]
    pool: Tensor,  # [P, 64, L + R] this layer's
    context: Context,
    axis: Axis | None,
) -> tuple[Tensor, Tensor]:
    """The attention block's addition to the residual [B, N, D], and the tokens' own pool rows [B, N, L + R].

    A rank has its share of the heads, the latent rows are the same on all.
    """
    H = p.q_b.shape[0]
    h = rms_norm(x, p.norm, m.norm_eps)
    q_latent, latent, k_rope = F.linear(h, p.qkv_a).split((m.q_lora, m.L, m.R), -1)
    latent = rms_norm(latent, p.kv_a_norm, m.lora_norm_eps)  # [B, N, L]
    q_latent = rms_norm(q_latent, p.q_a_norm, m.lora_norm_eps)  # [B, N, q_lora]
    q = F.linear(q_latent, p.q_b.flatten(0, 1)).unflatten(-1, (H, m.nope + m.R))
    q_nope, q_rope = q.split((m.nope, m.R), -1)

    # the one key head is rotated beside the H query heads
    rope = rotate_pairs(torch.cat((q_rope, k_rope.unsqueeze(2)), 2), context.cos, context.sin)  # [B, N, H + 1, R]
    q = torch.cat((per_head(q_nope, p.w_uk), rope[:, :, :H]), -1)  # absorbed: keys stay latent
    rows = torch.cat((latent, rope[:, :, H]), -1)

    o = ops.mla_tree_verify(
        q, pool, context.page_table, context.length, rows, context.ancestors, context.schedule, m.L, m.softmax_scale
    )
    o = per_head(o, p.w_uv.mT)  # absorbed: values leave the latent here, [B, N, H, value]
    return psum(F.linear(o.flatten(2), p.o.flatten(1)), axis), rows
