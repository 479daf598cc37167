"""Frozen dataclasses as pytrees: the one file that touches torch's private pytree module."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar, dataclass_transform

from torch.utils import _pytree

T = TypeVar("T")

tree_map = _pytree.tree_map
tree_leaves = _pytree.tree_leaves


def tree_paths(tree: Any) -> Iterator[tuple[str, Any]]:
    """Every leaf with where it stands, such as `target.layers[3].norm`."""
    for path, leaf in _pytree.tree_flatten_with_path(tree)[0]:
        yield _pytree.keystr(path).removeprefix("."), leaf


@dataclass_transform(frozen_default=True)
def pytree(cls: type[T]) -> type[T]:
    """Make `cls` a frozen dataclass whose fields are subtrees. Static numbers do not belong in it."""
    cls = dataclass(frozen=True)(cls)
    _pytree.register_dataclass(cls)
    return cls
