"""What an operator cannot take it refuses in a sentence, eagerly and in a trace; no requests give empty results."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kimi_fx.ops import KERNELS
from oracles.calls import attention, calls, experts, sampling, tree


def short(x: Tensor) -> Tensor:
    return x[:-1]


def narrow(x: Tensor) -> Tensor:
    return x[..., :-1]


def deeper(x: Tensor) -> Tensor:
    return x.unsqueeze(0)


def other_dtype(x: Tensor) -> Tensor:
    return x.to(torch.int32 if x.dtype == torch.int64 else torch.float64)


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
    ("norm_route", 2, lambda x: x[:143], "144 counters or more, found 143"),
    ("norm_route", 4, narrow, "router"),
    ("norm_route", 5, short, "bias"),
    ("norm_route", 6, short, "gate_up"),
    ("norm_route", 7, short, "valid"),
    ("norm_route", 8, lambda k: 17, "1 to 16 experts a token, found 17"),
    ("marlin_moe", 0, narrow, "w2"),
    ("marlin_moe", 1, narrow, "w13"),
    ("marlin_moe", 5, short, "weights|order"),
    ("marlin_moe", 6, short, "order"),
    ("marlin_moe", 7, short, "offsets"),
    ("marlin_moe", 8, lambda zeros: zeros[:3], "counters or more, found 3"),
    ("mla_tree_verify", 0, deeper, "q"),
    ("mla_tree_verify", 2, lambda x: x[:, 0], "page_table"),
    ("mla_tree_verify", 6, short, "schedule"),
    ("mla_tree_verify", 7, lambda latent: 577, "1 to 576 latent columns, found 577"),
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
