"""How the CUDA library is made, with a stand-in for nvcc: cached by content, whole or not at all."""

import stat
from pathlib import Path

import pytest

from kimi_fx.runtime.build import build, command

STAND_IN = """#!/bin/sh
if [ "$1" = --version ]; then echo "Cuda compilation tools, release 13.0, V13.0.88"; exit 0; fi
echo call >> "$CALLS"
case "$*" in *%s*) echo "error: no such thing" >&2; exit 1;; esac
while [ "$1" != -o ]; do shift; done
echo made > "$2"
"""


@pytest.fixture
def nvcc(tmp_path: Path, monkeypatch):
    """Installs a stand-in that fails where its arguments hold a word; returns how often it was called."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("KIMI_FX_CACHE", str(tmp_path / "cache"))

    def install(fails_at: str = "nothing-of-the-kind"):
        (tmp_path / "nvcc").write_text(STAND_IN % fails_at)
        (tmp_path / "nvcc").chmod(stat.S_IRWXU)
        return lambda: len((tmp_path / "calls").read_text().splitlines())

    return install


def test_built_once_for_each_choice_of_archs(nvcc):
    calls = nvcc()
    library = build(["sm_80"])
    first = calls()
    assert library.read_text() == "made\n" and first > 4  # every source, and the link
    assert build(["sm_80"]) == library and calls() == first
    assert build(["sm_80", "sm_90a"]) != library and calls() == 2 * first


def test_a_failed_compile_says_why_and_leaves_nothing(nvcc, tmp_path):
    nvcc("combine.cu")
    with pytest.raises(RuntimeError, match=r"(?s)combine\.cu.*no such thing"):
        build(["sm_80"])
    assert not list((tmp_path / "cache").glob("*.so")) and not list((tmp_path / "cache").glob("*/"))
    nvcc()
    assert build(["sm_80"]).exists()


def test_no_nvcc(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(ValueError, match="nvcc was found neither on PATH nor in .* or use ops=reference"):
        build(["sm_80"])


@pytest.mark.parametrize("words", [["arch=sm_75"], ["sm_80,sm_9"], ["jobs=4"]])
def test_unknown_words(words):
    with pytest.raises(ValueError, match="build takes arch= with some of sm_80, sm_90a, sm_120, found"):
        command(words)


def test_the_command_prints_the_library(nvcc, capsys):
    nvcc()
    assert command(["arch=[sm_80,sm_120]"]) == 0
    assert Path(capsys.readouterr().out.strip()).exists()
