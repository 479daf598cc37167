"""The compiled kernels of csrc/, where `runtime/build.py` has loaded them."""

from typing import Any

import torch


def kernels(name: str) -> Any:
    """The library's operators, or None where this one is not to be had."""
    loaded = torch.ops.kimi_fx_cuda
    return loaded if hasattr(loaded, name) else None
