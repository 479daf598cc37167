"""How fast the ranks exchange data: sums of a round's sizes, and blocks from each rank to the next, timed one by one.

It stands for no kernel: calls are launched from the host, not from a CUDA graph. The ranks' watch ends all of them if
something hangs, as peers behind PCIe may, with the switch to try.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import P2POp, batch_isend_irecv

from ..config import Config
from .load import pick_dtype, rank_device
from .ranks import Place, Ranks, follow_once

MODULE = "kimi_fx.runtime.links"  # whose `main` a started rank runs
FEWEST, MOST, ENOUGH = 10, 100, 0.2  # calls at least and at most, seconds of calls that are enough
BLOCK = 64 * 2**20  # bytes from rank to rank on CUDA
ADVICE = (
    ". If it hangs between GPUs, set NCCL_P2P_DISABLE=1 and try again; NCCL_DEBUG=INFO shows what NCCL chose. If it is "
    "only slow, raise mesh.timeout"
)


def measure(place: Place, config: Config, sizes: Sequence[int], width: int) -> list[str]:
    """As rank 0: a line for each number of tokens of that width, and one for blocks. Raises RuntimeError, or ends all
    ranks with the cause, where something fails or takes more than mesh.timeout."""
    ranks = Ranks(place, config, module=MODULE)
    try:
        lines = list(take_part(ranks, (list(sizes), width)))
        ranks.watch.done()
    except BaseException as error:
        ranks.fail(error)
        raise
    ranks.close()
    return lines


def follow(place: Place) -> int:
    """As another rank: 0, or 1 where any rank has failed."""
    return follow_once(place, take_part)


def main(place: dict[str, Any]) -> int:
    """Of a process that rank 0 started."""
    return follow(Place(**place))


def take_part(ranks: Ranks, asked: tuple[list[int], int] | None = None) -> Iterator[str]:
    """The same exchanges on all ranks; a line each."""
    config, place = ranks.config, ranks.place
    device = rank_device(config.device, place)
    ranks.watch.advice = ADVICE
    ranks.meet("ready")  # what a process takes to start is not counted
    ranks.watch.begin()
    ranks.join(device)
    if place.rank == 0:
        ranks.send([asked])
    else:
        (asked,) = ranks.follow() or [None]
    assert asked is not None
    sizes, width = asked
    for tokens in sizes:
        ranks.watch.begin()
        x = torch.zeros(tokens, width, dtype=pick_dtype(config.dtype, device), device=device)
        seconds = timed(partial(dist.all_reduce, x), device)
        yield f"sum of {tokens:>4} tokens, {x.nbytes:>11,} B: {1e6 * seconds:>9.1f} us"
    ranks.watch.begin()
    there = torch.zeros(BLOCK if device.type == "cuda" else BLOCK // 64, dtype=torch.uint8, device=device)
    here = torch.empty_like(there)
    after, before = ((place.rank + step) % place.size for step in (1, -1))

    def around() -> None:
        for work in batch_isend_irecv([P2POp(dist.isend, there, after), P2POp(dist.irecv, here, before)]):
            work.wait()

    seconds = timed(around, device)
    yield f"rank to rank, {there.nbytes:>11,} B: {there.nbytes / seconds / 1e9:>9.2f} GB/s each way, all at once"


def timed(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of a call, the median on the slowest rank, once it is warm; the shorter it is the more calls."""
    spent, one = 0.0, 0.0
    while spent < ENOUGH:
        one = typical(call, FEWEST, device)
        spent += FEWEST * one
    return typical(call, min(max(FEWEST, int(ENOUGH / one)), MOST), device)


def typical(call: Callable[[], object], calls: int, device: torch.device) -> float:
    """The median of so many; the same number on all ranks."""
    seconds = []
    for _ in range(calls):
        dist.all_reduce(torch.zeros(1))  # all begin together
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    slowest = torch.tensor(median(seconds), device=device, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)
