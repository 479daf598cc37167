"""The router against a brute force and against Hugging Face's; its work list; ties, padding, extremes."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from kimi_fx.ops.norm_route import choose

Routed = tuple[Tensor, Tensor, Tensor, Tensor]


def route(logits: Tensor, bias: Tensor, k: int, scale: float = 1.0, valid: Tensor | None = None) -> Routed:
    if valid is None:
        valid = torch.ones(len(logits), dtype=torch.bool)
    return choose(logits, bias, valid, k, scale)


def check_work_list(ids: Tensor, order: Tensor, offsets: Tensor, experts: int) -> None:
    expert = [e if e >= 0 else experts for e in ids.flatten().tolist()]
    assert order.tolist() == sorted(range(len(expert)), key=lambda pair: expert[pair])
    assert offsets.tolist() == [sum(e < limit for e in expert) for limit in range(experts + 1)]


@st.composite
def coarse_cases(draw: st.DrawFn) -> tuple[list[list[float]], list[float], list[bool], int]:
    """Few distinct logits and biases, so that most scores are tied and unequal ones are far apart."""
    tokens, experts = draw(st.integers(1, 6)), draw(st.integers(1, 12))
    value = st.sampled_from([-18.0, -2.0, -1.0, 0.0, 1.0, 3.0])
    bias = st.sampled_from([0.0, 0.25, -0.375])
    return (
        draw(st.lists(st.lists(value, min_size=experts, max_size=experts), min_size=tokens, max_size=tokens)),
        draw(st.lists(bias, min_size=experts, max_size=experts)),
        draw(st.lists(st.booleans(), min_size=tokens, max_size=tokens)),
        draw(st.integers(1, experts)),
    )


@settings(deadline=None, max_examples=150)
@given(coarse_cases())
def test_equals_brute_force_with_ties_and_padding(case: tuple) -> None:
    logits, bias, valid, k = case
    ids, weights, order, offsets = route(
        torch.tensor(logits), torch.tensor(bias), k, scale=2.827, valid=torch.tensor(valid)
    )
    assert ids.dtype == order.dtype == offsets.dtype == torch.int32 and weights.dtype == torch.float32
    for t, real in enumerate(valid):
        if not real:
            assert ids[t].tolist() == [-1] * k and weights[t].tolist() == [0.0] * k
            continue
        score = [1 / (1 + math.exp(-value)) for value in logits[t]]
        best = sorted(range(len(score)), key=lambda e: (-round(score[e] + bias[e], 6), e))[:k]
        assert ids[t].tolist() == best
        total = sum(score[e] for e in best)
        assert weights[t].tolist() == pytest.approx([2.827 * score[e] / total for e in best], rel=1e-5)
    check_work_list(ids, order, offsets, len(bias))


@pytest.mark.parametrize(("tokens", "experts", "k"), [(1, 32, 4), (64, 32, 4), (33, 384, 8), (5, 7, 7)])
def test_equals_hugging_face(tokens: int, experts: int, k: int) -> None:
    torch.manual_seed(tokens)
    config = DeepseekV3Config(
        n_routed_experts=experts,
        num_experts_per_tok=k,
        hidden_size=24,
        n_group=1,
        topk_group=1,
        norm_topk_prob=True,
        routed_scaling_factor=2.827,
    )
    router = DeepseekV3TopkRouter(config)
    torch.nn.init.normal_(router.weight, std=0.3)
    router.e_score_correction_bias.copy_(torch.randn(experts) * 0.2)
    with torch.no_grad():
        logits, hf_weights, hf_ids = router(torch.randn(tokens, 24))
    ids, weights, order, offsets = route(logits, router.e_score_correction_bias, k, scale=2.827)
    ours = torch.zeros(tokens, experts).scatter(1, ids.long(), weights)
    theirs = torch.zeros(tokens, experts).scatter(1, hf_ids, hf_weights)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    check_work_list(ids, order, offsets, experts)


def test_tiny_scores_chosen_by_a_large_bias_share_the_weight() -> None:
    bias = torch.zeros(32)
    bias[[3, 8, 20, 31]] = 12.0
    ids, weights, _, _ = route(torch.full((2, 32), -18.0), bias, 4, scale=2.827)
    assert ids.tolist() == [[3, 8, 20, 31]] * 2
    torch.testing.assert_close(weights, torch.full((2, 4), 2.827 / 4), rtol=1e-6, atol=0)


def test_scores_that_underflow_give_zero_weights() -> None:
    _, weights, _, _ = route(torch.full((1, 8), -200.0), torch.zeros(8), 2)
    assert weights.tolist() == [[0.0, 0.0]]


def test_bias_chooses_and_does_not_weigh() -> None:
    torch.manual_seed(0)
    logits, bias = torch.randn(9, 16), torch.zeros(16)
    bias[[2, 11]] = 5.0
    ids, weights, _, _ = route(logits, bias, 2)
    assert ids.sort(1).values.tolist() == [[2, 11]] * 9
    chosen = logits.double().sigmoid().gather(1, ids.long())
    torch.testing.assert_close(weights.double(), chosen / chosen.sum(1, keepdim=True), rtol=1e-5, atol=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_token_does_not_touch_another(bad: float) -> None:
    torch.manual_seed(1)
    logits, bias = torch.randn(6, 16), torch.randn(16)
    ids, weights, _, _ = route(logits, bias, 3)
    spoilt = logits.clone()
    spoilt[2] = bad
    others = torch.arange(6) != 2
    for valid in (torch.ones(6, dtype=torch.bool), others):
        new_ids, new_weights, order, offsets = route(spoilt, bias, 3, valid=valid)
        assert torch.equal(new_ids[others], ids[others])
        assert torch.equal(new_weights[others], weights[others])
        check_work_list(new_ids, order, offsets, 16)
    assert new_ids[2].tolist() == [-1] * 3 and new_weights[2].tolist() == [0.0] * 3


def test_padding_alone_visits_no_expert() -> None:
    nobody = torch.zeros(3, dtype=torch.bool)
    ids, weights, order, offsets = route(torch.randn(3, 8), torch.zeros(8), 2, valid=nobody)
    assert (ids == -1).all() and (weights == 0).all()
    assert order.tolist() == list(range(6)) and offsets.tolist() == [0] * 9


@pytest.mark.parametrize("experts", [2**15 - 1, 2**15, 40_000])
def test_more_experts_than_two_bytes_hold(experts: int) -> None:
    torch.manual_seed(2)
    valid = torch.tensor([True, False, True])
    ids, _, order, offsets = route(torch.randn(3, experts), torch.zeros(experts), 2, valid=valid)
    expert = torch.where(ids < 0, experts, ids).flatten()
    assert order.tolist() == sorted(range(6), key=expert.tolist().__getitem__)
    assert torch.equal(offsets, (expert < torch.arange(experts + 1).unsqueeze(1)).sum(1))


@pytest.mark.parametrize(("k", "bias", "valid"), [(17, 16, 5), (0, 16, 5), (-1, 16, 5), (4, 1, 5), (4, 16, 1)])
def test_arguments_that_disagree(k: int, bias: int, valid: int) -> None:
    logits, valid_ = torch.randn(5, 16), torch.ones(valid, dtype=torch.bool)
    with pytest.raises(ValueError, match=rf"top {k} of logits \[5, 16\] with bias \[{bias}\] and valid \[{valid}\]"):
        choose(logits, torch.zeros(bias), valid_, k, 1.0)
