"""A rank's weights as it computes with them, kept on disk in one file that later loads read from end to end.

    <cache>/weights-tp<ranks>-<fingerprint>/
        manifest.json         what they depend on: the checkpoint's files, the rank's geometry, how leaves are packed
        rank<r>.safetensors   all leaves in the order of the pytree
        rank<r>.json          a sum over the bytes of each; written last

Reading a checkpoint takes a rank through all files for a part of each, and packs; here it is one copy. A file that is
damaged is written again, with a warning. Files appear whole or not at all.
"""

import json
import os
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from ..checkpoint.files import DTYPES, CheckpointError, read_header
from ..config import Config, package_path
from ..graphs.params import Params, drafter_plan, target_plan
from ..graphs.pytree import tree_map, tree_paths
from ..graphs.state import Model
from .build import cache_folder
from .ingredients import PACKAGE, digest, geometry
from .store import MANIFEST, fingerprint, read_json, temporary, told, warn, write

PACKING = ("checkpoint/*.py", "graphs/params.py", "graphs/layers.py", "ops/marlin.py")
CHUNK = 64 * 2**20  # bytes read at once
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def loaded_once(
    config: Config, model: Model, rank: int, device: torch.device, dtype: torch.dtype, load: Callable[[], Params]
) -> Params:
    """What `load` gives, from the rank's file if it is there and sound, else written to it. StoreError where it cannot
    be written."""
    parts = ingredients(config, model, device, dtype)
    folder = cache_folder() / f"weights-tp{model.ranks}-{fingerprint(parts)}"
    file = folder / f"rank{rank}.safetensors"
    if (params := read(file, model, device)) is not None:
        return params
    params = load()
    with told(folder):
        folder.mkdir(exist_ok=True)
        write(folder / MANIFEST, json.dumps(parts, indent=1).encode())
        keep(file, params)
    return params


def ingredients(config: Config, model: Model, device: torch.device, dtype: torch.dtype) -> dict[str, str]:
    """All that decides what the leaves are, by name."""
    found = {"dtype": str(dtype).removeprefix("torch."), "device": device.type} | geometry(model)
    for role, path in (("target", config.target.path), ("drafter", config.drafter.path)):
        for file in sorted(package_path(path).glob("*.safetensors")) if path else ():
            stat = file.stat()
            found[f"{role} {file.name}"] = f"{stat.st_size} bytes of {stat.st_mtime_ns}"
    for pattern in PACKING:
        for source in sorted(PACKAGE.glob(pattern)):
            found[f"kimi_fx/{source.relative_to(PACKAGE).as_posix()}"] = digest(source.read_bytes())
    return found


def keep(file: Path, params: Params) -> None:
    """Write all leaves and then the note."""
    leaves = {path: leaf for path, leaf in tree_paths(params) if leaf is not None}
    header, end = {}, 0
    for path, leaf in leaves.items():
        header[path] = {"dtype": NAMES[leaf.dtype], "shape": list(leaf.shape), "data_offsets": [end, end + leaf.nbytes]}
        end += leaf.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with temporary(file) as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for leaf in leaves.values():
            out.write(data_of(leaf.cpu()))
    sums = {path: sum_of(leaf) for path, leaf in leaves.items()}
    write(file.with_suffix(".json"), json.dumps({"sums": sums}, indent=1).encode())


def read(file: Path, model: Model, device: torch.device) -> Params | None:
    """The leaves in the file, None if there is none; a damaged one is removed with a warning."""
    note = file.with_suffix(".json")
    if not note.exists():
        return None
    try:
        found, sums = read_leaves(file, device), read_json(note).get("sums", {})
        damage = next((f"{path} has changed" for path, leaf in found.items() if sum_of(leaf) != sums.get(path)), None)
    except (CheckpointError, OSError) as error:
        damage = str(error)
    if damage:
        warn(f"{file} is damaged ({damage}): the weights are read from the checkpoint and written again.")
        with told(file.parent):
            for part in (note, file):
                part.unlink(missing_ok=True)
        return None
    plan = Params(
        target_plan(model.target, model.ranks), drafter_plan(model.drafter, model.ranks) if model.drafter else None
    )
    places = iter([path for path, _ in tree_paths(plan)])
    return tree_map(lambda _: found.get(next(places)), plan)


def read_leaves(file: Path, device: torch.device) -> dict[str, Tensor]:
    """In the file's order, each in memory of its own."""
    entries = read_header(file)
    pinned = device.type == "cuda"
    staging = cycle(torch.empty(CHUNK, dtype=torch.uint8, pin_memory=True) for _ in range(2)) if pinned else None
    copied = torch.cuda.Event() if pinned else None
    leaves = {path: torch.empty(entry.shape, dtype=entry.dtype, device=device) for path, entry in entries.items()}
    with file.open("rb", buffering=0) as stream:
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        stream.seek(8 + int.from_bytes(stream.read(8), "little"))
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


def sum_of(leaf: Tensor) -> int:
    """Of its 8-byte words and the bytes behind them, on its device."""
    data = leaf.contiguous().view(-1).view(torch.uint8)
    whole = len(data) // 8 * 8
    return int(data[:whole].view(torch.int64).sum()) + int(data[whole:].sum())
