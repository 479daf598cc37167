"""Two ranks on two devices: the sums are exact, the texts are those of one, and all end when one fails."""

import gc
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import kimi_fx
from kimi_fx.compose import load_config
from kimi_fx.engine import Engine
from kimi_fx.runtime.build import library_for, load_kernels, own_arch
from kimi_fx.runtime.load import load
from kimi_fx.validate import judge
from oracles import ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
    pytest.mark.xdist_group("gpu ranks"),
]

ORACLES = Path(ranks.__file__).parent
SETTINGS = ["device=cuda", "run.batch=2", "run.nodes=[1,16]", "run.chunk=64", "cache.max_len=512"]
TWO = ["mesh.tp=2", "mesh.check=true", "mesh.timeout=60"]
HOW: dict[str, Any] = {"max_tokens": 48, "temperature": 0, "logprobs": 2, "ignore_eos": True}
SOON = 15  # seconds in which all ranks must have ended


def started(*words: str) -> "subprocess.Popen[bytes]":
    paths = [str(Path(kimi_fx.__file__).parents[1]), str(ORACLES), str(ORACLES.parent), *sys.path]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.Popen([sys.executable, *words], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_sums_are_exact_and_the_same_bits_on_both() -> None:
    load_kernels(torch.device("cuda"))
    done = started(str(ORACLES / "peers.py"), "2")
    _, said = done.communicate(timeout=100)
    assert done.returncode == 0, said.decode()
    assert b"Producer process" not in said


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Settings of a store that two ranks have warmed, one of them compiling; the library of kernels is there."""
    load_kernels(torch.device("cuda"))
    folder = tmp_path_factory.mktemp("cache")
    shutil.copy(library_for(own_arch(torch.device("cuda")))[0], folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KIMI_FX_CACHE", str(folder))
        load = started("-m", "kimi_fx", "warmup", *SETTINGS, "mesh.tp=2", "run.compile=true")
        _, said = load.communicate(timeout=300)
        assert load.returncode == 0, said.decode()
        assert said.decode().count("compiling round") == 4  # by one rank: all find it
        yield ["run.compile=true", "run.require_warm=true"]


@pytest.mark.parametrize("near", ["true", "false"])
def test_bf16_is_one_ranks_but_at_near_ties(
    near: str, golden: list[dict[str, torch.Tensor]], request: pytest.FixtureRequest
) -> None:
    """Compiled, captured and near, and twice the same; or operator by operator through NCCL."""
    prompts = [g["prompt"].tolist() for g in golden[:8]]
    alone = load_config(SETTINGS)
    plain = Engine(alone, load(alone, progress=False)).generate(prompts, mode="plain", **HOW)
    compiled = near == "true" and request.getfixturevalue("warm")
    engine = Engine.load([*SETTINGS, *TWO, *(compiled or []), f"mesh.near={near}"], progress=False)
    assert engine.ranks is not None
    (follower,) = engine.ranks.followers
    runs = [engine.generate(prompts, mode=mode, **HOW) for mode in ("plain", "tree", "tree")]
    assert all(verdict.good for run in runs for verdict in judge("ranks", plain, run, exact=False))
    assert [r.outputs[0].token_ids for r in runs[1]] == [r.outputs[0].token_ids for r in runs[2]]
    assert bool(compiled) == (sum(r.outputs[0].stats.eager_steps for r in runs[1]) == 0)
    del engine
    gc.collect()
    assert follower.poll() == 0


def test_fp32_ids_are_hugging_faces(golden: list[dict[str, torch.Tensor]]) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    engine = Engine.load([*SETTINGS, *TWO, "dtype=float32"], progress=False)
    results = engine.generate([g["prompt"].tolist() for g in golden[:4]], mode="tree", **HOW)
    for g, result in zip(golden, results, strict=False):
        assert list(result.outputs[0].token_ids) == g["greedy"][:48].tolist()


CAUSES = {
    "killed": "rank 1 ended by signal 9 (SIGKILL)",
    "raises": "rank 1: MemoryError: no room for an egg",
    "hangs": "a step has taken more than mesh.timeout=8 s: rank 0 in ",
}


@pytest.mark.parametrize("kind", ["near compiled", "near", "nccl"])
def test_one_fails_and_all_end(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """While the other waits in a kernel of its own, in a graph or outside, or in one of NCCL."""
    asked = ["ids=[3840,100,200]", "sampling.max_tokens=400", "sampling.ignore_eos=true", "mesh.timeout=8", "mesh.tp=2"]
    asked += request.getfixturevalue("warm") if "compiled" in kind else [f"mesh.near={str(kind == 'near').lower()}"]
    files = {how: tmp_path / how for how in CAUSES}
    running = {
        how: started(str(ORACLES / "failing.py"), how, str(file), *SETTINGS, *asked) for how, file in files.items()
    }
    for how, first in running.items():
        _, said = first.communicate(timeout=120)
        assert CAUSES[how] in said.decode() and "Traceback" not in said.decode(), (how, said.decode())
        pid, failed = files[how].read_text().split()
        assert first.returncode == 1
        assert time.time() - float(failed) < SOON + 5  # three pairs side by side, read one after the other
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)
