"""From a layer's low-rank projections to attention's inputs: absorbed queries and the tokens' own pool rows.

Both inner norms, the rotation of queries and key (neighbouring pairs), and the absorption of the key's up-projection
into the queries (arXiv:2405.04434, section 2.1). The projections come from `norm_linear`. On CUDA in bf16 with at most
128 rows the kernels of csrc/layer do it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .linear import few_rows
from .shapes import Given, agree, require


def check(
    qkv: Tensor,
    q_norm: Tensor,
    kv_norm: Tensor,
    q_b: Tensor,
    w_uk: Tensor,
    cos: Tensor,
    sin: Tensor,
    counters: Tensor,
) -> None:
    first: dict[str, Given] = {
        "cos": (cos, "T R", torch.float32),
        "sin": (sin, "T R", torch.float32),
        "q_norm": (q_norm, "q_lora", qkv.dtype),
        "kv_norm": (kv_norm, "L", qkv.dtype),
        "w_uk": (w_uk, "H nope L", qkv.dtype),
        "counters": (counters, "counters", torch.int32),
    }
    s = agree("q_up_absorb", first)
    sums = {"q_lora+L+R": s["q_lora"] + s["L"] + s["R"], "nope+R": s["nope"] + s["R"]}
    rest: dict[str, Given] = {"qkv": (qkv, "T q_lora+L+R", None), "q_b": (q_b, "H nope+R q_lora", qkv.dtype)}
    agree("q_up_absorb", rest, **s, **sums)
    require("q_up_absorb", s["R"] % 2 == 0, "pairs of rotated columns", f"R = {s['R']}")
    require("q_up_absorb", s["counters"] >= 4, "4 counters or more", s["counters"])


def reference(
    qkv: Tensor,  # [T, q_lora + L + R] q latent, latent, key to rotate
    q_norm: Tensor,  # [q_lora]
    kv_norm: Tensor,  # [L]
    q_b: Tensor,  # [H, nope + R, q_lora]
    w_uk: Tensor,  # [H, nope, L]
    cos: Tensor,  # [T, R] f32, an angle for each element
    sin: Tensor,  # [T, R] f32, negative for the first of a pair
    counters: Tensor,  # [4, up] i32 zero, and left so: the kernel's blocks count in it
    eps: float,
) -> tuple[Tensor, Tensor]:
    """q [T, H, L + R] and rows [T, L + R]."""
    check(qkv, q_norm, kv_norm, q_b, w_uk, cos, sin, counters)
    q_latent, latent, key = qkv.split((q_norm.shape[0], kv_norm.shape[0], cos.shape[1]), -1)
    q = F.linear(F.rms_norm(q_latent, q_norm.shape, q_norm, eps), q_b.flatten(0, 1)).unflatten(-1, q_b.shape[:2])
    q_nope, q_rope = q.split((w_uk.shape[1], cos.shape[1]), -1)
    turned = torch.cat((q_rope, key.unsqueeze(1)), 1)  # [T, H + 1, R]
    partner = turned.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    turned = torch.addcmul(turned * cos.unsqueeze(1), partner, sin.unsqueeze(1)).to(qkv.dtype)
    absorbed = torch.bmm(q_nope.transpose(0, 1), w_uk).transpose(0, 1)
    rows = torch.cat((F.rms_norm(latent, kv_norm.shape, kv_norm, eps), turned[:, -1]), -1)
    return torch.cat((absorbed, turned[:, :-1]), -1), rows


q_up_absorb = torch.library.custom_op("kimi_fx::q_up_absorb", reference, mutates_args=())


@q_up_absorb.register_fake
def _(
    qkv: Tensor,
    q_norm: Tensor,
    kv_norm: Tensor,
    q_b: Tensor,
    w_uk: Tensor,
    cos: Tensor,
    sin: Tensor,
    counters: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    check(qkv, q_norm, kv_norm, q_b, w_uk, cos, sin, counters)
    tokens, row = qkv.shape[0], kv_norm.shape[0] + cos.shape[1]
    return qkv.new_empty(tokens, q_b.shape[0], row), qkv.new_empty(tokens, row)


@q_up_absorb.register_kernel("cuda")
def _(
    qkv: Tensor,
    q_norm: Tensor,
    kv_norm: Tensor,
    q_b: Tensor,
    w_uk: Tensor,
    cos: Tensor,
    sin: Tensor,
    counters: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    check(qkv, q_norm, kv_norm, q_b, w_uk, cos, sin, counters)
    loaded = few_rows(qkv, q_norm, kv_norm, q_b, w_uk)
    if loaded is None:
        return reference(qkv, q_norm, kv_norm, q_b, w_uk, cos, sin, counters, eps)
    cos, sin = cos.contiguous(), sin.contiguous()
    return loaded.q_up_absorb(qkv.contiguous(), q_norm, kv_norm, q_b, w_uk, cos, sin, counters, eps)
