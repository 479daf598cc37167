"""Draw the target's token from the root's row, then from its child that holds that token, while there is one.

Every token is a fresh draw from the target's distribution after the true prefix, so drafts cannot change the
output at any temperature (DDTree, arXiv 2604.12989); there is no p/q test. Requests end here by stop id and
by length; stop strings are the host's. A row becomes a token in this order, in fp32:

1. repetition: an id in `seen` or on this path has its logit divided if positive, else multiplied;
2. `presence` is subtracted once from an id in `counts` or on this path, `frequency` once for each time;
3. `bias` is added;
4. stop ids go to -inf until the request has emitted its minimum;
5. temperature 0: the best id, the lowest on ties; else temperature, top-k, top-p, min-p and the keyed draw.

A row with NaN or +inf, or with nothing above -inf after step 4, draws nothing and ends its request.
On CUDA the kernels of csrc/round do it: the same ids but where two perturbed scores, or a mass and `top_p`, lie
within rounding.
"""

import math
from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..config import TOP_LOGPROBS
from .draw import best, draw, gumbel
from .library import kernels
from .shapes import Given, agree, require

RUNS, STOP, LENGTH, NON_FINITE = range(4)  # `finish`


SAMPLING = {  # the leaves of `Sampling` in graphs/state.py
    "temperature": ("B", torch.float32),
    "top_k": ("B", torch.int64),
    "top_p": ("B", torch.float32),
    "min_p": ("B", torch.float32),
    "presence": ("B", torch.float32),
    "frequency": ("B", torch.float32),
    "repetition": ("B", torch.float32),
    "bias": ("B V", torch.float32),
    "counts": ("B V", torch.int32),
    "seen": ("B V", torch.bool),
    "seed": ("B 2", torch.int64),
    "sample": ("B", torch.int64),
    "logprobs": ("B", torch.int32),
    "stop_ids": ("B stops", torch.int64),
    "remaining": ("B", torch.int64),
    "min_remaining": ("B", torch.int64),
}


class Rule(NamedTuple):
    """How one request is sampled: its row of `Sampling` in graphs/state.py."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    presence: float
    frequency: float
    repetition: float
    bias: Tensor  # [V] f32
    counts: Tensor  # [V] i32
    seen: Tensor  # [V] bool
    stop_ids: list[int]
    remaining: int
    min_remaining: int


def adjusted(
    logits: Tensor,  # [V] f32
    drawn: list[int],
    rule: Rule,
) -> Tensor:
    """The logits after penalties, bias and the stop ids' mask, [V]; `drawn` are the path's tokens so far."""
    if rule.presence or rule.frequency or rule.repetition != 1:
        path = torch.tensor(drawn, dtype=torch.long, device=logits.device)
        counts = rule.counts.index_add(0, path, torch.ones_like(path, dtype=rule.counts.dtype))
        repetition = logits.new_tensor(rule.repetition)
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(rule.seen.index_fill(0, path, True), repeated, logits)
        logits = logits - rule.presence * (counts > 0) - rule.frequency * counts
    logits = logits + rule.bias
    if len(drawn) < rule.min_remaining:
        for stop in rule.stop_ids:
            if stop >= 0:
                logits[stop] -= torch.inf  # subtracted, not written: a NaN must stay visible
    return logits


def choose(
    logits: Tensor,  # [V] f32, after `adjusted`
    rule: Rule,
    noise: Tensor | None,  # [V] f32; None: greedy
) -> int | None:
    """The token of one row, the lowest id on ties; None where NaN, +inf or nothing but -inf is left."""
    top, token = logits.max(0)  # NaN wins
    if not math.isfinite(top.item()):
        return None
    if noise is None:
        return int(token)
    # At most 0: a tiny temperature cannot overflow. CUDA divides by a tensor, but multiplies by the rounded
    # inverse of a Python number.
    scaled = (logits - top) / logits.new_tensor(rule.temperature)
    return draw(scaled, noise, rule.top_k, rule.top_p, rule.min_p)


def walk(
    logits: Tensor,  # [N, V] any float
    tokens: list[int],
    parents: list[int],
    rows: int,
    rule: Rule,
    noise: Callable[[int], Tensor],  # [V] f32 of a depth
) -> tuple[list[int], list[int], int]:
    """One request's drawn tokens, the nodes whose rows they came from, and `finish`."""
    node: int | None = 0
    drawn: list[int] = []
    path: list[int] = []
    while node is not None and len(drawn) < rows:
        row = adjusted(logits[node].float(), drawn, rule)
        token = choose(row, rule, noise(len(drawn)) if rule.temperature > 0 else None)
        if token is None:
            return drawn, path, NON_FINITE
        drawn.append(token)
        path.append(node)
        if token in rule.stop_ids:
            return drawn, path, STOP
        if len(drawn) == rule.remaining:
            return drawn, path, LENGTH
        children = (j for j in range(node + 1, len(tokens)) if parents[j] == node and tokens[j] == token)
        node = next(children, None)
    return drawn, path, RUNS


def report(
    logits: Tensor,  # [n, V] f32
    drawn: list[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of the drawn tokens [n], and the best ids and their log-probabilities [n, 20]."""
    log_prob = logits.log_softmax(-1)
    _, ids = best(logits, min(TOP_LOGPROBS, logits.shape[1]))
    ends = (0, TOP_LOGPROBS - ids.shape[1])
    own = log_prob.gather(1, torch.tensor(drawn, device=logits.device)[:, None])[:, 0]
    pad = torch.nn.functional.pad
    return own, pad(ids, ends, value=-1), pad(log_prob.gather(1, ids), ends)


def check(
    logits: Tensor, token: Tensor, parent: Tensor, position: Tensor, active: Tensor, rows: int, *sampling: Tensor
) -> None:
    tree: dict[str, Given] = {
        "logits": (logits, "B N V", None),
        "token": (token, "B N", torch.int64),
        "parent": (parent, "B N", torch.int64),
        "position": (position, "B", torch.int64),
        "active": (active, "B", torch.bool),
    }
    leaves: dict[str, Given] = {n: (x, *SAMPLING[n]) for n, x in zip(SAMPLING, sampling, strict=True)}
    s = agree("sample_and_walk", tree | leaves)
    least = min(rows, s["N"], s["V"])
    require("sample_and_walk", least >= 1, "one or more rows, nodes and tokens", f"{rows}, {s['N']} and {s['V']}")


def reference(
    logits: Tensor,  # [B, N, V] any float
    token: Tensor,  # [B, N] i64
    parent: Tensor,  # [B, N] i64; root and padding: -1
    position: Tensor,  # [B] i64 place of the root's token in the sequence
    active: Tensor,  # [B] bool
    rows: int,  # A, most tokens drawn
    temperature: Tensor,  # from here the leaves of `Sampling` in graphs/state.py
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    presence: Tensor,
    frequency: Tensor,
    repetition: Tensor,
    bias: Tensor,
    counts: Tensor,
    seen: Tensor,
    seed: Tensor,
    sample: Tensor,
    logprobs: Tensor,
    stop_ids: Tensor,
    remaining: Tensor,
    min_remaining: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The fields of `Emitted` in graphs/state.py: tokens [B, A], count [B], path [B, A], finish [B] (i64),
    logprob [B, A] f32, top_ids [B, A, 20] i64, top_logprobs [B, A, 20] f32.

    Log-probabilities are those of the raw rows; they stay 0 for a request with `logprobs` under 0, and past
    the vocabulary's end `top_ids` is -1. An active request has at least one token remaining; an inactive one
    draws nothing.
    """
    sampling = (
        temperature, top_k, top_p, min_p, presence, frequency, repetition, bias, counts, seen, seed, sample, logprobs,
        stop_ids, remaining, min_remaining,
    )  # fmt: skip
    check(logits, token, parent, position, active, rows, *sampling)
    if not len(logits):
        return fake(logits, token, parent, position, active, rows, *sampling)
    numbers = [x.tolist() for x in (temperature, top_k, top_p, min_p, presence, frequency, repetition)]
    wide = [x.unbind() for x in (bias, counts, seen)]
    limits = [x.tolist() for x in (stop_ids, remaining, min_remaining)]
    rules = [Rule(*row) for row in zip(*numbers, *wide, *limits, strict=True)]

    @cache  # for all requests at once, when the first of them gets that deep
    def depth_noise(d: int) -> Tensor:
        return gumbel(seed, position + 1 + d, sample, logits.shape[2])

    def noise(b: int, d: int) -> Tensor:
        return depth_noise(d)[b]

    batch = len(rules)
    tokens, paths = [[-1] * rows for _ in rules], [[0] * rows for _ in rules]
    count, finish = [0] * batch, [RUNS] * batch
    logprob = logits.new_zeros(batch, rows, dtype=torch.float32)
    top_ids = token.new_zeros(batch, rows, TOP_LOGPROBS)
    top_logprobs = logits.new_zeros(batch, rows, TOP_LOGPROBS, dtype=torch.float32)
    drafted, parents, wanted = token.tolist(), parent.tolist(), logprobs.tolist()
    for b in (b for b, runs in enumerate(active.tolist()) if runs):
        drawn, path, finish[b] = walk(logits[b], drafted[b], parents[b], rows, rules[b], partial(noise, b))
        n = count[b] = len(drawn)
        tokens[b][:n], paths[b][:n] = drawn, path
        if n and wanted[b] >= 0:
            logprob[b, :n], top_ids[b, :n], top_logprobs[b, :n] = report(logits[b, path].float(), drawn)
    host = [torch.tensor(x, device=logits.device) for x in (tokens, count, paths, finish)]
    return host[0], host[1], host[2], host[3], logprob, top_ids, top_logprobs


def fake(
    logits: Tensor, token: Tensor, parent: Tensor, position: Tensor, active: Tensor, rows: int, *rest: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    check(logits, token, parent, position, active, rows, *rest)
    batch = logits.shape[0]
    tokens, count = token.new_empty(batch, rows), token.new_empty(batch)
    logprob = logits.new_empty(batch, rows, dtype=torch.float32)
    top_ids = token.new_empty(batch, rows, TOP_LOGPROBS)
    top_logprobs = logits.new_empty(batch, rows, TOP_LOGPROBS, dtype=torch.float32)
    return tokens, count, torch.empty_like(tokens), torch.empty_like(count), logprob, top_ids, top_logprobs


sample_and_walk = torch.library.custom_op("kimi_fx::sample_and_walk", reference, mutates_args=())
sample_and_walk.register_fake(fake)


@sample_and_walk.register_kernel("cuda")
def _(
    logits: Tensor, token: Tensor, parent: Tensor, position: Tensor, active: Tensor, rows: int, *rest: Tensor
) -> tuple[Tensor, ...]:
    check(logits, token, parent, position, active, rows, *rest)
    loaded = kernels()
    if loaded is None or rows > 32 or logits.shape[2] > 32 * 8192:
        return reference(logits, token, parent, position, active, rows, *rest)
    first = (x.contiguous() for x in (logits.float(), token, parent, position, active))
    return loaded.sample_and_walk(*first, rows, *(x.contiguous() for x in rest))
