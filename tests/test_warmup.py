"""Compiled steps on a CPU, whole: warm-up in one process on two threads, serving in another on one.

The processes share a store in a fresh folder. Three buckets of a random pair are compiled, once for the module, and two
more for a pair of ranks.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kimi_fx.compose import load_config
from kimi_fx.engine import Engine
from kimi_fx.warmup import command
from oracles.toys import random_pair

pytestmark = pytest.mark.xdist_group("warmup")  # one process sets up for all

HERE = Path(__file__).parent
BUCKETS = ["prefill-16", "round-batch1-nodes8-block4-width7", "round-batch2-nodes8-block4-width7"]
KINDS = 8
UNVECTORED = {"TORCHINDUCTOR_VEC_ISA_OK": "0"}  # kernels without vectors compile in half the time


def run(module: str, *words: str, cache: Path, threads: int) -> subprocess.CompletedProcess[str]:
    settings = {"KIMI_FX_CACHE": str(cache), "OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(HERE)}
    settings |= UNVECTORED
    command = [sys.executable, "-W", "error", "-W", "ignore:`torch.jit:DeprecationWarning", "-m", module, *words]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | settings, cwd=HERE.parent)
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("pair")
    random_pair(folder, V=64, layers=2, block=4, inner=64)
    return [
        f"target={folder / 'target'}", f"drafter={folder / 'drafter'}", "device=cpu", "dtype=float32",
        "run.compile=true", "run.batch=2", "run.chunk=16", "run.nodes=[8]", "step.budget=6",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def warm(pair: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A cache, and what the warm-up said."""
    cache = tmp_path_factory.mktemp("cache")
    done = run("kimi_fx", "warmup", *pair, "cache.max_len=128", cache=cache, threads=2)
    assert Path(done.stdout.strip()).parent == cache
    return cache, done.stderr


def kernels(cache: Path) -> list[Path]:
    return sorted(cache.rglob("*.so"))


def test_warmup_says_what_it_does(warm: tuple[Path, str]) -> None:
    said = warm[1]
    assert "3 of 3 compiled steps are not in" in said and "no compiled step is in" in said
    assert sorted(re.findall("compiling (.*),", said)) == BUCKETS
    assert re.search(r"1 of 3: \S+ took .*, about .* left$", said, re.M)
    assert re.search(r"3 of 3: \S+ took [^,]*$", said, re.M) and "all were loaded and run in" in said


@pytest.fixture(scope="module")
def served(warm: tuple[Path, str], pair: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """From a copy of the store, with a longer context and other sampling defaults."""
    copy = shutil.copytree(warm[0], tmp_path_factory.mktemp("copy") / "cache")
    before = kernels(copy)
    words = [*pair, "cache.max_len=200", "cache.tokens=1280", "sampling.temperature=0.5"]
    found = json.loads(run("oracles.warm", *words, cache=copy, threads=1).stdout)
    assert kernels(copy) == before and before
    return found


def test_another_process_traces_nothing(served: dict[str, Any]) -> None:
    assert served["graphs"] == 0
    assert served["buckets"] == served["loaded"] == BUCKETS and served["called"] == BUCKETS
    assert served["backend"] == "cpu compiled"


def test_450_rounds_take_no_more_memory_and_say_the_same(served: dict[str, Any]) -> None:
    assert served["again"] and served["growth"] <= 0


def test_every_kind_of_request_is_as_eager(served: dict[str, Any]) -> None:
    check_texts(served)


def check_texts(served: dict[str, Any]) -> None:
    expected, found = served["expected"], served["found"]
    assert expected.pop("eager") and not found.pop("eager")
    assert len(found) == KINDS
    for kind, texts in expected.items():
        assert [ids for ids, _ in found[kind]] == [ids for ids, _ in texts], kind
        for (_, ours), (_, theirs) in zip(found[kind], texts, strict=True):
            assert ours == pytest.approx(theirs, abs=2e-3), kind


def test_a_round_without_a_bucket_runs_eagerly_and_is_counted(served: dict[str, Any]) -> None:
    steps, eager = served["beyond"]
    assert steps == eager > 0


def test_warming_again_builds_nothing(warm: tuple[Path, str], pair: list[str]) -> None:
    before = kernels(warm[0])
    done = run("kimi_fx", "warmup", *pair, "sampling.top_p=0.5", "run.threads=1", cache=warm[0], threads=1)
    assert "all 3 compiled steps are in" in done.stderr and "compiling" not in done.stderr
    assert kernels(warm[0]) == before


def test_cold_steps_are_named(warm: tuple[Path, str], pair: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ({"KIMI_FX_CACHE": str(warm[0])} | UNVECTORED).items():
        monkeypatch.setenv(name, value)
    more = [*pair, "run.require_warm=true", "run.nodes=[8,16]"]
    with pytest.raises(ValueError, match="2 of 5 compiled steps are not in .* not built there yet"):
        Engine.load(more)
    other = [*pair, "run.require_warm=true", "dtype=bfloat16"]
    with pytest.raises(ValueError, match=r"3 of 3 .* differs in dtype \(float32 there, bfloat16 here\)\): run kimi-fx"):
        Engine.load(other)


def test_one_rank_compiles_and_both_serve(pair: list[str], tmp_path: Path) -> None:
    """Neither traces again nor reads the checkpoint, and both give together what one gives operator by operator."""
    words = [*pair, "run.batch=1", "cache.max_len=128", "mesh.tp=2", "cache.weights=true"]
    done = run("kimi_fx", "warmup", *words, cache=tmp_path, threads=1)
    built = ["prefill-16", "round-batch1-nodes8-block4-width7"]
    (weights,) = tmp_path.glob("weights-tp2-*")
    (folder,) = (found for found in tmp_path.iterdir() if found != weights)
    assert done.stdout.strip() == str(folder) and "-tp2-" in folder.name
    kept = {file.name: file.stat().st_mtime_ns for file in weights.glob("rank*")}
    assert sorted(kept) == ["rank0.json", "rank0.safetensors", "rank1.json", "rank1.safetensors"]
    assert sorted(re.findall("compiling (.*),", done.stderr)) == built  # said by one
    before = kernels(tmp_path)
    more = ["mesh.check=true", "mesh.timeout=60"]
    served = json.loads(run("oracles.warm", *words, *more, cache=tmp_path, threads=1).stdout)
    assert served["graphs"] == 0 and served["loaded"] == built and kernels(tmp_path) == before
    assert kept == {file.name: file.stat().st_mtime_ns for file in weights.glob("rank*")}
    assert served["again"] and served["growth"] <= 0
    check_texts(served)


def test_kernels_and_reference_cannot_both_be_had(pair: list[str]) -> None:
    with pytest.raises(ValueError, match="run.compile=true .* ops=reference .* choose one"):
        Engine.load([*pair, "ops=reference"])
    assert Engine.load([*pair, "run.compile=null", "run.nodes=null"], progress=False).rounds is None


@pytest.mark.parametrize("word", ["run.compile=false", "run.require_warm=true"])
def test_warmup_without_compiling_is_refused(word: str) -> None:
    with pytest.raises(ValueError, match=f"{word} forbids to compile"):
        command([word])


def test_warmup_of_what_nothing_would_use() -> None:
    with pytest.raises(ValueError, match="not compiled on cpu in float32 unless run.compile=true is given"):
        command(["device=cpu"])


def test_settings_that_no_graph_sees(pair: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KIMI_FX_CACHE", str(tmp_path))

    def folder(*words: str) -> Path:
        from kimi_fx.runtime.load import prepare

        rounds = Engine(config := load_config([*pair, *words]), prepare(config)).rounds
        assert rounds is not None
        return rounds.store.folder

    usual = folder()
    for same in ("sampling.temperature=0", "run.batch=3", "cache.tokens=640", "step.budget=3", "run.threads=1"):
        assert folder(same) == usual
    for other in ("dtype=bfloat16", "drafter.window=8", "target.lora_norm_eps=1e-4", "mesh.tp=2"):
        assert folder(other) != usual
