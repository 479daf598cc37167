"""The sum over ranks whose devices store into each other's memory: one kernel, the same bits on every rank.

A small sum is all latency, and a library's call is several times that of a store over NVLink. Each rank has a buffer
that the others have mapped; both are made once, before anything is captured, and are found by the name of the ranks'
process group, as torch finds its communicators. Without them, or without the kernel of csrc/round, the group sums.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import _functional_collectives  # noqa: F401 (tracing needs what it registers)

from .library import kernels

HEADER = 2**16  # bytes of a buffer before its slots; csrc/round/peer_sum.h says what is there
TRAFFIC = 8 * 2**20  # bytes that a sum may store into all ranks together; larger ones are the group's


@dataclass(frozen=True)
class Peers:
    """What a rank needs of the others."""

    rank: int
    buffers: tuple[Tensor, ...]  # of every rank, as this device addresses them, zero at first
    addresses: Tensor  # [ranks] i64, on the device


JOINED: dict[str, Peers] = {}  # by process group, while it lives


def capacity(ranks: int) -> int:
    """Bytes of the largest array that is summed so."""
    return TRAFFIC // ranks // 16 * 16


def buffer_size(ranks: int) -> int:
    """Bytes of a rank's buffer: calls alternate between two sets of slots."""
    return HEADER + 2 * ranks * capacity(ranks)


def reference(
    x: Tensor,  # any shape, f32 or bf16
    group: str,
) -> Tensor:
    """The sum over the ranks of the group."""
    c10d = torch.ops._c10d_functional
    return c10d.wait_tensor(c10d.all_reduce(x.contiguous(), "sum", group))


peer_sum = torch.library.custom_op("kimi_fx::peer_sum", reference, mutates_args=())


@peer_sum.register_fake
def _(x: Tensor, group: str) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@peer_sum.register_kernel("cuda")
def _(x: Tensor, group: str) -> Tensor:
    loaded, peers = kernels(), JOINED.get(group)
    if loaded is None or peers is None or x.nbytes % 16:
        return reference(x, group)
    return loaded.peer_sum(x.contiguous(), peers.addresses, peers.rank, capacity(len(peers.buffers)))
