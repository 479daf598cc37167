"""Collectives over a named axis of ranks, in the manner of a JAX `shard_map`: the code sees local arrays.

Without an axis each is the identity and nothing is traced. The functional operators are called as they are: the Python
layer above them wraps eager results in a tensor subclass and names differ between versions of torch. No rank's own
number is in here: one traced graph serves all ranks, and a rank finds its place in a leaf of the parameters.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.peer_sum import capacity, peer_sum

_c10d = torch.ops._c10d_functional


@dataclass(frozen=True)
class Axis:
    """Ranks that share the work of one round."""

    group: str  # name of their process group
    size: int
    near: bool = False  # small sums go through their devices' own memory


def psum(x: Tensor, axis: Axis | None) -> Tensor:
    """The sum over the ranks, the same bits on each."""
    if axis is None:
        return x
    if axis.near and x.nbytes <= capacity(axis.size):
        return peer_sum(x, axis.group)
    return _c10d.wait_tensor(_c10d.all_reduce(x.contiguous(), "sum", axis.group))


def gather(x: Tensor, axis: Axis | None) -> Tensor:
    """The ranks' arrays side by side: dim 0 grows by the axis' size."""
    if axis is None:
        return x
    return _c10d.wait_tensor(_c10d.all_gather_into_tensor(x.contiguous(), axis.size, axis.group))


def gather_columns(
    x: Tensor,  # [..., V / ranks]
    axis: Axis | None,
) -> Tensor:
    """Whole rows on every rank, [..., V]."""
    if axis is None:
        return x
    return gather(x.unsqueeze(0), axis).movedim(0, -2).flatten(-2)


def rows_of_columns(
    x: Tensor,  # [T, V / ranks]
    axis: Axis,
) -> Tensor:
    """Rank r gets whole rows r R to (r + 1) R - 1, [R, V] with R = T / ranks rounded up; rows past T are zeros."""
    R = rows_each(x.shape[0], axis)
    x = F.pad(x, (0, 0, 0, R * axis.size - x.shape[0]))
    parts = [R] * axis.size
    swapped = _c10d.wait_tensor(_c10d.all_to_all_single(x.contiguous(), parts, parts, axis.group))
    return swapped.unflatten(0, (axis.size, R)).movedim(0, 1).flatten(1)


def rows_each(rows: int, axis: Axis) -> int:
    """Rows a rank has of that many, rounded up."""
    return -(-rows // axis.size)
