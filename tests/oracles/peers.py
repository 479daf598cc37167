"""Two ranks that sum arrays of many sizes through each other's memory: `python peers.py` is the first.

Every rank knows what all ranks have, so each checks its own sums, in fp64; digests show that all have the same bits.
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from kimi_fx.compose import load_config
from kimi_fx.graphs.axis import Axis, psum
from kimi_fx.ops.peer_sum import JOINED, capacity
from kimi_fx.runtime.agree import digest
from kimi_fx.runtime.build import load_kernels
from kimi_fx.runtime.load import rank_device, settled
from kimi_fx.runtime.ranks import GROUP, Place, Ranks

SIZES = [8, 1024, 7168, 8 * 7168, 65 * 7168, 256 * 8 * 128 + 8]  # elements; the last of another block's second piece


def held(rank: int, size: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(1000 * seed + rank)).to(dtype)


def take_part(ranks: Ranks) -> None:
    rank, size = ranks.place.rank, ranks.place.size
    device = rank_device("cuda", ranks.place)
    load_kernels(device)
    ranks.join(device)
    assert len(JOINED[GROUP].buffers) == size
    axis = Axis(GROUP, size, near=True)
    sizes = [*SIZES, capacity(size) // 4]
    cases = [(n, seed, dtype) for dtype in (torch.bfloat16, torch.float32) for seed in range(12) for n in sizes]
    own = [held(rank, *case).to(device) for case in cases]
    junk = [torch.full_like(x, torch.nan) for x in own]  # where the results will lie
    del junk
    found = [psum(x, axis) for x in own]  # one behind the other, of all sizes
    check(cases, found, size)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        captured = [psum(x, axis) for x in own]
    for _ in range(20):
        for y in captured:
            y.fill_(torch.nan)
        graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(found, captured, strict=True))
    large = torch.ones(capacity(size) // 2 + 8, device=device, dtype=torch.bfloat16)
    assert torch.equal(psum(large, axis), large * size)  # the group's
    torch.cuda.synchronize()
    del graph


def check(cases: list[tuple[int, int, torch.dtype]], found: list[Tensor], ranks: int) -> None:
    for case, y in zip(cases, found, strict=True):
        exact = sum(held(rank, *case).double() for rank in range(ranks))
        assert isinstance(exact, Tensor) and y.dtype == case[-1]
        if ranks == 2:
            assert torch.equal(y.cpu(), exact.to(y.dtype)), case  # of two numbers rounded once
        else:
            torch.testing.assert_close(y.cpu().double(), exact, rtol=2**-8, atol=1e-2)
    bits = torch.tensor([digest(y) for y in found])
    every = [torch.zeros_like(bits) for _ in range(ranks)]
    dist.all_gather(every, bits)
    assert all(torch.equal(bits, other) for other in every)


def main(place: dict[str, Any]) -> int:
    ranks = Ranks(Place(**place))
    take_part(ranks)
    while ranks.follow() is not None:
        pass
    ranks.close()
    return 0


if __name__ == "__main__":
    place = Place(0, int(sys.argv[1]), 0)
    config = settled(load_config([f"mesh.tp={sys.argv[1]}", "mesh.timeout=60"]), place)
    assert config.mesh.near, "no NVLink"
    first = Ranks(place, config, module="peers")
    take_part(first)
    first.close()
