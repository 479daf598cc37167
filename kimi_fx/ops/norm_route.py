"""What the expert block reads: the normed hidden states, the router's choice, the first half of the shared expert.

RMSNorm, then router and shared gate | up as one product of the same input. The router's sums are fp32 of the rounded
input and of weights as stored, its choice is DeepSeek-V3's with one group of experts (arXiv:2412.19437, section 2.1.2):
the bias chooses, the unbiased score weighs. On CUDA in bf16 with at most 128 rows and 32 of 1024 experts the kernel of
csrc/layer does all of it in one launch.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .linear import ROWS, few_rows
from .shapes import Given, agree, require

Routed = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def counters_of(tokens: int, experts: int, k: int) -> int:
    """How many counters the kernels of a pass need; references count in none.

    Layers' products use 4 and, here, one a logit and a choice; `marlin_moe` 8 an item, which is an expert with 8 of its
    tokens or more, and 8 besides.
    """
    return max(4 + min(tokens, ROWS) * (experts + k), 8 * (1 + experts + tokens * k // 8))


def check(
    x: Tensor,
    squares: Tensor,
    counters: Tensor,
    norm: Tensor,
    router: Tensor,
    bias: Tensor,
    gate_up: Tensor,
    valid: Tensor,
    k: int,
) -> None:
    wanted: dict[str, Given] = {
        "x": (x, "T D", None),
        "squares": (squares, "T pieces", torch.float32),
        "counters": (counters, "counters", torch.int32),
        "norm": (norm, "D", None),
        "router": (router, "E D", None),
        "bias": (bias, "E", torch.float32),
        "gate_up": (gate_up, "2 I D", x.dtype),
        "valid": (valid, "T", torch.bool),
    }
    sizes = agree("norm_route", wanted)
    require("norm_route", 1 <= k <= sizes["E"], f"1 to {sizes['E']} experts a token", k)
    least = counters_of(sizes["T"], sizes["E"], k)
    require("norm_route", sizes["counters"] >= least, f"{least} counters or more", sizes["counters"])


def reference(
    x: Tensor,  # [T, D]
    squares: Tensor,  # [T, pieces] f32 that add up to the sum of x's squares, from `v_up_o`
    counters: Tensor,  # [counters_of(T, E, k)] i32 zero, and left so: the kernel's blocks tell each other there
    norm: Tensor,  # [D]
    router: Tensor,  # [E, D]
    bias: Tensor,  # [E] f32
    gate_up: Tensor,  # [2, I, D] of the shared expert
    valid: Tensor,  # [T] bool; False: padding, visits no expert
    k: int,
    scale: float,
    eps: float,
) -> Routed:
    """h = rms_norm(x) [T, D], silu(gate) * up of h [T, I], and ids, weights, order, offsets as `choose` has them."""
    check(x, squares, counters, norm, router, bias, gate_up, valid, k)
    inverse = (squares.sum(1, keepdim=True) / x.shape[1] + eps).rsqrt()
    h = (x.float() * inverse * norm.float()).to(x.dtype)
    gate, up = F.linear(h, gate_up.flatten(0, 1)).chunk(2, -1)
    return h, F.silu(gate) * up, *choose(logits_of(h, router), bias, valid, k, scale)


def logits_of(
    h: Tensor,  # [T, D]
    router: Tensor,  # [E, D]
) -> Tensor:
    """[T, E] f32: products of what is given, sums in fp32. Of bf16 tensor cores do it, in a fifth of the time that fp32
    copies take."""
    if h.is_cuda and h.dtype == router.dtype == torch.bfloat16:
        return torch.mm(h, router.mT, out_dtype=torch.float32)
    return F.linear(h.float(), router.float())


def choose(
    logits: Tensor,  # [T, E] f32
    bias: Tensor,  # [E] f32
    valid: Tensor,  # [T] bool; False: padding, visits no expert
    k: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Route every token to the k experts with the best sigmoid(logit) + bias, lowest id on ties.

    ids      [T, k] i32  experts, best first; -1 for padding
    weights  [T, k] f32  scale * score / (sum of the k scores + 1e-20), scores without bias; 0 for padding
    order    [T*k] i32   pairs (token * k + slot) stably sorted by expert, padding last
    offsets  [E+1] i32   expert e owns order[offsets[e] : offsets[e+1]]; offsets[E] counts the real pairs

    ValueError where the arguments disagree in shape, or for fewer than one expert a token or more than there are.
    """
    _check(logits, bias, valid, k)
    experts = logits.shape[1]
    valid = valid.unsqueeze(1)
    score = logits.sigmoid()
    # topk leaves the order of ties open
    ids = torch.sort(score + bias, dim=1, descending=True, stable=True).indices[:, :k]
    weights = score.gather(1, ids)
    weights = torch.where(valid, weights / (weights.sum(1, keepdim=True) + 1e-20) * scale, 0.0)
    short = torch.int16 if experts < 2**15 else torch.int64  # what is sorted takes time by its bits
    by_expert, order = torch.where(valid, ids, experts).flatten().to(short).sort(stable=True)
    first = torch.arange(experts + 1, device=logits.device, dtype=short)
    offsets = torch.searchsorted(by_expert, first, out_int32=True)
    return torch.where(valid, ids, -1).int().contiguous(), weights.contiguous(), order.int(), offsets


def _check(logits: Tensor, bias: Tensor, valid: Tensor, k: int) -> None:
    tokens, experts = logits.shape
    if bias.shape != (experts,) or valid.shape != (tokens,) or not 1 <= k <= experts:
        raise ValueError(
            f"top {k} of logits [{tokens}, {experts}] with bias {list(bias.shape)} and valid {list(valid.shape)} was "
            "asked for: one bias an expert, one valid a token, and no more experts a token than there are."
        )


norm_route = torch.library.custom_op("kimi_fx::norm_route", reference, mutates_args=())


@norm_route.register_fake
def _(
    x: Tensor,
    squares: Tensor,
    counters: Tensor,
    norm: Tensor,
    router: Tensor,
    bias: Tensor,
    gate_up: Tensor,
    valid: Tensor,
    k: int,
    scale: float,
    eps: float,
) -> Routed:
    check(x, squares, counters, norm, router, bias, gate_up, valid, k)
    tokens, experts = x.shape[0], router.shape[0]
    ids, order = (x.new_empty(shape, dtype=torch.int32) for shape in ((tokens, k), (tokens * k,)))
    weights = x.new_empty((tokens, k), dtype=torch.float32)
    offsets = x.new_empty((experts + 1,), dtype=torch.int32)
    return torch.empty_like(x), x.new_empty(tokens, gate_up.shape[1]), ids, weights, order, offsets


@norm_route.register_kernel("cuda")
def _(
    x: Tensor,
    squares: Tensor,
    counters: Tensor,
    norm: Tensor,
    router: Tensor,
    bias: Tensor,
    gate_up: Tensor,
    valid: Tensor,
    k: int,
    scale: float,
    eps: float,
) -> Routed:
    check(x, squares, counters, norm, router, bias, gate_up, valid, k)
    loaded = few_rows(x, norm, router, gate_up)
    if loaded is None or k > 32 or router.shape[0] > 1024:
        return reference(x, squares, counters, norm, router, bias, gate_up, valid, k, scale, eps)
    whole = x.contiguous(), squares.contiguous()
    return loaded.norm_route(*whole, counters, norm, router, bias, gate_up, valid.contiguous(), k, scale, eps)
