"""The expert layer against a dense fp64 loop and Hugging Face's; packed weights against plain ones."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Experts

from kimi_fx.ops import marlin_moe
from kimi_fx.ops.marlin import dequantise, marlin_pack, marlin_pack_scales
from kimi_fx.ops.norm_route import counters_of

FLOATS = [torch.float32, torch.bfloat16]


@dataclass
class Experts:
    """One layer's experts both ways: packed INT4, and what it means as [E, in, out]."""

    packed: tuple[Tensor, Tensor, Tensor, Tensor]
    w13: Tensor  # [E, D, 2I] bf16
    w2: Tensor  # [E, I, D] bf16

    def plain(self, dtype: torch.dtype) -> tuple[Tensor, None, Tensor, None]:
        return self.w13.to(dtype), None, self.w2.to(dtype), None


def int4(E: int, N: int, K: int) -> tuple[Tensor, Tensor, Tensor]:
    words = torch.randint(-(2**31), 2**31, (E, N, K // 8)).int()
    scales = (torch.rand(E, N, K // 32) / (4 * K**0.5)).bfloat16()
    return marlin_pack(words), marlin_pack_scales(scales), dequantise(words, scales).mT.contiguous()


def make_experts(E: int, D: int, inner: int) -> Experts:
    w13, s13, plain13 = int4(E, 2 * inner, D)
    w2, s2, plain2 = int4(E, D, inner)
    return Experts((w13, s13, w2, s2), plain13, plain2)


def work_list(ids: Tensor, E: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs by expert and each expert's start, from ids [T, k] with -1 for padding; counters."""
    expert = [e if e >= 0 else E for e in ids.flatten().tolist()]
    order = sorted(range(len(expert)), key=lambda pair: expert[pair])
    starts = [sum(e < limit for e in expert) for limit in range(E + 1)]
    counters = torch.zeros(counters_of(len(ids), E, ids.shape[1]), dtype=torch.int32)
    return torch.tensor(order, dtype=torch.int32), torch.tensor(starts, dtype=torch.int32), counters


def dense(x: Tensor, w13: Tensor, w2: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Every expert on every token in fp64, mixed by a [T, E] matrix of summed weights."""
    mix = torch.zeros(len(x), len(w13), dtype=torch.float64)
    for t, row in enumerate(ids.tolist()):
        for slot, e in enumerate(row):
            if e >= 0:
                mix[t, e] += weights[t, slot].double()
    gate, up = torch.einsum("td,edi->eti", x.double(), w13.double()).chunk(2, dim=-1)
    hidden = gate / (1 + torch.exp(-gate)) * up
    return torch.einsum("te,eti,eid->td", mix, hidden, w2.double())


def relative_error(ours: Tensor, exact: Tensor) -> float:
    return ((ours.double() - exact).norm() / exact.norm().clamp_min(1e-30)).item()


def run(x: Tensor, experts: tuple, ids: Tensor, weights: Tensor) -> Tensor:
    E = len(experts[0])
    return marlin_moe.reference(x, *experts, weights.masked_fill(ids < 0, 0.0), *work_list(ids, E))


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    T=st.integers(1, 12),
    E=st.integers(1, 9),
    k=st.integers(1, 5),
    D=st.integers(1, 40),
    inner=st.integers(1, 24),
    padding=st.booleans(),
)
def test_plain_weights_equal_a_dense_fp64_loop(
    seed: int, T: int, E: int, k: int, D: int, inner: int, padding: bool
) -> None:
    torch.manual_seed(seed)
    x, w13 = torch.randn(T, D), torch.randn(E, D, 2 * inner) / D**0.5
    w2 = torch.randn(E, inner, D) / inner**0.5
    ids, weights = torch.randint(E, (T, k)), torch.rand(T, k)
    if padding:
        ids[torch.rand(T) < 0.5] = -1
    out = run(x, (w13, None, w2, None), ids, weights)
    torch.testing.assert_close(out.double(), dense(x, w13, w2, ids, weights), rtol=1e-4, atol=1e-5)
    assert (out[ids[:, 0] < 0] == 0).all()


@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 2**32 - 1),
    T=st.integers(1, 12),
    E=st.integers(1, 6),
    k=st.integers(1, 4),
    D=st.sampled_from([64, 128, 192]),
    inner=st.sampled_from([32, 64, 96]),
)
def test_packed_weights_equal_their_meaning(seed: int, T: int, E: int, k: int, D: int, inner: int) -> None:
    torch.manual_seed(seed)
    experts = make_experts(E, D, inner)
    ids, weights = torch.randint(-1, E, (T, 1)).expand(T, k), torch.rand(T, k)
    ids = torch.where(ids >= 0, (ids + torch.arange(k)) % E, ids)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
        x = torch.randn(T, D).to(dtype)
        packed = run(x, experts.packed, ids, weights)
        assert packed.dtype == dtype
        assert torch.equal(packed, run(x, experts.plain(dtype), ids, weights))
        assert relative_error(packed, dense(x, experts.w13, experts.w2, ids, weights)) < tolerance


ROUTES = {
    "one token": [[3, 0]],
    "one expert has every token": [[2, 2]] * 7,
    "an expert chosen twice by a token": [[1, 1], [0, 3], [3, 3]],
    "most experts idle": [[5, 0]] * 4,
    "padding between": [[-1, -1], [4, 2], [-1, -1], [2, 5]],
    "padding alone": [[-1, -1], [-1, -1]],
}


@pytest.mark.parametrize("route", ROUTES.values(), ids=ROUTES.keys())
@pytest.mark.parametrize("dtype", FLOATS)
def test_routes(route: list[list[int]], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    experts, ids = make_experts(6, 64, 32), torch.tensor(route)
    x, weights = torch.randn(len(route), 64).to(dtype), torch.rand(len(route), 2)
    exact = dense(x, experts.w13, experts.w2, ids, weights)
    for form in (experts.packed, experts.plain(dtype)):
        out = run(x, form, ids, weights)
        assert relative_error(out, exact) < (1e-5 if dtype == torch.float32 else 1e-2)
        assert (out[ids[:, 0] < 0] == 0).all()


def test_zero_scales_give_zeros() -> None:
    torch.manual_seed(1)
    w13, s13, w2, s2 = make_experts(4, 64, 32).packed
    x, ids, weights = torch.randn(3, 64), torch.randint(4, (3, 2)), torch.rand(3, 2)
    assert (run(x, (w13, torch.zeros_like(s13), w2, s2), ids, weights) == 0).all()
    assert (run(x, (w13, s13, w2, torch.zeros_like(s2)), ids, weights) == 0).all()


def test_a_nan_stays_in_its_token() -> None:
    torch.manual_seed(2)
    experts = make_experts(4, 64, 32).plain(torch.float32)
    x, ids, weights = torch.randn(5, 64), torch.randint(4, (5, 2)), torch.rand(5, 2)
    before = run(x, experts, ids, weights)
    x[3, 7] = torch.nan
    after = run(x, experts, ids, weights)
    assert after[3].isnan().all()
    others = torch.arange(5) != 3
    assert torch.equal(after[others], before[others])


def test_bf16_outputs_are_summed_in_fp32() -> None:
    # every expert gives exactly 1 = (silu(32) / 32); a bf16 sum would stay at 256, whose spacing is 2
    w13 = torch.tensor([[[32.0, 1 / 32]]]).expand(9, 1, 2).bfloat16()
    w2 = torch.ones(9, 1, 1, dtype=torch.bfloat16)
    weights = torch.tensor([[256.0] + [1.0] * 8])
    out = run(torch.ones(1, 1, dtype=torch.bfloat16), (w13, None, w2, None), torch.arange(9)[None], weights)
    assert out.item() == 264.0


def test_equals_hugging_face() -> None:
    torch.manual_seed(3)
    config = DeepseekV3Config(
        n_routed_experts=8, num_experts_per_tok=3, hidden_size=48, moe_intermediate_size=20, hidden_act="silu"
    )
    config._experts_implementation = "eager"
    theirs = DeepseekV3Experts(config)
    torch.nn.init.normal_(theirs.gate_up_proj, std=0.2)
    torch.nn.init.normal_(theirs.down_proj, std=0.2)
    x, weights = torch.randn(11, 48), torch.rand(11, 3)
    ids = torch.rand(11, 8).argsort(1)[:, :3]
    with torch.no_grad():
        expected = theirs(x, ids, weights)
        plain = (theirs.gate_up_proj.mT.contiguous(), None, theirs.down_proj.mT.contiguous(), None)
        torch.testing.assert_close(run(x, plain, ids, weights), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", FLOATS)
def test_operator_is_well_formed(dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    experts, ids = make_experts(5, 64, 32), torch.tensor([[0, 4], [-1, -1], [4, 2]])
    x, weights = torch.randn(3, 64).to(dtype), torch.rand(3, 2).masked_fill(ids < 0, 0.0)
    for form in (experts.packed, experts.plain(dtype)):
        args = (x, *form, weights, *work_list(ids, 5))
        torch.library.opcheck(torch.ops.kimi_fx.marlin_moe, args)
        assert torch.equal(marlin_moe.marlin_moe(*args), marlin_moe.reference(*args))


def test_no_tokens() -> None:
    x, weights = torch.zeros(0, 64), torch.zeros(0, 2)
    w13, w2 = torch.zeros(3, 64, 64), torch.zeros(3, 32, 64)
    ids = torch.zeros(0, 2, dtype=torch.int32)
    out = marlin_moe.marlin_moe(x, w13, None, w2, None, weights, *work_list(ids, 3))
    assert out.shape == (0, 64)
