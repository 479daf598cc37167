"""Whatever can be wrong with the files of a checkpoint is named before any tensor is read."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from kimi_fx.checkpoint import CheckpointError
from kimi_fx.checkpoint.files import INDEX, read_entries, read_header
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


def test_what_is_no_file(folder: Path) -> None:
    for name in (FIRST, SECOND):
        (folder / name).unlink()
    (folder / FIRST).symlink_to(folder / "gone")
    (folder / SECOND).mkdir()
    message = refused(folder)
    assert "1 of 3 files the index names are absent: " + FIRST in message
    assert f"{SECOND}: cannot be read (Is a directory)" in message
    (folder / INDEX).unlink()
    assert "1 of 3 files the shards' numbering asks for are absent: " + FIRST in refused(folder)
    (folder / INDEX).symlink_to(folder / "gone")
    assert refused(folder) == f"{folder / INDEX}: cannot be read (No such file or directory)"


def test_a_single_file_that_is_a_link_to_nothing(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "gone")
    assert "absent: model.safetensors" in refused(tmp_path)


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
        ((100_000).to_bytes(8, "little") + b"[" * 100_000, "header is damaged (ValueError: nested too deeply)"),
        ((7).to_bytes(8, "little") + b'{"\xff":1}', "header is damaged (UnicodeDecodeError"),
    ],
    ids=lambda value: str(value)[:30],
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


def with_header(file: Path, header: dict[str, Any], size: int = 16) -> Path:
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(size))
    return file


def spec(start: int, end: int) -> dict[str, Any]:
    return {"dtype": "U8", "shape": [end - start], "data_offsets": [start, end]}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"t2": spec(0, 16), "t3": spec(0, 16)}, "t3 begins at byte 0 of the data, where 16 is next"),
        ({"t2": spec(0, 9), "t3": spec(8, 16)}, "t3 begins at byte 8 of the data, where 9 is next"),
        ({"t2": spec(0, 7), "t3": spec(8, 16)}, "t3 begins at byte 8 of the data, where 7 is next"),
        ({"t2": spec(4, 16)}, "t2 begins at byte 4 of the data, where 0 is next"),
        ({"t2": spec(0, 16), "__metadata__": {"format": 1}}, "__metadata__ is {'format': 1}, not texts by name"),
        ({"t2": spec(0, 16), "__metadata__": ["pt"]}, "'list' object has no attribute"),
        ({"t2": spec(0, 16) | {"shape": [-4, -4]}}, "shape [-4, -4] at [0, 16], not whole numbers"),
        ({"t2": spec(0, 16) | {"shape": [16.0]}}, "shape [16.0] at [0, 16], not whole numbers"),
    ],
)
def test_headers_that_safetensors_refuses(folder: Path, header: dict[str, Any], message: str) -> None:
    with_header(folder / SECOND, header)
    assert f"{SECOND}: its header is damaged" in refused(folder) and message in refused(folder)


few = st.sampled_from([0, 1, 2, 4, 8, 12, 16])
odd = st.sampled_from([-1, True, 1.0, "1", None, [], {}, 2**64])
specs = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["U8", "BF16", "F32", "Q4"]),
        "shape": st.lists(few | odd, max_size=2) | odd,
        "data_offsets": st.lists(few | odd, min_size=1, max_size=3) | odd,
    }
)
sound = st.tuples(few, few).map(lambda ends: spec(*sorted(ends)))
metadata = st.fixed_dictionaries({}, optional={"__metadata__": st.dictionaries(st.just("a"), odd | st.text()) | odd})


@given(st.dictionaries(st.sampled_from("abc"), sound | specs | odd), metadata)
def test_accepted_headers_are_those_that_safetensors_accepts(
    tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, Any], notes: dict[str, Any]
) -> None:
    file = with_header(tmp_path_factory.getbasetemp() / "any.safetensors", tensors | notes)

    def accepts(read: Callable[[], Any], error: type[Exception]) -> bool:
        try:
            read()
        except error:
            return False
        return True

    def theirs() -> None:
        with safe_open(file, "numpy"):
            pass

    assert accepts(lambda: read_header(file), CheckpointError) == accepts(theirs, SafetensorError)


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
