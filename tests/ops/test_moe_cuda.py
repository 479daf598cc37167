"""The CUDA kernels of the experts, against fp64.

Experts are drawn as compressed-tensors words, packed on the device, and meant as their dequantised bf16 matrices.
Memory is poisoned before every call, so that an element nobody wrote shows.
"""

from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kimi_fx.ops.marlin import (
    dequantise,
    marlin_pack,
    marlin_pack_scales,
    marlin_unpack,
    marlin_unpack_scales,
)
from kimi_fx.ops.marlin_moe import marlin_moe
from kimi_fx.ops.norm_route import choose, counters_of
from kimi_fx.runtime.build import load_kernels

pytestmark = pytest.mark.gpu

SCALE = 2.827
seeds = st.integers(0, 2**31)


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    load_kernels(torch.device("cuda"))


def poison(*sizes: int) -> None:
    """The allocator hands freed blocks to the next call."""
    junk = [torch.full((max(n, 1),), torch.nan, device="cuda") for n in sizes for _ in range(2)]
    del junk


def work_list(ids: Tensor, E: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs by expert and each expert's start, from ids [T, k] with -1 for padding; counters."""
    expert, order = torch.where(ids < 0, E, ids).flatten().sort(stable=True)
    starts = torch.bincount(expert, minlength=E + 1).cumsum(0)[:E]
    zeros = torch.zeros(counters_of(len(ids), E, ids.shape[1]), dtype=torch.int32, device="cuda")
    return order.int(), torch.nn.functional.pad(starts, (1, 0)).int(), zeros


class Experts(NamedTuple):
    """Both ways: packed, and what it means."""

    packed: tuple[Tensor, Tensor, Tensor, Tensor]
    w13: Tensor  # [E, 2I, D] bf16
    w2: Tensor  # [E, D, I] bf16


def int4(E: int, N: int, K: int, generator: torch.Generator, words: int | None) -> tuple[Tensor, Tensor, Tensor]:
    drawn = torch.randint(-(2**31), 2**31, (E, N, K // 8), generator=generator, device="cuda")
    drawn = (drawn if words is None else drawn * 0 + words).int()
    scales = (torch.rand(E, N, K // 32, generator=generator, device="cuda") / (2.5 * K**0.5)).bfloat16()
    return marlin_pack(drawn), marlin_pack_scales(scales), dequantise(drawn, scales)


def make_experts(E: int, D: int, inner: int, seed: int = 0, words: int | None = None) -> Experts:
    generator = torch.Generator("cuda").manual_seed(seed)
    w13, s13, plain13 = int4(E, 2 * inner, D, generator, words)
    w2, s2, plain2 = int4(E, D, inner, generator, words)
    return Experts((w13, s13, w2, s2), plain13, plain2)


def inputs(T: int, D: int, k: int, seed: int) -> tuple[Tensor, Tensor]:
    """x and weights."""
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(T, D, generator=generator, device="cuda").bfloat16()
    return x, torch.rand(T, k, generator=generator, device="cuda") + 0.05


def draw_ids(T: int, E: int, k: int, spread: int, seed: int) -> Tensor:
    """k different experts a token, of the first `spread` and k."""
    generator = torch.Generator("cuda").manual_seed(seed)
    among = min(E, max(k, spread))
    return torch.rand(T, among, generator=generator, device="cuda").argsort(1)[:, :k].int()


def run(x: Tensor, experts: Experts, ids: Tensor, weights: Tensor) -> Tensor:
    (T, D), k = x.shape, ids.shape[1]
    lists = work_list(ids, len(experts.w2))
    poison(T * D // 2, T * D, T * k * D // 2, T * k * D, T * k * experts.w2.shape[2] // 2)
    out = marlin_moe(x, *experts.packed, weights.masked_fill(ids < 0, 0.0), *lists)
    assert not lists[2].any()
    return out


def exact(x: Tensor, experts: Experts, ids: Tensor, weights: Tensor) -> Tensor:
    """[T, D] f64, expert by expert."""
    out = torch.zeros(x.shape, dtype=torch.float64, device="cuda")
    for e in ids.unique().tolist():
        if e < 0:
            continue
        tokens, slots = (ids == e).nonzero(as_tuple=True)
        gate, up = (x[tokens].double() @ experts.w13[e].double().T).chunk(2, dim=1)
        rows = gate / (1 + torch.exp(-gate)) * up @ experts.w2[e].double().T
        out.index_add_(0, tokens, weights[tokens, slots, None].double() * rows)
    return out


def assert_near(ours: Tensor, expected: Tensor) -> None:
    assert ours.dtype == torch.bfloat16
    error = ((ours.double() - expected).norm() / expected.norm().clamp_min(1e-30)).item()
    assert error < 1e-2, f"relative error {error:.2e}"  # NaN fails too


def check_moe(x: Tensor, experts: Experts, ids: Tensor, weights: Tensor) -> None:
    padding = ids[:, 0] < 0
    x[padding] = torch.nan  # nobody reads it
    out = run(x, experts, ids, weights)
    assert (out[padding] == 0).all()
    assert_near(out[~padding], exact(x, experts, ids, weights)[~padding])
    assert torch.equal(out, run(x, experts, ids, weights))  # bit for bit


@settings(deadline=None, max_examples=80)
@given(
    T=st.sampled_from([1, 2, 8, 9, 16, 17, 32, 64, 65, 128, 300]) | st.integers(1, 140),
    E=st.sampled_from([1, 3, 8, 32, 60]),
    k=st.integers(1, 8),
    D=st.sampled_from([64, 128, 192, 256, 448, 1024]),
    inner=st.sampled_from([32, 64, 96, 128, 192, 256, 512]),
    spread=st.sampled_from([1, 4, 60]),
    padding=st.sampled_from([0.0, 0.4]),
    seed=seeds,
)
def test_any_shape(T: int, E: int, k: int, D: int, inner: int, spread: int, padding: float, seed: int) -> None:
    k = min(k, E)
    ids = draw_ids(T, E, k, spread, seed)
    ids[torch.rand(T, generator=torch.Generator().manual_seed(seed)).cuda() < padding] = -1
    x, weights = inputs(T, D, k, seed)
    check_moe(x, make_experts(E, D, inner, seed), ids, weights)


@pytest.mark.parametrize(
    ("T", "E", "k", "D", "inner"),
    [
        (1, 384, 8, 7168, 256),
        (16, 384, 8, 7168, 256),
        (64, 48, 8, 7168, 256),
        (16, 16, 8, 7168, 2048),
        (40, 12, 4, 7168, 256),
        (2048, 16, 8, 1024, 256),
        (4096, 8, 2, 256, 64),
    ],
)
def test_sizes_of_a_large_model(T: int, E: int, k: int, D: int, inner: int) -> None:
    x, weights = inputs(T, D, k, seed=T)
    check_moe(x, make_experts(E, D, inner), draw_ids(T, E, k, E, seed=T), weights)


ROUTES = {
    "one expert has every token": [[2, 2]] * 70,
    "an expert chosen twice by a token": [[1, 1], [0, 3], [3, 3]],
    "the last expert alone": [[5, 5]],
    "padding between": [[-1, -1], [4, 2], [-1, -1], [2, 5]],
    "padding alone": [[-1, -1]] * 9,
}


@pytest.mark.parametrize("route", ROUTES.values(), ids=ROUTES.keys())
def test_uneven_routes(route: list[list[int]]) -> None:
    x, weights = inputs(len(route), 512, 2, seed=0)
    check_moe(x, make_experts(6, 512, 128), torch.tensor(route, dtype=torch.int32, device="cuda"), weights)


@pytest.mark.parametrize("words", [0, -1, -2004318072], ids=["-8", "7", "0"])
def test_every_code_the_same(words: int) -> None:
    x, weights = inputs(9, 512, 2, seed=0)
    experts, ids = make_experts(6, 512, 128, words=words), draw_ids(9, 6, 2, 6, seed=0)
    if experts.w2.any():
        check_moe(x, experts, ids, weights)
    else:
        assert run(x, experts, ids, weights).abs().max() < 1e-5  # codes may be biased in the products


@pytest.mark.parametrize("T", [9, 100, 400])
@pytest.mark.parametrize("size", [2.0**-20, 2.0**20])
def test_activations_of_other_sizes(T: int, size: float) -> None:
    """Small enough and large enough that a scale applied to them would show."""
    x, weights = inputs(T, 512, 2, seed=0)
    check_moe(x * size, make_experts(24, 512, 128), draw_ids(T, 24, 2, 24, seed=0), weights)


@pytest.mark.parametrize("which", [1, 3])
def test_zero_scales_give_zeros(which: int) -> None:
    x, weights = inputs(9, 512, 2, seed=0)
    experts = make_experts(6, 512, 128)
    packed = [torch.zeros_like(w) if i == which else w for i, w in enumerate(experts.packed)]
    out = run(x, experts._replace(packed=tuple(packed)), draw_ids(9, 6, 2, 6, seed=0), weights)
    assert (out == 0).all()


def test_a_nan_stays_in_its_token() -> None:
    x, weights = inputs(20, 512, 2, seed=0)
    experts, ids = make_experts(6, 512, 128), draw_ids(20, 6, 2, 6, seed=0)
    before = run(x, experts, ids, weights)
    x[3, 7] = torch.nan
    after = run(x, experts, ids, weights)
    others = torch.arange(20, device="cuda") != 3
    assert after[3].isnan().all() and torch.equal(after[others], before[others])


@pytest.mark.parametrize("T", [1, 16, 64, 200])
def test_a_captured_graph_follows_the_routing(T: int) -> None:
    """Router and experts together, replayed with other hidden states, logits and padding."""
    E, k, D = 32, 4, 512
    experts, bias = make_experts(E, D, 128), torch.zeros(E, device="cuda")
    x, logits = inputs(T, D, k, seed=0)[0], torch.zeros(T, E, device="cuda")
    valid = torch.ones(T, dtype=torch.bool, device="cuda")
    counters = torch.zeros(counters_of(T, E, k), dtype=torch.int32, device="cuda")  # one for all calls

    def layer() -> tuple[Tensor, Tensor, Tensor]:
        ids, weights, order, offsets = choose(logits, bias, valid, k, SCALE)
        return ids, weights, marlin_moe(x, *experts.packed, weights, order, offsets, counters)

    layer()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids, weights, out = layer()
    for seed, narrow in enumerate((0.0, 0.0, 8.0, 0.0)):
        generator = torch.Generator("cuda").manual_seed(seed)
        x.copy_(torch.randn(T, D, generator=generator, device="cuda"))
        logits.copy_(torch.randn(T, E, generator=generator, device="cuda"))
        logits[:, :k] += narrow  # all tokens to the same experts
        valid.copy_(torch.rand(T, generator=generator, device="cuda") < 0.8)
        poison(T * D, T * k * D)
        graph.replay()
        expected = exact(x, experts, ids, weights)
        assert (out[~valid] == 0).all() and (ids[~valid] == -1).all()
        assert_near(out[valid], expected[valid])
        assert torch.equal(out, layer()[2])


def test_other_dtypes_take_the_reference() -> None:
    x, weights = inputs(5, 128, 2, seed=0)
    experts, ids = make_experts(6, 128, 64), draw_ids(5, 6, 2, 6, seed=0)
    lists = work_list(ids, 6)
    out = marlin_moe(x.float(), *experts.packed, weights, *lists)
    torch.testing.assert_close(out.double(), exact(x, experts, ids, weights), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("E", "N", "K"), [(1, 64, 32), (3, 192, 96), (2, 512, 7168)])
def test_packing_on_the_device_is_bit_equal(E: int, N: int, K: int) -> None:
    words = torch.randint(-(2**31), 2**31, (E, N, K // 8)).int()
    scales = torch.randn(E, N, K // 32).bfloat16()
    packed, packed_scales = marlin_pack(words.cuda()), marlin_pack_scales(scales.cuda())
    assert torch.equal(packed.cpu(), marlin_pack(words))
    assert torch.equal(packed_scales.cpu(), marlin_pack_scales(scales))
    assert torch.equal(marlin_unpack(packed).cpu(), words)
    assert torch.equal(marlin_unpack_scales(packed_scales).cpu(), scales)
    assert torch.equal(dequantise(words.cuda(), scales.cuda()).cpu(), dequantise(words, scales))


def test_opcheck() -> None:
    x, weights = inputs(5, 128, 2, seed=0)
    ids = draw_ids(5, 6, 2, 6, seed=0)
    torch.library.opcheck(marlin_moe, (x, *make_experts(6, 128, 64).packed, weights, *work_list(ids, 6)))
