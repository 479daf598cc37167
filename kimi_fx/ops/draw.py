"""Choosing tokens from logits: exact ranking, the filters of sampling, and the keyed draw.

Plain functions that `build_tree` and `sample_and_walk` share; never traced. The noise depends on a request's
seed, its sample and the token's index in the sequence and on nothing else, so that plain decoding, a chain
and a tree draw the same tokens. Temperature, penalties and stops are not here.
"""

import torch
from torch import Tensor

WORD = 0xFFFFFFFF


def best(
    logits: Tensor,  # [..., V] f32
    k: int,
) -> tuple[Tensor, Tensor]:
    """The k best logits of each row and their ids, [..., k] each, by (logit descending, id ascending).

    Both orders go into one 64-bit key, because `topk` leaves the order of equal values open.
    """
    last = logits.shape[-1] - 1
    bits = (logits + 0.0).view(torch.int32)  # -0.0 becomes +0.0, which has the same rank
    bits ^= (bits >> 31).bitwise_and_(0x7FFFFFFF)  # now ascends with the logit
    key = bits.long()  # in place from here: fresh memory costs more than the arithmetic
    key <<= 32
    key += torch.arange(last, -1, -1, device=logits.device)
    ids = last - (key.topk(k).values & WORD)
    return logits.gather(-1, ids), ids


def keep(
    logits: Tensor,  # [V] f32, already divided by the temperature
    top_k: int,
    top_p: float,
    min_p: float,
) -> Tensor:
    """The logits with every filtered id at -inf, [V]. `top_k` >= V, `top_p` 1 and `min_p` 0 filter nothing.

    In the order of `best` the first `top_k` stay; of these, renormalised, an id stays while the mass before
    it is under `top_p` (the first always does) and its own is at least `min_p` times that of the first.
    """
    values, ids = best(logits, min(top_k, logits.shape[-1]))
    probability = values.softmax(-1)
    stays = probability >= min_p * probability[0]
    if top_p < 1:
        stays &= probability.cumsum(-1) - probability < top_p
    return torch.full_like(logits, -torch.inf).scatter(-1, ids, values.where(stays, -torch.inf))


def philox(
    counter: Tensor,  # [4, ...] i64, 32-bit words
    key: Tensor,  # [2, ...] i64, 32-bit words
) -> Tensor:
    """Philox4x32-10 of "Parallel random numbers: as easy as 1, 2, 3" (Salmon et al., 2011): [4, ...] i64."""
    each = (2,) + (1,) * (key.ndim - 1)
    multiplier = torch.tensor([0xD2511F53, 0xCD9E8D57], device=key.device).view(each)
    weyl = torch.tensor([0x9E3779B9, 0xBB67AE85], device=key.device).view(each)
    even, odd = counter[0::2], counter[1::2]
    for _ in range(10):
        product = (even * multiplier).flip(0)  # wraps modulo 2^64: the masks below see the right bits
        even = ((product >> 32) ^ odd ^ key) & WORD
        odd = product & WORD
        key = (key + weyl) & WORD
    return torch.stack((even, odd), 1).flatten(0, 1)


def uniform(
    words: Tensor,  # [...] i64, 32-bit words
) -> Tensor:
    """[...] f32 in (0, 1), fine-grained near 0: there `gumbel` is largest, and rare tokens depend on it."""
    return ((words | 1).float() * 2.0**-32).clamp(max=1 - 2.0**-24)


def gumbel(
    seed: Tensor,  # [B, 2] i64 low and high 32 bits
    index: Tensor,  # [B] i64 place in the sequence of the token to draw
    sample: Tensor,  # [B] i64
    vocabulary: int,
) -> Tensor:
    """Standard Gumbel noise for every id, [B, V] f32.

    Id i uses word i & 3 of the counter (i >> 2, index, sample, 0).
    """
    quad = torch.arange((vocabulary + 3) // 4, device=seed.device)
    counter = torch.broadcast_tensors(quad, index[:, None], sample[:, None], torch.zeros_like(quad))
    words = philox(torch.stack(counter), seed.T[..., None]).movedim(0, -1).flatten(1)[:, :vocabulary]
    return -torch.log(-torch.log1p(-uniform(words)))


def draw(
    logits: Tensor,  # [V] f32, already divided by the temperature; the largest is 0
    noise: Tensor,  # [V] f32
    top_k: int,
    top_p: float,
    min_p: float,
) -> int:
    """One id by the Gumbel-max rule, the lowest on ties."""
    if top_k < logits.shape[-1] or top_p < 1 or min_p > 0:
        logits = keep(logits, top_k, top_p, min_p)
    return int((logits + noise).argmax())
