"""What a checkpoint folder holds: its JSON files, its shards and every tensor's place, from headers alone.

Reads no tensor data. Whatever is wrong with the files themselves (an absent or extra shard, a Git LFS
pointer, a web page saved as a shard, a truncated download, a header that safetensors refuses) is found here, all
of it in one message. Does not know which tensors a model needs: see `preflight.py`.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
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


@contextmanager
def reading(what: Path | str) -> Iterator[None]:
    """A CheckpointError that names the file or folder which the system does not let us read."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{what}: cannot be read ({error.strerror})") from None


def read_file(path: Path) -> bytes:
    """All bytes of a file. Raises CheckpointError when it is absent, cannot be read or is only a stand-in."""
    with reading(path):
        if not path.parent.is_dir():
            raise CheckpointError(f"{path.parent}: no such folder")
        if not os.path.lexists(path):
            raise CheckpointError(f"{path.parent}: holds no {path.name}")
        data = path.read_bytes()
    if problem := stand_in(data):
        raise CheckpointError(f"{path}: {problem}")
    return data


def text_of(path: Path) -> str:
    """A file of text. Raises CheckpointError as `read_file` does, and when it is not in UTF-8."""
    try:
        return read_file(path).decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: not a text in UTF-8 (byte {error.start:,}: {error.reason})") from None


def parse_json(text: str | bytes, **hooks: Any) -> Any:
    """What a JSON text says. Raises ValueError for anything else, and for lists in lists beyond what Python reads."""
    try:
        return json.loads(text, **hooks)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Raises CheckpointError as `read_file` does, and when the file holds anything else."""
    try:
        value = parse_json(read_file(path))
    except CheckpointError:
        raise
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
    with reading(folder):
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
    listed = sorted(folder.glob("*.safetensors"))
    present = {file for file in listed if file.exists()}  # not a link to nothing
    if os.path.lexists(folder / INDEX):
        index = _weight_map(folder / INDEX)
        wanted = {folder / name for name in set(index.values())}
        origin = "the index names"
    else:
        index = {}
        single = folder / "model.safetensors"
        wanted = {single} if single in listed else set(_numbered(folder, listed))
        origin = "the shards' numbering asks for"
    if not listed and not wanted:
        what = "an empty folder" if not any(folder.iterdir()) else "no safetensors file"
        raise CheckpointError(f"{folder}: {what}, nothing to load")
    problems = []
    if absent := sorted(wanted - present):
        which = first_few(file.name for file in absent)
        problems.append(f"{len(absent):,} of {len(wanted):,} files {origin} are absent: {which}")
    if extra := sorted(present - wanted):
        which = first_few(file.name for file in extra)
        problems.append(f"{len(extra):,} files are no part of the checkpoint, move them away: {which}")
    return index, sorted(wanted & present), problems


def _weight_map(path: Path) -> dict[str, str]:
    index = read_json(path).get("weight_map")
    if not isinstance(index, dict) or not index or not all(isinstance(name, str) for name in index.values()):
        raise CheckpointError(f"{path}: has no weight_map from tensor names to file names")
    return index


def _numbered(folder: Path, listed: list[Path]) -> list[Path]:
    """`model-*` shards; with `-of-N` names all N of them, the absent ones too."""
    shards = [file for file in listed if file.name.startswith("model-")]
    for file in shards:
        if match := re.fullmatch(r"model-([0-9]+)-of-([0-9]{1,6})\.safetensors", file.name):
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

    Raises CheckpointError for what cannot be read, a stand-in, a damaged header, tensors that do not fill the data
    one after another, or data shorter or longer than the header says.
    """
    with reading(file.name), file.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
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
        header = parse_json(text.decode())
        notes = header.pop("__metadata__", None)
        if notes is not None and not all(isinstance(note, str) for note in notes.values()):
            raise ValueError(f"__metadata__ is {notes}, not texts by name")
        entries = {name: _entry(file, spec) for name, spec in header.items()}
        promised = 8 + length + _end(entries)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file.name}: its header is damaged ({type(error).__name__}: {error})") from None
    if size != promised:
        state = "truncated" if size < promised else "too long"
        raise CheckpointError(f"{file.name}: {state}, the header says {promised:,} bytes, the file has {size:,}")
    return entries


def _entry(file: Path, spec: dict[str, Any]) -> Entry:
    dtype, shape, (start, end) = DTYPES[spec["dtype"]], tuple(spec["shape"]), spec["data_offsets"]
    numbers = (*shape, start, end)
    if {*map(type, numbers)} != {int} or min(numbers) < 0 or max(numbers) >= 2**64:
        raise ValueError(f"shape {list(shape)} at {[start, end]}, not whole numbers")
    if end - start != prod(shape) * dtype.itemsize:
        raise ValueError(f"{end - start} bytes for {spec['dtype']} {list(shape)}")
    return Entry(file, dtype, shape, start, end)


def _end(entries: dict[str, Entry]) -> int:
    """Where the data ends. Raises ValueError where it does not begin at 0, overlaps, or has a hole."""
    end = 0
    for start, after, name in sorted((entry.start, entry.end, name) for name, entry in entries.items()):
        if start != end:
            raise ValueError(f"{name} begins at byte {start:,} of the data, where {end:,} is next")
        end = after
    return end


def stand_in(data: bytes) -> str | None:
    """What a file is instead of itself, if it is a Git LFS pointer or a web page."""
    if data.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer, not the file itself; fetch it with `git lfs pull`"
    if data[:512].lstrip().lower().startswith((b"<!doctype html", b"<html", b"<?xml")):
        return "a web page, not the file itself; the download failed, fetch it again"
    return None
