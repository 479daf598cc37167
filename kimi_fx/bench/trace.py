"""A traced replay of a round, cut into its parts by the names and the order of its kernels.

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


def traced(replay: Callable[[], object]) -> list[Kernel]:
    """What one replay runs on the device, by start."""
    replay()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        replay()
        torch.cuda.synchronize()
    spans = ((e.name, e.time_range) for e in trace.events() if e.device_type == DeviceType.CUDA)
    return sorted((Kernel(name, t.start / 1e6, t.end / 1e6) for name, t in spans), key=lambda k: (k.start, k.end))


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
