"""A plan against a checkpoint's entries, before any data is read: names, shapes, dtypes and bytes.

All problems come in one message, alike ones on one line with a count, so that a wrong width is one line and
not 69,120. Reads no files: `files.py` did. The values of `weight_shape` tensors are checked by `load.py`.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from ..graphs.params import Leaf, Source
from ..graphs.pytree import tree_leaves
from .files import Entry, refuse

LINES = 30  # of one kind of problem


@dataclass(frozen=True)
class Layout:
    """How a family's tensors are named on disk, beside what the plan says."""

    prefix: str  # of every name, in wrapped checkpoints
    skipped: tuple[str, ...]  # beginnings or ends of names that text inference does not need


TARGET = Layout("language_model.", ("vision_tower.", "mm_projector.", "rotary_emb.inv_freq"))
DRAFTER = Layout("model.", ("rotary_emb.inv_freq",))


@dataclass(frozen=True)
class Stored:
    """A tensor the plan needs on disk."""

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]  # the usual one first

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtypes[0].itemsize


@dataclass(frozen=True)
class Report:
    """What a checkpoint that passed holds."""

    prefix: str  # its names' prefix, maybe empty
    needed: tuple[Stored, ...]
    bytes: int  # of the needed tensors
    skipped: dict[str, int]  # tensors skipped, by group


def shape_name(source: Source) -> str | None:
    """The companion tensor [2] that states the unpacked shape of an INT4 source; None for any other."""
    name = source.name
    return name.removesuffix("packed") + "shape" if name.endswith(".weight_packed") else None


def needed(plan: Any) -> Iterator[Stored]:
    """Every tensor a plan reads, once each, the `weight_shape` companions too."""
    seen: set[str] = set()
    leaves: list[Leaf] = tree_leaves(plan)
    for leaf in leaves:
        for source in leaf.sources:
            if source.name in seen:
                continue
            seen.add(source.name)
            yield Stored(source.name, source.shape, (leaf.stored,))
            if companion := shape_name(source):
                yield Stored(companion, (2,), (torch.int32, torch.int64))


def plan_bytes(plan: Any) -> int:
    """Bytes on disk of a plan's tensors."""
    return sum(tensor.bytes for tensor in needed(plan))


def check(plan: Any, entries: dict[str, Entry], layout: Layout, where: str) -> Report:
    """Raise CheckpointError with everything missing, unexpected, or of a shape or dtype not planned."""
    tensors = tuple(needed(plan))
    prefix = layout.prefix if any(layout.prefix + tensor.name in entries for tensor in tensors) else ""
    wanted = {prefix + tensor.name: tensor for tensor in tensors}
    both = [(name, tensor, entries[name]) for name, tensor in wanted.items() if name in entries]
    rest = {name: _skipped(name.removeprefix(layout.prefix), layout) for name in entries if name not in wanted}
    shapes = [(n, f"{list(e.shape)} on disk, {list(w.shape)} wanted") for n, w, e in both if e.shape != w.shape]
    dtypes = [(n, f"{e.dtype} on disk, {w.dtypes[0]} wanted") for n, w, e in both if e.dtype not in w.dtypes]
    refuse(
        where,
        _listed("missing", [(name, "") for name in wanted if name not in entries])
        + _listed("unexpected", [(name, "") for name, group in rest.items() if not group])
        + _listed("of another shape than config.json says", shapes)
        + _listed("of another dtype", dtypes),
    )
    skipped = Counter(group for group in rest.values() if group)
    return Report(prefix, tensors, sum(entry.bytes for _, _, entry in both), dict(skipped))


def _skipped(name: str, layout: Layout) -> str | None:
    return next((group for group in layout.skipped if name.startswith(group) or name.endswith(group)), None)


def _listed(kind: str, tensors: list[tuple[str, str]]) -> list[str]:
    """A headline with the count, then a line for each pattern of names with the same complaint."""
    if not tensors:
        return []
    alike: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, complaint in tensors:
        alike[re.sub(r"(?<=\.)[0-9]+(?=\.)", "*", name), complaint].append(name)
    lines = [
        (f"{len(group):,} x {pattern}, first {group[0]}" if len(group) > 1 else group[0])
        + (f": {complaint}" if complaint else "")
        for (pattern, complaint), group in alike.items()
    ]
    if len(lines) > LINES:
        lines = [*lines[:LINES], f"and {len(lines) - LINES:,} more lines like these"]
    return [f"{len(tensors):,} tensors {kind}:\n      " + "\n      ".join(lines)]
