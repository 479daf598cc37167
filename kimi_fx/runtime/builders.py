"""All cold buckets of one engine built ahead, on CUDA by several processes at once.

Compiling needs shapes alone, so a builder's weights have no memory. Each has a folder of its own for what the compiler
writes, and the process that asked moves that into the store. On a CPU, kernels of C++ take most of the time: they are
compiled on all cores and shared by the buckets, so one process builds. Where several ranks share the model each of them
builds by itself, one bucket after another, since tracing needs their process group.
"""

import math
import os
from collections.abc import Generator, Sequence
from concurrent.futures import as_completed
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config
from torch import Tensor

from ..config import DrafterModel, TargetModel
from ..graphs.params import Params
from ..graphs.pytree import tree_map
from ..graphs.state import Model
from .buckets import Bucket, name
from .compiled import compile_step, example
from .crew import crew, submit
from .rounds import Rounds, clock
from .tensorrt import operators

MOST = 8  # builders: each holds a traced graph, and on CUDA a context

Built = Generator[tuple[Bucket, dict[str, Any]], None, None]


@dataclass(frozen=True)
class Form:
    """A tensor but for its numbers."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def form(tensor: Tensor) -> Form:
    return Form(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)


def hollow(form: Form) -> Tensor:
    """A tensor of that form without memory: it can be traced with, not computed."""
    tensor = torch.empty_strided(form.shape, form.stride, dtype=form.dtype, device=form.device)
    tensor.untyped_storage().resize_(0)
    return tensor


def build_all(rounds: Rounds, params: Params) -> None:
    """Build what is cold, saying how far it is and how long the rest takes."""
    cold, total = rounds.cold(), len(rounds.buckets)
    rounds.say(rounds.lack(cold) if cold else f"all {total} compiled steps are in {rounds.store.folder}")
    at_once = min(len(cold), os.cpu_count() or 1, MOST) if params.target.embed.is_cuda and rounds.ranks is None else 1
    built = in_parallel(rounds, params, cold, at_once) if at_once > 1 else one_by_one(rounds, params, cold)
    with closing(built):
        for done, (bucket, entry) in enumerate(built, 1):
            waits = math.ceil((len(cold) - done) / at_once)
            left = f", about {clock(rounds.pace(cold) * waits)} left" if waits else ""
            rounds.say(f"{done} of {len(cold)}: {name(bucket)} took {clock(entry['seconds'])}{left}")


def one_by_one(rounds: Rounds, params: Params, cold: Sequence[Bucket]) -> Built:
    for bucket in cold:
        yield bucket, rounds.build(bucket, example(bucket, params, rounds.model))


def in_parallel(rounds: Rounds, params: Params, cold: Sequence[Bucket], at_once: int) -> Built:
    """Each bucket's entry, as it is done; one that another process has built meanwhile is not built again."""
    rounds.say(f"compiling {', '.join(map(name, cold))}, {at_once} at once, about {clock(rounds.pace(cold))} each")
    forms: Any = tree_map(form, params)
    model = rounds.model.target, rounds.model.drafter, rounds.backend  # operators cannot be sent
    threads = max(1, (os.cpu_count() or 1) // at_once)
    with rounds.store.building(), rounds.store.workshop() as folder, crew(at_once) as pool:
        jobs = {}
        for bucket in cold:
            if entry := rounds.store.entry(name(bucket)):
                yield bucket, entry
            else:
                jobs[submit(pool, build, bucket, forms, model, folder / name(bucket), threads)] = bucket
        for job in as_completed(jobs):
            yield jobs[job], rounds.keep(jobs[job], *job.result(), folder / name(jobs[job]))


def build(
    bucket: Bucket, forms: Any, model: tuple[TargetModel, DrafterModel | None, str], kernels: Path, threads: int
) -> tuple[bytes, dict[str, Any]]:
    """In a builder: a bucket's function, and what is noted of it."""
    torch._inductor.config.compile_threads = threads
    target, drafter, backend = model
    idle = example(bucket, tree_map(hollow, forms), Model(target, drafter, operators(backend)))
    return compile_step(bucket, idle, kernels)
