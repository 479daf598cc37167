"""The products of a layer in fp64, each written out from its formula, and random arguments for them."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

EPS, SCALE = 1e-5, 2.827


class Case(NamedTuple):
    """An operator's name and arguments, and what it should return; None: not checked here."""

    name: str
    args: tuple[Any, ...]
    expected: tuple[Tensor | None, ...]


class Draw:
    """Random tensors of one dtype and device; weights keep their products near 1."""

    def __init__(self, seed: int, device: str, dtype: torch.dtype) -> None:
        self.generator = torch.Generator(device).manual_seed(seed)
        self.dtype = dtype

    def values(self, *size: int, std: float = 1.0) -> Tensor:
        drawn = torch.randn(size, generator=self.generator, device=self.generator.device)
        return (drawn * std).to(self.dtype)

    def weights(self, *size: int) -> Tensor:
        return self.values(*size, std=size[-1] ** -0.5)


def counters(like: Tensor) -> Tensor:
    return torch.zeros(4 + 128 * 1056, dtype=torch.int32, device=like.device)


def rms(x: Tensor, weight: Tensor) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def swish(gate: Tensor, up: Tensor) -> Tensor:
    return gate / (1 + (-gate).exp()) * up


def times(x: Tensor, weight: Tensor) -> Tensor:
    return x.double() @ weight.double().T


def norm_linear(draw: Draw, T: int, D: int, out: int, wide: bool) -> Case:
    x, norm, weight = draw.values(T, D, std=3.0), draw.values(D), draw.weights(out, D)
    return Case("norm_linear", (x, norm, weight, EPS, wide), (times(rms(x, norm), weight),))


def linear_add(draw: Draw, T: int, D: int, out: int, residual: bool, other: bool) -> Case:
    x, weight = draw.values(T, D), draw.weights(out, D)
    added = [draw.values(T, out) if wanted else None for wanted in (residual, other)]
    y = times(x, weight) + sum(a.double() for a in added if a is not None)
    return Case("linear_add", (x, weight, *added), (y,))


def norm_gate_up(draw: Draw, T: int, D: int, inner: int) -> Case:
    x, norm, weight = draw.values(T, D), draw.values(D), draw.weights(2, inner, D)
    h = rms(x, norm)
    return Case("norm_gate_up", (x, norm, weight, EPS), (swish(times(h, weight[0]), times(h, weight[1])),))


def q_up_absorb(draw: Draw, T: int, H: int, q_lora: int, L: int, R: int, nope: int) -> Case:
    qkv, q_norm, kv_norm = draw.values(T, q_lora + L + R, std=2.0), draw.values(q_lora), draw.values(L)
    q_b, w_uk = draw.weights(H, nope + R, q_lora), draw.weights(H, nope, L)
    angle = torch.rand(T, R // 2, generator=draw.generator, device=qkv.device) * 7
    cos, sin = (
        torch.stack((a, b), -1).flatten(1) for a, b in ((angle.cos(), angle.cos()), (-angle.sin(), angle.sin()))
    )
    turn = torch.polar(torch.ones_like(angle).double(), angle.double())

    def rotated(x: Tensor) -> Tensor:  # [T, n, R]
        pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * turn.unsqueeze(1)).flatten(-2)

    q = torch.einsum("tk,hok->tho", rms(qkv[:, :q_lora], q_norm), q_b.double())
    absorbed = torch.einsum("thn,hnl->thl", q[..., :nope], w_uk.double())
    key = rotated(qkv[:, None, q_lora + L :])[:, 0]
    rows = torch.cat((rms(qkv[:, q_lora : q_lora + L], kv_norm), key), -1)
    expected = torch.cat((absorbed, rotated(q[..., nope:])), -1), rows
    return Case("q_up_absorb", (qkv, q_norm, kv_norm, q_b, w_uk, cos, sin, counters(qkv), EPS), expected)


def v_up_o(draw: Draw, T: int, H: int, L: int, value: int, D: int) -> Case:
    o, w_uv = draw.values(T, H, L), draw.weights(H, value, L)
    weight, residual = draw.weights(D, H * value), draw.values(T, D)
    v = torch.einsum("thl,hvl->thv", o.double(), w_uv.double()).flatten(1)
    x = residual.double() + times(v, weight)
    squares = torch.stack([piece.square().sum(1) for piece in x.split(32, 1)], 1)
    return Case("v_up_o", (o, w_uv, weight, residual, counters(o)), (x, squares))


def norm_route(draw: Draw, T: int, D: int, E: int, inner: int, k: int, padding: float = 0.0) -> Case:
    x, norm = draw.values(T, D, std=2.0), draw.values(D)
    router, gate_up = draw.weights(E, D), draw.weights(2, inner, D)
    device = x.device
    bias = torch.randn(E, generator=draw.generator, device=device) * 0.1
    valid = torch.rand(T, generator=draw.generator, device=device) >= padding
    squares = torch.stack([piece.float().square().sum(1) for piece in x.split(32, 1)], 1)
    h = rms(x, norm)
    shared = swish(times(h, gate_up[0]), times(h, gate_up[1]))
    args = (x, squares, counters(x), norm, router, bias, gate_up, valid, k, SCALE, EPS)
    return Case("norm_route", args, (h, shared, None, None, None, None))


def check_choice(case: Case, h: Tensor, ids: Tensor, weights: Tensor, order: Tensor, offsets: Tensor) -> None:
    """The router's choice among fp64 scores of the very h that was returned, but for gaps that fp32 cannot see."""
    _, _, _, _, router, bias, _, valid, k, scale, _ = case.args
    score = times(h, router).sigmoid()
    biased = score + bias.double()
    best = biased.sort(1, descending=True).indices[:, :k]
    chosen = ids.long().clamp_min(0)
    gap = (biased.gather(1, chosen) - biased.gather(1, best)).abs()[valid]
    assert (gap[(chosen != best)[valid]] < 1e-6).all(), gap.max()
    share = score.gather(1, chosen)
    share = scale * share / share.sum(1, keepdim=True)
    torch.testing.assert_close(weights[valid].double(), share[valid], rtol=1e-5, atol=1e-12)
    assert (ids[~valid] == -1).all() and (weights[~valid] == 0).all()
    expert, expected = torch.where(ids < 0, len(bias), ids).flatten().sort(stable=True)
    assert torch.equal(order, expected.int())
    starts = torch.bincount(expert, minlength=len(bias) + 1).cumsum(0)
    assert torch.equal(offsets[1:], starts[:-1].int()) and offsets[0] == 0
