"""What an operator cannot take it refuses in a sentence, eagerly and in a trace; no requests give empty results."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kimi_fx.ops import KERNELS
from oracles import layer
from oracles.layer import Draw

f32, i32, i64 = torch.float32, torch.int32, torch.int64
T, D, E, K = 5, 48, 6, 2
B, N, H, L, R, V, KV, HEAD, PAGES = 2, 4, 4, 24, 8, 11, 2, 16, 3


def numbers(*shape: int, dtype: torch.dtype = i64) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def products() -> dict[str, tuple[Any, ...]]:
    draw = Draw(0, "cpu", f32)
    cases = [
        layer.norm_linear(draw, T, D, 24, wide=True),
        layer.linear_add(draw, T, D, 24, residual=True, other=True),
        layer.norm_gate_up(draw, T, D, 16),
        layer.q_up_absorb(draw, T, 3, 40, 32, R, 16),
        layer.v_up_o(draw, T, 3, 32, 16, 136),
        layer.norm_route(draw, T, 136, 12, 16, 3),
    ]
    return {case.name: case.args for case in cases}


def experts(packed: bool) -> tuple[Any, ...]:
    route = (torch.rand(T, K), numbers(T * K, dtype=i32), numbers(E + 1, dtype=i32), numbers(400, dtype=i32))
    x = torch.zeros(T, 64)
    if not packed:
        return (x, torch.zeros(E, 64, 64), None, torch.zeros(E, 32, 64), None, *route)
    s13, s2 = (torch.zeros(E, n, 64, dtype=torch.bfloat16) for n in (2, 1))
    return (x, numbers(E, 4, 128, dtype=i32), s13, numbers(E, 2, 128, dtype=i32), s2, *route)


def attention(nodes: int = N) -> tuple[Any, ...]:
    length = numbers(B, dtype=i32)
    q, pool, rows = torch.zeros(B, nodes, H, L + R), torch.zeros(7, 64, L + R), torch.zeros(B, nodes, L + R)
    schedule = KERNELS.mla_schedule(length, nodes, H)
    return (q, pool, numbers(B, PAGES, dtype=i32), length, rows, numbers(B, nodes, 2), schedule, L, 0.1)


def tree(batch: int = B) -> tuple[Any, ...]:
    return (torch.zeros(batch, 3, V), *(numbers(batch) for _ in range(3)), 8, 4)


def block() -> tuple[Any, ...]:
    pool, own = torch.zeros(7, 64, KV, HEAD), torch.zeros(B, N, KV, HEAD)
    table, length = numbers(B, PAGES, dtype=i32), numbers(B, dtype=i32)
    return (torch.zeros(B, N, H, HEAD), pool, pool, table, length, own, own, 0.1, 0, True)


def sampling(batch: int = B) -> tuple[Any, ...]:
    one, many = torch.zeros(batch), numbers(batch)
    wide = (torch.zeros(batch, V), numbers(batch, V, dtype=i32), numbers(batch, V, dtype=torch.bool))
    ends = (numbers(batch, dtype=i32), numbers(batch, 8), many, many)
    first = (torch.zeros(batch, N, V), numbers(batch, N), numbers(batch, N), many, numbers(batch, dtype=torch.bool))
    return (*first, 3, one, many, one, one, one, one, one, *wide, numbers(batch, 2), many, *ends)


def write() -> tuple[Any, ...]:
    dtypes = {"i": i32, "l": i64, "b": torch.bool}

    def of(kind: str, *shape: int) -> Tensor:
        return numbers(*shape, dtype=dtypes[kind])

    pool, draft = torch.zeros(2, 7, 64, L + R), torch.zeros(3, 7, 64, KV, HEAD)
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
    own = torch.zeros(3, B, 3, KV, HEAD)
    walk = (of("l", B, 3), of("l", B), of("l", B, 3), of("l", B), of("l", B), of("b", B))
    return (pool, draft, draft.clone(), *state, torch.zeros(2, B, N, L + R), own, own, *walk)


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


def short(x: Tensor) -> Tensor:
    return x[:-1]


def narrow(x: Tensor) -> Tensor:
    return x[..., :-1]


def deeper(x: Tensor) -> Tensor:
    return x.unsqueeze(0)


def other_dtype(x: Tensor) -> Tensor:
    return x.to(i32 if x.dtype == i64 else torch.float64)


Change = Callable[[Any], Any]
BAD: list[tuple[str, int, Change, str]] = [  # operator, place of the argument, what is done to it, what is said
    ("norm_linear", 0, deeper, "x"),
    ("norm_linear", 1, narrow, "norm"),
    ("norm_linear", 2, narrow, "weight"),
    ("norm_linear", 2, other_dtype, "weight"),
    ("linear_add", 1, narrow, "weight"),
    ("linear_add", 2, lambda x: x[:1], "residual"),
    ("linear_add", 2, other_dtype, "residual"),
    ("linear_add", 3, lambda x: x[:, :1], "other"),
    ("norm_gate_up", 0, deeper, "x"),
    ("norm_gate_up", 2, short, "gate_up"),
    ("norm_gate_up", 2, lambda x: x.flatten(0, 1), "gate_up"),
    ("q_up_absorb", 0, narrow, "qkv"),
    ("q_up_absorb", 3, narrow, "q_b"),
    ("q_up_absorb", 4, short, "w_uk|q_b"),
    ("q_up_absorb", 5, narrow, "sin"),
    ("q_up_absorb", 6, short, "sin"),
    ("q_up_absorb", 6, other_dtype, "sin"),
    ("q_up_absorb", 7, lambda x: x[:3], "4 counters or more, found 3"),
    ("q_up_absorb", 7, other_dtype, "counters"),
    ("v_up_o", 1, narrow, "w_uv"),
    ("v_up_o", 2, narrow, "weight"),
    ("v_up_o", 3, lambda x: x[:1], "residual"),
    ("v_up_o", 3, other_dtype, "residual"),
    ("v_up_o", 4, lambda x: x[:3], "4 counters or more, found 3"),
    ("norm_route", 1, short, "squares"),
    ("norm_route", 1, lambda x: x[:, 0], "squares"),
    ("norm_route", 2, lambda x: x[:111], "112 counters or more, found 111"),
    ("norm_route", 4, narrow, "router"),
    ("norm_route", 5, short, "bias"),
    ("norm_route", 6, short, "gate_up"),
    ("norm_route", 7, short, "valid"),
    ("norm_route", 8, lambda k: 13, "1 to 12 experts a token, found 13"),
    ("marlin_moe", 0, narrow, "w2"),
    ("marlin_moe", 1, narrow, "w13"),
    ("marlin_moe", 5, short, "weights|order"),
    ("marlin_moe", 6, short, "order"),
    ("marlin_moe", 7, short, "offsets"),
    ("marlin_moe", 8, lambda zeros: zeros[:3], "counters or more, found 3"),
    ("mla_tree_verify", 0, deeper, "q"),
    ("mla_tree_verify", 2, lambda x: x[:, 0], "page_table"),
    ("mla_tree_verify", 6, short, "schedule"),
    ("mla_tree_verify", 7, lambda latent: 33, "1 to 32 latent columns, found 33"),
    ("mla_schedule", 0, deeper, "length"),
    ("mla_schedule", 0, lambda x: x[0], "length"),
    ("mla_schedule", 0, lambda x: x.long(), "length"),
    ("build_tree", 0, deeper, "logits"),
    ("build_tree", 1, short, "anchor"),
    ("build_tree", 2, other_dtype, "budget"),
    ("build_tree", 4, lambda nodes: 0, "1 to 128 nodes, found 0"),
    ("build_tree", 4, lambda nodes: 129, "1 to 128 nodes, found 129"),
    ("build_tree", 5, lambda width: 0, "a max_width of 1 or more, found 0"),
    ("draft_attention", 0, lambda q: q[:, :, :3], "3 and 2"),
    ("draft_attention", 1, lambda x: x[:, :32], "pool_k"),
    ("draft_attention", 4, short, "length"),
    ("draft_attention", 4, other_dtype, "length"),
    ("draft_attention", 6, narrow, "v"),
    ("draft_attention", 8, lambda window: -1, "a window of 0 or more, found -1"),
    ("sample_and_walk", 1, narrow, "token"),
    ("sample_and_walk", 2, short, "parent"),
    ("sample_and_walk", 5, lambda rows: 0, "one or more rows, nodes and tokens, found 0, 4 and 11"),
    ("sample_and_walk", 13, narrow, "bias"),
    ("sample_and_walk", 19, lambda x: x[:, 0], "stop_ids"),
    ("commit", 2, other_dtype, "draft_v"),
    ("commit", 10, short, "page_table"),
    ("commit", 11, narrow, "rows"),
    ("commit", 12, lambda x: x[:, :, 1:], "v"),
    ("commit", 16, short, "tokens"),
    ("commit", 17, short, "count"),
]


@pytest.mark.parametrize(("name", "place", "change", "said"), BAD)
def test_a_wrong_call_is_refused(name: str, place: int, change: Change, said: str) -> None:
    call = list(calls()[name])
    call[place] = change(call[place])
    check_refusal(name, call, said)


def check_refusal(name: str, call: list[Any], said: str) -> None:
    match = rf"^{name} takes ({said}) of shape .*\.$" if said.replace("_", "").replace("|", "").isalnum() else said
    before = [x.clone() if isinstance(x, Tensor) else x for x in call]
    for device in ("cpu", "meta"):
        moved = [x.to(device) if isinstance(x, Tensor) else x for x in call]
        with pytest.raises(ValueError, match=match):
            getattr(KERNELS, name)(*moved)
    assert all(torch.equal(x, y) for x, y in zip(call, before, strict=True) if isinstance(x, Tensor))


@pytest.mark.parametrize(("place", "said"), [(1, "w13"), (2, "s13"), (3, "w13|w2"), (4, "s2")])
def test_packed_experts(place: int, said: str) -> None:
    call = list(experts(packed=True))
    call[place] = call[place][:, :1] if place != 4 else call[place][..., :1]
    check_refusal("marlin_moe", call, said)


def test_a_tree_too_large() -> None:
    check_refusal("mla_tree_verify", list(attention(129)), "a tree of at most 128 nodes, found 129")


@pytest.mark.parametrize("name", calls())
def test_the_calls_are_right_otherwise(name: str) -> None:
    getattr(KERNELS, name)(*calls()[name])


@pytest.mark.parametrize(("name", "call"), [("build_tree", tree(0)), ("sample_and_walk", sampling(0))])
def test_no_requests_give_what_a_trace_says(name: str, call: tuple[Any, ...]) -> None:
    found = getattr(KERNELS, name)(*call)
    traced = getattr(KERNELS, name)(*(x.to("meta") if isinstance(x, Tensor) else x for x in call))
    assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in traced]
    assert all(len(x) == 0 for x in found)
