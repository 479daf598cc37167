"""The artefact store with bytes for functions: whole or absent, checked, shared, copied, and in words."""

import errno
import json
import multiprocessing
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from kimi_fx.runtime.store import Store, StoreError, told, write

WORDS = {"torch": "2.13.0", "cuda": "13.0", "triton": "3.6.0", "arch": "sm_90", "tp": "1", "dtype": "bfloat16"}
CODE = b"code" * 1000
SHARED = "inductor/ab/shared.so"


def fill(store: Store, name: str = "round", seconds: float = 40.0) -> Store:
    with store.building(), store.workshop() as kernels:
        (kernels / "ab").mkdir()
        (kernels / "ab" / f"{name}.so").write_bytes(b"kernel" * 100)
        (kernels / "ab" / "shared.so").write_bytes(name.encode())
        (kernels / "ab" / f"{name}.lock").touch()
        store.add(name, CODE, kernels, seconds=seconds, arguments=["float32 [2]"])
    return store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return fill(Store(tmp_path, WORDS))


def test_the_folder_says_what_it_is_for(tmp_path: Path) -> None:
    store = Store(tmp_path, WORDS)
    assert store.folder.name.startswith("2.13.0-13.0-3.6.0-sm_90-tp1-")
    assert Store(tmp_path, dict(reversed(WORDS.items()))).folder == store.folder
    assert all(Store(tmp_path, WORDS | {key: "other"}).folder != store.folder for key in WORDS)
    assert store.entry("round") is None and not store.folder.exists()  # looking creates nothing


def test_what_was_added_is_there(store: Store) -> None:
    again = Store(store.root, dict(WORDS))
    entry = again.entry("round")
    assert entry is not None and entry["seconds"] == 40.0 and entry["arguments"] == ["float32 [2]"]
    assert sorted(entry["files"]) == ["inductor/ab/round.so", SHARED, "round.aot"]
    assert again.code("round").read_bytes() == CODE and again.entry("other") is None
    assert json.loads((again.folder / "manifest.json").read_text()) == WORDS
    assert not list(store.root.rglob("*.tmp")) and not list(store.folder.glob("build-*"))


def test_a_kernel_that_two_functions_have_is_the_first_ones(store: Store) -> None:
    entry = fill(store, "later").entry("later")
    assert entry is not None and sorted(entry["files"]) == ["inductor/ab/later.so", SHARED, "later.aot"]
    assert (store.folder / SHARED).read_bytes() == b"round" and store.entry("round")


@pytest.mark.parametrize("names", [("round", "later"), ("later", "round")])
@pytest.mark.parametrize("data", [b"rou", b"r0und", None])
def test_damage_of_a_shared_kernel_is_seen_by_all_that_use_it(
    store: Store, capsys: Any, names: tuple[str, str], data: bytes | None
) -> None:
    victim = fill(store, "later").folder / SHARED
    victim.unlink() if data is None else victim.write_bytes(data)
    for name in names:
        assert store.entry(name) is None
        assert f"{victim} is damaged or gone: {name} has to be built again" in capsys.readouterr().err
    for name in names:
        assert fill(store, name).entry(name) is not None
    assert store.entry(names[0]) and not capsys.readouterr().err


def test_a_shared_kernel_built_again_takes_the_damaged_ones_place(store: Store) -> None:
    """The other's note is of other bytes: it goes, and leaves the new ones alone."""
    (store.folder / SHARED).write_bytes(b"")
    fill(store, "later")
    assert (store.folder / SHARED).read_bytes() == b"later" and store.entry("later")
    assert store.entry("round") is None and store.entry("later")
    assert fill(store).entry("round") and store.entry("later")


def test_only_sound_kernels_enter_a_build(store: Store) -> None:
    fill(store, "sound")
    (store.inductor / "ab" / "left.so").write_bytes(b"")  # no note claims it
    (store.inductor / "ab" / "round.so").write_bytes(b"")
    with store.building(), store.workshop(stocked=True) as kernels:
        found = {file.name: file for file in kernels.rglob("*") if file.is_file()}
        assert sorted(found) == ["shared.so", "sound.so"]
        found["shared.so"].write_bytes(b"in place")  # a copy
        (kernels / "ab" / "left.so").write_bytes(b"made again")
        store.add("new", CODE, kernels, seconds=1.0, arguments=[])
    entry = store.entry("new")
    assert entry is not None and {Path(file).name for file in entry["files"]} == {*found, "left.so", "new.aot"}
    assert (store.inductor / "ab" / "left.so").read_bytes() == b"made again" and store.entry("sound")


def test_what_a_broken_build_left_is_removed(store: Store) -> None:
    (store.folder / "build-1" / "ab").mkdir(parents=True)
    with store.building():
        assert not list(store.folder.glob("build-*"))


@pytest.mark.parametrize("file", ["round.aot", "inductor/ab/round.so", "round.json"])
@pytest.mark.parametrize("harm", ["cut", "changed", "gone"])
def test_a_damaged_entry_is_built_again_with_a_warning(store: Store, capsys: Any, file: str, harm: str) -> None:
    fill(store, "sound")
    victim = store.folder / file
    if harm == "gone":
        victim.unlink()
    else:
        data = victim.read_bytes()
        victim.write_bytes(data[:-7] if harm == "cut" else b"\0" + data[1:])
    assert store.entry("round") is None
    said = capsys.readouterr().err
    warned = f"{victim} is damaged or gone: round has to be built again" in said
    assert warned != ((file, harm) == ("round.json", "gone"))
    assert store.entry("round") is None and not capsys.readouterr().err  # said once
    assert store.entry("sound") is not None
    assert fill(store).entry("round") is not None


NOTE = {"seconds": 1.0, "arguments": ["float32 [2]"], "files": {"round.aot": "0"}}


@pytest.mark.parametrize(
    "harm",
    [
        {"files": ["round.aot"]}, {"files": {}}, {"files": 3}, {"files": {"round.aot": ["0"]}},
        {"seconds": "40"}, {"seconds": None}, {"seconds": float("nan")}, {"seconds": -1}, {"seconds": 10**400},
        {"arguments": None}, {"arguments": "float32"}, {"arguments": [1]},
    ],
)  # fmt: skip
def test_notes_of_another_form_are_damage(store: Store, capsys: Any, harm: dict[str, Any]) -> None:
    fill(store, "sound", 60.0)
    (store.folder / "round.json").write_text(json.dumps(NOTE | harm))
    assert store.pace() == 60
    fill(store, "other")
    assert store.entry("round") is None and "round.json is damaged or gone" in capsys.readouterr().err
    assert fill(store).entry("round") is not None and store.entry("sound") is not None


@pytest.mark.parametrize("file", ["round.json", "round.aot", "inductor/ab/round.so"])
def test_a_folder_in_place_of_a_file_is_damage(store: Store, capsys: Any, file: str) -> None:
    (store.folder / file).unlink()
    (store.folder / file / "below").mkdir(parents=True)
    assert store.entry("round") is None and f"{file} is damaged or gone" in capsys.readouterr().err
    assert fill(store).entry("round") is not None
    (store.folder / "round.json").unlink()
    (store.folder / "round.aot").unlink()
    (store.folder / "round.aot").mkdir()
    assert fill(store).entry("round") is not None


@pytest.mark.parametrize("key", ["{root}/kept", "../kept", "inductor/../../kept", "sound.aot", ".", "", "inductor"])
def test_nothing_outside_is_removed(store: Store, capsys: Any, key: str) -> None:
    fill(store, "sound")
    kept = store.root / "kept"
    kept.write_text("kept")
    files = {"round.aot": "0", key.format(root=store.root): "0"}
    (store.folder / "round.json").write_text(json.dumps(NOTE | {"files": files}))
    assert store.entry("round") is None and "round.json is damaged" in capsys.readouterr().err
    assert kept.read_text() == "kept" and store.entry("sound") is not None


def test_a_copy_elsewhere_is_as_good(store: Store, tmp_path: Path) -> None:
    shutil.copytree(store.root, tmp_path / "copy")
    assert Store(tmp_path / "copy", WORDS).entry("round") is not None


def test_a_miss_names_the_ingredient(store: Store, tmp_path: Path) -> None:
    assert Store(tmp_path / "none", WORDS).why_cold(["a"]) == f"no compiled step is in {tmp_path / 'none'}"
    assert store.why_cold(["a"]) == "not built there yet"
    (store.root / "weights-tp1-0").mkdir()
    (store.root / "weights-tp1-0" / "manifest.json").write_text('{"dtype": "float32"}')  # no compiled steps
    fill(Store(store.root, WORDS | {"torch": "2.11.0", "tp": "8"}))
    other = Store(store.root, WORDS | {"dtype": "float32"})
    assert other.why_cold(["a"]) == (
        f"the nearest folder, {store.folder.name}, differs in dtype (bfloat16 there, float32 here)"
    )
    new = Store(store.root, WORDS | {"triton": "4", "drafter": "none"})
    assert "drafter (nothing there, none here) and 1 more" in new.why_cold(["a"])


def test_damage_is_the_reason_until_it_is_built_again(store: Store) -> None:
    fill(store, "later")
    (store.folder / "round.aot").write_bytes(b"")
    for _ in range(2):
        assert store.entry("round") is None
        assert store.why_cold(["round"]) == "1 damaged"
        assert store.why_cold(["round", "other"]) == "1 damaged, the others not built yet"
    assert fill(store).entry("round")
    assert store.why_cold(["other"]) == store.why_cold(["round"]) == "not built there yet"


def test_several_may_see_the_same_damage(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process has removed the note meanwhile."""
    (store.folder / "round.aot").write_bytes(b"")
    monkeypatch.setattr("kimi_fx.runtime.store.warn", lambda _: (store.folder / "round.json").unlink())
    assert store.entry("round") is None and store.why_cold(["round"]) == "1 damaged"


def test_what_is_in_the_way_and_what_was_left_goes(store: Store) -> None:
    """A link named like a build, a writer's file that nobody finished, files in the places of folders."""
    fill(store, "later")
    (store.folder / "build-link").symlink_to(store.root)
    (store.folder / "0123456789abcdef.tmp").write_bytes(b"half")
    shutil.rmtree(store.inductor / "ab")
    (store.inductor / "ab").write_bytes(b"")
    assert store.entry("round") is None and fill(store).entry("round")
    assert not list(store.folder.glob("build-*")) and not list(store.folder.glob("*.tmp"))
    shutil.rmtree(store.inductor)
    store.inductor.symlink_to(store.root / "gone")
    assert store.entry("round") is None and fill(store).entry("round")


def test_how_long_a_build_takes(store: Store) -> None:
    fill(store, "longer", 60.0)
    assert store.pace() == 50
    assert Store(store.root, WORDS | {"tp": "8"}).pace() is None


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (errno.EROFS, "cannot be written, set KIMI_FX_CACHE to another folder"),
        (errno.EACCES, "cannot be read or written by this user"),
        (errno.EIO, "cannot be used, set KIMI_FX_CACHE to another folder"),
        (errno.ENOSPC, "is on a full disk, free some space"),
    ],
)
def test_what_a_disk_refuses_is_said(store: Store, monkeypatch: pytest.MonkeyPatch, code: int, words: str) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuse)
        with pytest.raises(StoreError, match=f"The artefact store {store.folder} {words}.*{os.strerror(code)}"):
            fill(store, "another")
    assert store.entry("another") is None and store.entry("round") and not list(store.root.rglob("*.tmp"))


def test_a_refusal_deep_inside_is_found_and_others_pass(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="full disk"), told(tmp_path):
        try:
            raise OSError(errno.ENOSPC, "no space")
        except OSError as error:
            raise RuntimeError("the compiler failed") from error
    with pytest.raises(RuntimeError, match="the compiler failed"), told(tmp_path):
        raise RuntimeError("the compiler failed")


def test_a_folder_nobody_may_write() -> None:
    with pytest.raises(StoreError, match="cannot be read or written by this user"):
        fill(Store(Path("/sys/kimi_fx"), WORDS))


def test_a_folder_in_the_place_of_the_lock(store: Store) -> None:
    (store.folder / "lock").unlink()
    (store.folder / "lock").mkdir()
    with pytest.raises(StoreError, match=f"{store.folder} cannot be used, set KIMI_FX_CACHE .*: {store.folder}/lock"):
        fill(store, "another")


def test_errors_of_other_files_pass(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), told(tmp_path / "store"):
        (tmp_path / "compiler").open()


@pytest.mark.parametrize("file", ["round.json", "round.aot", "inductor/ab/round.so"])
def test_what_may_not_be_read_is_not_called_damaged(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: Any, file: str
) -> None:
    closed, opened = store.folder / file, Path.open

    def refuse(path: Path, *how: Any, **more: Any) -> Any:
        if path == closed:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opened(path, *how, **more)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", refuse)
        with pytest.raises(StoreError, match=f"cannot be read or written by this user, .*Permission denied: {closed}"):
            store.entry("round")
    assert store.entry("round") and not capsys.readouterr().err


def test_others_may_read_what_the_umask_lets_them(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        store = fill(Store(tmp_path, WORDS))
    finally:
        os.umask(before)
    assert {oct(file.stat().st_mode & 0o777) for file in store.folder.rglob("*") if file.is_file()} == {"0o640"}


def test_notes_and_manifests_nested_too_deeply_are_damage(store: Store, capsys: Any) -> None:
    (store.folder / "round.json").write_text("[" * 100_000)
    (store.folder / "manifest.json").write_text("[" * 100_000)
    assert Store(store.root, WORDS | {"torch": "4"}).why_cold(["a"]) == f"no compiled step is in {store.root}"
    assert store.entry("round") is None and "round.json is damaged or gone" in capsys.readouterr().err


def test_a_read_only_store_is_loaded_from_a_copy(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with store.kernel_folder() as folder:
        assert folder == store.inductor
    monkeypatch.setattr(os, "access", lambda *_: False)
    with store.kernel_folder() as folder:
        assert folder != store.inductor and (folder / "ab" / "round.so").exists()
    assert not folder.exists() and store.entry("round")


def test_a_file_is_whole_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    write(file, b"before")

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        write(file, b"after" * 100)
    assert file.read_bytes() == b"before" and list(tmp_path.iterdir()) == [file]


def share(root: Path, builds: Any, die: bool) -> None:
    """Add three functions where they are missing; one process dies half way through its first."""
    store = Store(root, WORDS)
    for name in ("a", "b", "c"):
        with store.building():
            if store.entry(name) is None:
                if die:
                    (store.folder / "a.aot").write_bytes(CODE[:100])
                    os._exit(1)
                builds.put(name)
                with store.workshop() as kernels:
                    store.add(name, CODE, kernels, seconds=1.0, arguments=[])


def test_processes_share_an_empty_folder(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    builds = context.Queue()
    processes = [context.Process(target=share, args=(tmp_path, builds, i == 0)) for i in range(8)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [p.exitcode for p in processes][1:] == [0] * 7
    assert sorted(builds.get(timeout=5) for _ in range(3)) == ["a", "b", "c"] and builds.empty()
    assert all(Store(tmp_path, WORDS).entry(name) for name in "abc")
