"""Weights kept on disk: the same leaves as the checkpoint's, found again, and written again once anything differs."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import kimi_fx
from kimi_fx.compose import load_config
from kimi_fx.graphs.pytree import tree_leaves
from kimi_fx.runtime import load as module
from kimi_fx.runtime.load import load, prepare
from kimi_fx.runtime.store import StoreError
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


@pytest.mark.parametrize("harm", ["cut", "changed", "longer", "no header", "no note", "another note"])
def test_damage_is_mended(harm: str, words: list[str], reads: list[Any], tmp_path: Path, capsys: Any) -> None:
    expected = leaves(words)
    (file,) = (tmp_path / "cache").rglob("rank0.safetensors")
    data, note = file.read_bytes(), file.with_suffix(".json")
    harmed = {
        "cut": data[:-9], "changed": data[:-9] + bytes([data[-9] ^ 1]) + data[-8:], "longer": data + b"\0",
        "no header": b"\0" * len(data),
    }  # fmt: skip
    if harm in harmed:
        file.write_bytes(harmed[harm])
    elif harm == "no note":
        note.unlink()
    else:
        note.write_text("{}")
    assert same(leaves(words), expected) and len(reads) == 2
    assert ("is damaged" in capsys.readouterr().err) == (harm != "no note")
    assert file.read_bytes() == data
    assert same(leaves(words), expected) and len(reads) == 2
    assert not list(file.parent.glob("*.tmp"))


def test_a_full_disk_leaves_nothing(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(kimi_fx.runtime.weights, "data_of", full)  # type: ignore[attr-defined]
    with pytest.raises(StoreError, match="full disk"):
        leaves(words)
    (folder,) = (tmp_path / "cache").glob("weights-*")
    assert {f.name for f in folder.iterdir()} == {"manifest.json"}


def test_a_copied_cache_is_of_use(words: list[str], reads: list[Any], tmp_path: Path, monkeypatch: Any) -> None:
    expected = leaves(words)
    shutil.copytree(tmp_path / "cache", tmp_path / "other")
    monkeypatch.setenv("KIMI_FX_CACHE", str(tmp_path / "other"))
    assert same(leaves(words), expected) and len(reads) == 1
