"""The compiled kernels of csrc/, where `runtime/build.py` has loaded them."""

from typing import Any

import torch


def kernels() -> Any:
    """The library's operators, all or None."""
    loaded = torch.ops.kimi_fx_cuda
    return loaded if hasattr(loaded, "mla_tree_verify") else None
