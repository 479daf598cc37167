"""Compiles csrc/ with nvcc into one library and loads it.

The library lies in the user's cache under a hash of sources, flags, compiler and torch, so it is built once: at first
use on a CUDA device, or ahead by `kimi-fx build`. It is linked against the LibTorch stable ABI and only loads where
torch has CUDA. Nothing here is needed on a CPU.
"""

import ctypes
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch

from ..config import environment, package_path
from ..ops.library import kernels
from .store import told

LIBRARY = "kimi_fx_cuda"  # also the namespace of its operators
ARCHS = ("sm_80", "sm_90a", "sm_120")  # a kernel family each; others of 8.0 and up take one of these families
FLAGS = ("-std=c++20", "-O3", "-Xcompiler", "-fPIC", "-DUSE_CUDA", "-DTORCH_TARGET_VERSION=0x020b000000000000ULL")


def load_kernels(device: torch.device) -> None:
    """Make the library's operators known to torch, building it first where the cache has none for this machine.

    Raises ValueError for a device or compiler that cannot do it, RuntimeError where compiling or loading fails.
    """
    if kernels() is not None:
        return
    library = build(own_arch(device))
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        raise RuntimeError(
            f"{library} could not be loaded: {error.__cause__ or error}. Delete it to have it compiled again."
        ) from error


def library_for(arch: str) -> tuple[Path, list[Path], list[str]]:
    """Where the library for an architecture lies once it is compiled, from which files, and with which flags."""
    found = (source for deep in ("*", "*/*") for source in source_folder().glob(deep))
    sources = sorted(source for source in found if source.suffix in (".cu", ".cpp", ".h"))
    flags = [*FLAGS, f"-gencode=arch={arch.replace('sm', 'compute')},code={arch}"]
    key = hashlib.sha256("\n".join([torch.__version__, *flags]).encode())
    for source in sources:
        key.update(source.name.encode() + b"\0" + source.read_bytes())
    return cache_folder() / f"{LIBRARY}-{arch}-{key.hexdigest()[:16]}.so", sources, flags


def build(arch: str) -> Path:
    """The library for an architecture, compiled unless the cache has it; only then is nvcc needed."""
    library, sources, flags = library_for(arch)
    if library.exists():
        return library
    nvcc = compiler(arch)
    with locked(library.parent / f"{LIBRARY}.lock"):
        if not library.exists():
            print(f"compiling the CUDA kernels for {arch}", file=sys.stderr, flush=True)
            compile_library(nvcc, [s for s in sources if s.suffix != ".h"], flags, library)
    return library


def compile_library(nvcc: str, sources: list[Path], flags: list[str], library: Path) -> None:
    """Each source to an object, all at once, and the objects to `library`, which appears whole or not at all."""
    root = Path(torch.__file__).parent

    def compile_one(source: Path) -> str:
        target = Path(work) / f"{source.parent.name}-{source.stem}.o"
        run([nvcc, *flags, f"-I{root / 'include'}", f"-I{source_folder()}", "-c", str(source), "-o", str(target)])
        return str(target)

    for broken_off in library.parent.glob(f"{library.stem}-*/"):
        shutil.rmtree(broken_off)
    room = tempfile.TemporaryDirectory(dir=library.parent, prefix=f"{library.stem}-")
    with room as work, ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, sources))
        link = ["-shared", f"-L{root / 'lib'}", "-Xlinker", "--no-as-needed", "-ltorch"]
        made = Path(work) / library.name
        run([nvcc, *objects, *link, "-o", str(made)])
        os.replace(made, library)


def run(command: list[str]) -> str:
    """What the command prints. Raises RuntimeError with its errors where it fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"nvcc failed: {' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def own_arch(device: torch.device) -> str:
    """The device's architecture as nvcc names it. Raises ValueError for one the kernels do not support."""
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        name = torch.cuda.get_device_name(device)
        raise ValueError(f"{name} has compute capability {major}.{minor}, the kernels need 8.0: use ops=reference.")
    return f"sm_{major}{minor}{'a' if major == 9 else ''}"


def find_nvcc() -> str:
    """nvcc on PATH, under CUDA_HOME or in /usr/local/cuda. Raises ValueError where there is none."""
    home = Path(environment("CUDA_HOME") or "/usr/local/cuda") / "bin"
    found = shutil.which("nvcc") or shutil.which("nvcc", path=str(home))
    if found is None:
        toolkit = " ".join(("the CUDA toolkit", *filter(None, [torch.version.cuda])))
        raise ValueError(
            f"nvcc was found neither on PATH nor in {home}: install {toolkit} or set CUDA_HOME to compile the kernels; "
            "generation without them takes ops=reference."
        )
    return found


def compiler(arch: str) -> str:
    """nvcc. Raises ValueError where there is none, or none that fits the driver and knows the architecture."""
    nvcc = find_nvcc()
    check_driver(nvcc)
    archs = [found for found in run([nvcc, "--list-gpu-code"]).split() if known(found) or found == "sm_90"]
    if arch.removesuffix("a") not in archs:
        named = ", ".join(archs).replace("sm_90", "sm_90a")
        raise ValueError(f"{nvcc} does not know {arch}: it compiles the kernels for {named}.")
    return nvcc


def check_driver(nvcc: str) -> None:
    """Raises ValueError where the driver is of an older CUDA generation than nvcc, RuntimeError for a broken nvcc."""
    number, version = ctypes.c_int(0), run([nvcc, "--version"])
    if torch.cuda.is_available():
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    driver, release = number.value, re.search(r"release ([0-9]+)\.([0-9]+)", version)
    if driver and release and driver // 1000 < int(release[1]):
        raise ValueError(
            f"the driver runs CUDA {driver // 1000}.{driver % 1000 // 10} and nvcc is {release[1]}.{release[2]}: "
            "update the driver or put an older nvcc first on PATH."
        )


def source_folder() -> Path:
    """csrc inside an installed package, else beside it in the repository."""
    package = Path(__file__).parent.parent
    return next(f for f in (package / "csrc", package.parent / "csrc") if f.is_dir())


def cache_folder() -> Path:
    """KIMI_FX_CACHE, else kimi_fx in the user's cache; made if need be. Raises ValueError where it cannot be."""
    own, shared = environment("KIMI_FX_CACHE"), environment("XDG_CACHE_HOME")
    wanted = own or f"{shared or '~/.cache'}/kimi_fx"
    try:
        folder = package_path(wanted).absolute()  # wherever the process goes
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ValueError(f"the cache {wanted} cannot be made ({why}): set KIMI_FX_CACHE to another folder.") from None
    return folder


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process at a time; the others wait and then find what it made. StoreError where that cannot be arranged."""
    with told(path.parent, "set KIMI_FX_CACHE to another folder"):
        file = path.open("w")
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def command(overrides: Sequence[str]) -> int:
    """`kimi-fx build [arch=sm_80,sm_90a,sm_120]`: without `arch`, this machine's own. Prints a library's path each."""
    words = [word.removeprefix("arch=").strip("[]") for word in overrides]
    archs = [arch for word in words for arch in word.split(",")]
    if not all(known(arch) for arch in archs):
        raise ValueError(
            f"build takes arch= with some of {', '.join(ARCHS)} and the like, found {' '.join(overrides)}."
        )
    if not archs and not torch.cuda.is_available():
        raise ValueError(f"no CUDA device is visible to build for: name one or more with arch={','.join(ARCHS)}.")
    wanted = dict.fromkeys(archs or [own_arch(torch.device("cuda"))])
    for arch in wanted:
        if not library_for(arch)[0].exists():
            compiler(arch)
    for arch in wanted:
        print(build(arch), flush=True)
    return 0


def known(arch: str) -> bool:
    """Whether nvcc and the kernels know it: 8.0 and up; 9.0 has instructions that only sm_90a names."""
    number = re.fullmatch(r"sm_([0-9]{2,3})", arch.removesuffix("a"))
    return (
        arch == "sm_90a"
        or number is not None
        and arch == f"sm_{number[1]}"
        and int(number[1]) >= 80
        and arch != "sm_90"
    )
