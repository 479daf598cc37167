"""What can change a compiled function: versions, machine, compilers' settings, geometry, weights' shapes, our sources.

Everything here is a word or a number that a person can compare. How requests are sampled, how many run, how long they
are and on how many threads is not among it: no graph sees it. Nor is a rank's own number, which its weights hold.
"""

import hashlib
import platform
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from sysconfig import get_path
from typing import Any

import torch

from ..config import environment, environment_of
from ..graphs.params import drafter_plan, target_plan
from ..graphs.pytree import tree_leaves
from ..graphs.state import Model
from .build import source_folder
from .tensorrt import versions

# Settings of Inductor that change no code; all others count
FREE = ("TORCHINDUCTOR_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS")
PACKAGE = Path(__file__).parents[1]
# What is compiled, and what is noted of it
TRACED = ("config.py", "graphs/*.py", "ops/*.py", "runtime/compiled.py", "runtime/store.py", "runtime/tensorrt.py")


def ingredients(model: Model, dtype: torch.dtype, device: torch.device) -> dict[str, str]:
    """By name; the first ones show in the folder's name."""
    on_cuda = device.type == "cuda"
    found = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "cpu",
        "triton": installed("triton"),
        "arch": cuda_arch(device) if on_cuda else torch.backends.cpu.get_cpu_capability().lower(),
        "tp": str(model.ranks),
        "near": str(bool(model.axis and model.axis.near)).lower(),
        "python": platform.python_version(),
        "device": cuda_name(device) if on_cuda else digest(cpu_flags()),
        "dtype": str(dtype).removeprefix("torch."),
        "drafter.backend": versions() if model.ops.draft_project else "inductor",
    } | geometry(model)
    for pattern in TRACED:
        for file in sorted(PACKAGE.glob(pattern)):
            found[f"kimi_fx/{file.relative_to(PACKAGE).as_posix()}"] = digest(file.read_bytes())
    found |= {name: value for name, value in environment_of("TORCHINDUCTOR_").items() if name not in FREE}
    if not on_cuda:  # the compiler's command, by which Inductor names what it compiles
        found |= {"CXX": environment("CXX") or "as found", "headers": f"{get_path('include')}, {torch.__path__[0]}"}
    else:
        sources = sorted(f for f in source_folder().rglob("*") if f.suffix in (".cu", ".cpp", ".h"))
        found["csrc"] = digest(b"\0".join(f.name.encode() + b"\0" + f.read_bytes() for f in sources))
    return found


def geometry(model: Model) -> dict[str, str]:
    """Of both models, and the shapes of their weights."""
    found = {"weights": digest(repr([(leaf.shape, leaf.stored, leaf.dtype) for leaf in plan_leaves(model)]))}
    found |= flat("target", asdict(model.target))
    return found | (flat("drafter", asdict(model.drafter)) if model.drafter else {"drafter": "none"})


def plan_leaves(model: Model) -> Iterator[Any]:
    yield from tree_leaves(target_plan(model.target, model.ranks))
    if model.drafter:
        yield from tree_leaves(drafter_plan(model.drafter, model.ranks))


def flat(name: str, values: dict[str, Any]) -> dict[str, str]:
    """Nested fields under dotted names."""
    found: dict[str, str] = {}
    for key, value in values.items():
        found |= flat(f"{name}.{key}", value) if isinstance(value, dict) else {f"{name}.{key}": str(value)}
    return found


def cuda_name(device: torch.device) -> str:
    """With its index, which compiled code holds; every rank's is 0."""
    index = torch.cuda.current_device() if device.index is None else device.index
    return f"{torch.cuda.get_device_name(index)}, cuda:{index}"


def cuda_arch(device: torch.device) -> str:
    return "sm_{}{}".format(*torch.cuda.get_device_capability(device))


def cpu_flags() -> str:
    """The instruction sets of this machine, for which Inductor compiles."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((" ".join(sorted(line.split()[2:])) for line in lines if line.startswith(("flags", "Features"))), "")


def installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def digest(data: str | bytes) -> str:
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()[:12]
