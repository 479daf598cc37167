"""A rank's weights as it computes with them, kept on disk in one file that later loads read from end to end.

    <cache>/weights-tp<ranks>-<fingerprint>/
        manifest.json         what they depend on: the checkpoint's files, the rank's geometry, how leaves are packed
        rank<r>.safetensors   all leaves in the order of the pytree, under the header that their forms alone decide
        rank<r>.json          a sum over the bytes of each; written last

Reading a checkpoint takes a rank through all files for a part of each, and packs; here it is one copy. A file that is
damaged is written again, with a warning. Files appear whole or not at all.
"""

import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from ..checkpoint.files import DTYPES
from ..checkpoint.load import pace, pack_experts
from ..checkpoint.shards import local_leaf
from ..config import Config, package_path
from ..graphs.params import Experts, Leaf, Params, drafter_plan, target_plan
from ..graphs.pytree import tree_map, tree_paths
from ..graphs.state import Model
from .build import cache_folder
from .ingredients import PACKAGE, digest, geometry
from .store import MANIFEST, StoreError, fingerprint, read_json, remove_stale, temporary, told, warn, write

ADVICE = "set KIMI_FX_CACHE to another folder, or cache.weights=false to do without"
PACKING = ("checkpoint/*.py", "graphs/params.py", "graphs/layers.py", "ops/marlin.py")
CHUNK = 64 * 2**20  # bytes read at once
SUMMED = 4 * 2**20  # bytes summed at once: a CPU keeps them in its caches
SAMPLE = 64 * 2**10  # bytes of a block that stands for a shard's data
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def loaded_once(
    config: Config,
    model: Model,
    rank: int,
    device: torch.device,
    dtype: torch.dtype,
    load: Callable[[], Params],
    progress: bool,
) -> Params:
    """What `load` gives, from the rank's file if it is there and sound, else written to it. StoreError where it cannot
    be written, before `load` if that can be known."""
    parts = ingredients(config, model, device, dtype)
    folder = cache_folder() / f"weights-tp{model.ranks}-{fingerprint(parts)}"
    file, forms = folder / f"rank{rank}.safetensors", packed_forms(model, device, dtype)
    with told(folder, ADVICE):
        check_places(file)
        if (params := read(file, forms, device, progress)) is not None:
            return params
        make_room(file, parts, sum(form.nbytes for form in named(forms).values()))
    params = load()
    with told(folder, ADVICE):
        keep(file, params)
    if progress:
        print(f"packed weights: kept in {file}", file=sys.stderr)
    return params


def ingredients(config: Config, model: Model, device: torch.device, dtype: torch.dtype) -> dict[str, str]:
    """All that decides what the leaves are, by name."""
    found = {"dtype": str(dtype).removeprefix("torch."), "device": device.type} | geometry(model)
    for role, path in (("target", config.target.path), ("drafter", config.drafter.path)):
        if not path:
            continue
        folder = package_path(path).resolve()
        found[f"{role} folder"] = str(folder)
        for file in sorted(folder.glob("*.safetensors")):
            stat = file.stat()
            found[f"{role} {file.name}"] = f"{stat.st_size} bytes of {stat.st_mtime_ns}, {sampled(file)}"
    for pattern in PACKING:
        for source in sorted(PACKAGE.glob(pattern)):
            found[f"kimi_fx/{source.relative_to(PACKAGE).as_posix()}"] = digest(source.read_bytes())
    return found


def sampled(file: Path) -> str:
    """A digest of a shard's header and of three blocks of its data, as whole shards take too long to read."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = min(8 + int.from_bytes(stream.read(8), "little"), size)
        found = hashlib.sha256()
        for at, length in ((0, start), (start, SAMPLE), ((start + size) // 2, SAMPLE), (max(size - SAMPLE, 0), SAMPLE)):
            stream.seek(at)
            found.update(stream.read(length))
    return found.hexdigest()[:16]


def packed_forms(model: Model, device: torch.device, dtype: torch.dtype) -> Params:
    """The leaves that a rank computes with, as tensors without data."""

    def empty(leaf: Leaf) -> Tensor:
        return torch.empty(local_leaf(leaf, model.ranks).shape, dtype=leaf.dtype or dtype, device="meta")

    def node(part: Leaf | Experts) -> Tensor | Experts:
        if isinstance(part, Experts):  # a CPU has a form of its own, for which nothing moves to it
            return pack_experts(tree_map(empty, part), dtype, "cpu" if device.type == "cpu" else "meta")
        return empty(part)

    target = target_plan(model.target, model.ranks)
    drafter = drafter_plan(model.drafter, model.ranks) if model.drafter else None
    return Params(
        tree_map(node, target, is_leaf=lambda part: isinstance(part, Experts)), drafter and tree_map(node, drafter)
    )


def check_places(file: Path) -> None:
    """Raise StoreError for a file in the folder's place or a folder in a file's."""
    folder = file.parent
    if folder.exists() and not folder.is_dir():
        raise StoreError(f"{folder} is a file where a folder of weights belongs: move it away, {ADVICE}.")
    for part in (folder / MANIFEST, file, file.with_suffix(".json")):
        if part.is_dir():
            raise StoreError(f"{part} is a folder where a file belongs: move it away, {ADVICE}.")


def make_room(file: Path, parts: dict[str, str], size: int) -> None:
    """The folder with its manifest, and space for the rank's file."""
    folder = file.parent
    folder.mkdir(exist_ok=True)
    remove_stale(folder)
    write(folder / MANIFEST, json.dumps(parts, indent=1).encode())
    if (free := shutil.disk_usage(folder).free) < size:
        sizes = f"would take {size / 1e9:.2f} GB and its disk has {free / 1e9:.2f} GB free"
        raise StoreError(f"{file} {sizes}: free some space, {ADVICE}.")


def keep(file: Path, params: Params) -> None:
    """Write all leaves and then the note."""
    leaves = named(params)
    with temporary(file) as out:
        out.write(header(leaves))
        for leaf in leaves.values():
            out.write(data_of(leaf.cpu()))
    sums = {path: sum_of(leaf) for path, leaf in leaves.items()}
    write(file.with_suffix(".json"), json.dumps({"sums": sums}, indent=1).encode())


def read(file: Path, forms: Params, device: torch.device, progress: bool) -> Params | None:
    """The leaves in the file, None if there is none; a damaged one is removed with a warning."""
    note, start = file.with_suffix(".json"), time.monotonic()
    if not note.exists():
        return None
    try:
        leaves, sums = read_leaves(file, named(forms), device), read_json(note).get("sums")
        damage = check_sums(leaves, sums if isinstance(sums, dict) else {})
    except PermissionError:
        raise
    except OSError as error:
        damage = str(error)
    if damage:
        warn(f"{file} is damaged ({damage}): the weights are read from the checkpoint and written again.")
        for part in (note, file):
            part.unlink(missing_ok=True)
        return None
    if progress:
        size = sum(leaf.nbytes for leaf in leaves.values())
        print(f"packed weights: read {pace(size, time.monotonic() - start)} from {file}", file=sys.stderr)
    places = iter([path for path, _ in tree_paths(forms)])
    return tree_map(lambda _: leaves.get(next(places)), forms)


def check_sums(leaves: dict[str, Tensor], sums: dict[str, str]) -> str | None:
    return next((f"{path} has changed" for path, leaf in leaves.items() if sum_of(leaf) != sums.get(path)), None)


def named(params: Params) -> dict[str, Tensor]:
    """The leaves by their paths, in the order of the pytree."""
    return {path: leaf for path, leaf in tree_paths(params) if leaf is not None}


def header(leaves: dict[str, Tensor]) -> bytes:
    """What a safetensors file of these leaves begins with."""
    entries, end = {}, 0
    for path, leaf in leaves.items():
        start, end = end, end + leaf.nbytes
        entries[path] = {"dtype": NAMES[leaf.dtype], "shape": list(leaf.shape), "data_offsets": [start, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_leaves(file: Path, forms: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Leaves of these forms, each in memory of its own. OSError if the file holds anything else."""
    start, size = header(forms), file.stat().st_size
    wanted = len(start) + sum(form.nbytes for form in forms.values())
    if size != wanted:
        raise OSError(f"it has {size:,} bytes in place of {wanted:,}")
    pinned = device.type == "cuda"
    staging = cycle(torch.empty(CHUNK, dtype=torch.uint8, pin_memory=True) for _ in range(2)) if pinned else None
    copied = torch.cuda.Event() if pinned else None
    with file.open("rb", buffering=0) as stream:
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        if stream.read(len(start)) != start:
            raise OSError("its header is not that of these weights")
        leaves = {path: torch.empty_like(form, device=device) for path, form in forms.items()}
        for leaf in leaves.values():
            for part in leaf.view(-1).view(torch.uint8).split(CHUNK):
                if staging is None or copied is None:
                    fill(stream, part)
                    continue
                buffer = next(staging)[: len(part)]
                fill(stream, buffer)  # while the other one is copied
                copied.synchronize()
                part.copy_(buffer, non_blocking=True)
                copied.record()
    if copied:
        copied.synchronize()
    return leaves


def fill(stream: BinaryIO, part: Tensor) -> None:
    """The next bytes of the file, all of them."""
    view = part.numpy().data
    while view:
        count = stream.readinto(view)  # type: ignore[attr-defined]
        if not count:
            raise OSError("it ends too early")
        view = view[count:]


def data_of(leaf: Tensor) -> memoryview:
    return leaf.contiguous().view(-1).view(torch.uint8).numpy().data


def sum_of(leaf: Tensor) -> str:
    """Of its 8-byte words, each times an odd number that depends on its place, and of the bytes behind them; on its
    device. One word that differs always shows, as odd factors lose nothing modulo 2^64."""
    data = leaf.contiguous().view(-1).view(torch.uint8)
    whole = len(data) // 8 * 8
    parts = data[:whole].view(torch.int64).split(SUMMED // 8)
    factors = odd_factors(len(parts[0]), leaf.device)
    sums = torch.stack([(part * factors[: len(part)]).sum() for part in parts])
    return digest(repr((sums.tolist(), data[whole:].tolist())))


def odd_factors(count: int, device: torch.device) -> Tensor:
    """Scattered over all of int64, so that words which trade places are not multiplied by nearly the same."""
    mixed = torch.arange(1, count + 1, device=device) * 0x1E3779B97F4A7C15
    mixed ^= mixed >> 29
    return mixed * 0x3F58476D1CE4E5B9 | 1
