"""The CUDA write of a round against the reference on the CPU, bit for bit; what is not to be written is NaN."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kimi_fx.ops import commit as module
from kimi_fx.runtime.build import load_kernels

pytestmark = pytest.mark.gpu

PAGES, V = 3, 4096
MUTATED = ("pool", "draft_k", "draft_v", "anchor", "length", "active", "counts", "seen", "remaining", "min_remaining")


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    load_kernels(torch.device("cuda"))


def case(
    batch: int,
    nodes: int,
    depth: int,
    rng: random.Random,
    dtype: torch.dtype = torch.bfloat16,
    layers: tuple[int, int] = (3, 2),
    heads: tuple[int, int] = (2, 64),
    row: int = 576,
) -> dict[str, Tensor]:
    """Arguments by name on the CPU: requests anywhere in their pages, some idle, some ending."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    total = batch * PAGES + 2
    running = [rng.random() < 0.7 for _ in range(batch)]
    kept = [rng.randint(0, depth) if r else 0 for r in running]
    start = [rng.choice([0, 1, 62, 63, 64, 100, PAGES * 64 - depth]) for _ in range(batch)]
    path = [rng.sample(range(nodes), n) + [0] * (depth - n) for n in kept]
    tokens = [[rng.randrange(7) for _ in range(n)] + [-1] * (depth - n) for n in kept]

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).to(dtype)

    return {
        "pool": torch.full((layers[0], total, 64, row), torch.nan, dtype=dtype),
        "draft_k": torch.full((layers[1], total, 64, *heads), torch.nan, dtype=dtype),
        "draft_v": torch.full((layers[1], total, 64, *heads), torch.nan, dtype=dtype),
        "anchor": torch.tensor([rng.randrange(V) for _ in range(batch)]),
        "length": torch.tensor(start, dtype=torch.int32),
        "active": torch.tensor(running),
        "counts": torch.randint(0, 3, (batch, V), generator=generator, dtype=torch.int32),
        "seen": torch.rand(batch, V, generator=generator) < 0.5,
        "remaining": torch.tensor([n + rng.randrange(3) for n in kept]),
        "min_remaining": torch.tensor([rng.randrange(6) for _ in range(batch)]),
        "page_table": torch.tensor(rng.sample(range(total), batch * PAGES), dtype=torch.int32).view(batch, PAGES),
        "rows": normal(layers[0], batch, nodes, row),
        "k": normal(layers[1], batch, depth, *heads),
        "v": normal(layers[1], batch, depth, *heads),
        "path": torch.tensor(path).view(batch, depth),
        "kept": torch.tensor(kept),
        "tokens": torch.tensor(tokens).view(batch, depth),
        "count": torch.tensor(kept),
        "finish": torch.tensor([rng.choice([0, 0, 1, 2]) for _ in range(batch)]),
        "running": torch.tensor(running),
    }


def assert_same(a: dict[str, Tensor]) -> None:
    """The operator on the device does what the reference does on the CPU, and nothing else."""
    ours = {name: x.cuda() for name, x in a.items()}
    ours["v"] = torch.stack((ours["v"], ours["v"]), 3)[:, :, :, 1]  # rows apart, as one product leaves them
    module.reference(**a)
    module.commit(*ours.values())
    for name, x in a.items():
        bits = {2: torch.int16, 4: torch.int32}[x.itemsize] if x.is_floating_point() else x.dtype
        assert torch.equal(ours[name].cpu().contiguous().view(bits), x.contiguous().view(bits)), name


@settings(deadline=None, max_examples=60)
@given(
    batch=st.integers(1, 5),
    nodes=st.sampled_from([1, 8, 16, 64, 128]),
    depth=st.integers(1, 16),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    heads=st.sampled_from([(1, 128), (8, 128), (2, 64), (1, 8)]),
    rng=st.randoms(use_true_random=False),
)
def test_equals_the_reference(
    batch: int, nodes: int, depth: int, dtype: torch.dtype, heads: tuple[int, int], rng: random.Random
) -> None:
    assert_same(case(batch, nodes, min(depth, nodes), rng, dtype, heads=heads))


def test_a_round_of_the_largest_target() -> None:
    assert_same(case(2, 64, 8, random.Random(0), layers=(61, 6), heads=(1, 128)))


def test_a_prompt_chunk() -> None:
    """What enters the pool is not what was emitted: 150 rows, one token."""
    a = case(1, 150, 150, random.Random(1))
    a["kept"][:], a["path"][:], a["length"][:] = 150, torch.arange(150), 30
    a["tokens"], a["count"] = torch.tensor([[5]]), torch.tensor([1])
    assert_same(a)


def test_without_a_drafter() -> None:
    a = case(2, 4, 3, random.Random(2), heads=(1, 1))
    assert_same(a | {name: a[name][:0] for name in ("draft_k", "draft_v", "k", "v")})


def test_no_request_and_no_row_write_nothing() -> None:
    a = case(2, 4, 3, random.Random(6))
    wide = ("pool", "draft_k", "draft_v")
    assert_same(
        {name: x if name in wide else x[:, :0] if name in ("rows", "k", "v") else x[:0] for name, x in a.items()}
    )
    for name in ("k", "v", "path"):
        a[name] = a[name][:, :, :0] if name != "path" else a[name][:, :0]
    a["kept"][:] = 0
    assert_same(a)


@pytest.mark.parametrize("name", ["length", "seen", "page_table", "kept", "k", "rows"])
def test_shapes_that_disagree_are_refused(name: str) -> None:
    a = {key: x.cuda() for key, x in case(2, 4, 3, random.Random(7)).items()}
    dim = 1 if name in ("k", "rows") else 0
    a[name] = torch.cat((a[name], a[name]), dim)
    with pytest.raises(ValueError, match=rf"takes {name} of shape .* found \[.*4.*\]"):
        module.commit(*a.values())


def test_rows_of_odd_sizes_take_the_reference() -> None:
    assert_same(case(2, 4, 3, random.Random(3), row=5, heads=(1, 3)))


def test_a_captured_graph_advances_the_state() -> None:
    a = {name: x.cuda() for name, x in case(2, 16, 4, random.Random(4)).items()}
    a["kept"][:], a["count"][:] = 4, 4
    a["tokens"][:], a["length"][:] = 3, 10
    module.commit(*a.values())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        module.commit(*a.values())
    counts = a["counts"][:, 3].clone()
    for _ in range(5):
        graph.replay()
    assert a["length"].tolist() == [34, 34] and torch.equal(a["counts"][:, 3], counts + 20)


def test_opcheck() -> None:
    torch.library.opcheck(module.commit, tuple(x.cuda() for x in case(3, 8, 5, random.Random(5)).values()))
