"""Router of one expert layer: the experts each token visits, their weights, and the work list by expert.

DeepSeek-V3's sigmoid router with one group of experts (arXiv:2412.19437, section 2.1.2): the bias chooses,
the unbiased score weighs. It neither computes the logits nor runs an expert. On CUDA the kernels of csrc/moe do it for
at most 32 of 1024 experts, once `runtime/build.py` has loaded them.
"""

import torch
from torch import Tensor

from .library import kernels


def reference(
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
    check(logits, bias, valid, k)
    experts = logits.shape[1]
    valid = valid.unsqueeze(1)
    score = logits.sigmoid()
    # topk leaves the order of ties open
    ids = torch.sort(score + bias, dim=1, descending=True, stable=True).indices[:, :k]
    weights = score.gather(1, ids)
    weights = torch.where(valid, weights / (weights.sum(1, keepdim=True) + 1e-20) * scale, 0.0)
    by_expert, order = torch.where(valid, ids, experts).flatten().sort(stable=True)
    first = torch.arange(experts + 1, device=logits.device)
    offsets = torch.searchsorted(by_expert, first, out_int32=True)
    return torch.where(valid, ids, -1).int().contiguous(), weights.contiguous(), order.int(), offsets


def check(logits: Tensor, bias: Tensor, valid: Tensor, k: int) -> None:
    tokens, experts = logits.shape
    if bias.shape != (experts,) or valid.shape != (tokens,) or not 1 <= k <= experts:
        raise ValueError(
            f"top {k} of logits [{tokens}, {experts}] with bias {list(bias.shape)} and valid {list(valid.shape)} was "
            "asked for: one bias an expert, one valid a token, and no more experts a token than there are."
        )


def fake(logits: Tensor, bias: Tensor, valid: Tensor, k: int, scale: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    check(logits, bias, valid, k)
    tokens, experts = logits.shape
    return (
        logits.new_empty((tokens, k), dtype=torch.int32),
        logits.new_empty((tokens, k)),
        logits.new_empty((tokens * k,), dtype=torch.int32),
        logits.new_empty((experts + 1,), dtype=torch.int32),
    )


moe_route = torch.library.custom_op("kimi_fx::moe_route", reference, mutates_args=())
moe_route.register_fake(fake)


@moe_route.register_kernel("cuda")
def _(logits: Tensor, bias: Tensor, valid: Tensor, k: int, scale: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    loaded = kernels("moe_route")
    if loaded is None or logits.dtype != torch.float32 or k > 32 or logits.shape[1] > 1024:
        return reference(logits, bias, valid, k, scale)
    check(logits, bias, valid, k)
    return loaded.moe_route(logits.contiguous(), bias.contiguous(), valid.contiguous(), k, scale)
