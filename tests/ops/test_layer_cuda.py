"""A layer's products on the GPU in bf16: against fp64, memory poisoned before, bit-equal when repeated."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kimi_fx.bench.layer import launches
from kimi_fx.ops import KERNELS
from kimi_fx.ops.norm_route import choose
from kimi_fx.runtime.build import load_kernels
from oracles import layer
from oracles.layer import Case, Draw

pytestmark = pytest.mark.gpu

rows = st.sampled_from([1, 7, 8, 9, 16, 17, 32, 33, 63, 64, 65, 128]) | st.integers(1, 128)
inputs = st.sampled_from([8, 64, 264, 512, 1032, 2048]) | st.integers(1, 300).map(lambda n: 8 * n)
outputs = st.sampled_from([8, 16, 64, 72, 128, 520, 2112]) | st.integers(1, 150).map(lambda n: 8 * n)
seeds = st.integers(0, 2**31)


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    load_kernels(torch.device("cuda"))


def draw(seed: int) -> Draw:
    return Draw(seed, "cuda", torch.bfloat16)


def call(case: Case) -> tuple[Tensor, ...]:
    """The allocator hands freed blocks to the next call."""
    elements = [t.numel() for t in case.expected if t is not None]
    junk = [torch.full((n,), torch.nan, device="cuda") for n in elements for _ in range(3)]
    junk += [torch.full((n // 2 + 1,), torch.nan, device="cuda") for n in elements for _ in range(3)]
    del junk
    found = getattr(KERNELS, case.name)(*case.args)
    return found if isinstance(found, tuple) else (found,)


def check(case: Case) -> None:
    found = call(case)
    for ours, expected in zip(found, case.expected, strict=True):
        if expected is None:
            continue
        error = ((ours.double() - expected).norm() / expected.norm().clamp_min(1e-30)).item()
        many = ours.numel() >= 1024 and case.args[0].shape[-1] >= 128
        most = 5e-3 if many else 2e-2  # few values scatter, and in few inputs roundings of inputs do not cancel
        assert error < most, f"{case.name}: relative error {error:.2e}"  # NaN fails too
    if case.name == "norm_route":
        layer.check_choice(case, found[0], *found[2:])
    assert all(torch.equal(a, b) for a, b in zip(found, call(case), strict=True))
    assert not any(t.any() for t in case.args if isinstance(t, Tensor) and t.dtype == torch.int32), "counters"


@settings(deadline=None, max_examples=120)
@given(T=rows, D=inputs, out=outputs, wide=st.booleans(), seed=seeds)
def test_norm_linear(T: int, D: int, out: int, wide: bool, seed: int) -> None:
    check(layer.norm_linear(draw(seed), T, D, out, wide))


@settings(deadline=None, max_examples=120)
@given(T=rows, D=inputs, out=outputs, residual=st.booleans(), other=st.booleans(), seed=seeds)
def test_linear_add(T: int, D: int, out: int, residual: bool, other: bool, seed: int) -> None:
    check(layer.linear_add(draw(seed), T, D, out, residual, other))


@settings(deadline=None, max_examples=80)
@given(T=rows, D=inputs, inner=outputs, seed=seeds)
def test_norm_gate_up(T: int, D: int, inner: int, seed: int) -> None:
    check(layer.norm_gate_up(draw(seed), T, D, inner))


@settings(deadline=None, max_examples=80)
@given(
    T=rows,
    H=st.integers(1, 9),
    q_lora=st.sampled_from([64, 128, 1536]),
    L=st.sampled_from([64, 128, 512]),
    R=st.sampled_from([8, 64]),
    nope=st.sampled_from([8, 32, 128, 192]),
    seed=seeds,
)
def test_q_up_absorb(T: int, H: int, q_lora: int, L: int, R: int, nope: int, seed: int) -> None:
    check(layer.q_up_absorb(draw(seed), T, H, q_lora, L, R, nope))


@settings(deadline=None, max_examples=80)
@given(T=rows, H=st.integers(1, 9), L=st.sampled_from([64, 512]), value=outputs, D=outputs, seed=seeds)
def test_v_up_o(T: int, H: int, L: int, value: int, D: int, seed: int) -> None:
    check(layer.v_up_o(draw(seed), T, H, L, value, D))


@settings(deadline=None, max_examples=80)
@given(
    T=rows,
    D=inputs,
    E=st.sampled_from([8, 32, 64, 384, 1024]),
    inner=st.sampled_from([8, 64, 256, 512]),
    k=st.sampled_from([1, 4, 8]),
    padding=st.sampled_from([0.0, 0.3]),
    seed=seeds,
)
def test_norm_route(T: int, D: int, E: int, inner: int, k: int, padding: float, seed: int) -> None:
    check(layer.norm_route(draw(seed), T, D, E, inner, k, padding))


@settings(deadline=None, max_examples=40)
@given(T=rows, E=st.sampled_from([8, 32, 96, 104, 384, 1000, 1024]), k=st.integers(1, 32), seed=seeds)
def test_the_lowest_id_wins_ties(T: int, E: int, k: int, seed: int) -> None:
    """Inputs with one value not zero: equal weights give equal logits."""
    k, (_, args, _) = min(k, E), layer.norm_route(draw(seed), T, 64, E, 8, min(k, E), padding=0.2)
    x, squares, counters, norm, router, bias, gate_up, valid, *rest = args
    x.zero_()[:, 0] = 2
    squares.fill_(4 / squares.shape[1])
    router.zero_()[:, 0] = torch.randint(-2, 3, (E,), device="cuda") / 8
    bias = torch.randint(0, 2, (E,), device="cuda") * 4.0
    found = KERNELS.norm_route(x, squares, counters, norm.fill_(1), router, bias, gate_up, valid, *rest)
    logits = found[0].float() @ router.float().T
    expected = choose(logits, bias, valid, k, layer.SCALE)
    assert all(torch.equal(found[2 + i], expected[i]) for i in (0, 2, 3))


def of_a_large_model(T: int, seed: int = 0) -> list[Case]:
    """Kimi K2, one of eight ranks."""
    d = draw(seed)
    return [
        layer.norm_linear(d, T, 7168, 2112, wide=False),
        layer.q_up_absorb(d, T, 8, 1536, 512, 64, 128),
        layer.v_up_o(d, T, 8, 512, 128, 7168),
        layer.norm_route(d, T, 7168, 384, 256, 8),
        layer.linear_add(d, T, 256, 7168, residual=True, other=True),
        layer.norm_gate_up(d, T, 7168, 2304),
        layer.norm_linear(d, T, 7168, 20480, wide=True),
    ]


@pytest.mark.parametrize("T", [1, 8, 16, 17, 32, 64, 65, 128])
def test_sizes_of_a_large_model(T: int) -> None:
    for case in of_a_large_model(T):
        check(case)


@pytest.mark.parametrize("T", [1, 13, 64, 128])
def test_launches(T: int) -> None:
    """One an operator, and one for the norm of many rows."""
    for case in of_a_large_model(T):
        kernels = launches(lambda case=case: getattr(KERNELS, case.name)(*case.args))
        assert len(kernels) == 1 + (T > 16 and "norm" in case.name), f"{case.name}: {kernels}"


@pytest.mark.parametrize("T", [1, 16, 128])
def test_a_captured_graph_follows_its_inputs(T: int) -> None:
    for case in of_a_large_model(T):
        operator, x = getattr(KERNELS, case.name), case.args[0]
        operator(*case.args)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            operator(*case.args)  # alone it would find its inputs ready; twice it must wait
            found = operator(*case.args)
        for factor in (-1.0, 0.5):
            x.mul_(factor)
            graph.replay()
            eager = operator(*case.args)
            pairs = zip(*(y if isinstance(y, tuple) else (y,) for y in (found, eager)), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs)


def test_a_nan_stays_in_its_row() -> None:
    for case in of_a_large_model(20):
        before = call(case)
        case.args[0][3].fill_(torch.nan)
        others = torch.arange(20, device="cuda") != 3
        for a, b in zip(before, call(case), strict=True):
            if a.shape[0] == 20:
                assert torch.equal(a[others], b[others])


def test_many_rows_and_other_dtypes_take_the_reference() -> None:
    """Called directly or not, an operator takes any number of rows."""
    many = layer.norm_linear(draw(0), 200, 512, 64, wide=False)
    check(many)
    check(layer.norm_route(draw(0), 200, 512, 64, 64, 8, padding=0.3))
    assert torch.equal(torch.ops.kimi_fx.norm_linear(*many.args), call(many)[0])
    case = layer.norm_linear(Draw(0, "cuda", torch.float32), 5, 512, 64, wide=True)
    torch.testing.assert_close(call(case)[0].double(), case.expected[0], rtol=1e-3, atol=1e-3)


def test_opcheck() -> None:
    for case in of_a_large_model(5):
        torch.library.opcheck(getattr(torch.ops.kimi_fx, case.name), case.args)
