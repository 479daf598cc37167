"""Whatever can be wrong with the files of a checkpoint is named before any tensor is read."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from kimi_fx.checkpoint import CheckpointError
from kimi_fx.checkpoint.files import INDEX, read_entries
from oracles.write_checkpoint import write_shards

FIRST, SECOND, THIRD = (f"model-{i:05}-of-000003.safetensors" for i in (1, 2, 3))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three shards of two tensors each."""
    kinds = [torch.bfloat16, torch.float32, torch.int32, torch.int64, torch.uint8, torch.float8_e4m3fn]
    tensors = {f"t{i}": torch.zeros(i, 3).to(kind) for i, kind in enumerate(kinds)}
    write_shards(tmp_path, tensors, 3)
    return tmp_path


def refused(folder: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        read_entries(folder)
    return str(error.value)


def test_entries_are_what_safetensors_reads(folder: Path) -> None:
    entries = read_entries(folder)
    assert len(entries) == 6
    for name, entry in entries.items():
        with safe_open(entry.file, "pt") as file:
            tensor = file.get_tensor(name)
        assert (entry.dtype, entry.shape, entry.bytes) == (tensor.dtype, tuple(tensor.shape), tensor.nbytes)


def test_without_an_index(folder: Path) -> None:
    with_index = read_entries(folder)
    (folder / INDEX).unlink()
    assert read_entries(folder) == with_index
    (folder / SECOND).unlink()
    assert "1 of 3 files the shards' numbering asks for are absent" in refused(folder) and SECOND in refused(folder)


def test_a_single_file(tmp_path: Path) -> None:
    write_shards(tmp_path, {"a": torch.zeros(2)}, 1)
    assert list(read_entries(tmp_path)) == ["a"]


def test_nothing_there(tmp_path: Path) -> None:
    assert "an empty folder" in refused(tmp_path)
    (tmp_path / "README.md").write_text("hello")
    assert "no safetensors file" in refused(tmp_path)
    assert "no such folder" in refused(tmp_path / "absent")


def test_absent_and_extra_shards(folder: Path) -> None:
    (folder / SECOND).unlink()
    save_file({"x": torch.zeros(1)}, folder / "model-00009-of-000003.safetensors")
    message = refused(folder)
    assert "1 of 3 files the index names are absent: " + SECOND in message
    assert "1 files are no part of the checkpoint" in message and "model-00009-of-000003" in message


def test_index_and_files_disagree(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["t0"], index["weight_map"]["lost"] = SECOND, FIRST
    del index["weight_map"]["t5"]
    (folder / INDEX).write_text(json.dumps(index))
    message = refused(folder)
    assert f"2 tensors are not in the file the index gives for them: lost ({FIRST}), t0 ({SECOND})" in message
    assert "1 tensors are in the files but not in the index: t5" in message


def test_a_tensor_in_two_files(folder: Path) -> None:
    save_file({"t0": torch.zeros(2), "t2": torch.zeros(2), "t3": torch.zeros(2)}, folder / SECOND)
    assert f"{SECOND} repeats 1 tensors of other files: t0" in refused(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "Git LFS pointer"),
        (b"\n <!doctype HTML><html><head>", "web page"),
        (b"", "not a safetensors file"),
        (b"\0" * 64, "not a safetensors file"),
        (b"\xff" * 64, "not a safetensors file"),
        ((40).to_bytes(8, "little") + b"{", "truncated"),
        ((4).to_bytes(8, "little") + b"{{}}", "header is damaged"),
        ((2).to_bytes(8, "little") + b"[]", "header is damaged"),
    ],
)
def test_stand_ins(folder: Path, content: bytes, message: str) -> None:
    (folder / SECOND).write_bytes(content)
    assert message in refused(folder) and SECOND in refused(folder)


def test_wrong_header_entries(folder: Path) -> None:
    for spec in (
        {"dtype": "Q4", "shape": [1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1]},
    ):
        header = json.dumps({"t2": spec}).encode()
        (folder / SECOND).write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
        assert "header is damaged" in refused(folder)


def test_every_bad_file_is_named_at_once(folder: Path) -> None:
    whole = (folder / FIRST).read_bytes()
    (folder / FIRST).write_bytes(whole[:-2])
    (folder / SECOND).write_bytes((folder / SECOND).read_bytes() + b"\0")
    (folder / THIRD).write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    message = refused(folder)
    assert "3 problems" in message
    assert f"{FIRST}: truncated, the header says {len(whole):,} bytes, the file has {len(whole) - 2:,}" in message
    assert f"{SECOND}: too long" in message and f"{THIRD}: a Git LFS pointer" in message


@pytest.mark.parametrize("content", ["{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}'])
def test_index_without_a_map(folder: Path, content: str) -> None:
    (folder / INDEX).write_text(content)
    assert "no weight_map" in refused(folder)
