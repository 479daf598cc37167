"""What a checkpoint folder holds: its JSON files, its shards and every tensor's place, from headers alone.

Reads no tensor data. Whatever is wrong with the files themselves (an absent or extra shard, a Git LFS
pointer, a web page saved as a shard, a truncated download) is found here, all of it in one message. Does not
know which tensors a model needs: see `preflight.py`.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

HEADER_LIMIT = 100_000_000  # bytes; the safetensors format allows no more
INDEX = "model.safetensors.index.json"
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded; the message names every problem found."""


@dataclass(frozen=True)
class Entry:
    """One tensor on disk."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # of its bytes, from the end of the header
    end: int

    @property
    def bytes(self) -> int:
        return self.end - self.start


def refuse(what: str, problems: list[str]) -> None:
    """Raise CheckpointError when there are problems: one line for one, a list for several."""
    if len(problems) == 1:
        raise CheckpointError(f"{what}: {problems[0]}")
    if problems:
        raise CheckpointError(f"{what}: {len(problems)} problems\n" + "\n".join(f"  - {p}" for p in problems))


def first_few(items: Iterable[Any], limit: int = 3) -> str:
    """The first few, and how many more there are."""
    found = [str(item) for item in items]
    more = f" and {len(found) - limit:,} more" if len(found) > limit else ""
    return ", ".join(found[:limit]) + more


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises CheckpointError when the file is absent or holds anything else."""
    if not path.parent.is_dir():
        raise CheckpointError(f"{path.parent}: no such folder")
    if not path.is_file():
        raise CheckpointError(f"{path.parent}: holds no {path.name}")
    data = path.read_bytes()
    if problem := stand_in(data):
        raise CheckpointError(f"{path}: {problem}")
    try:
        value = json.loads(data)
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON ({error})") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: a JSON {type(value).__name__}, not an object")
    return value


def read_entries(folder: Path) -> dict[str, Entry]:
    """Every tensor in a folder's safetensors files, by its name on disk.

    The files are those of `model.safetensors.index.json`, else `model.safetensors`, else all of
    `model-*.safetensors`. Raises CheckpointError with all problems of all files.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder")
    index, shards, problems = _shards(folder)
    entries: dict[str, Entry] = {}
    for file in shards:
        try:
            found = read_header(file)
        except CheckpointError as error:
            problems.append(str(error))
            continue
        if twice := entries.keys() & found.keys():
            problems.append(f"{file.name} repeats {len(twice):,} tensors of other files: {first_few(sorted(twice))}")
        entries |= found
    refuse(str(folder), problems or _against_index(index, entries))
    return entries


def _shards(folder: Path) -> tuple[dict[str, str], list[Path], list[str]]:
    """The index's map (empty without one), the shards that are there, and what is wrong with the set."""
    present = sorted(folder.glob("*.safetensors"))
    if (folder / INDEX).is_file():
        index = _weight_map(folder / INDEX)
        wanted = {folder / name for name in set(index.values())}
        origin = "the index names"
    else:
        index = {}
        single = folder / "model.safetensors"
        wanted = {single} if single in present else set(_numbered(folder, present))
        origin = "the shards' numbering asks for"
    if not present and not wanted:
        what = "an empty folder" if not any(folder.iterdir()) else "no safetensors file"
        raise CheckpointError(f"{folder}: {what}, nothing to load")
    problems = []
    if absent := sorted(wanted - set(present)):
        which = first_few(file.name for file in absent)
        problems.append(f"{len(absent):,} of {len(wanted):,} files {origin} are absent: {which}")
    if extra := sorted(set(present) - wanted):
        which = first_few(file.name for file in extra)
        problems.append(f"{len(extra):,} files are no part of the checkpoint, move them away: {which}")
    return index, sorted(wanted & set(present)), problems


def _weight_map(path: Path) -> dict[str, str]:
    index = read_json(path).get("weight_map")
    if not isinstance(index, dict) or not index or not all(isinstance(name, str) for name in index.values()):
        raise CheckpointError(f"{path}: has no weight_map from tensor names to file names")
    return index


def _numbered(folder: Path, present: list[Path]) -> list[Path]:
    """`model-*` shards; with `-of-N` names all N of them, the absent ones too."""
    shards = [file for file in present if file.name.startswith("model-")]
    for file in shards:
        if match := re.fullmatch(r"model-(\d+)-of-(\d+)\.safetensors", file.name):
            width, count = len(match[1]), int(match[2])
            return [folder / f"model-{n:0{width}}-of-{match[2]}.safetensors" for n in range(1, count + 1)]
    return shards


def _against_index(index: dict[str, str], entries: dict[str, Entry]) -> list[str]:
    if not index:
        return []
    problems = []
    lost = sorted(name for name, file in index.items() if name not in entries or entries[name].file.name != file)
    if lost:
        where = first_few(f"{name} ({index[name]})" for name in lost)
        problems.append(f"{len(lost):,} tensors are not in the file the index gives for them: {where}")
    if extra := sorted(entries.keys() - index.keys()):
        problems.append(f"{len(extra):,} tensors are in the files but not in the index: {first_few(extra)}")
    return problems


def read_header(file: Path) -> dict[str, Entry]:
    """The tensors of one safetensors file, from its header.

    Raises CheckpointError for a stand-in, a damaged header, or data shorter or longer than the header says.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(512)
        length = int.from_bytes(start[:8], "little")
        if problem := stand_in(start):
            raise CheckpointError(f"{file.name}: {problem}")
        if size < 8 or not 2 <= length <= HEADER_LIMIT:
            raise CheckpointError(f"{file.name}: not a safetensors file (its header would be {length:,} bytes)")
        stream.seek(8)
        text = stream.read(length)
    if len(text) < length:
        raise CheckpointError(f"{file.name}: truncated, {size:,} bytes of a header of {8 + length:,}")
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        entries = {name: _entry(file, spec) for name, spec in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file.name}: its header is damaged ({type(error).__name__}: {error})") from None
    promised = 8 + length + max((entry.end for entry in entries.values()), default=0)
    if size != promised:
        state = "truncated" if size < promised else "too long"
        raise CheckpointError(f"{file.name}: {state}, the header says {promised:,} bytes, the file has {size:,}")
    return entries


def _entry(file: Path, spec: dict[str, Any]) -> Entry:
    dtype, shape, (start, end) = DTYPES[spec["dtype"]], tuple(spec["shape"]), spec["data_offsets"]
    if not 0 <= start <= end or end - start != prod(shape) * dtype.itemsize:
        raise ValueError(f"{end - start} bytes for {spec['dtype']} {list(shape)}")
    return Entry(file, dtype, shape, start, end)


def stand_in(data: bytes) -> str | None:
    """What a file is instead of itself, if it is a Git LFS pointer or a web page."""
    if data.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer, not the file itself; fetch it with `git lfs pull`"
    if data[:512].lstrip().lower().startswith((b"<!doctype html", b"<html", b"<?xml")):
        return "a web page, not the file itself; the download failed, fetch it again"
    return None
