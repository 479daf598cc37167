"""Drawing at every node and following the draws afterwards is what the walk does, field by field and bit by bit."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kimi_fx.graphs import sampling
from kimi_fx.graphs.axis import Axis
from kimi_fx.graphs.pytree import tree_leaves
from kimi_fx.graphs.state import Model, StepState, Tree, empty_state
from kimi_fx.ops import REFERENCE
from kimi_fx.ops import sample_and_walk as module

B, V, DEPTHS = 5, 12, 3
INF = torch.inf


def requests(draw: torch.Generator) -> StepState:
    """Some greedy, some sampled; each with penalties, filters, stops and limits or without."""

    def some(low: float, high: float, off: float) -> Tensor:
        on = torch.rand(B, generator=draw) < 0.5
        return (low + (high - low) * torch.rand(B, generator=draw)).where(on, off)

    def whole(low: int, high: int, *size: int) -> Tensor:
        return torch.randint(low, high, (B, *size), generator=draw)

    state = empty_state(B, 1, V, torch.device("cpu"))
    counts = whole(0, 3, V).int() * whole(0, 2, V).int()
    s = replace(
        state.sampling,
        temperature=some(0.3, 1.5, 0.0), top_k=whole(1, V + 1), top_p=some(0.3, 1.0, 1.0), min_p=some(0.0, 0.3, 0.0),
        presence=some(-2, 2, 0.0), frequency=some(-2, 2, 0.0), repetition=some(0.5, 2, 1.0),
        bias=torch.randn(B, V, generator=draw) * whole(0, 2, V), counts=counts,
        seen=(counts > 0) | (whole(0, 4, V) == 0),
        seed=whole(0, 2**32, 2), sample=whole(0, 3), logprobs=whole(-1, 4).int(), stop_ids=whole(-8, V, 8),
        remaining=whole(1, 5), min_remaining=whole(0, 3),
    )  # fmt: skip
    return replace(state, sampling=s, active=whole(0, 5) > 0)


def drafted(draw: torch.Generator, nodes: int) -> Tree:
    """Trees over few tokens, so that draws are often drafted."""
    marginals = torch.randn(B, DEPTHS, V, generator=draw)
    budget, width = (torch.randint(low, nodes + 1, (B,), generator=draw) for low in (0, 1))
    anchor = torch.randint(V, (B,), generator=draw)
    return Tree(*REFERENCE.build_tree(marginals, anchor, budget.clamp(max=nodes - 1), width, nodes, nodes))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), nodes=st.sampled_from([1, 2, 8, 16]), strange=st.booleans())
def test_every_node_then_the_walk(seed: int, nodes: int, strange: bool) -> None:
    draw = torch.Generator().manual_seed(seed)
    state, tree = requests(draw), drafted(draw, nodes)
    logits = torch.randn(B, nodes, V, generator=draw) * 2
    logits.scatter_(2, tree.token.roll(-1, 1).unsqueeze(2), 4.0)  # a later node's token, now and then a child's
    if strange:
        bad = torch.tensor([torch.nan, INF, -INF])[torch.randint(3, (B,), generator=draw)]
        logits[torch.arange(B), torch.randint(nodes, (B,), generator=draw)] = bad.unsqueeze(1)
    rows = min(DEPTHS + 1, nodes)
    position = torch.randint(1, 100, (B,), generator=draw)
    expected = module.reference(
        logits, tree.token, tree.parent, position, state.active, rows, *tree_leaves(state.sampling)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "rows_of_columns", lambda x, axis: x)
        patch.setattr(sampling, "gather", lambda x, axis: x)
        model: Any = Model(None, None, REFERENCE)  # type: ignore[arg-type]
        found = sampling.sample_and_walk(
            model, Axis("alone", 1), torch.tensor([0]), logits, state, tree, position, state.active, rows
        )
    for name, want, got in zip(vars(found), (*expected, tree.valid.sum(1)), tree_leaves(found), strict=True):
        assert want.dtype == got.dtype and torch.equal(want.nan_to_num(7), got.nan_to_num(7)), name
