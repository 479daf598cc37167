"""Every .cu compiles for every architecture we name, without a spill and within the chip's shared memory."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from kimi_fx.runtime.build import ARCHS, FLAGS, library_for, source_folder

SOURCES = [source for source in library_for("sm_90a")[1] if source.suffix == ".cu"]
SHARED = {"sm_80": 163, "sm_90a": 227, "sm_120": 99}  # KiB a block may use; the launchers assert the dynamic part


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("source", SOURCES, ids=lambda s: s.stem)
def test_compiles_without_spills(source: Path, arch: str, tmp_path: Path) -> None:
    command = ["nvcc", *FLAGS, f"-gencode=arch={arch.replace('sm', 'compute')},code={arch}", "-Xptxas", "-v", "-cubin"]
    strict = ["-Werror", "all-warnings", "-Xptxas", "-warn-spills,-warn-lmem-usage"]
    strict += ["-diag-suppress=177"] if arch != "sm_90a" else []  # helpers of a kernel this chip does not get
    done = subprocess.run(
        [*command, *strict, f"-I{source_folder()}", "-o", str(tmp_path / "out.cubin"), str(source)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert all(int(n) == 0 for n in re.findall(r"(\d+) bytes (?:stack frame|spill)", done.stderr)), done.stderr
    assert all(int(n) <= SHARED[arch] * 1024 for n in re.findall(r"(\d+) bytes smem", done.stderr)), done.stderr
