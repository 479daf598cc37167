"""A round over an axis as one graph: its collectives, the same graph on every rank, and none on a single rank."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from kimi_fx.compose import load_config
from kimi_fx.graphs.state import Shape, empty_pool, empty_state
from kimi_fx.graphs.step import ddtree_step
from kimi_fx.ops import KERNELS
from kimi_fx.runtime.load import load, prepare
from oracles.write_checkpoint import drafter_config, target_config, write_drafter, write_target


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    sizes = {"num_hidden_layers": 2, "first_k_dense_replace": 1, "n_routed_experts": 4, "num_experts_per_tok": 2}
    write_target(folder / "target", target_config(**sizes))
    taps = {"dflash_config": {"target_layer_ids": [1, 0], "mask_token_id": 316}, "num_target_layers": 2}
    write_drafter(folder / "drafter", drafter_config(**taps), folder / "target")
    return folder


def traced(folder: Path, ranks: int, near: bool = False) -> tuple[str, Counter[str]]:
    """The code of a round, and how often it calls each collective."""
    config = load_config(
        [f"target={folder / 'target'}", f"drafter={folder / 'drafter'}", "device=cpu", "dtype=float32"]
        + [f"mesh.tp={ranks}"]
    )
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",)) if ranks > 1 else None
    loaded = load(config, prepare(config), progress=False, mesh=mesh)
    axis = replace(loaded.model.axis, near=near) if loaded.model.axis else None
    model = replace(loaded.model, ops=KERNELS, axis=axis)
    pool, state = empty_pool(model, 3, loaded.dtype, loaded.device), empty_state(2, 2, 320, loaded.device)
    graphs: list[Any] = []

    def keep(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(ddtree_step, backend=keep, fullgraph=True)(loaded.params, pool, state, Shape(2, 8, 6, 7), model)
    (graph,) = graphs
    called = [str(getattr(node.target, "__name__", node.target)) for node in graph.graph.nodes]
    names = ("all_reduce", "all_gather_into_tensor", "all_to_all_single", "peer_sum")
    return graph.code, Counter(name for call in called for name in names if name in call)


def test_collectives_of_a_round(folder: Path) -> None:
    codes = []
    for rank in (0, 1):  # of ranks whose collectives move nothing
        dist.init_process_group("fake", rank=rank, world_size=2, store=FakeStore())
        code, counts = traced(folder, 2)
        dist.destroy_process_group()
        target, drafter = 1 + 2 * 2, 1 + 2 * 2 + 1  # the embedding, two a layer; the drafter's `fc`
        assert counts == {"all_reduce": target + drafter, "all_to_all_single": 1, "all_gather_into_tensor": 2}
        codes.append(code)
    assert codes[0] == codes[1]


def test_sums_through_the_devices_memory(folder: Path) -> None:
    """All of them, as they are small."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    _, counts = traced(folder, 2, near=True)
    dist.destroy_process_group()
    assert counts == {"peer_sum": 11, "all_to_all_single": 1, "all_gather_into_tensor": 2}


def test_a_single_rank_has_none(folder: Path) -> None:
    assert not traced(folder, 1)[1]
