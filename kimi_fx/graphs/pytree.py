"""Frozen dataclasses as pytrees: the one file that touches torch's private pytree module."""

from dataclasses import dataclass
from typing import TypeVar, dataclass_transform

from torch.utils import _pytree

T = TypeVar("T")

tree_map = _pytree.tree_map
tree_leaves = _pytree.tree_leaves


@dataclass_transform(frozen_default=True)
def pytree(cls: type[T]) -> type[T]:
    """Make `cls` a frozen dataclass whose fields are subtrees. Static numbers do not belong in it."""
    cls = dataclass(frozen=True)(cls)
    _pytree.register_dataclass(cls)
    return cls
