"""A process that serves from a warm store: every kind of request, no compiling, the ids of an eager engine.

    python -m oracles.warm <override> …

Prints what the test looks at, as JSON. `run.require_warm` is on and so is, on every rank, the ban on tracing.
"""

import gc
import json
import sys
import time
from typing import Any

import torch
from torch._dynamo.utils import counters

from kimi_fx import SamplingParams
from kimi_fx.compose import load_config
from kimi_fx.engine import Engine
from kimi_fx.runtime.buckets import name
from kimi_fx.runtime.rounds import eager
from oracles.strict import Strict

ALONE = ["mesh.tp=1", "mesh.check=false", "mesh.timeout=10"]
COMMON: dict[str, Any] = {"max_tokens": 9, "ignore_eos": True}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled and seeded": {"temperature": 1.0, "seed": 7},
    "filtered": {"temperature": 1.3, "seed": 8, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "penalised": {"temperature": 0, "presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.5},
    "with log-probabilities": {"temperature": 0, "logprobs": 5, "logit_bias": {3: 2.0}},
    "stopped": {"temperature": 1.0, "seed": 9, "stop_token_ids": list(range(6)), "min_tokens": 2},
}


def serve(engine: Engine) -> dict[str, Any]:
    """Each kind alone, all of them together, and plain decoding beside trees."""
    prompts = [[5 + k, 1, 4, 1, 5, 9, 2, 6] * (k + 1) for k in range(len(KINDS))]
    params = [SamplingParams(**COMMON | kind) for kind in KINDS.values()]
    runs = {kind: [engine.generate(p, s)] for kind, p, s in zip(KINDS, prompts, params, strict=True)}
    runs["mixed"] = engine.generate(prompts, params)
    runs["plain"] = engine.generate(prompts, params, mode="plain")
    return {
        kind: [(list(c.token_ids), [round(p.logprob, 3) for p in c.logprobs or ()]) for r in results for c in r.outputs]
        for kind, results in runs.items()
    } | {"eager": sum(c.stats.eager_steps for results in runs.values() for r in results for c in r.outputs)}


def growth(engine: Engine) -> int:
    """Tensors more after every 150 of 450 rounds, at the least: what is kept once is no leak."""

    def tensors() -> int:
        for _ in range(3):
            engine.generate([1, 2], max_tokens=51, mode="plain", ignore_eos=True)
        gc.collect()
        return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())

    first, second, third = tensors(), tensors(), tensors()
    return min(second - first, third - second)


def main(overrides: list[str]) -> None:
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = False
    expected = serve(Engine.open(eager(load_config([*overrides, *ALONE])), progress=False))
    with torch.compiler.set_stance("fail_on_recompile"):
        with torch.inference_mode():  # of the caller's: no tensor of ours may be made in it
            begun = time.perf_counter()
            engine = Strict.open(load_config([*overrides, "run.compile=true", "run.require_warm=true"]), progress=False)
            start = time.perf_counter() - begun
            found = serve(engine)
        again, more = serve(engine), growth(engine)
        beyond = engine.generate([1, 2, 3], max_tokens=9, temperature=0, ignore_eos=True, budget=12)
    assert engine.rounds is not None
    print(json.dumps({
        "expected": expected, "found": found, "again": again == found, "growth": more,
        "buckets": sorted(name(b) for b in engine.rounds.buckets),
        "loaded": sorted(name(b) for b in engine.rounds.steps),
        "called": sorted(name(b) for b in engine.rounds.calls),
        "graphs": counters["stats"]["unique_graphs"],
        "beyond": [beyond.stats.steps, beyond.stats.eager_steps],
        "backend": beyond.stats.backend, "start": start,
    }))  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])
