"""Which part of a leaf a rank has, as the plan's axes say: its placement on a mesh, its slice, its local shape.

DTensors hold weights in logical shape while they are loaded; a round runs on what `local` makes of them. Sizes that
ranks cannot share are refused before anything is read.
"""

from dataclasses import replace
from math import prod
from typing import TypeVar

from torch import Size, Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from ..config import DrafterModel, TargetModel
from ..graphs.params import Leaf
from ..graphs.pytree import tree_map

T = TypeVar("T")
AXES = ("tp",)  # of the mesh, in its order


def placements(leaf: Leaf) -> tuple[Placement, ...]:
    """One for each axis of the mesh."""
    return tuple(Shard(leaf.axes.index(axis)) if axis in leaf.axes else Replicate() for axis in AXES)


def distribute(leaf: Leaf, own: Tensor, mesh: DeviceMesh) -> DTensor:
    """The leaf as a DTensor in logical shape, from this rank's part of it."""
    strides = tuple(prod(leaf.shape[dim + 1 :]) for dim in range(len(leaf.shape)))
    return DTensor.from_local(own, mesh, placements(leaf), run_check=False, shape=Size(leaf.shape), stride=strides)


def local(params: T) -> T:
    """Every DTensor's part that this rank has, as a plain tensor; plain ones as they are."""
    return tree_map(lambda leaf: leaf.to_local() if isinstance(leaf, DTensor) else leaf, params)


def share(leaf: Leaf, whole: Tensor, mesh: DeviceMesh | None, first: int = 0) -> Tensor:
    """A view of this rank's part of the leaf's dims from `first` on, of which `whole` has all that is stored."""
    for axis in AXES:
        if mesh is not None and axis in leaf.axes:
            dim = leaf.axes.index(axis)
            width = leaf.shape[dim] // mesh[axis].size()
            start = mesh.get_local_rank(axis) * width // leaf.repeat
            whole = whole.narrow(dim - first, start, -(-width // leaf.repeat))
    return whole


def local_leaf(leaf: Leaf, ranks: int) -> Leaf:
    """The leaf with the shape of one rank's part."""
    sizes = zip(leaf.shape, leaf.axes, strict=True)
    return replace(leaf, shape=tuple(size // ranks if axis else size for size, axis in sizes))


def check_divides(target: TargetModel, drafter: DrafterModel | None, ranks: int) -> None:
    """Raise ValueError with every size that the ranks cannot share, and the numbers of ranks that could."""
    problems = indivisible(target, drafter, ranks) if ranks > 1 else []
    if problems:
        usable = [1] + [n for n in range(2, target.H + 1) if not indivisible(target, drafter, n)]
        raise ValueError(
            f"mesh.tp={ranks} cannot share {', '.join(problems)}: use mesh.tp={' or '.join(map(str, usable))}."
        )


def indivisible(target: TargetModel, drafter: DrafterModel | None, ranks: int) -> list[str]:
    """What that many ranks cannot share evenly, in words."""
    m, d = target, drafter
    sizes = {"the heads": m.H, "the vocabulary": m.V, "the dense width": m.dense, "the shared width": m.shared * m.I}
    if d:
        sizes |= {"the drafter's heads": d.H, "its MLP width": d.inner, "its features": len(d.taps) * d.D}
    found = [f"{name} ({size})" for name, size in sizes.items() if size % ranks]
    if m.I % (ranks * m.group):
        found.append(f"the expert width ({m.I}: {m.I / ranks:g} columns a rank, in groups of {m.group} to a scale)")
    if d and d.KV % ranks and ranks % d.KV:
        found.append(f"the drafter's key/value heads ({d.KV})")
    return found
