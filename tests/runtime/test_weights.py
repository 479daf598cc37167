"""Weights kept on disk: the same leaves as the checkpoint's, found again, and written again once anything differs."""

import fcntl
import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kimi_fx
from kimi_fx.compose import load_config
from kimi_fx.graphs.axis import Axis
from kimi_fx.graphs.pytree import tree_leaves
from kimi_fx.runtime import load as module
from kimi_fx.runtime import memory
from kimi_fx.runtime.load import load, prepare
from kimi_fx.runtime.store import StoreError
from kimi_fx.runtime.weights import SAMPLE, packed_forms, sampled, sum_of
from oracles.toys import random_pair


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("KIMI_FX_CACHE", str(tmp_path / "cache"))
    random_pair(tmp_path / "pair", V=64, layers=2, block=4, inner=64)
    folders = [f"{role}={tmp_path / 'pair' / role}" for role in ("target", "drafter")]
    return [*folders, "device=cpu", "dtype=float32", "cache.weights=true"]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """One for each time that a target is read from its checkpoint."""
    seen: list[Any] = []
    read = module.load_target
    monkeypatch.setattr(module, "load_target", lambda *args: seen.append(args) or read(*args))
    return seen


def leaves(words: list[str]) -> list[Any]:
    config = load_config(words)
    return tree_leaves(load(config, prepare(config), progress=False).params)


def same(found: list[Any], expected: list[Any]) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(a is b is None or a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


def test_found_again(words: list[str], reads: list[Any], tmp_path: Path) -> None:
    from_checkpoint = leaves([*words, "cache.weights=false"])
    assert not (tmp_path / "cache").exists() or not list((tmp_path / "cache").glob("weights-*"))
    assert same(leaves(words), from_checkpoint) and len(reads) == 2
    assert same(leaves(words), from_checkpoint) and len(reads) == 2
    (folder,) = (tmp_path / "cache").glob("weights-tp1-*")
    assert {f.name for f in folder.iterdir()} == {"manifest.json", "rank0.json", "rank0.safetensors"}
    assert same(leaves([*words, "dtype=bfloat16"]), leaves([*words, "dtype=bfloat16"])) and len(reads) == 3
    file = next((tmp_path / "pair" / "target").glob("*.safetensors"))
    os.utime(file, ns=(0, 0))  # another checkpoint of the same sizes
    leaves(words)
    assert len(reads) == 4


def change(file: Path, at: int) -> None:
    """Another byte there, at the same time of change."""
    stat, data = file.stat(), bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_checkpoints_of_equal_names_sizes_and_times(words: list[str], reads: list[Any], tmp_path: Path) -> None:
    shutil.copytree(tmp_path / "pair", tmp_path / "twin")
    twin = [word.replace(str(tmp_path / "pair"), str(tmp_path / "twin")) for word in words]
    leaves(words)
    leaves(twin)
    assert len(reads) == 2  # another folder, though nothing in it differs
    change(next((tmp_path / "twin" / "target").glob("*.safetensors")), -1)
    assert same(leaves(twin), leaves([*twin, "cache.weights=false"])) and len(reads) == 4
    assert not same(leaves(twin), leaves(words)) and len(reads) == 4


def test_a_sample_sees_header_start_middle_and_end(tmp_path: Path) -> None:
    file, size = tmp_path / "a.safetensors", 16 * SAMPLE
    file.write_bytes((1000).to_bytes(8, "little") + bytes(size - 8))
    seen = {sampled(file)}
    for count, at in enumerate((500, 1008 + SAMPLE - 1, size // 2 + 1000, size - 1), 2):
        change(file, at)
        seen.add(sampled(file))
        assert len(seen) == count


def harmed(data: bytes, harm: str) -> bytes:
    length = 8 + int.from_bytes(data[:8], "little")
    entries, body = json.loads(data[8:length]), data[length:]
    name, entry = next((name, entry) for name, entry in entries.items() if len(entry["shape"]) == 2)
    if harm == "moved":
        return data[:length] + body[8:16] + body[:8] + body[16:]
    if harm == "reversed shape":
        entry["shape"].reverse()
    elif harm == "negative shape":
        entry["shape"] = [-n for n in entry["shape"]]
    elif harm == "another type":
        entry["dtype"] = "I32"
    elif harm == "leaf missing":
        entries[name + "s"] = entries.pop(name)
    text = json.dumps(entries).encode().ljust(length - 8)
    return len(text).to_bytes(8, "little") + text + body


FORMS = ["moved", "reversed shape", "negative shape", "another type", "leaf missing"]
NOTES = {"another note": "{}", "no object": "[]", "no sums": '{"sums": []}', "odd sums": '{"sums": {"a": [1]}}'}
NOTES["nested too deeply"] = "[" * 100_000


@pytest.mark.parametrize("harm", ["cut", "changed", "longer", "no header", "no file", "no note", *FORMS, *NOTES])
def test_damage_is_mended(harm: str, words: list[str], reads: list[Any], tmp_path: Path, capsys: Any) -> None:
    expected = leaves(words)
    (file,) = (tmp_path / "cache").rglob("rank0.safetensors")
    data, note = file.read_bytes(), file.with_suffix(".json")
    cuts = {
        "cut": data[:-9], "changed": data[:-9] + bytes([data[-9] ^ 1]) + data[-8:], "longer": data + b"\0",
        "no header": b"\0" * len(data),
    }  # fmt: skip
    if harm in cuts or harm in FORMS:
        file.write_bytes(cuts.get(harm) or harmed(data, harm))
        assert file.read_bytes() != data
    elif harm in NOTES:
        note.write_text(NOTES[harm])
    else:
        (note if harm == "no note" else file).unlink()
    assert same(leaves(words), expected) and len(reads) == 2
    assert ("is damaged" in capsys.readouterr().err) == (harm != "no note")
    assert file.read_bytes() == data
    assert same(leaves(words), expected) and len(reads) == 2
    assert not list(file.parent.glob("*.tmp"))


@pytest.mark.parametrize("name", ["rank0.json", "rank0.safetensors", "manifest.json", "."])
def test_a_folder_and_a_file_in_each_others_place(
    name: str, words: list[str], reads: list[Any], tmp_path: Path
) -> None:
    leaves(words)
    (folder,) = (tmp_path / "cache").glob("weights-*")
    if name == ".":
        shutil.rmtree(folder)
        folder.touch()
    else:
        (folder / name).unlink()
        (folder / name).mkdir()
    with pytest.raises(StoreError, match="belongs: move it away, .*cache.weights=false"):
        leaves(words)
    assert len(reads) == 1


@given(data=st.binary(min_size=1, max_size=100), moves=st.randoms())
def test_a_sum_depends_on_order(data: bytes, moves: Any) -> None:
    moved = moves.sample(data, len(data))
    sums = [sum_of(torch.tensor(list(some), dtype=torch.uint8)) for some in (data, moved, data)]
    assert sums[0] == sums[2] and (sums[0] == sums[1]) == (list(data) == moved)


def test_a_sum_sees_chunks_and_rows_that_trade_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kimi_fx.runtime.weights, "SUMMED", 2**12)  # type: ignore[attr-defined]
    leaf = torch.randn(2**12, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    tops = leaf.view(torch.int64) & -(2**48)  # one bf16 of four: differences of the highest bits alone
    for data in (leaf.view(torch.int64), tops):
        for width in (1, 64, 256, 512):
            rows = data.view(-1, width)
            assert sum_of(rows.roll(1, 0)) != sum_of(rows) != sum_of(rows.flip(0))


def test_a_full_disk_leaves_nothing(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(kimi_fx.runtime.weights, "data_of", full)  # type: ignore[attr-defined]
    with pytest.raises(StoreError, match="full disk.*cache.weights=false"):
        leaves(words)
    (folder,) = (tmp_path / "cache").glob("weights-*")
    assert {f.name for f in folder.iterdir()} == {"manifest.json"}


def test_a_copied_cache_is_of_use(words: list[str], reads: list[Any], tmp_path: Path, monkeypatch: Any) -> None:
    expected = leaves(words)
    shutil.copytree(tmp_path / "cache", tmp_path / "other")
    monkeypatch.setenv("KIMI_FX_CACHE", str(tmp_path / "other"))
    assert same(leaves(words), expected) and len(reads) == 1


def test_a_disk_that_cannot_take_them_is_found_first(
    words: list[str], reads: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
        with pytest.raises(StoreError, match="its disk has 0.00 GB free: free some space, .*cache.weights=false"):
            leaves(words)
    with monkeypatch.context() as patch:
        patch.setenv("KIMI_FX_CACHE", "/sys/kimi_fx")
        with pytest.raises(ValueError, match="cannot be made .*: set KIMI_FX_CACHE to another folder"):
            leaves(words)
    assert not reads and not list((tmp_path / "cache").rglob("rank*"))


def test_what_a_killed_writer_left_is_removed(words: list[str], tmp_path: Path) -> None:
    leaves(words)
    (folder,) = (tmp_path / "cache").glob("weights-*")
    stale, theirs = folder / "stale.tmp", folder / "theirs.tmp"
    (folder / "rank0.json").unlink()
    for file in (stale, theirs):
        file.write_bytes(b"half")
    with theirs.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # as a writer does that is at work
        leaves(words)
    assert not stale.exists() and theirs.exists()


def test_what_was_read_is_said(words: list[str], tmp_path: Path, capsys: Any) -> None:
    config = load_config(words)
    said = [(load(config), capsys.readouterr().err)[1] for _ in range(2)]
    (file,) = (tmp_path / "cache").rglob("rank0.safetensors")
    assert f"packed weights: kept in {file}\n" in said[0] and "target: loaded" in said[0]
    assert re.fullmatch(rf"packed weights: read 0.00 GB in .* GB/s\) from {re.escape(str(file))}\n", said[1])


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_forms_take_what_the_memory_plan_says(ranks: int, device: str, words: list[str]) -> None:
    model = prepare(load_config(words)).model
    target = replace(model.target, D=64, I=128)
    model = replace(model, target=target, axis=Axis("tp", ranks, False) if ranks > 1 else None)
    forms = tree_leaves(packed_forms(model, torch.device(device), torch.bfloat16))
    planned = memory.weights(model, torch.bfloat16, device == "cuda")
    assert sum(form.nbytes for form in forms if form is not None) == sum(part.held for part in planned)
