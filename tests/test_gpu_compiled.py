"""Compiled and captured rounds on a CUDA device: the eager ids, one launch a round, nothing the host waits for."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from kimi_fx import SamplingParams
from kimi_fx.compose import load_config
from kimi_fx.engine import Engine
from kimi_fx.runtime.compiled import example
from kimi_fx.runtime.load import Loaded, load

pytestmark = pytest.mark.gpu
SETTINGS = ["device=cuda", "run.batch=3", "run.nodes=[1,16]", "run.chunk=64", "cache.max_len=512"]
KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1.0, "seed": 7},
    {"temperature": 1.3, "seed": 8, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 0, "presence_penalty": 1.0, "repetition_penalty": 1.2, "logprobs": 5},
]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Engine, Engine]:
    """The same weights compiled and eager."""
    torch.backends.cuda.matmul.allow_tf32 = False
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KIMI_FX_CACHE", str(tmp_path_factory.mktemp("cache")))
        config = load_config([*SETTINGS, f"dtype={request.param}", "run.compile=true"])
        loaded = load(config, progress=False)
        compiled = Engine(config, loaded)
        for bucket in compiled.rounds.buckets:
            compiled.rounds.build(bucket, example(bucket, loaded.params, compiled.rounds.model))
        with torch.no_grad():
            compiled.rounds.load_all(loaded.params, compiled.pool, compiled.state)
    return compiled, eager(loaded)


def eager(loaded: Loaded) -> Engine:
    return Engine(load_config([*SETTINGS, f"dtype={str(loaded.dtype).removeprefix('torch.')}"]), loaded)


def texts(engine: Engine, prompts: list[list[int]], **fields: Any) -> list[tuple[int, ...]]:
    params = [SamplingParams(max_tokens=40, ignore_eos=True, **KINDS[i % 4]) for i in range(len(prompts))]
    return [r.outputs[0].token_ids for r in engine.generate(prompts, params, **fields)]


def test_every_kind_of_request_is_as_eager(both: tuple[Engine, Engine], held_out: list[list[int]]) -> None:
    """Twelve requests of three slots join and leave, in every mode, read one round behind."""
    compiled, plain = both
    prompts = [p[: 20 + 9 * i] for i, p in enumerate(held_out[:12])]
    for mode in ("tree", "chain", "plain"):
        ours, theirs = (texts(e, prompts, mode=mode) for e in both)
        assert ours == texts(compiled, prompts, mode=mode)
        if plain.loaded.dtype == torch.float32:
            assert ours == theirs
    assert compiled.lag == 1 and not compiled.flights


def test_one_launch_a_round(both: tuple[Engine, Engine], held_out: list[list[int]]) -> None:
    compiled, _ = both
    for prompt in held_out[:3]:
        compiled.add(prompt[:40], SamplingParams(max_tokens=200, temperature=0, ignore_eos=True))
    for _ in range(8):
        compiled.step()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        for _ in range(10):
            compiled.step()
    called = Counter(event.name for event in trace.events())
    for request in [*compiled.seated]:
        compiled.cancel(request.id)
    assert called["cudaGraphLaunch"] == 10
    waits = {name for name in called if "Synchronize" in name} - {"cudaEventSynchronize", "cudaDeviceSynchronize"}
    assert not waits and called["cudaLaunchKernel"] == 0


def test_captured_in_another_order(both: tuple[Engine, Engine], held_out: list[list[int]]) -> None:
    compiled, _ = both
    other = Engine(compiled.config, compiled.loaded)
    other.rounds.steps = compiled.rounds.steps
    with torch.no_grad():
        for bucket in reversed(compiled.rounds.calls):
            other.rounds.call(bucket, other.loaded.params, other.pool, other.state)
    prompts = [p[:30] for p in held_out[:6]]
    assert texts(other, prompts) == texts(compiled, prompts)


def test_300_rounds_take_no_more_memory(both: tuple[Engine, Engine]) -> None:
    compiled, _ = both

    def used() -> int:
        compiled.generate([1, 2, 3], max_tokens=150, temperature=0, ignore_eos=True, mode="plain")
        return torch.cuda.memory_allocated()

    used()
    assert used() == used()
