"""Seats: writing a request into its row of the state, and keeping the occupied rows dense."""

import torch

from ..config import STOP_SLOTS
from ..graphs.pytree import tree_map
from ..graphs.state import Sampling, StepState
from ..request import Request


def seat(state: StepState, slot: int, request: Request, stop_ids: tuple[int, ...]) -> None:
    """Fill row `slot` with a request about to be prefilled; it stays inactive until its anchor is drawn."""
    tree_map(lambda leaf, row: leaf[slot].copy_(row), state, _row(state, request, stop_ids))


def move(state: StepState, source: int, to: int) -> None:
    """Copy a row over another."""
    if source != to:
        tree_map(lambda leaf: leaf[to].copy_(leaf[source]), state)


def vacate(state: StepState, slot: int) -> None:
    """Make a row padding: it decodes nothing and reads no page. The host does not wait, as it would to assign a number:
    the device may be in a step that never ends."""
    state.active[slot].fill_(False)
    state.length[slot].fill_(0)


def _row(state: StepState, request: Request, stop_ids: tuple[int, ...]) -> StepState:
    p, vocab = request.params, state.sampling.counts.shape[1]
    table = torch.zeros(state.page_table.shape[1], dtype=torch.int32)
    table[: len(request.pages)] = torch.tensor(request.pages, dtype=torch.int32)
    bias = torch.zeros(vocab)
    for token, value in (p.logit_bias or {}).items():
        bias[token] = value
    seen = torch.zeros(vocab, dtype=torch.bool)
    seen[torch.tensor(request.prompt)] = True
    stops = torch.full((STOP_SLOTS,), -1)
    stops[: len(stop_ids)] = torch.tensor(stop_ids, dtype=torch.int64)
    number = torch.tensor
    return StepState(
        anchor=number(0),
        length=number(0),
        page_table=table,
        budget=number(request.plan.budget),
        width=number(request.plan.width),
        active=number(False),
        sampling=Sampling(
            temperature=number(float(p.temperature or 0)),
            top_k=number(min(p.top_k, vocab) if p.top_k and p.top_k > 0 else vocab),
            top_p=number(float(1 if p.top_p is None else p.top_p)),
            min_p=number(float(p.min_p)),
            presence=number(float(p.presence_penalty)),
            frequency=number(float(p.frequency_penalty)),
            repetition=number(float(p.repetition_penalty)),
            bias=bias,
            counts=torch.zeros(vocab, dtype=torch.int32),
            seen=seen,
            seed=number([request.seed & 0xFFFFFFFF, request.seed >> 32 & 0xFFFFFFFF]),
            sample=number(request.sample),
            logprobs=number(-1 if p.logprobs is None else p.logprobs),
            stop_ids=stops,
            remaining=number(request.limit),
            min_remaining=number(p.least),
        ),
    )
