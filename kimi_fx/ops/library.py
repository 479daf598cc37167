"""The compiled kernels of csrc/, where `runtime/build.py` has loaded them."""

from typing import Any

import torch

# These compile and pass on an emulated device but have not run on a GPU in their present form: only their tests and
# benchmarks, which clear the set, use them, else the reference stands in.
UNTRIED = {"marlin_moe", "build_tree", "sample_and_walk", "commit", "draft_attention"}


def kernels(name: str) -> Any:
    """The library's operators, or None where this one is not to be had."""
    loaded = torch.ops.kimi_fx_cuda
    return loaded if name not in UNTRIED and hasattr(loaded, name) else None
