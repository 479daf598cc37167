"""A step on its way: what was launched, for whom, and what came once the host asks.

On CUDA the numbers are copied to the host as soon as they exist, so that they are read while the next round runs.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..graphs.pytree import tree_map
from ..graphs.state import Emitted, Tree
from ..request import Request


@dataclass(frozen=True)
class Flight:
    """One launched step. Rows are those of the state at its launch."""

    rows: list[tuple[int, Request]]
    emitted: Emitted
    tree: Tree | None = None  # of a round that is traced
    decoding: bool = True  # a round, not a prefill
    eager: bool = True  # operator by operator
    arrived: Any = None  # event after which the tensors may be read; None: now


def copied(flight: Flight) -> Flight:
    """The flight with its tensors in host memory, on their way there."""

    def copy(leaf: Tensor) -> Tensor:
        return torch.empty_like(leaf, device="cpu", pin_memory=True).copy_(leaf, non_blocking=True)

    emitted, tree = tree_map(copy, flight.emitted), flight.tree and tree_map(copy, flight.tree)
    arrived = torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(flight.emitted.count.device))
    return replace(flight, emitted=emitted, tree=tree, arrived=arrived)
