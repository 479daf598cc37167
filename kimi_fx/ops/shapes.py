"""What an operator was given against what it takes: shapes and dtypes alone, never values.

So a CPU, a GPU and a trace refuse the same calls in the same words, and nothing waits for a device.
"""

import torch
from torch import Tensor

Given = tuple[Tensor | None, str, torch.dtype | None]  # None: absent, any dtype


def agree(op: str, arguments: dict[str, Given], **sizes: int) -> dict[str, int]:
    """The size of every letter, as "T D" of x names them: a letter not in `sizes` is what it is where it first stands.

    ValueError for the first argument of another shape or dtype.
    """
    for name, (x, letters, dtype) in arguments.items():
        if x is None:
            continue
        axes = letters.split()
        if x.dim() == len(axes):
            sizes = dict(zip(axes, x.shape, strict=True)) | sizes
        wanted = [int(axis) if axis.isdigit() else sizes.get(axis, axis) for axis in axes]
        if list(x.shape) != wanted or dtype not in (None, x.dtype):
            raise ValueError(
                f"{op} takes {name} of shape {_text(axes)} = {_text(wanted)} in {dtype or x.dtype}, "
                f"found {_text(list(x.shape))} in {x.dtype}."
            )
    return sizes


def _text(shape: list) -> str:
    return f"[{', '.join(map(str, shape))}]"


def require(op: str, holds: bool, wanted: str, found: object) -> None:
    """ValueError unless `holds`."""
    if not holds:
        raise ValueError(f"{op} takes {wanted}, found {found}.")
