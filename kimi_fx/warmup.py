"""`kimi-fx warmup`: every compiled step that a configuration needs, built into the artefact store, then run.

What the store has is left as it is, so an interrupted warm-up goes on where it was, and several may run at once. The
weights are random ones of the checkpoint's shapes: no compiled step depends on their values, and none are read, unless
the ranks' weights are to be kept (cache.weights). Several ranks start as they do to serve, so that what they build has
run on them.
"""

import time
from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh

from .checkpoint.load import random_params
from .checkpoint.shards import local
from .compose import OF_REQUESTS, check_used, load_config, resolve
from .engine import Engine
from .graphs.params import Params, drafter_plan, target_plan
from .runtime.build import load_kernels
from .runtime.builders import build_all
from .runtime.load import Loaded, load, pick_device, pick_dtype
from .runtime.rounds import Rounds, clock, compiles


class Warmup(Engine):
    """An engine that is loaded with random weights, every step built and run, and then serves nothing."""

    def _load(self, progress: bool, mesh: DeviceMesh | None = None) -> None:
        assert self.rounds is not None
        if self.loaded.device.type == "cuda":
            load_kernels(self.loaded.device)
        with torch.inference_mode(False), torch.no_grad(), self.rounds.unlimited():
            kept = self.config.cache.weights
            params = (
                load(self.config, self.loaded, progress, mesh).params if kept else random_weights(self.loaded, mesh)
            )
            build_all(self.rounds, params)
            start = time.monotonic()
            run_all(self, self.rounds, params)
        self.rounds.say(f"all were loaded and run in {clock(time.monotonic() - start)}")


def command(overrides: Sequence[str]) -> int:
    """Prints the store's folder. Raises ValueError where compiling is forbidden, or nothing would use what it makes."""
    check_used("warmup", overrides, dict.fromkeys(OF_REQUESTS, "leave it out"))
    given = {setting.key: setting.value for setting in resolve(overrides) if setting.origin != "default"}
    for key, forbids in (("run.compile", False), ("run.require_warm", True)):
        if given.get(key) is forbids:
            given_as = f"{key}={str(forbids).lower()}"
            raise ValueError(f"{given_as} forbids to compile, which is all that warmup does: leave it out.")
    config = load_config(overrides)
    device = pick_device(config.device)
    dtype = pick_dtype(config.dtype, device)
    if not compiles(config, device, dtype):
        raise ValueError(
            f"steps are not compiled on {device.type} in {str(dtype).removeprefix('torch.')} unless run.compile=true "
            "is given: add it here and to what serves afterwards."
        )
    engine = Warmup.open(config)
    assert engine.rounds is not None
    print(engine.rounds.store.folder)
    return 0


def run_all(engine: Engine, rounds: Rounds, params: Params) -> None:
    """Every bucket over the engine's own buffers, its slots idle."""
    for bucket in rounds.buckets:
        rounds.call(bucket, params, engine.pool, engine.state)()


def random_weights(ready: Loaded, mesh: DeviceMesh | None) -> Params:
    """On a mesh this rank's."""
    model, how = ready.model, (0, ready.device, ready.dtype, mesh)
    drafter = random_params(drafter_plan(model.drafter, model.ranks), *how) if model.drafter else None
    return local(Params(random_params(target_plan(model.target, model.ranks), *how), drafter))
