"""The CUDA kernels of the drafter's attention against a dense fp64 softmax.

Pages lie anywhere, rows that hold no committed token are NaN, and memory is poisoned before every call.
"""

from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kimi_fx.ops.draft_attention import draft_attention
from kimi_fx.runtime.build import load_kernels

pytestmark = pytest.mark.gpu

SCALE = 0.15
LENGTHS = [0, 1, 63, 64, 65, 200, 1000, 4096]


class Case(NamedTuple):
    q: Tensor
    pool_k: Tensor
    pool_v: Tensor
    page_table: Tensor
    length: Tensor
    k: Tensor
    v: Tensor


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    load_kernels(torch.device("cuda"))


def case(lengths: list[int], slots: int, heads: tuple[int, int], head: int, seed: int) -> Case:
    generator = torch.Generator().manual_seed(seed)
    on_device = torch.Generator("cuda").manual_seed(seed)
    B, (H, KV), each = len(lengths), heads, max(lengths) // 64 + 2

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=on_device, device="cuda", dtype=torch.bfloat16)

    pools = normal(2, B * each + 3, 64, KV, head)
    pages = torch.randperm(B * each + 3, generator=generator)[: B * each].view(B, each)
    held = torch.zeros(B * each + 3, 64, dtype=torch.bool)
    held[pages] = (torch.arange(each * 64) < torch.tensor(lengths)[:, None]).view(B, each, 64)
    pools[:, ~held.cuda()] = torch.nan
    k, v = normal(B, slots, 2, KV, head).unbind(2)
    length = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    return Case(normal(B, slots, H, head), pools[0].clone(), pools[1].clone(), pages.int().cuda(), length, k, v)


def dense(c: Case, window: int, causal: bool) -> Tensor:
    """[B, S, H, head] f64."""
    out = torch.empty(c.q.shape, dtype=torch.float64, device="cuda")
    B, S, H, _ = c.q.shape
    for b, length in enumerate(c.length.tolist()):
        pages = c.page_table[b].long()
        keys = torch.cat((c.pool_k[pages].flatten(0, 1)[:length], c.k[b])).double()
        values = torch.cat((c.pool_v[pages].flatten(0, 1)[:length], c.v[b])).double()
        ahead = torch.arange(length + S, device="cuda") - length - torch.arange(S, device="cuda")[:, None]
        hidden = (ahead.abs() >= (window or length + S + 1)) | (causal & (ahead > 0))
        for head in range(H):
            kv = head // (H // c.k.shape[2])
            scores = (SCALE * c.q[b, :, head].double() @ keys[:, kv].T).masked_fill(hidden, -torch.inf)
            out[b, :, head] = scores.softmax(-1) @ values[:, kv]
    return out


def attend(c: Case, window: int, causal: bool) -> Tensor:
    junk = [torch.full((n,), torch.nan, device="cuda") for n in (1 << 22, 1 << 16, c.q.numel() // 2)]
    del junk
    return draft_attention(*c, SCALE, window, causal)


def assert_near(c: Case, window: int, causal: bool) -> None:
    ours, exact = attend(c, window, causal), dense(c, window, causal)
    error = ((ours.double() - exact).norm() / exact.norm()).item()
    assert error < 5e-3, f"relative error {error:.2e}"  # NaN fails too
    assert torch.equal(ours, attend(c, window, causal))


@settings(deadline=None, max_examples=80)
@given(
    lengths=st.lists(st.sampled_from(LENGTHS) | st.integers(0, 2000), min_size=1, max_size=4),
    slots=st.sampled_from([1, 7, 8, 16, 17, 64]),
    heads=st.sampled_from([(8, 1), (64, 8), (4, 2), (4, 4), (6, 2), (1, 1)]),
    head=st.sampled_from([64, 128]),
    window=st.sampled_from([0, 1, 2, 8, 63, 64, 65, 500, 10_000]),
    causal=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_any_shape(
    lengths: list[int], slots: int, heads: tuple[int, int], head: int, window: int, causal: bool, seed: int
) -> None:
    assert_near(case(lengths, slots, heads, head, seed), window, causal)


@pytest.mark.parametrize(
    ("lengths", "slots", "heads"),
    [([262_144], 8, (8, 1)), ([32_000, 3], 16, (64, 8)), ([97 * i for i in range(64)], 8, (8, 1))],
)
def test_the_extremes(lengths: list[int], slots: int, heads: tuple[int, int]) -> None:
    assert_near(case(lengths, slots, heads, 128, 0), 0, False)


@pytest.mark.parametrize(("window", "causal"), [(0, False), (0, True), (65, False), (700, True)])
@pytest.mark.parametrize(
    ("slots", "heads"), [(1, (1, 1)), (63, (1, 1)), (64, (1, 1)), (13, (5, 1)), (64, (2, 1)), (17, (16, 2))]
)
def test_many_tiles_a_split(slots: int, heads: tuple[int, int], window: int, causal: bool) -> None:
    """More requests than splits can be, so that tiles are many; lengths around the ends of pages."""
    assert_near(case([max(64 * (i % 33) + i % 3 - 1, 0) for i in range(70)], slots, heads, 128, 3), window, causal)


def test_what_a_window_hides_may_be_anything() -> None:
    """Pages wholly before the window are not read."""
    c = case([200], 8, (8, 1), 128, 1)
    expected = attend(c, 48, True)
    hidden = c.page_table[0, :2].long()  # rows 0..127; slot 0, at 200, sees 153 and on
    c.pool_k[hidden] = c.pool_v[hidden] = torch.nan
    assert torch.equal(attend(c, 48, True), expected)


def test_a_captured_graph_follows_lengths() -> None:
    held = case([3000, 5000], 8, (8, 1), 128, 1)
    held = held._replace(pool_k=held.pool_k.nan_to_num(0.5), pool_v=held.pool_v.nan_to_num(0.5))
    draft_attention(*held, SCALE, 0, False)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = draft_attention(*held, SCALE, 0, False)
    for lengths in ([0, 0], [5000, 1], [64, 4999], [2500, 2500]):
        held.length.copy_(torch.tensor(lengths))
        graph.replay()
        assert torch.equal(out, draft_attention(*held, SCALE, 0, False))


def test_opcheck() -> None:
    torch.library.opcheck(draft_attention, (*case([65, 0], 4, (8, 1), 128, 2), SCALE, 48, True))
