"""`kimi-fx bench sums mesh.tp=2`: what ranks pay for their sums, by stores into each other's memory and through NCCL.

First alone: calls over arrays of their own in one CUDA graph. Then inside a forward pass of Kimi K2.6, shared by these
ranks as in serving but of as few layers as asked for: some tokens of one request after its context, compiled and
captured, the same compiled code both ways. A sum's time in the pass is what its kernel adds after all before it ended,
the median of one replay. Numbers are those of the slowest rank.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..checkpoint.configs import read_target
from ..compose import conf_folder, load_config
from ..config import PAGE, Config, TargetModel
from ..graphs.axis import Axis, psum
from ..graphs.state import Model, empty_pool, empty_state
from ..ops import KERNELS
from ..ops.peer_sum import JOINED
from ..request import Plan
from ..runtime.buckets import Chunk
from ..runtime.build import load_kernels
from ..runtime.load import Loaded, Text, rank_device, settled
from ..runtime.ranks import GROUP, Place, Ranks, follow_once, own_place
from ..runtime.rounds import Rounds
from ..warmup import random_weights
from .device import captured, given, listed, median, numbers
from .rank import seat_all
from .record import table
from .trace import Kernel, traced

MODULE = "kimi_fx.bench.sums"  # whose `main` a started rank runs
CALLS = 40
CONTEXT = 5500
WAYS = ("near", "nccl")
DEFAULTS = {"tokens": "[1,8,16,32,64]", "pass": "[16,64]", "layers": "[8]"}
SETTINGS = ["mesh.tp", "mesh.timeout"]
SUMS = ("peer_sum_kernel", "nccl")  # in the names of their kernels
Asked = dict[str, list[int]]


def run(overrides: Sequence[str]) -> int:
    """Takes `tokens=[1,8]` of the sums alone, `pass=[16]` of the forward pass and its `layers=[8]`, `mesh.tp=2` and
    `mesh.timeout=10`."""
    words = given("sums", [*DEFAULTS, *SETTINGS], overrides)
    asked = chosen(DEFAULTS | words)
    config = load_config(["target=kimi_k2_6", *(f"{key}={words[key]}" for key in SETTINGS if key in words)])
    place = own_place(config)
    if place.port:
        raise ValueError("bench sums starts its ranks itself: call it without torchrun.")
    devices = torch.cuda.device_count()
    if config.mesh.tp < 2 or devices < config.mesh.tp:
        there = f"found mesh.tp={config.mesh.tp} and {devices} of them"
        raise ValueError(f"bench sums needs mesh.tp=2 or more and as many CUDA devices, {there}.")
    config = settled(config, place)
    if config.device != "cuda" or not config.mesh.near:
        raise ValueError("bench sums compares two ways to sum on CUDA devices joined by NVLink, found none.")
    ranks = Ranks(place, config, module=MODULE)
    try:
        found = list(take_part(ranks, asked))
        ranks.watch.done()
    except BaseException as error:
        ranks.fail(error)
        raise
    print(f"{torch.cuda.get_device_name()}, {place.size} ranks, torch {torch.__version__}, us\n")
    for heads in dict.fromkeys(tuple(row) for row in found):
        rows = [[f"{row[head]:.4g}" for head in heads] for row in found if tuple(row) == heads]
        print(table([list(heads), *rows]) + "\n", flush=True)
    ranks.close()
    return 0


def chosen(words: Mapping[str, str]) -> Asked:
    """The lists to measure. ValueError for what cannot be."""
    limits = {"tokens": 4096, "pass": 4096, "layers": kimi().layers}
    lists = {key: numbers(key, listed(words[key]), 1, most) for key, most in limits.items()}
    if len(lists["layers"]) > 1:
        raise ValueError(f"layers is one number, found {', '.join(map(str, lists['layers']))}.")
    return lists


def kimi() -> TargetModel:
    return read_target(conf_folder() / "target/kimi_k2_6", None)


def main(place: dict[str, Any]) -> int:
    """Of a process that rank 0 started."""
    return follow_once(Place(**place), take_part)


@torch.no_grad()
def take_part(ranks: Ranks, asked: Asked | None = None) -> Iterator[dict[str, float]]:
    """The same on all ranks; a row of numbers each."""
    config, place = ranks.config, ranks.place
    device = rank_device(config.device, place)
    load_kernels(device)
    mesh = ranks.join(device)
    if place.rank == 0:
        ranks.send([asked])
    else:
        (asked,) = ranks.follow() or [None]
    assert asked is not None
    axis = Axis(GROUP, place.size, near=True)
    model = slice_of(asked["layers"][0], axis)
    for tokens in asked["tokens"]:
        ranks.watch.begin()
        yield {"tokens": tokens, "bytes": tokens * model.target.D * 2} | alone(tokens, model.target.D, axis, device)
    ranks.watch.done()  # weights and compiling take their time
    yield from passes(ranks, mesh, config, model, asked["pass"], device)


def slice_of(layers: int, axis: Axis) -> Model:
    """The first layers of Kimi K2.6, no drafter."""
    return Model(replace(kimi(), layers=layers), None, KERNELS, axis)


def alone(tokens: int, D: int, axis: Axis, device: torch.device) -> dict[str, float]:
    """A call's microseconds in a graph of many."""
    arrays = [torch.randn(tokens, D, device=device, dtype=torch.bfloat16) for _ in range(CALLS)]

    def call(x: Tensor) -> Tensor:
        return psum(x, axis)

    return {way: slowest(one_way(way, lambda: median(captured(call, arrays).replay))) / CALLS for way in WAYS}


def one_way(way: str, measure: Callable[[], float]) -> float:
    with without_buffers(way == "nccl"):
        return measure()


@contextmanager
def without_buffers(off: bool) -> Iterator[None]:
    """Sums go through the group where the ranks' buffers are not known."""
    peers = JOINED.pop(GROUP) if off else None
    try:
        yield
    finally:
        if peers:
            JOINED[GROUP] = peers


def slowest(seconds: float) -> float:
    """Microseconds of the rank that took longest."""
    found = torch.tensor(1e6 * seconds, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def passes(
    ranks: Ranks, mesh: DeviceMesh, config: Config, model: Model, sizes: Sequence[int], device: torch.device
) -> Iterator[dict[str, float]]:
    """The forward pass of each size: its time, and how much of it is sums."""
    loaded = Loaded(None, model, device, torch.bfloat16, Text())
    loaded = replace(loaded, params=random_weights(loaded, mesh))
    rounds = Rounds(replace(config, run=replace(config.run, nodes=(1,))), loaded, Plan("plain", 0, 1))
    rounds.ranks, ranks.release = ranks, rounds.release
    pages = torch.arange(CONTEXT // PAGE + 2, device=device).int()
    pool = empty_pool(model, len(pages), torch.bfloat16, device)
    state = empty_state(1, len(pages), model.target.V, device)
    seat_all(state, 1, CONTEXT, 1, pages)
    for tokens in sizes:
        ids = torch.randint(model.target.V, (1, tokens), device=device)
        dist.broadcast(ids, 0)
        count = torch.tensor([tokens], device=device)
        arguments = (loaded.params, pool, state, ids, count, count == 0, rounds.model)
        call = partial(rounds.step(Chunk(tokens), arguments), *arguments)
        row: dict[str, float] = {"tokens in a pass": tokens, "layers": model.target.layers}
        for way in WAYS:
            with without_buffers(way == "nccl"):
                row |= {f"{way} {name}": value for name, value in in_a_pass(rounds, call, state.length).items()}
        yield row


def in_a_pass(rounds: Rounds, call: Callable[[], Any], length: Tensor) -> dict[str, float]:
    assert rounds.graphs is not None
    replay = rounds.graphs.capture(call)

    def again() -> object:
        length.fill_(CONTEXT)
        return replay()

    seconds = slowest(median(again))
    each = sums(traced(again)[0])
    one = slowest(statistics.median(each))  # the first waits for a rank whose trace begins later
    return {"pass": seconds, "a sum": one, "share": one * len(each) / seconds}


def sums(kernels: Sequence[Kernel]) -> list[float]:
    """Seconds that each sum's kernel adds after all before it ended."""
    ended, each = 0.0, []
    for kernel in kernels:
        if any(piece in kernel.name for piece in SUMS):
            each.append(max(kernel.end - max(kernel.start, ended), 0.0))
        ended = max(ended, kernel.end)
    return each
