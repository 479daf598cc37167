"""`kimi-fx warmup`: every compiled step that a configuration needs, built into the artefact store, then run.

What the store has is left as it is, so an interrupted warm-up goes on where it was, and several may run at once. The
weights are random ones of the checkpoint's shapes: no compiled step depends on their values, and none are read.
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from .checkpoint.load import random_params
from .compose import load_config
from .engine import Engine
from .graphs.params import Params, drafter_plan, target_plan
from .graphs.state import Shape, slots
from .runtime.buckets import name
from .runtime.compiled import example
from .runtime.load import Loaded, prepare
from .runtime.rounds import Rounds, clock, say


def command(overrides: Sequence[str]) -> int:
    """Prints the store's folder."""
    config = load_config(overrides)
    config = replace(config, run=replace(config.run, compile=True, require_warm=False))
    engine = Engine(config, prepare(config))
    assert engine.rounds is not None
    with torch.inference_mode(False):
        params = random_weights(engine.loaded)
    build_all(engine.rounds, params)
    start = time.monotonic()
    with torch.inference_mode(False), torch.no_grad():
        run_all(engine, engine.rounds, params)
    say(f"all were loaded and run in {clock(time.monotonic() - start)}")
    print(engine.rounds.store.folder)
    return 0


def build_all(rounds: Rounds, params: Params) -> None:
    """Build what is cold, saying how far it is and how long the rest takes."""
    cold, total = rounds.cold(), len(rounds.buckets)
    say(rounds.lack(cold) if cold else f"all {total} compiled steps are in {rounds.store.folder}")
    for done, bucket in enumerate(cold):
        pace = rounds.store.pace()
        left = f", about {clock(pace * (len(cold) - done))} left" if pace else ""
        print(f"{done + 1} of {len(cold)}{left}: ", end="", file=sys.stderr)
        entry = rounds.build(bucket, example(bucket, params, rounds.model))
        say(f"{name(bucket)} took {clock(entry['seconds'])}")


def run_all(engine: Engine, rounds: Rounds, params: Params) -> None:
    """Every bucket over the engine's own buffers, its slots idle."""
    for bucket in rounds.buckets:
        _, _, idle, *rest = example(bucket, params, rounds.model)
        arguments = (params, engine.pool, slots(engine.state, len(idle.anchor)), *rest)
        rounds.step(bucket, arguments)(*arguments)
        if isinstance(bucket, Shape):
            rounds.call(bucket, params, engine.pool, engine.state)()


def random_weights(ready: Loaded) -> Params:
    model, how = ready.model, (0, ready.device, ready.dtype)
    drafter = random_params(drafter_plan(model.drafter), *how) if model.drafter else None
    return Params(random_params(target_plan(model.target), *how), drafter)
