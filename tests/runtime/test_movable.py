"""Triton's cache in a folder that has been moved."""

import shutil
from pathlib import Path

import pytest

cache = pytest.importorskip("triton.runtime.cache")

from kimi_fx.runtime.compiled import building_in  # noqa: E402


def test_a_kernel_is_found_where_its_folder_is_now(tmp_path: Path) -> None:
    first, then = tmp_path / "first", tmp_path / "then"
    with building_in(first):
        made = cache.get_cache_manager("1234")
        assert made.get_group("kernel.json") is None
        files = {name: made.put(name.encode(), name) for name in ("kernel.json", "kernel.cubin")}
        made.put_group("kernel.json", files)
        assert made.get_group("kernel.json") == files
    shutil.move(first, then)
    with building_in(then):
        found = cache.get_cache_manager("1234").get_group("kernel.json")
    assert {name: Path(file).read_text() for name, file in found.items()} == {name: name for name in files}
    assert all(Path(file).is_relative_to(then) for file in found.values())


def test_a_group_that_names_no_files_is_none(tmp_path: Path) -> None:
    with building_in(tmp_path):
        made = cache.get_cache_manager("1234")
        made.put("{}", "__grp__kernel.json", binary=False)
        assert made.get_group("kernel.json") is None
