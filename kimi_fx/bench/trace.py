"""A traced round, the second of two in a row, cut into its parts by the names and the order of its kernels.

Where an operator has kernels of its own they are known by name; what lies before the tree's is the drafter's, what lies
after sampling is the commit, the rest belongs to the target's layers. A kernel's time is from its start to the start of
the next one, so gaps count and overlaps do not count twice.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from .work import PARTS

# Pieces of the names under which csrc/ has them.
OWN = {
    "summarise_kernel": "tree",
    "build_kernel": "tree",
    "kimi_fx::mla": "attention",
    "kimi_fx::moe": "experts",
    "walk_kernel": "sample",
    "logprobs_kernel": "sample",
}


class Kernel(NamedTuple):
    name: str
    start: float  # seconds
    end: float


def traced(round_: Callable[[], object]) -> tuple[list[Kernel], float]:
    """What the second of two rounds in a row runs on the device, by start, and the seconds for which nothing of a round
    ran before it: the first hides what its launch takes. RuntimeError where these are not two graphs."""
    round_()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        round_()
        round_()
        torch.cuda.synchronize()
    launches: dict[int, list[Kernel]] = {}
    for e in trace.events():
        if e.device_type == DeviceType.CUDA:
            span = Kernel(e.name, e.time_range.start / 1e6, e.time_range.end / 1e6)
            launches.setdefault(e.id, []).append(span)  # all that one call launched has one number
    graphs = [sorted(spans, key=lambda k: (k.start, k.end)) for spans in launches.values() if len(spans) > 1]
    if len(graphs) != 2 or len(graphs[0]) != len(graphs[1]):
        raise RuntimeError(f"A trace of two rounds has {[len(spans) for spans in graphs]} kernels a graph.")
    first, second = sorted(graphs, key=lambda spans: spans[0].start)
    return second, second[0].start - max(k.end for k in first)


def shares(kernels: Sequence[Kernel]) -> dict[str, float]:
    """Each part's share of the time. RuntimeError where the tree's or the sampling kernels are not there."""
    parts = [next((part for piece, part in OWN.items() if piece in k.name), "") for k in kernels]
    if not {"tree", "sample"} <= set(parts):
        raise RuntimeError(f"A trace of {len(kernels)} kernels has none that builds the tree or none that samples.")
    first, last = parts.index("tree"), len(parts) - 1 - parts[::-1].index("sample")
    ends = [k.start for k in kernels[1:]] + [max(k.end for k in kernels)]
    seconds = dict.fromkeys(PARTS, 0.0)
    for i, (part, k, end) in enumerate(zip(parts, kernels, ends, strict=True)):
        seconds["draft" if i < first else "commit" if i > last else part or "rest"] += end - k.start
    return {part: s / (ends[-1] - kernels[0].start) for part, s in seconds.items()}
