"""A step on its way: what was launched, for whom, and what came once the host asks.

On CUDA the numbers are copied to the host as soon as they exist, so that they are read while the next round runs.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..graphs.pytree import tree_leaves, tree_map
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


def in_one_piece(emitted: Emitted) -> Emitted:
    """The same numbers as views of one buffer, each from a multiple of 8 bytes on."""
    leaves = [leaf.flatten().view(torch.uint8) for leaf in tree_leaves(emitted)]
    whole, at = torch.cat([piece for leaf in leaves for piece in (leaf, leaf.new_zeros(-len(leaf) % 8))]), 0

    def view(leaf: Tensor) -> Tensor:
        nonlocal at
        start, at = at, at + leaf.nbytes + -leaf.nbytes % 8
        return whole[start : start + leaf.nbytes].view(leaf.dtype).view(leaf.shape)

    return tree_map(view, emitted)


def copied(flight: Flight) -> Flight:
    """The flight with its tensors in host memory, on their way there: one copy for all that share a buffer."""
    buffers: dict[int, Tensor] = {}

    def copy(leaf: Tensor) -> Tensor:
        storage = leaf.untyped_storage()
        if (key := storage.data_ptr()) not in buffers:
            whole = leaf.new_empty(0, dtype=torch.uint8).set_(storage)
            buffers[key] = torch.empty_like(whole, device="cpu", pin_memory=True).copy_(whole, non_blocking=True)
        host = torch.empty(0, dtype=leaf.dtype)
        return host.set_(buffers[key].untyped_storage(), leaf.storage_offset(), leaf.shape, leaf.stride())

    emitted, tree = tree_map(copy, flight.emitted), flight.tree and tree_map(copy, flight.tree)
    arrived = torch.cuda.Event()
    arrived.record(torch.cuda.current_stream(flight.emitted.count.device))
    return replace(flight, emitted=emitted, tree=tree, arrived=arrived)
