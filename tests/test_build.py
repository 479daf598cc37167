"""How the CUDA library is made, with a stand-in for nvcc: cached by content, whole or not at all."""

import stat
from pathlib import Path

import pytest

from kimi_fx.runtime.build import build, cache_folder, command
from kimi_fx.runtime.store import StoreError

STAND_IN = """#!/bin/sh
if [ "$1" = --version ]; then echo "Cuda compilation tools, release 13.0, V13.0.88"; exit 0; fi
if [ "$1" = --list-gpu-code ]; then printf 'sm_75\nsm_80\nsm_89\nsm_90\nsm_120\ncompute_80\n'; exit 0; fi
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


def test_built_once_for_each_arch(nvcc):
    calls = nvcc()
    library = build("sm_80")
    first = calls()
    assert library.read_text() == "made\n" and first > 4  # every source, and the link
    assert build("sm_80") == library and calls() == first
    assert build("sm_90a") != library and calls() == 2 * first


def test_what_is_cached_needs_neither_nvcc_nor_a_writable_folder(nvcc, monkeypatch, tmp_path):
    nvcc()
    library = build("sm_80")
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("kimi_fx.runtime.build.locked", None)
    assert build("sm_80") == library


def test_a_failed_compile_says_why_and_leaves_nothing(nvcc, tmp_path):
    nvcc("combine.cu")
    with pytest.raises(RuntimeError, match=r"(?s)combine\.cu.*no such thing"):
        build("sm_80")
    assert not list((tmp_path / "cache").glob("*.so")) and not list((tmp_path / "cache").glob("*/"))
    nvcc()
    assert build("sm_80").exists()


def test_what_a_killed_build_left_goes_with_the_next(nvcc, tmp_path):
    nvcc()
    library = build("sm_80")
    library.unlink()
    left = tmp_path / "cache" / f"{library.stem}-killed"
    left.mkdir()
    (left / "mma.o").touch()
    assert build("sm_80") == library and not left.exists()


def test_a_broken_nvcc(nvcc, tmp_path):
    nvcc()
    (tmp_path / "nvcc").write_text("#!/bin/sh\necho cannot find libcudart >&2; exit 127\n")
    with pytest.raises(RuntimeError, match="(?s)--version.*cannot find libcudart"):
        build("sm_80")


def test_a_file_for_a_cache(nvcc, monkeypatch, tmp_path):
    nvcc()
    for place in (tmp_path / "nvcc", tmp_path / "nvcc" / "below"):
        monkeypatch.setenv("KIMI_FX_CACHE", str(place))
        with pytest.raises(ValueError, match=f"{place} cannot be made .*: set KIMI_FX_CACHE to another folder"):
            build("sm_80")


@pytest.mark.parametrize("place", ["/sys/kimi_fx/x", "/proc/x", "/" + "a" * 300, "/proc/self/exe/x", "~no-such-user/x"])
def test_a_cache_that_cannot_be_made(monkeypatch, place):
    monkeypatch.setenv("KIMI_FX_CACHE", place)
    with pytest.raises(ValueError, match="the cache .* cannot be made .*: set KIMI_FX_CACHE to another folder"):
        cache_folder()


def test_a_folder_in_place_of_the_lock(nvcc, tmp_path):
    nvcc()
    (tmp_path / "cache" / "kimi_fx_cuda.lock").mkdir(parents=True)
    with pytest.raises(StoreError, match="cannot be used, set KIMI_FX_CACHE to another folder .*Is a directory"):
        build("sm_80")


def test_no_nvcc(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(ValueError, match="nvcc was found neither on PATH nor in .* takes ops=reference"):
        build("sm_80")


@pytest.mark.parametrize(
    "word", ["arch=sm_75", "sm_80,sm_9", "arch=sm_90", "arch=sm_80a", "jobs=4", "arch=", "arch=sm_８０"]
)
def test_unknown_words(word):
    with pytest.raises(ValueError, match="build takes arch= with some of sm_80, sm_90a, sm_120 and the like, found"):
        command([word])


def test_an_arch_that_nvcc_lacks_is_refused_before_anything_is_made(nvcc, tmp_path):
    nvcc()
    with pytest.raises(ValueError, match="nvcc does not know sm_999: .* for sm_80, sm_89, sm_90a, sm_120"):
        command(["arch=sm_80,sm_999"])
    assert not (tmp_path / "calls").exists() and not list((tmp_path / "cache").iterdir())


def test_the_command_prints_each_library_once(nvcc, capsys):
    nvcc()
    assert command(["arch=[sm_80,sm_120]", "arch=sm_80", "arch=sm_89"]) == 0
    printed = capsys.readouterr().out.split()
    assert [Path(p).name.split("-")[1] for p in printed] == ["sm_80", "sm_120", "sm_89"]
    assert all(Path(p).exists() for p in printed) and printed[0] == str(build("sm_80"))
