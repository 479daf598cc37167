"""The round: node logits, the pool after every commit, padding, batches, one set of buffers in every shape.

Every pool here is NaN wherever nothing was committed, so a stray read fails any of these tests. Long because one
set of buffers serves every shape.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from checks import (
    LOGITS,
    Ask,
    assert_rows,
    check_node_logits,
    check_pool,
    sampled,
    small_vocabulary,
)
from kimi_fx.engine import Engine
from kimi_fx.graphs.pytree import tree_leaves, tree_map
from kimi_fx.graphs.state import Shape, Tree
from kimi_fx.graphs.step import prefill_step
from kimi_fx.ops import KERNELS
from oracles.rounds import (
    few_tokens,
    live_rows,
    one_round,
    plain_rows,
    prefilled,
    random_engine,
    shape,
    with_ops,
)


@pytest.fixture(scope="module")
def engine(make_engine: Any) -> Engine:
    return make_engine()


def same(a: Any, b: Any) -> bool:
    """Bit for bit, NaN equal to itself."""
    return all(torch.allclose(x, y, 0, 0, equal_nan=True) for x, y in zip(tree_leaves(a), tree_leaves(b), strict=True))


def form(tree: Tree) -> tuple[Tensor, Tensor, Tensor]:
    return tree.token, tree.parent, tree.depth


def copied(tree: Any) -> Any:
    return tree_map(torch.clone, tree)


# ---- nodes


@pytest.mark.parametrize(("nodes", "budget"), [(8, 7), (16, 15), (16, 9), (64, 63), (1, 0)])
def test_nodes_of_a_drafted_tree(engine: Engine, held_out: list[list[int]], nodes: int, budget: int) -> None:
    """A budget under the bucket's leaves padding."""
    check_node_logits(engine, held_out[nodes][: 20 if nodes == 64 else 62], nodes, budget)


@pytest.mark.parametrize(("nodes", "budget", "length"), [(32, 31, 63), (128, 100, 10)])
def test_nodes_of_a_bushy_tree(engine: Engine, held_out: list[list[int]], nodes: int, budget: int, length: int) -> None:
    """Siblings at every depth, paths across a page's end, and nodes in the second word of the bits."""
    check_node_logits(engine, held_out[0][:length], nodes, budget, few_tokens(engine, 1, 3, seed=nodes))


def test_nodes_on_another_geometry(tmp_path: Any) -> None:
    other = random_engine(tmp_path)
    check_node_logits(other, list(range(60)), 32, 31, few_tokens(other, 1, 3, seed=1))


# ---- the pool


@pytest.mark.parametrize("chunk", [512, 37])
def test_pool_is_what_a_plain_prefill_writes(make_engine: Any, held_out: list[list[int]], chunk: int) -> None:
    """Three slots for four requests of all modes: they join, end and move, and the rounds' bucket changes."""
    engine = make_engine("run.batch=3", f"run.chunk={chunk}", "cache.max_len=320")
    asked = [
        Ask(held_out[0], 12, "plain"),
        Ask(held_out[1][:60], 40, "chain"),
        Ask(held_out[2][:64], 30, "tree", 15),
        Ask(held_out[3][:1], 20, "tree", 63),
    ]
    check_pool(engine, asked)


def test_pool_of_one_engine_in_changing_modes(make_engine: Any, held_out: list[list[int]]) -> None:
    """Pages go from one request to the next with all that is in them."""
    engine = make_engine("run.batch=1", "cache.max_len=192")
    for prompt, mode, budget in ((0, "tree", 63), (1, "plain", None), (2, "chain", None), (3, "tree", 3)):
        check_pool(engine, [Ask(held_out[prompt][: 90 - 20 * prompt], 24, mode, budget)])


def test_accepted_nodes_become_dense_rows(engine: Engine, golden: list[dict[str, Tensor]]) -> None:
    """The path 0, 3, 4 of a tree drawn by hand; the round after it is that of a fresh request."""
    prompt, greedy = golden[0]["prompt"].tolist(), golden[0]["greedy"].tolist()
    wrong = [t for t in range(100, 110) if t not in greedy[:4]]
    tokens = torch.tensor([[greedy[0], wrong[0], wrong[1], greedy[1], greedy[2], wrong[2], wrong[3], wrong[4]]])
    parents = [-1, 0, 1, 0, 3, 3, 4, 4]
    bits = [1 << node for node in range(8)]
    depths = [0] * 8
    for node in range(1, 8):
        bits[node] |= bits[parents[node]]
        depths[node] = depths[parents[node]] + 1
    ancestors = torch.stack((torch.tensor([bits]), torch.zeros(1, 8).long()), -1)
    by_hand = tokens, torch.tensor([parents]), torch.tensor([depths]), torch.zeros(1, 8), ancestors, tokens >= 0

    pool, state = prefilled(engine, [prompt], [15])
    _, emitted, _ = one_round(engine, pool, state, shape(engine, 8), build_tree=lambda *_: by_hand)
    assert (emitted.path[0, :3].tolist(), emitted.tokens[0, :3].tolist()) == ([0, 3, 4], greedy[1:4])
    committed = prompt + greedy[:3]
    assert (emitted.count, state.length, state.anchor) == (3, len(committed), greedy[3])
    assert_rows(live_rows(pool, state.page_table[0], len(committed)), plain_rows(engine, committed))
    _, _, after = one_round(engine, pool, state, shape(engine, 16))
    fresh = one_round(engine, *prefilled(engine, [committed], [15]), shape(engine, 16))[2]
    assert (after - fresh).abs().max() < LOGITS


# ---- what no request has written


def test_unused_and_reserved_rows_are_never_read(make_engine: Any, golden: list[dict[str, Tensor]]) -> None:
    engine = make_engine("run.batch=3", "cache.max_len=512", "cache.tokens=2048", "run.chunk=16")
    for leaf in tree_leaves(engine.pool):
        leaf.fill_(torch.nan)
    prompts = [g["prompt"].tolist() for g in golden[:4]]
    for mode in ("tree", "chain", "plain"):
        results = engine.generate(prompts, max_tokens=24, temperature=0, ignore_eos=True, mode=mode, logprobs=1)
        for g, result in zip(golden, results, strict=False):
            assert list(result.outputs[0].token_ids) == g["greedy"][:24].tolist()
            assert all(-100 < lp.logprob <= 0 for lp in result.outputs[0].logprobs)


# ---- padding


def counting(engine: Engine, visits: list[int]) -> Callable[..., Any]:
    """`norm_route` that notes how many pairs of token and expert there are."""

    def norm_route(*args: Any) -> Any:
        routed = engine.model.ops.norm_route(*args)
        visits.append(int(routed[5][-1]))
        return routed

    return norm_route


@pytest.mark.parametrize("nodes", [8, 16])
def test_padded_bucket_equals_unpadded(engine: Engine, held_out: list[list[int]], nodes: int) -> None:
    """A budget of 3 in its own four nodes and in a larger bucket."""
    prompt = held_out[5][:62]
    both = []
    for bucket in (4, nodes):
        pool, state = prefilled(engine, [prompt], [3])
        rounds = [one_round(engine, pool, state, shape(engine, bucket)) for _ in range(4)]
        both.append((rounds, state, live_rows(pool, state.page_table[0], int(state.length))))
        blank = pool.target[:, state.page_table[0].long()].flatten(1, 2)[:, int(state.length) :]
        assert blank.isnan().all()
    for (own, e, logits), (tree, padded, more) in zip(both[0][0], both[1][0], strict=True):
        assert all(torch.equal(x, y[:, :4]) for x, y in zip(form(own), form(tree), strict=True))
        assert tree.valid.tolist() == [[True] * 4 + [False] * (nodes - 4)]
        assert (logits - more[:, :4]).abs().max() < LOGITS and more.isfinite().all()
        n = int(e.count)
        assert padded.count == n and e.nodes == padded.nodes == 4
        assert e.tokens[0, :n].tolist() == padded.tokens[0, :n].tolist()
    assert same(both[0][1], both[1][1])
    assert_rows(both[1][2], both[0][2])


def test_an_inactive_slot_is_padding(engine: Engine, held_out: list[list[int]]) -> None:
    """One slot empty, one amid its prompt: they change nothing, load no expert and touch no page."""
    prompts = [held_out[0][:50], [1], held_out[1][:70], held_out[2][:64]]
    pool, state = prefilled(engine, prompts, [15, 15, 15, 6])
    state.length[1], state.active[1] = 0, False
    state.active[2] = False
    before_pool, before = copied(pool), copied(state)
    expected = [
        one_round(engine, copied(pool), tree_map(lambda x, b=b: x[b : b + 1].clone(), state), shape(engine, 16))
        for b in (0, 3)
    ]
    visits: list[int] = []
    _, emitted, logits = one_round(engine, pool, state, shape(engine, 16, 4), norm_route=counting(engine, visits))
    m = engine.model.target
    assert visits == [m.K * (16 + 7)] * (m.layers - m.dense_layers)
    for b, (_, alone, own) in zip((0, 3), expected, strict=True):
        assert emitted.tokens[b].tolist() == alone.tokens[0].tolist()
        valid = int(alone.nodes)
        assert (logits[b, :valid] - own[0, :valid]).abs().max() < LOGITS
    assert emitted.count[1:3].tolist() == [0, 0] and (emitted.tokens[1:3] == -1).all()
    assert same(tree_map(lambda x: x[1:3], state), tree_map(lambda x: x[1:3], before))
    for b in (0, 3):  # with their new rows taken away again the pool is as it was
        start, end = int(before.length[b]), int(state.length[b])
        at = torch.arange(start, end)
        page, slot = state.page_table[b, at // 64].long(), at % 64
        for leaf, old in zip(tree_leaves(pool), tree_leaves(before_pool), strict=True):
            assert leaf[:, page, slot].isfinite().all()
            leaf[:, page, slot] = old[:, page, slot]
    assert same(pool, before_pool)


def test_a_padded_chunk_equals_a_full_one(engine: Engine, held_out: list[list[int]]) -> None:
    prompt = held_out[0][:20]
    rows = []
    visits: list[int] = []
    model, m = with_ops(engine, norm_route=counting(engine, visits)).model, engine.model.target
    for padding in (0, 12):
        pool, state = prefilled(engine, [[1]], [15])
        state.length.zero_()
        tokens, count = torch.tensor([prompt + [7] * padding]), torch.tensor([20])
        _, emitted = prefill_step(engine.loaded.params, pool, state, tokens, count, torch.tensor([True]), model)
        assert (emitted.count.tolist(), state.length.tolist()) == ([1], [20])
        assert pool.target[:, state.page_table[0, 0], 20:].isnan().all()
        rows.append((live_rows(pool, state.page_table[0], 20), emitted.tokens[0, 0]))
    assert visits == [m.K * 20] * 2 * (m.layers - m.dense_layers)
    assert rows[0][1] == rows[1][1]
    assert_rows(rows[1][0], rows[0][0])


# ---- batches


def test_a_batch_of_different_trees(engine: Engine, held_out: list[list[int]]) -> None:
    """Plain, chain and trees of three budgets and lengths side by side: each as alone, round after round."""
    prompts = [held_out[0][:5], held_out[1][:64], held_out[2], held_out[3][:100], held_out[4][:63]]
    budgets, widths = [15, 1, 6, 0, 15], [15, 1, 1, 1, 3]
    pool, state = prefilled(engine, prompts, budgets, widths)
    alone = [prefilled(engine, [p], [n], [w]) for p, n, w in zip(prompts, budgets, widths, strict=True)]
    for _ in range(4):
        tree, emitted, logits = one_round(engine, pool, state, shape(engine, 16, 5))
        for b, (own_pool, own_state) in enumerate(alone):
            own, e, own_logits = one_round(engine, own_pool, own_state, shape(engine, 16))
            n = int(e.nodes)
            assert emitted.nodes[b] == n == budgets[b] + 1
            assert same([x[b] for x in form(tree)], [x[0] for x in form(own)])
            assert (logits[b, :n] - own_logits[0, :n]).abs().max() < LOGITS
            assert (emitted.tokens[b].tolist(), emitted.path[b].tolist()) == (e.tokens[0].tolist(), e.path[0].tolist())
    for b, (own_pool, own_state) in enumerate(alone):
        assert state.length[b] == own_state.length[0]
        rows, own_rows = (
            live_rows(p, s.page_table[i], int(own_state.length))
            for p, s, i in ((pool, state, b), (own_pool, own_state, 0))
        )
        assert_rows(rows, own_rows)


# ---- one set of buffers


def test_every_shape_in_the_same_buffers(engine: Engine, golden: list[dict[str, Tensor]]) -> None:
    """Large tree, small tree, plain, chain, in one request: each round is that of fresh buffers."""
    prompt, greedy = golden[1]["prompt"].tolist(), golden[1]["greedy"].tolist()
    pool, state = prefilled(engine, [prompt], [0])
    text = [*prompt, int(state.anchor)]
    for nodes, width in ((64, 63), (8, 7), (1, 1), (8, 1), (64, 63), (1, 1), (16, 15)):
        state.budget.fill_(nodes - 1)
        state.width.fill_(width)
        bucket = replace(shape(engine, nodes), width=width)
        fresh_tree, fresh, fresh_logits = one_round(
            engine, *prefilled(engine, [text[:-1]], [nodes - 1], [width]), bucket
        )
        tree, emitted, logits = one_round(engine, pool, state, bucket)
        assert same(form(tree), form(fresh_tree))
        assert (logits - fresh_logits).abs().max() < LOGITS
        assert emitted.tokens.tolist() == fresh.tokens.tolist()
        text += emitted.tokens[0, : int(emitted.count)].tolist()
        assert_rows(live_rows(pool, state.page_table[0], int(state.length)), plain_rows(engine, text[:-1]))
    assert text == (prompt + greedy)[: len(text)]


# ---- limits


def test_more_nodes_than_there_are(tmp_path: Path) -> None:
    """Two levels of five tokens hold 30 nodes; a budget of 63 takes them all and tokens stay those of plain rounds."""
    small = small_vocabulary(tmp_path)
    assert torch.equal(sampled(small, Shape(40, 1, 1, 1)), sampled(small, Shape(40, 64, 3, 63)))
    pool, state = prefilled(small, [[0, 1]], [63])
    tree, emitted, logits = one_round(small, pool, state, Shape(1, 64, 3, 63))
    assert tree.depth[0].bincount().tolist() == [1 + 33, 5, 25] and emitted.nodes == 31
    assert logits.isfinite().all()


# ---- operators


def test_dispatched_operators_mean_the_references(engine: Engine, held_out: list[list[int]]) -> None:
    """The same round through the dispatcher, bit for bit."""
    dispatched = Engine(engine.config, replace(engine.loaded, model=replace(engine.model, ops=KERNELS)))
    both = []
    for one in (engine, dispatched):
        pool, state = prefilled(one, [held_out[0][:30], held_out[1][:70]], [15, 3])
        rounds = [one_round(one, pool, state, shape(one, 16, 2)) for _ in range(2)]
        both.append((rounds, pool, state))
    assert same(both[0], both[1])
