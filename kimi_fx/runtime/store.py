"""The artefact store: compiled functions on disk, in one folder for each set of ingredients that can change them.

    <cache>/<torch>-<cuda>-<triton>-<arch>-tp<ranks>-<fingerprint>/
        manifest.json    the ingredients
        inductor/        Inductor's own cache: kernels, their sources, of all functions; TensorRT engines
        <name>.aot       one function
        <name>.json      its checksums, those of all kernels it may load, seconds it took; written last
        <name>.damaged   a mark: the function was here, and a file was not as noted

Files appear whole or not at all, and one process at a time builds, never in `inductor` itself: Inductor trusts what it
finds, so it is only shown kernels with the checksum that a note has. A folder may be copied to an equal machine. Knows
files only, not what is in them.
"""

import errno
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from ..checkpoint.files import parse_json

MANIFEST = "manifest.json"
BUILD = "build-"  # folders of builds that run, or were broken off
LONGEST = 1e9  # seconds that a build may have taken
LABEL = ("torch", "cuda", "triton", "arch")  # ingredients that the folder's name shows
ADVICE = "set KIMI_FX_CACHE to another folder, or run.compile=false to do without"
REASONS = {
    **dict.fromkeys((errno.EACCES, errno.EPERM), "cannot be read or written by this user"),
    errno.EROFS: "cannot be written",
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "is on a full disk, free some space"),
}


class StoreError(RuntimeError):
    """The store cannot be read or written; the message says what to do."""


@dataclass(frozen=True)
class Store:
    """One folder of the cache. Nothing is created before something is built."""

    root: Path
    ingredients: Mapping[str, str]

    @property
    def folder(self) -> Path:
        named = (self.ingredients[key].replace(" ", "_") for key in LABEL)
        return self.root / "-".join([*named, f"tp{self.ingredients['tp']}", fingerprint(self.ingredients)])

    @property
    def inductor(self) -> Path:
        return self.folder / "inductor"

    def code(self, name: str) -> Path:
        return self.folder / f"{name}.aot"

    def mark(self, name: str) -> Path:
        return self.folder / f"{name}.damaged"

    def entry(self, name: str) -> dict[str, Any] | None:
        """What `add` noted, if the function is here and sound; where a file is damaged the note is removed with a
        warning, and a mark left. StoreError for files that this user may not read."""
        note = self.folder / f"{name}.json"
        with told(self.folder):
            if not note.exists():
                return None
            entry = read_note(note)
            files = entry.get("files", {})
            damaged = [self.folder / file for file, digest in files.items() if checksum(self.folder / file) != digest]
            if files and not damaged:
                return entry
            warn(f"{(*damaged, note)[0]} is damaged or gone: {name} has to be built again.")
            write(self.mark(name), b"")
            remove(note)  # `add` replaces the files, and others that noted them are to see the damage too
        return None

    def sound(self) -> dict[str, str]:
        """The kernels that are as a note says, and their checksums."""
        claims = {claim for note in self.folder.glob("*.json") for claim in read_note(note).get("files", {}).items()}
        kernels = ((file, digest) for file, digest in claims if below(file, "inductor"))
        return {file: digest for file, digest in kernels if checksum(self.folder / file) == digest}

    @contextmanager
    def building(self, quiet: bool = False) -> Iterator[None]:
        """The only builder of this folder, once others are done. StoreError where the folder cannot be written."""
        with told(self.folder):
            self.make_folder(self.inductor)
            with (self.folder / "lock").open("w") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    if not quiet:
                        warn(f"waiting for another process, or rank, that is building in {self.folder}")
                    fcntl.flock(lock, fcntl.LOCK_EX)
                for broken_off in self.folder.glob(f"{BUILD}*"):
                    remove(broken_off)
                remove_stale(self.folder)
                if not (self.folder / MANIFEST).exists():
                    write(self.folder / MANIFEST, json.dumps(dict(self.ingredients), indent=1).encode())
                yield

    @contextmanager
    def workshop(self, stocked: bool = False) -> Iterator[Path]:
        """A folder to build in, or below it several at once; only while `building`. Stocked, it holds copies of the
        sound kernels, which a build may use again."""
        with tempfile.TemporaryDirectory(dir=self.folder, prefix=BUILD, ignore_cleanup_errors=True) as folder:
            for file in self.sound() if stocked else ():
                copy = folder / Path(file).relative_to("inductor")
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(self.folder / file, copy)
            yield Path(folder)

    def add(self, name: str, code: bytes, kernels: Path, seconds: float, arguments: Sequence[str]) -> None:
        """Keep a function, its kernels, all checksums, the seconds it took and the arguments it takes; only while
        `building`. All that is in the folder of its kernels is noted, and moved to `inductor` if not sound there."""
        write(self.code(name), code)
        sound = self.sound()
        files = {self.code(name).name: checksum(self.code(name))}
        for made in sorted(f for f in kernels.rglob("*") if f.is_file() and f.suffix not in (".lock", ".tmp")):
            file = self.inductor / made.relative_to(kernels)
            key = file.relative_to(self.folder).as_posix()
            if key not in sound:
                self.make_folder(file.parent)
                if file.is_dir():
                    remove(file)
                os.replace(made, file)
            files[key] = sound.get(key) or checksum(file)
        note = {"seconds": seconds, "arguments": list(arguments), "files": files}
        write(self.folder / f"{name}.json", json.dumps(note, indent=1).encode())
        remove(self.mark(name))

    def make_folder(self, folder: Path) -> None:
        """With those it is in; files in their places go."""
        for way in (*reversed(folder.relative_to(self.folder).parents), folder.relative_to(self.folder)):
            if not (place := self.folder / way).is_dir():
                place.unlink(missing_ok=True)
        folder.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def kernel_folder(self) -> Iterator[Path]:
        """Inductor's cache to load from: a copy where the store is read-only, as Inductor locks what it reads."""
        if os.access(self.folder, os.W_OK):
            yield self.inductor
            return
        with tempfile.TemporaryDirectory() as copy:
            yield Path(shutil.copytree(self.inductor, Path(copy) / "inductor"))

    def why_cold(self, names: Sequence[str]) -> str:
        """How this folder came to lack these: damage, or the nearest folder of the cache, and what differs there."""
        if damaged := sum(self.mark(name).exists() for name in names):
            return f"{damaged} damaged" + (", the others not built yet" if damaged < len(names) else "")
        if (self.folder / MANIFEST).exists():
            return "not built there yet"
        others = (other for other in self.root.glob(f"*/{MANIFEST}") if os.access(other, os.R_OK))
        found = {other.parent.name: read_json(other) for other in others}
        steps = {name: theirs for name, theirs in found.items() if theirs.keys() >= {*LABEL}}
        apart = {name: difference(self.ingredients, theirs) for name, theirs in steps.items()}
        if not apart:
            return f"no compiled step is in {self.root}"
        nearest = min(apart, key=lambda name: len(apart[name]))
        first, more = apart[nearest][0], len(apart[nearest]) - 1
        return f"the nearest folder, {nearest}, differs in {first}" + (f" and {more} more" if more else "")

    def pace(self) -> float | None:
        """Seconds a build took here on average."""
        with told(self.folder):
            known = [entry["seconds"] for entry in map(read_note, self.folder.glob("*.json")) if entry]
        return sum(known) / len(known) if known else None


def fingerprint(ingredients: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(dict(ingredients), sort_keys=True).encode()).hexdigest()[:16]


def difference(ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """A phrase for each ingredient that differs."""
    keys = [key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)]
    return [f"{key} ({theirs.get(key, 'nothing')} there, {ours.get(key, 'nothing')} here)" for key in sorted(keys)]


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object, empty where there is none. Raises PermissionError where there may be one."""
    try:
        found = parse_json(file.read_bytes())
    except PermissionError:
        raise
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def read_note(file: Path) -> dict[str, Any]:
    """What `add` noted, empty where it is not of that form."""
    note = read_json(file)
    files, arguments, seconds = note.get("files"), note.get("arguments"), note.get("seconds")
    sound = (
        isinstance(files, dict)
        and f"{file.stem}.aot" in files
        and all(key == f"{file.stem}.aot" or below(key, "inductor") for key in files)
        and all(digest and isinstance(digest, str) for digest in files.values())
        and isinstance(arguments, list)
        and all(isinstance(argument, str) for argument in arguments)
        and isinstance(seconds, int | float)
        and 0 <= seconds < LONGEST  # nor is NaN
    )
    return note if sound else {}


def below(key: str, folder: str) -> bool:
    """Whether a path leads into the folder and stays there."""
    parts = PurePosixPath(key).parts
    return len(parts) > 1 and parts[0] == folder and ".." not in parts


def on_the_way(file: Path, folder: Path) -> bool:
    """Whether a file is in the folder, or is the folder itself or one that it is in."""
    return file.is_relative_to(folder) or folder.is_relative_to(file)


def remove(file: Path) -> None:
    """A file, or a folder in its place."""
    if file.is_dir() and not file.is_symlink():
        shutil.rmtree(file)
    else:
        file.unlink(missing_ok=True)


def checksum(file: Path) -> str:
    """SHA-256 of a file; empty where there is none. Raises PermissionError where there may be one."""
    try:
        with file.open("rb") as data:
            return hashlib.file_digest(data, "sha256").hexdigest()
    except PermissionError:
        raise
    except OSError:
        return ""


def write(file: Path, data: bytes) -> None:
    """The file appears whole, or not at all."""
    if file.is_dir():
        remove(file)
    with temporary(file) as out:
        out.write(data)


@contextmanager
def temporary(file: Path) -> Iterator[BinaryIO]:
    """What is written takes the file's place at the end, whole, or not at all. Locked from before the first byte.
    Others may read it if the umask lets them, as `tempfile` would not have it."""
    made = file.with_name(f"{secrets.token_hex(8)}.tmp")
    with made.open("xb") as out:
        try:
            fcntl.flock(out, fcntl.LOCK_EX)
            yield out
            out.flush()
            os.fsync(out.fileno())
            os.replace(made, file)
        except BaseException as error:
            made.unlink(missing_ok=True)
            if isinstance(error, OSError) and error.filename is None:
                error.filename = str(file)
            raise


def remove_stale(folder: Path) -> None:
    """Temporary files of writers that were killed: they have bytes, and nobody holds their lock."""
    for file in folder.glob("*.tmp"):
        with suppress(OSError), file.open("r+b") as left:
            fcntl.flock(left, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if file.stat().st_size:
                file.unlink()


@contextmanager
def told(folder: Path, advice: str = ADVICE) -> Iterator[None]:
    """A StoreError with a sentence for what a disk can refuse, however deep the error lies: whatever befalls the folder
    or a file in it, and what is in `REASONS` if no file is named."""
    try:
        yield
    except StoreError:
        raise
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None:
            full = os.strerror(errno.ENOSPC) in str(cause)
            code = errno.ENOSPC if full else getattr(cause, "errno", None)
            named = getattr(cause, "filename", None)
            if code and (code in REASONS if named is None else on_the_way(Path(str(named)), folder)):
                which = f": {named}" if named else ""
                what = f"{REASONS.get(code, 'cannot be used')}, {advice} ({os.strerror(code)}{which})"
                raise StoreError(f"The artefact store {folder} {what}.") from error
            cause = cause.__cause__ or cause.__context__
        raise


def warn(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
