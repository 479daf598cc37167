"""A right call of every operator, of a few small requests, in what the kernels take: bf16, and widths that fit."""

from typing import Any

import torch
from torch import Tensor

from kimi_fx.ops import KERNELS
from oracles import layer
from oracles.layer import Draw

bf16, i32, i64 = torch.bfloat16, torch.int32, torch.int64
T, D, E, K = 5, 48, 6, 2
B, N, H, L, R, V, KV, HEAD, PAGES = 2, 4, 8, 512, 64, 11, 2, 64, 3


def numbers(*shape: int, dtype: torch.dtype = i64) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def products() -> dict[str, tuple[Any, ...]]:
    draw = Draw(0, "cpu", bf16)
    cases = [
        layer.norm_linear(draw, T, D, 24, wide=True),
        layer.linear_add(draw, T, D, 24, residual=True, other=True),
        layer.norm_gate_up(draw, T, D, 16),
        layer.q_up_absorb(draw, T, 3, 40, 32, 8, 16),
        layer.v_up_o(draw, T, 3, 32, 16, 136),
        layer.norm_route(draw, T, 136, 16, 16, 3),
    ]
    return {case.name: case.args for case in cases}


def experts(packed: bool) -> tuple[Any, ...]:
    route = (torch.rand(T, K), numbers(T * K, dtype=i32), numbers(E + 1, dtype=i32), numbers(400, dtype=i32))
    x = numbers(T, 64, dtype=bf16)
    if not packed:
        return (x, numbers(E, 64, 128, dtype=bf16), None, numbers(E, 64, 64, dtype=bf16), None, *route)
    s13, s2 = (numbers(E, 2, n, dtype=bf16) for n in (128, 64))
    return (x, numbers(E, 4, 256, dtype=i32), s13, numbers(E, 4, 128, dtype=i32), s2, *route)


def attention(nodes: int = N) -> tuple[Any, ...]:
    length = numbers(B, dtype=i32)
    q, pool, rows = (numbers(*n, L + R, dtype=bf16) for n in ((B, nodes, H), (7, 64), (B, nodes)))
    schedule = KERNELS.mla_schedule(length, nodes, H)
    return (q, pool, numbers(B, PAGES, dtype=i32), length, rows, numbers(B, nodes, 2), schedule, L, 0.1)


def tree(batch: int = B) -> tuple[Any, ...]:
    return (torch.zeros(batch, 3, V), *(numbers(batch) for _ in range(3)), 8, 4)


def block() -> tuple[Any, ...]:
    q, pool, own = (numbers(*n, HEAD, dtype=bf16) for n in ((B, N, H), (7, 64, KV), (B, N, KV)))
    table, length = numbers(B, PAGES, dtype=i32), numbers(B, dtype=i32)
    return (q, pool, pool, table, length, own, own, 0.1, 0, True)


def sampling(batch: int = B) -> tuple[Any, ...]:
    one, many = torch.zeros(batch), numbers(batch)
    wide = (torch.zeros(batch, V), numbers(batch, V, dtype=i32), numbers(batch, V, dtype=torch.bool))
    ends = (numbers(batch, dtype=i32), numbers(batch, 8), many, many)
    first = (torch.zeros(batch, N, V), numbers(batch, N), numbers(batch, N), many, numbers(batch, dtype=torch.bool))
    return (*first, 3, one, many, one, one, one, one, one, *wide, numbers(batch, 2), many, *ends)


def write() -> tuple[Any, ...]:
    dtypes = {"r": bf16, "i": i32, "l": i64, "b": torch.bool}

    def of(kind: str, *shape: int) -> Tensor:
        return numbers(*shape, dtype=dtypes[kind])

    pool, draft = of("r", 2, 7, 64, L + R), of("r", 3, 7, 64, KV, HEAD)
    state = (
        of("l", B),
        of("i", B),
        of("b", B),
        of("i", B, V),
        of("b", B, V),
        of("l", B),
        of("l", B),
        of("i", B, PAGES),
    )
    own = of("r", 3, B, 3, KV, HEAD)
    walk = (of("l", B, 3), of("l", B), of("l", B, 3), of("l", B), of("l", B), of("b", B))
    return (pool, draft, draft.clone(), *state, of("r", 2, B, N, L + R), own, own, *walk)


def calls() -> dict[str, tuple[Any, ...]]:
    return products() | {
        "marlin_moe": experts(packed=False),
        "mla_schedule": (numbers(B, dtype=i32), N, H),
        "mla_tree_verify": attention(),
        "build_tree": tree(),
        "draft_attention": block(),
        "sample_and_walk": sampling(),
        "commit": write(),
    }
