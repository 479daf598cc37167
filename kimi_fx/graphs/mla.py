"""Multi-head latent attention in its absorbed form (DeepSeek-V2, arXiv:2405.04434, section 2.1).

One latent row a token serves every head as key and value. The layer reads the pool and returns the new rows; it
writes nothing.
"""

from torch import Tensor

from ..config import TargetModel
from ..ops import Ops
from .axis import Axis, psum
from .params import Attention
from .state import Context


def attend(
    p: Attention,
    m: TargetModel,
    ops: Ops,
    x: Tensor,  # [T, D]
    pool: Tensor,  # [P, 64, L + R] this layer's
    context: Context,
    axis: Axis | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The residual stream after attention [T, D], sums of its squares [T, pieces], the tokens' pool rows [T, L + R].

    A rank has its share of the heads, the latent rows are the same on all.
    """
    c = context
    qkv = ops.norm_linear(x, p.norm, p.qkv_a, m.norm_eps, False)
    q, rows = ops.q_up_absorb(
        qkv, p.q_a_norm, p.kv_a_norm, p.q_b, p.w_uk, c.cos, c.sin, c.counters, m.lora_norm_eps
    )  # fmt: skip
    by_request = (c.length.shape[0], -1)  # B, N
    o = ops.mla_tree_verify(
        q.unflatten(0, by_request), pool, c.page_table, c.length, rows.unflatten(0, by_request), c.ancestors,
        c.schedule, m.L, m.softmax_scale,
    )  # fmt: skip
    o = o.flatten(0, 1)
    if axis is None:
        return *ops.v_up_o(o, p.w_uv, p.o.flatten(1), x, c.counters), rows
    part, _ = ops.v_up_o(o, p.w_uv, p.o.flatten(1), None, c.counters)
    x = x + psum(part, axis)
    return x, x.float().square().sum(1, keepdim=True), rows
