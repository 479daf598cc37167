"""Steps in buckets, with the traced functions themselves standing in for compiled ones: padding, the store, words.

What compiling does is `test_warmup.py`'s. Here nothing is compiled, so that every shape can be tried.
"""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kimi_fx.runtime.rounds
from kimi_fx import SamplingParams
from kimi_fx.compose import load_config
from kimi_fx.engine import Engine
from kimi_fx.graphs import step
from kimi_fx.graphs.pytree import tree_map
from kimi_fx.graphs.state import Shape
from kimi_fx.runtime.buckets import Chunk, name
from kimi_fx.runtime.compiled import load_step, signature
from kimi_fx.runtime.load import Loaded
from kimi_fx.runtime.rounds import check_steps, compiles, eager
from oracles.toys import random_pair

Make = Callable[..., Engine]
HOW = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return random_pair(tmp_path_factory.mktemp("small"), V=64, layers=2, block=8)


@pytest.fixture
def make(small: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Engines with steps in buckets, over one cache."""
    monkeypatch.setenv("KIMI_FX_CACHE", str(tmp_path / "cache"))

    def load_step(file: Path, arguments: Any, kernels: Path) -> Any:
        traced = step.prefill_step if file.name.startswith("prefill") else step.ddtree_step
        traced(*arguments)
        return traced

    def compile_step(_: Any, arguments: Any, __: Any) -> tuple[bytes, dict[str, Any]]:
        return b"", {"seconds": 1.0, "arguments": signature(arguments)}

    monkeypatch.setattr(kimi_fx.runtime.rounds, "compile_step", compile_step)
    monkeypatch.setattr(kimi_fx.runtime.rounds, "load_step", load_step)

    def engine(*overrides: str, compiled: bool = True) -> Engine:
        config = load_config(["cache.max_len=128", "run.chunk=80", "run.compile=true", *overrides])
        return Engine(config if compiled else eager(config), small)

    return engine


def run(engine: Engine) -> dict[int, list[int]]:
    texts: dict[int, list[int]] = {}
    while engine.busy:
        for delta in engine.step():
            texts.setdefault(delta.request, []).extend(delta.token_ids)
    return texts


@pytest.mark.parametrize("buckets", ["run.nodes=[32]", "run.nodes=[1,8,16]", "step.mode=chain"])
def test_padding_changes_nothing(make: Make, buckets: str) -> None:
    """Requests of all modes join, leave and move, in a pool that is NaN wherever nothing was committed."""
    batched, alone = make(buckets, "run.batch=7"), make("run.batch=1", compiled=False)
    for leaf in vars(batched.pool).values():
        leaf.fill_(torch.nan)
    rng = np.random.default_rng(0)
    asked, texts = {}, {}
    for i in range(24):
        params = SamplingParams(max_tokens=int(rng.integers(1, 14)), seed=i, temperature=float(i % 2), ignore_eos=True)
        mode = ("plain", "chain", "tree")[i % 3]
        how = (rng.integers(0, 60, rng.integers(1, 100)).tolist(), params, mode, 5 if mode == "tree" else None)
        asked[batched.add(*how)] = how
        for delta in batched.step():
            texts.setdefault(delta.request, []).extend(delta.token_ids)
    for request, ids in run(batched).items():
        texts.setdefault(request, []).extend(ids)
    for request, how in asked.items():
        alone.add(*how)
        assert [texts[request]] == list(run(alone).values()), how
    assert batched.rounds is not None and len(batched.rounds.calls) > 2
    assert set(batched.rounds.steps) >= {Chunk(64), Chunk(80)}


def test_padding_slots_touch_no_page(make: Make) -> None:
    """Two of the three slots a bucket has are empty, one was used before; only the live request's pages change."""
    engine = make("run.nodes=[8]", "run.batch=3", "step.budget=7")
    engine.generate([[1] * 70, [2] * 70, [3] * 5], max_tokens=5, **HOW)
    engine.rounds.buckets = [b for b in engine.rounds.buckets if isinstance(b, Chunk) or b.batch == 3]
    request = engine.add([4] * 70, SamplingParams(max_tokens=20, **HOW))
    while engine.seated == [] or engine.seated[0].prefilling:
        engine.step()
    live, before = engine.seated[0].pages, tree_map(torch.clone, engine.pool)
    engine.step()
    others = [page for page in range(engine.pages.count) if page not in live]
    for was, now in zip(vars(before).values(), vars(engine.pool).values(), strict=True):
        assert torch.equal(was[:, others], now[:, others]) and not torch.equal(was[:, live], now[:, live])
    assert list(run(engine)) == [request] and engine.rounds.calls.keys() >= {Shape(3, 8, 8, 7)}


def test_rounds_without_a_bucket_are_counted(make: Make) -> None:
    engine = make("run.nodes=[1,8]", "run.batch=1", "step.budget=7")
    stats = [engine.generate([1, 2], max_tokens=9, budget=b, **HOW).stats for b in (0, 7, 8)]
    assert [s.eager_steps for s in stats] == [0, 0, stats[2].steps] and stats[0].backend == "cpu compiled"


def test_a_cold_start_says_so_and_a_warm_one_nothing(make: Make, capsys: Any) -> None:
    def start() -> Engine:
        engine = make("run.batch=1")
        assert engine.rounds is not None
        engine.rounds.load_all(engine.loaded.params, engine.pool, engine.state)
        return engine

    cold = start()
    said = capsys.readouterr().err
    assert re.search("4 of 4 compiled steps are not in .*no compiled step is in .* takes about 36 s, or ahead by", said)
    cold.generate([1, 2], max_tokens=9, budget=15, **HOW)
    said = capsys.readouterr().err.splitlines()
    built = {name(Chunk(64)), name(Shape(1, 16, 8, 15))}
    assert {line.split(",")[0] for line in said} == {f"compiling {bucket}" for bucket in built}
    warm = start()
    assert "2 of 4 compiled steps are not in" in capsys.readouterr().err
    assert {name(b) for b in warm.rounds.steps} == built
    warm.generate([1, 2], max_tokens=9, budget=15, **HOW)
    assert not capsys.readouterr().err


def test_compiling_can_be_refused(make: Make) -> None:
    with pytest.raises(ValueError, match="require_warm=true, but 4 of 4 compiled steps are not in .*kimi-fx warmup"):
        make("run.batch=1", "run.require_warm=true")
    first = make("run.batch=1")
    for budget, prompt in ((0, [1]), (15, [1] * 70)):
        first.generate(prompt, max_tokens=9, budget=budget, **HOW)
    second = make("run.batch=1", "run.require_warm=true", "sampling.temperature=0.3", "cache.tokens=640")
    assert second.generate([1], max_tokens=9, **HOW).stats.eager_steps == 0
    third = make("run.batch=1", "run.require_warm=true")
    (third.rounds.store.folder / f"{name(Chunk(64))}.json").unlink()
    with pytest.raises(RuntimeError, match="run.require_warm=true, but prefill-64 is gone"):
        third.generate([1], max_tokens=9, **HOW)


def test_a_build_is_shown_no_leftovers(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of earlier builds it may use again, and then relies on; never what a build that was killed left."""
    engine, seen = make("run.batch=1"), []

    def compile_step(_: Any, arguments: Any, kernels: Path) -> tuple[bytes, dict[str, Any]]:
        seen.append(sorted(file.name for file in kernels.iterdir()))
        (kernels / f"{len(seen)}.so").touch()
        return b"", {"seconds": 1.0, "arguments": signature(arguments)}

    monkeypatch.setattr(kimi_fx.runtime.rounds, "compile_step", compile_step)
    assert engine.rounds is not None
    store = engine.rounds.store
    store.inductor.mkdir(parents=True)
    (store.inductor / "left.so").touch()
    engine.generate([1], max_tokens=9, **HOW)
    assert seen == [[], ["1.so"]]
    assert sorted(len(store.entry(name(b))["files"]) for b in engine.rounds.steps) == [2, 3]
    (store.inductor / "1.so").unlink()
    assert len(make("run.batch=1").rounds.cold()) == 4


@pytest.mark.parametrize("code", [b"", b"\x80\x04cut"])
def test_files_that_hold_no_function(tmp_path: Path, code: bytes) -> None:
    (tmp_path / "round.aot").write_bytes(code)
    with pytest.raises(RuntimeError, match="round.aot holds no compiled function .*: delete it"):
        load_step(tmp_path / "round.aot", (), tmp_path)


def test_weights_of_another_layout_are_refused(make: Make) -> None:
    make("run.batch=1").generate([1], max_tokens=3, **HOW)
    other = make("run.batch=1")
    other.loaded = replace(other.loaded, params=tree_map(torch.Tensor.double, other.loaded.params))
    with pytest.raises(RuntimeError, match=r"prefill-64 takes torch.float32 \[64, 32\] on cpu and was given .*float64"):
        other.generate([1], max_tokens=3, **HOW)


def test_a_trace_of_padded_rounds(make: Make, tmp_path: Path) -> None:
    lines = []
    for compiled in (True, False):
        engine = make("run.nodes=[32]", "run.batch=2", f"run.trace={tmp_path / 'trace'}", compiled=compiled)
        engine.generate([[1, 2], [3]], max_tokens=9, budget=5, **HOW)
        lines.append([json.loads(line) for line in (tmp_path / "trace").read_text().splitlines()])
    assert lines[0]
    for padded, exact in zip(*lines, strict=True):
        assert padded.pop("scores") == pytest.approx(exact.pop("scores"), abs=1e-4)
        assert padded == exact


def test_an_eager_engine_does_not_import_the_compiler() -> None:
    code = """
import sys, kimi_fx
engine = kimi_fx.Engine.load(["run.batch=1", "cache.max_len=128", "device=cpu"], progress=False)
engine.generate([1, 2], max_tokens=2)
assert not {"torch._dynamo", "torch._inductor"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_eager_settings_contradict_nothing() -> None:
    """Whatever was said of compiled steps."""
    words = ["run.compile=true", "run.nodes=[8]", "run.require_warm=true", "drafter.backend=tensorrt"]
    plain = eager(load_config(words)), torch.device("cuda"), torch.bfloat16
    check_steps(*plain)
    assert not compiles(*plain)


def test_requiring_what_is_not_in_use() -> None:
    with pytest.raises(ValueError, match="none are in use: set run.compile=true"):
        check_steps(load_config(["run.require_warm=true"]), torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("name", ["a b", "a'b", "a\tb"])
def test_a_path_that_the_compiler_would_split(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """It is refused before the compiler is called; a warm store there serves."""
    engine = make("run.batch=1", "run.nodes=[8]", "step.budget=7")
    expected = engine.generate([[1] * 70, [1, 2, 3]], max_tokens=4, **HOW)[1]
    shutil.copytree(tmp_path / "cache", tmp_path / name)
    monkeypatch.setenv("KIMI_FX_CACHE", str(tmp_path / name))
    warm = make("run.batch=1", "run.nodes=[8]", "step.budget=7")
    assert warm.generate([1, 2, 3], max_tokens=4, **HOW).outputs[0].token_ids == expected.outputs[0].token_ids
    with pytest.raises(ValueError, match=f"{name} has a blank or a quote in it.*set KIMI_FX_CACHE"):
        make("run.batch=1", "run.nodes=[16]", "step.budget=15")


def test_a_relative_cache_stays_where_it_was(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KIMI_FX_CACHE", "own")
    engine = make("run.batch=1", "run.nodes=[8]", "step.budget=7")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    engine.generate([1, 2, 3], max_tokens=4, **HOW)
    assert list((tmp_path / "own").iterdir()) and not list((tmp_path / "elsewhere").iterdir())
