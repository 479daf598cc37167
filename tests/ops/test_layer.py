"""A layer's products, the reference in fp32, against the formulas in fp64."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_fx.ops import KERNELS, REFERENCE
from oracles import layer
from oracles.layer import Case, Draw

CASES: dict[str, Callable[[Draw, int], Case]] = {
    "norm_linear": lambda draw, T: layer.norm_linear(draw, T, 48, 24, wide=False),
    "lm_head": lambda draw, T: layer.norm_linear(draw, T, 48, 40, wide=True),
    "linear_add": lambda draw, T: layer.linear_add(draw, T, 48, 24, residual=True, other=True),
    "linear": lambda draw, T: layer.linear_add(draw, T, 48, 24, residual=False, other=False),
    "norm_gate_up": lambda draw, T: layer.norm_gate_up(draw, T, 48, 16),
    "q_up_absorb": lambda draw, T: layer.q_up_absorb(draw, T, 3, 40, 32, 8, 16),
    "v_up_o": lambda draw, T: layer.v_up_o(draw, T, 3, 32, 16, 136),
    "norm_route": lambda draw, T: layer.norm_route(draw, T, 136, 12, 16, 3, padding=0.3),
}


@pytest.mark.parametrize("name", CASES)
@settings(deadline=None, max_examples=8)
@given(T=st.integers(1, 9), seed=st.integers(0, 2**31))
def test_against_the_formula(name: str, T: int, seed: int) -> None:
    case = CASES[name](Draw(seed, "cpu", torch.float32), T)
    found = getattr(REFERENCE, case.name)(*case.args)
    found = found if isinstance(found, tuple) else (found,)
    for ours, expected in zip(found, case.expected, strict=True):
        if expected is not None:
            torch.testing.assert_close(ours.double(), expected, rtol=1e-4, atol=1e-4)
    if case.name == "norm_route":
        layer.check_choice(case, found[0], *found[2:])


@pytest.mark.parametrize("name", CASES)
def test_opcheck(name: str) -> None:
    case = CASES[name](Draw(0, "cpu", torch.float32), 5)
    torch.library.opcheck(getattr(torch.ops.kimi_fx, case.name), case.args)


@pytest.mark.parametrize("T", [128, 129])
@pytest.mark.parametrize("name", CASES)
def test_a_compiler_sees_through_many_rows(name: str, T: int) -> None:
    """What the kernels take is one call of the operator; more rows are the reference's own steps."""
    case, called = CASES[name](Draw(0, "cpu", torch.float32), T), []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        called.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    torch.compiler.reset()
    found = torch.compile(getattr(KERNELS, case.name), fullgraph=True, backend=backend)(*case.args)
    torch.testing.assert_close(found, getattr(REFERENCE, case.name)(*case.args), rtol=0, atol=0)
    assert sum("kimi_fx" in name for name in called) == (T <= 128)
