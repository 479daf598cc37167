"""What ranks decide about each other's memory, where there is none; and how the benchmark counts a sum."""

import os
from dataclasses import replace

import pytest

from kimi_fx.bench.sums import run, sums
from kimi_fx.bench.trace import Kernel
from kimi_fx.compose import load_config
from kimi_fx.config import see_only
from kimi_fx.ops.peer_sum import HEADER, buffer_size, capacity
from kimi_fx.runtime import load as module
from kimi_fx.runtime.load import far_apart, settled
from kimi_fx.runtime.ranks import Place

TWO = Place(0, 2, 0)


def test_a_cpu_has_no_near_ranks() -> None:
    found = settled(load_config(["device=cpu", "mesh.tp=2"]), TWO)
    assert found.mesh.near is False and found.device == "cpu"
    with pytest.raises(ValueError, match="mesh.near=true, but the ranks are on a CPU: leave it out"):
        settled(load_config(["device=cpu", "mesh.tp=2", "mesh.near=true"]), TWO)
    with pytest.raises(ValueError, match="mesh.near=true, but there is one rank: leave it out"):
        settled(load_config(["mesh.near=true"]), Place(0, 1, 0))


def test_what_keeps_devices_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    config, cuda = load_config(["mesh.tp=2"]), module.torch.device("cuda")
    monkeypatch.setattr(module, "first_gap", lambda _: None)
    assert far_apart(config, TWO, cuda) is None
    assert far_apart(replace(config, ops="reference"), TWO, cuda) == "ops=reference avoids the kernel for it"
    launched = replace(TWO, port=29500)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert far_apart(config, launched, cuda) == "the ranks are on several machines"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert far_apart(config, launched, cuda) is None
    monkeypatch.setattr(module, "first_gap", lambda _: (0, 1))
    assert far_apart(config, TWO, cuda) == "no NVLink joins devices 0 and 1"


@pytest.mark.parametrize(
    ("visible", "index", "left"), [(None, 3, "3"), ("4,6", 1, "6"), ("GPU-a,GPU-b", 0, "GPU-a"), ("4", 1, "")]
)
def test_a_rank_sees_its_own_device(
    visible: str | None, index: int, left: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible or "")
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    see_only(index)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == left


@pytest.mark.parametrize("ranks", [2, 3, 8, 64])
def test_buffers_hold_two_calls_of_all_ranks(ranks: int) -> None:
    assert capacity(ranks) % 16 == 0 and ranks * capacity(ranks) <= 8 * 2**20
    assert buffer_size(ranks) == HEADER + 2 * ranks * capacity(ranks)
    assert capacity(8) >= 64 * 7168 * 2  # a tree of 64 nodes over eight ranks


def test_a_sum_costs_what_it_adds() -> None:
    """One that starts early waits for the kernel before it, which is not its own time."""
    kernels = [
        Kernel("gemm", 0.0, 10.0), Kernel("void peer_sum_kernel<>", 8.0, 14.0), Kernel("norm", 13.0, 20.0),
        Kernel("ncclDevKernel_AllReduce", 21.0, 30.0), Kernel("peer_sum_kernel", 25.0, 29.0),
    ]  # fmt: skip
    assert sums(kernels) == [4.0, 9.0, 0.0]


def test_the_benchmark_needs_linked_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="as many CUDA devices, found mesh.tp=2 and 1 of them"):
        run(["mesh.tp=2"])
    with pytest.raises(ValueError, match="wanted|tokens"):
        run(["tokens=[0]"])
