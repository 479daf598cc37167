"""Matrix products of few rows: of a normed input, onto a residual, and the first half of an MLP.

The layers of target and drafter are made of them where nothing more special fits. Weights are plain matrices [out, in],
RMSNorm as the models have it. On CUDA in bf16 with at most 128 rows and widths in multiples of 8 the kernels of
csrc/layer do it: the sums stay in fp32 to the end, and of a normed input x * weight is rounded, 1 / rms joins the sums.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .library import kernels
from .shapes import Given, agree

ROWS = 128  # at most, in the kernels


def few_rows(
    x: Tensor,  # [T, …]
    *weights: Tensor,
) -> Any:
    """The library where its products take these, else None: then the reference does it."""
    fits = 0 < x.shape[0] <= ROWS and all(t.dtype == torch.bfloat16 for t in (x, *weights))
    return kernels() if fits and all(n % 8 == 0 for w in weights for n in w.shape[-2:]) else None


def by_rows(op: Callable[..., Any], reference: Callable[..., Any]) -> Callable[..., Any]:
    """The operator for as many rows as its kernel takes. For more the reference in its place: a compiler sees through
    it and fuses what lies around its products, where of an operator it sees a call."""

    def call(x: Tensor, *rest: Any) -> Any:
        return (op if x.shape[0] <= ROWS else reference)(x, *rest)

    return call


def check_norm_linear(x: Tensor, norm: Tensor, weight: Tensor) -> None:
    agree("norm_linear", {"x": (x, "T D", None), "norm": (norm, "D", x.dtype), "weight": (weight, "out D", x.dtype)})


def check_linear_add(x: Tensor, weight: Tensor, residual: Tensor | None, other: Tensor | None) -> None:
    added: dict[str, Given] = {"residual": (residual, "T out", x.dtype), "other": (other, "T out", x.dtype)}
    agree("linear_add", {"x": (x, "T in", None), "weight": (weight, "out in", x.dtype), **added})


def check_norm_gate_up(x: Tensor, norm: Tensor, gate_up: Tensor) -> None:
    wanted: dict[str, Given] = {"norm": (norm, "D", x.dtype), "gate_up": (gate_up, "2 I D", x.dtype)}
    agree("norm_gate_up", {"x": (x, "T D", None), **wanted})


def norm_linear_reference(
    x: Tensor,  # [T, D]
    norm: Tensor,  # [D]
    weight: Tensor,  # [out, D]
    eps: float,
    wide: bool,
) -> Tensor:
    """rms_norm(x) @ weight.T, [T, out] as x or, `wide`, f32."""
    check_norm_linear(x, norm, weight)
    y = F.linear(F.rms_norm(x, norm.shape, norm, eps), weight)
    return y.float() if wide else y


def linear_add_reference(
    x: Tensor,  # [T, in]
    weight: Tensor,  # [out, in]
    residual: Tensor | None,  # [T, out]
    other: Tensor | None,  # [T, out]
) -> Tensor:
    """residual + other + x @ weight.T, [T, out]."""
    check_linear_add(x, weight, residual, other)
    y = F.linear(x, weight)
    y = y if other is None else y + other
    return y if residual is None else y + residual


def norm_gate_up_reference(
    x: Tensor,  # [T, D]
    norm: Tensor,  # [D]
    gate_up: Tensor,  # [2, I, D]
    eps: float,
) -> Tensor:
    """silu(gate) * up of rms_norm(x), [T, I]."""
    check_norm_gate_up(x, norm, gate_up)
    gate, up = F.linear(F.rms_norm(x, norm.shape, norm, eps), gate_up.flatten(0, 1)).chunk(2, -1)
    return F.silu(gate) * up


norm_linear = torch.library.custom_op("kimi_fx::norm_linear", norm_linear_reference, mutates_args=())
linear_add = torch.library.custom_op("kimi_fx::linear_add", linear_add_reference, mutates_args=())
norm_gate_up = torch.library.custom_op("kimi_fx::norm_gate_up", norm_gate_up_reference, mutates_args=())


@norm_linear.register_fake
def _(x: Tensor, norm: Tensor, weight: Tensor, eps: float, wide: bool) -> Tensor:
    check_norm_linear(x, norm, weight)
    return x.new_empty(x.shape[0], weight.shape[0], dtype=torch.float32 if wide else x.dtype)


@linear_add.register_fake
def _(x: Tensor, weight: Tensor, residual: Tensor | None, other: Tensor | None) -> Tensor:
    check_linear_add(x, weight, residual, other)
    return x.new_empty(x.shape[0], weight.shape[0])


@norm_gate_up.register_fake
def _(x: Tensor, norm: Tensor, gate_up: Tensor, eps: float) -> Tensor:
    check_norm_gate_up(x, norm, gate_up)
    return x.new_empty(x.shape[0], gate_up.shape[1])


@norm_linear.register_kernel("cuda")
def _(x: Tensor, norm: Tensor, weight: Tensor, eps: float, wide: bool) -> Tensor:
    check_norm_linear(x, norm, weight)
    loaded = few_rows(x, norm, weight)
    if loaded is None:
        return norm_linear_reference(x, norm, weight, eps, wide)
    return loaded.norm_linear(x.contiguous(), norm, weight, eps, wide)


@linear_add.register_kernel("cuda")
def _(x: Tensor, weight: Tensor, residual: Tensor | None, other: Tensor | None) -> Tensor:
    check_linear_add(x, weight, residual, other)
    loaded = few_rows(x, weight)
    if loaded is None:
        return linear_add_reference(x, weight, residual, other)
    whole = (a if a is None else a.contiguous() for a in (residual, other))
    return loaded.linear_add(x.contiguous(), weight, *whole)


@norm_gate_up.register_kernel("cuda")
def _(x: Tensor, norm: Tensor, gate_up: Tensor, eps: float) -> Tensor:
    check_norm_gate_up(x, norm, gate_up)
    loaded = few_rows(x, norm, gate_up)
    if loaded is None:
        return norm_gate_up_reference(x, norm, gate_up, eps)
    return loaded.norm_gate_up(x.contiguous(), norm, gate_up, eps)
