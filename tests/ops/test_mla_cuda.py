"""The CUDA kernels of tree-verify attention against a dense fp64 softmax.

Pages lie anywhere, rows that hold no committed token are NaN, and memory is poisoned before every call, so that an
element nobody wrote shows. The largest lengths are the longest contexts Kimi K2 takes.
"""

from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kimi_fx.ops.mla_tree_verify import mla_schedule, mla_tree_verify
from kimi_fx.runtime.build import load_kernels

pytestmark = pytest.mark.gpu

SCALE = 0.1352
LENGTHS = [0, 1, 63, 64, 65, 127, 1000, 4095, 4096, 8191, 8192, 20_000]


class Case(NamedTuple):
    q: Tensor
    pool: Tensor
    page_table: Tensor
    length: Tensor
    rows: Tensor
    ancestors: Tensor | None


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    load_kernels(torch.device("cuda"))


def tree(nodes: int, generator: torch.Generator) -> Tensor:
    """[N, N]: node i sees itself and what its parent sees; a tenth are padding, which sees itself only."""
    sees = torch.eye(nodes, dtype=torch.bool)
    for node in range(1, nodes):
        if torch.rand((), generator=generator) < 0.9:
            sees[node] |= sees[int(torch.randint(node, (), generator=generator))]
    return sees


def words(sees: Tensor) -> Tensor:
    """[..., N, 2] i64: bit j % 64 of word j // 64."""
    padded = torch.nn.functional.pad(sees.long(), (0, 128 - sees.shape[-1])).unflatten(-1, (2, 64))
    return (padded << torch.arange(64)).sum(-1)


def case(lengths: list[int], nodes: int, heads: int, causal: bool, seed: int) -> tuple[Case, Tensor]:
    """Random inputs and what each node sees of the nodes, [B, N, N]."""
    generator = torch.Generator().manual_seed(seed)
    on_device = torch.Generator("cuda").manual_seed(seed)
    B, each = len(lengths), max(lengths) // 64 + 2

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=on_device, device="cuda", dtype=torch.bfloat16)

    pool = normal(B * each + 3, 64, 576)
    pages = torch.randperm(B * each + 3, generator=generator)[: B * each].view(B, each)
    held = torch.zeros(B * each + 3, 64, dtype=torch.bool)
    held[pages] = (torch.arange(each * 64) < torch.tensor(lengths)[:, None]).view(B, each, 64)
    pool[~held.cuda()] = torch.nan
    chain = torch.ones(nodes, nodes, dtype=torch.bool).tril().expand(B, -1, -1)
    sees = chain if causal else torch.stack([tree(nodes, generator) for _ in lengths])
    length = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    bits = None if causal else words(sees).cuda()
    q = normal(B, nodes, heads, 576) * 0.4  # a spread of scores like a trained model's
    return Case(q, pool, pages.int().cuda(), length, normal(B, nodes, 576), bits), sees.cuda()


def dense(c: Case, sees: Tensor) -> Tensor:
    """[B, N, H, 512] f64."""
    out = torch.empty(*c.q.shape[:3], 512, dtype=torch.float64, device="cuda")
    for b, length in enumerate(c.length.tolist()):
        keys = torch.cat((c.pool[c.page_table[b].long()].flatten(0, 1)[:length], c.rows[b])).double()
        for node, seen in enumerate(sees[b]):
            scores = SCALE * c.q[b, node].double() @ keys.T
            scores[:, length:].masked_fill_(~seen, -torch.inf)
            out[b, node] = scores.softmax(-1) @ keys[:, :512]
    return out


def attend(c: Case) -> Tensor:
    """Over poisoned memory: the allocator hands the freed blocks to the call."""
    schedule = mla_schedule(c.length, c.q.shape[1], c.q.shape[2])
    junk = [torch.full((n,), torch.nan, device="cuda") for n in (c.q[..., :256].numel(), 264 * 64 * 512, 264 * 64)]
    del junk
    return mla_tree_verify(*c, schedule, 512, SCALE)


def assert_near(ours: Tensor, exact: Tensor) -> None:
    error = ((ours.double() - exact).norm() / exact.norm()).item()
    assert error < 5e-3, f"relative error {error:.2e}"  # NaN fails too


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.sampled_from(LENGTHS) | st.integers(0, 3000), min_size=1, max_size=6),
    nodes=st.sampled_from([1, 2, 4, 8, 16, 17, 32, 33, 64, 65, 128]) | st.integers(1, 128),
    heads=st.sampled_from([1, 2, 3, 4, 8, 16, 64]),
    causal=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_any_shape(lengths: list[int], nodes: int, heads: int, causal: bool, seed: int) -> None:
    c, sees = case(lengths, nodes, heads, causal, seed)
    ours = attend(c)
    assert_near(ours, dense(c, sees))
    assert torch.equal(ours, attend(c))  # bit for bit


@pytest.mark.parametrize(
    ("lengths", "nodes", "heads", "causal"),
    [
        ([262_144], 1, 8, False),
        ([262_144], 8, 8, False),
        ([262_144, 0], 64, 8, False),
        ([100], 1, 128, False),
        ([99 * i for i in range(64)], 1, 8, False),
        ([41 * i for i in range(64)], 64, 8, False),
        ([5500], 1024, 8, True),
        ([65], 4096, 8, True),
    ],
)
def test_the_extremes(lengths: list[int], nodes: int, heads: int, causal: bool) -> None:
    c, sees = case(lengths, nodes, heads, causal, seed=nodes)
    assert_near(attend(c), dense(c, sees))


@pytest.mark.parametrize(("nodes", "heads"), [(1, 8), (4, 8), (16, 8)])
def test_a_captured_graph_follows_lengths_and_trees(nodes: int, heads: int) -> None:
    held, _ = case([3000, 5000], nodes, heads, False, seed=1)
    held = held._replace(pool=held.pool.nan_to_num(0.5))  # lengths grow and shrink over the same pages
    attend(held)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = mla_tree_verify(*held, mla_schedule(held.length, nodes, heads), 512, SCALE)
    for seed, lengths in enumerate(([0, 0], [5000, 1], [64, 4999], [2500, 2500])):
        other, sees = case(lengths, nodes, heads, False, seed)
        for name in ("q", "length", "rows", "ancestors"):
            getattr(held, name).copy_(getattr(other, name))
        graph.replay()
        assert_near(out, dense(held, sees))
        assert torch.equal(out, attend(held))


def test_other_dtypes_take_the_reference() -> None:
    c, sees = case([70, 5], 8, 2, False, seed=0)
    whole = Case(*(x.double() if x is not None and x.is_floating_point() else x for x in c))
    torch.testing.assert_close(attend(whole), dense(c, sees), rtol=0, atol=1e-5)  # its softmax is fp32


def test_opcheck() -> None:
    c, _ = case([65, 0], 4, 8, False, seed=0)
    torch.library.opcheck(mla_schedule, (c.length, 4, 8))
    torch.library.opcheck(mla_tree_verify, (*c, mla_schedule(c.length, 4, 8), 512, SCALE))
