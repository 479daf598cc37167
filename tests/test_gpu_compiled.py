"""Compiled rounds on a CUDA device: in fp32 the eager ids; in bf16, captured, the ids of the same functions called one
by one, one launch a round, nothing the host waits for.

A dtype's steps are built once, by processes side by side, and served by two: this one and one that may not trace.
"""

import gc
import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from kimi_fx import SamplingParams
from kimi_fx.compose import load_config
from kimi_fx.engine import Engine
from kimi_fx.graphs.pytree import tree_leaves
from kimi_fx.runtime.buckets import name
from kimi_fx.runtime.builders import build_all
from kimi_fx.runtime.load import load
from kimi_fx.runtime.rounds import eager

pytestmark = pytest.mark.gpu
HERE = Path(__file__).parent
SETTINGS = ["device=cuda", "run.batch=2", "run.chunk=160", "cache.max_len=512"]
NODES = {"float32": "run.nodes=[16]", "bfloat16": "run.nodes=[1,16]"}
STARTS_IN = 10  # seconds, weights, kernels and graphs of kimi-nano
INSIDE = ("draft_kernel", "build_kernel", "mla::", "moe::", "walk_kernel", "copy_kernel")  # in our kernels' names
KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.0, "seed": 7},
    {"temperature": 1.3, "seed": 8, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 0, "presence_penalty": 1.0, "repetition_penalty": 1.2, "logprobs": 5},
]


@dataclass(frozen=True)
class Both:
    """Engines over the same weights that give the same ids, and where the compiled steps are."""

    compiled: Engine
    plain: Engine  # eager in fp32, in bf16 compiled but not captured
    cache: Path


captured = pytest.mark.parametrize("both", ["bfloat16"], indirect=True)  # in fp32 nothing is


@pytest.fixture(scope="module")
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Both:
    torch.backends.cuda.matmul.allow_tf32 = False
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setenv("KIMI_FX_CACHE", str(cache))
        words = [*SETTINGS, NODES[request.param], f"dtype={request.param}", "run.compile=true"]
        config = load_config(words)
        loaded = load(config, progress=False)
        compiled = Engine(config, loaded)
        assert compiled.rounds is not None and len(compiled.rounds.buckets) == (4 if request.param == "float32" else 6)
        build_all(compiled.rounds, loaded.params)
        compiled.rounds.load_all(loaded.params, compiled.pool, compiled.state)
        if request.param == "float32":
            return Both(compiled, Engine(eager(load_config(words)), loaded), cache)
        plain = Engine(config, loaded)
        plain.rounds.graphs, plain.rounds.steps = None, dict(compiled.rounds.steps)
    return Both(compiled, plain, cache)


def texts(engine: Engine, prompts: list[list[int]], tokens: int = 40, **fields: Any) -> list[tuple[int, ...]]:
    params = [SamplingParams(max_tokens=tokens, ignore_eos=True, **KINDS[i % 4]) for i in range(len(prompts))]
    return [r.outputs[0].token_ids for r in engine.generate(prompts, params, **fields)]


@pytest.mark.parametrize(("both", "tokens"), [("float32", 12), ("bfloat16", 40)], indirect=["both"])
def test_every_kind_of_request_is_as_eager(tokens: int, both: Both, held_out: list[list[int]]) -> None:
    """Eight requests of two slots join and leave, in every mode, read one round behind."""
    prompts = [p[: 20 + 9 * i] for i, p in enumerate(held_out[:8])]
    for mode in ("tree", "chain", "plain"):
        ours = texts(both.compiled, prompts, tokens, mode=mode)
        assert ours == texts(both.compiled, prompts, tokens, mode=mode) == texts(both.plain, prompts, tokens, mode=mode)
    assert not both.compiled.flights


@captured
def test_300_rounds_of_requests_that_join_leave_and_are_cancelled(both: Both, held_out: list[list[int]]) -> None:
    """Both engines get the same requests before the same steps: in bf16 what a request gets hangs on its neighbours
    too. In a pool that is NaN wherever nothing was committed; after the first rounds no more memory is taken."""
    rng, engines = np.random.default_rng(1), (both.compiled, both.plain)
    for leaf in (leaf for engine in engines for leaf in tree_leaves(engine.pool)):
        leaf.fill_(torch.nan)
    came: tuple[list[Any], list[Any]] = ([], [])
    steps, rounds, cancelled = 0, 300, 0
    memory, loaded = [], dict(both.compiled.rounds.steps)
    while steps < rounds or both.compiled.busy:
        if steps < rounds and len(both.compiled.waiting) < 2:
            kind = KINDS[int(rng.integers(4))] | {"seed": steps}
            params = SamplingParams(max_tokens=int(rng.integers(1, 50)), ignore_eos=True, **kind)
            prompt = held_out[steps % 96][: int(rng.integers(1, 128))]
            mode = str(rng.choice(["plain", "chain", "tree"]))
            for engine in engines:
                engine.add(prompt, params, mode)
        if both.compiled.seated and rng.random() < 0.05:
            cancelled += 1
            for engine in engines:
                engine.cancel(engine.seated[-1].id)
        for engine, deltas in zip(engines, came, strict=True):
            deltas += [(steps, delta.token_ids, delta.finish_reason) for delta in engine.step()]
        steps += 1
        if steps in (rounds // 2, rounds):
            memory.append(torch.cuda.memory_allocated())
    assert memory[0] == memory[1] and both.compiled.rounds.steps == loaded
    assert came[0] == came[1] and not both.plain.busy
    assert cancelled and sum(reason == "length" for *_, reason in came[0]) > rounds // 15


@captured
def test_one_launch_a_round(both: Both, held_out: list[list[int]]) -> None:
    """Drafter, tree and target are inside it; between two the card does nothing but copy results."""
    engine, rounds = both.compiled, 10
    assert engine.lag == 1
    for prompt in held_out[:2]:
        engine.add(prompt[:40], SamplingParams(max_tokens=200, temperature=0, ignore_eos=True))
    for _ in range(8):
        engine.step()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as trace:
        for _ in range(rounds):
            engine.step()
    for request in [*engine.seated]:
        engine.cancel(request.id)
    called = Counter(event.name for event in trace.events())
    assert called["cudaGraphLaunch"] == rounds
    waits = {name for name in called if "Synchronize" in name} - {"cudaEventSynchronize", "cudaDeviceSynchronize"}
    assert not waits and called["cudaLaunchKernel"] == called["cudaLaunchKernelExC"] == 0
    launched: dict[int, list[str]] = {}
    for event in trace.events():
        if event.device_type == DeviceType.CUDA:
            launched.setdefault(event.id, []).append(event.name)
    graphs = [names for names in launched.values() if len(names) > 1]
    alone = {names[0] for names in launched.values() if len(names) == 1}
    assert len(graphs) == rounds and all("Memcpy" in name for name in alone)
    for names in graphs:
        ours = [name for name in names if "kimi_fx::" in name]
        assert not [piece for piece in INSIDE if not any(piece in name for name in ours)]


@captured
def test_captured_in_another_order(both: Both, held_out: list[list[int]]) -> None:
    first = both.compiled
    other = Engine(first.config, first.loaded)
    other.rounds.steps = first.rounds.steps
    with torch.no_grad():
        for bucket in reversed(first.rounds.calls):
            other.rounds.call(bucket, other.loaded.params, other.pool, other.state)
    prompts = [p[:30] for p in held_out[:6]]
    assert texts(other, prompts) == texts(first, prompts)


@captured
def test_another_process_traces_nothing(both: Both) -> None:
    """Every kind of request in every bucket, under a ban on tracing."""
    words = [*SETTINGS, NODES["bfloat16"], "dtype=bfloat16"]
    settings = {"KIMI_FX_CACHE": str(both.cache), "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
    gc.collect()
    done = subprocess.run(
        [sys.executable, "-m", "oracles.warm", *words],
        capture_output=True, text=True, env=os.environ | settings, cwd=HERE.parent,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    served = json.loads(done.stdout)
    every = sorted(name(bucket) for bucket in both.compiled.rounds.buckets)
    assert served["graphs"] == 0 and served["loaded"] == served["buckets"] == every
    assert served["called"] == every and served["backend"] == "cuda compiled"
    assert served["again"] and served["growth"] <= 0 and served["start"] < STARTS_IN
    assert served["found"]["eager"] == 0
