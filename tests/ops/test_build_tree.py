"""The draft tree against a plain best-first search, all prefixes of a small vocabulary, and worked examples."""

import heapq
import itertools
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_fx.ops import build_tree as module

INF = torch.inf


class Built(NamedTuple):
    token: torch.Tensor
    parent: torch.Tensor
    depth: torch.Tensor
    score: torch.Tensor
    ancestors: torch.Tensor
    valid: torch.Tensor


def build(logits, budget, width=None, nodes=None, max_width=None, anchor=None) -> Built:
    """`reference` with a whole batch's settings filled in; by default nothing is cut off."""
    batch, _, vocabulary = logits.shape
    budget = torch.as_tensor(budget).expand(batch)
    width = torch.as_tensor(vocabulary if width is None else width).expand(batch)
    nodes = int(budget.max()) + 1 if nodes is None else nodes
    max_width = vocabulary if max_width is None else max_width
    anchor = torch.arange(900, 900 + batch) if anchor is None else anchor
    return Built(*module.reference(logits, anchor, budget, width, nodes, max_width))


def ranking(row: list[float]) -> list[int]:
    return sorted(range(len(row)), key=lambda i: (-row[i], i))


def heap_tree(logits: torch.Tensor, total: torch.Tensor, budget: int, width: int) -> list[tuple]:
    """(token, parent, depth, score) of each node by plain best-first search: a popped node pushes all its children.

    In fp32; entries compare by (score descending, depth, parent, rank). `total` is the rows' log-sum-exp.
    """
    rows = [row.tolist() for row in logits.float()]
    ranks = [ranking(row)[:width] for row in rows]
    nodes, heap = [(None, -1, 0, np.float32(0))], []

    def push_children(parent: int) -> None:
        _, _, depth, score = nodes[parent]
        for rank, token in enumerate(ranks[depth] if depth < len(rows) else []):
            logit = np.float32(rows[depth][token])
            if logit > -np.inf:
                log_prob = min(logit - np.float32(total[depth]), np.float32(0))
                heapq.heappush(heap, (-(score + log_prob), depth + 1, parent, rank))

    push_children(0)
    while heap and len(nodes) <= budget:
        cost, depth, parent, rank = heapq.heappop(heap)
        nodes.append((ranks[depth - 1][rank], parent, depth, -cost))
        push_children(len(nodes) - 1)
    return nodes[1:]


def drafted(tree: Built, b: int = 0) -> list[tuple]:
    """(token, parent, depth, score) of the request's drafted nodes."""
    fields = (tree.token, tree.parent, tree.depth, tree.score)
    rows = zip(*(x[b, 1:].tolist() for x in fields), tree.valid[b, 1:].tolist(), strict=True)
    return [tuple(row[:4]) for row in rows if row[4]]


def check_form(tree: Built, budget: list[int], width: list[int], anchor: list[int]) -> None:
    """What holds of every tree: root, parents first, the path's bits, distinct siblings, inert padding."""
    for b, valid in enumerate(tree.valid.tolist()):
        count = sum(valid)
        assert valid == [True] * count + [False] * (len(valid) - count) and 1 <= count <= budget[b] + 1
        parent, depth = tree.parent[b].tolist(), tree.depth[b].tolist()
        words = [(low % 2**64) | (high % 2**64) << 64 for low, high in tree.ancestors[b].tolist()]
        assert (tree.token[b, 0], parent[0], depth[0], tree.score[b, 0], words[0]) == (anchor[b], -1, 0, 0, 1)
        for i in range(1, count):
            assert 0 <= parent[i] < i and depth[i] == depth[parent[i]] + 1
            assert words[i] == words[parent[i]] | 1 << i
            assert tree.score[b, i] <= tree.score[b, i - 1] and tree.score[b, i] <= tree.score[b, parent[i]]
        edges = list(zip(parent[1:count], tree.token[b, 1:count].tolist(), strict=True))
        assert len(set(edges)) == len(edges)
        assert max([parent[1:count].count(i) for i in range(count)]) <= width[b]
        for i in range(count, len(valid)):
            assert (tree.token[b, i], tree.score[b, i]) == (0, -INF)
            assert (parent[i], depth[i], words[i]) == (-1, 0, 1 << i)


def random_logits(kind: str, shape: tuple, generator: torch.Generator) -> torch.Tensor:
    x = torch.randn(shape, generator=generator)
    if kind == "quantised":
        return x.mul(1.5).round()
    if kind == "flat":
        return torch.zeros(shape)
    if kind == "peaked":
        return x.mul(20)
    if kind == "masked":
        return x.round().masked_fill(torch.rand(shape, generator=generator) < 0.6, -INF)
    return x.mul(2)


@pytest.mark.parametrize("kind", ["normal", "quantised", "flat", "peaked", "masked"])
def test_tree_equals_heap(kind):
    """1,200 requests of each kind, six to a batch, each with its own budget and width."""
    generator, rng = torch.Generator().manual_seed(0), np.random.default_rng(0)
    for _ in range(200):
        depths, vocabulary, nodes = rng.integers(1, [8, 12, 40]).tolist()
        logits = random_logits(kind, (6, depths, vocabulary), generator)
        budget, width = rng.integers(0, nodes, 6), rng.integers(1, vocabulary + 2, 6)
        tree = build(logits, torch.from_numpy(budget), torch.from_numpy(width), nodes)
        check_form(tree, budget.tolist(), width.tolist(), list(range(900, 906)))
        total = logits.logsumexp(-1)
        for b in range(6):
            assert drafted(tree, b) == heap_tree(logits[b], total[b], int(budget[b]), int(width[b]))


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_tree_equals_heap_on_small_integers(data):
    depths, vocabulary = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    values = st.sampled_from([0.0, -0.0, 1.0, -1.0, -INF])
    rows = data.draw(st.lists(values, min_size=depths * vocabulary, max_size=depths * vocabulary))
    logits = torch.tensor(rows).view(1, depths, vocabulary)
    budget = data.draw(st.integers(0, 70))
    assert drafted(build(logits, budget)) == heap_tree(logits[0], logits.logsumexp(-1)[0], budget, vocabulary)


@pytest.mark.parametrize("nodes", [64, 128])
def test_tree_equals_heap_at_full_size(nodes):
    logits = torch.randn(2, 15, 4096, generator=torch.Generator().manual_seed(1)) * 3
    logits[1] = logits[1].round()
    tree = build(logits, nodes - 1, max_width=nodes - 1)
    total = logits.logsumexp(-1)
    for b in range(2):
        assert drafted(tree, b) == heap_tree(logits[b], total[b], nodes - 1, nodes - 1)
    check_form(tree, [nodes - 1] * 2, [nodes - 1] * 2, [900, 901])


def test_tree_holds_the_most_probable_prefixes():
    """In fp64, over every prefix there is: the drafted nodes have the largest possible sum of q(u)."""
    generator = torch.Generator().manual_seed(2)
    for _ in range(40):
        logits = torch.randn(1, 3, 4, generator=generator) * 2
        q = logits[0].double().softmax(-1).tolist()
        prefixes = [p for depth in (1, 2, 3) for p in itertools.product(range(4), repeat=depth)]
        values = sorted((np.prod([q[d][i] for d, i in enumerate(p)]) for p in prefixes), reverse=True)
        for budget in (1, 5, 20, 84):
            score = build(logits, budget).score[0, 1:].double().exp()
            assert score.sum().item() == pytest.approx(sum(values[:budget]), rel=1e-5)


def test_worked_example():
    """L = 3, B = 6: depth 1 A .55 B .32 C .13, depth 2 D .50 E .35 F .15, depth 3 G .60 H .25 I .15."""
    a, b, d, e, g = 0, 1, 3, 4, 6
    p = torch.zeros(1, 3, 9)
    p[0, 0, :3] = torch.tensor([0.55, 0.32, 0.13])
    p[0, 1, 3:6] = torch.tensor([0.5, 0.35, 0.15])
    p[0, 2, 6:] = torch.tensor([0.6, 0.25, 0.15])
    tree = build(p.log(), 6, anchor=torch.tensor([77]))
    assert tree.token[0].tolist() == [77, a, b, d, e, g, d]
    assert tree.parent[0].tolist() == [-1, 0, 0, 1, 1, 3, 2]
    assert tree.depth[0].tolist() == [0, 1, 1, 2, 2, 3, 2]
    assert tree.score[0].exp().tolist() == pytest.approx([1, 0.55, 0.32, 0.275, 0.1925, 0.165, 0.16])
    visible = ["1", "11", "101", "1101", "11001", "110101", "1010001"]
    assert [f"{low:b}"[::-1] for low, _ in tree.ancestors[0].tolist()] == visible


def test_shallower_node_first_on_a_tie():
    """A 2/3 and B 1/3 over D 1/2 and E 1/2: B, AD and AE have exactly equal scores."""
    half = torch.zeros(2).logsumexp(0)
    tree = build(torch.stack((torch.stack((torch.zeros(()), -half)), torch.zeros(2)))[None], 6)
    assert tree.score[0, 2] == tree.score[0, 3] == tree.score[0, 4]
    assert tree.depth[0].tolist() == [0, 1, 1, 2, 2, 2, 2]
    assert tree.parent[0].tolist() == [-1, 0, 0, 1, 1, 2, 2]
    assert tree.token[0, 1:].tolist() == [0, 1, 0, 1, 0, 1]


def test_two_levels():
    """Depth 1 A .6 B .4, depth 2 C .7 D .3, budget 4: A, AC, B, BC."""
    tree = build(torch.tensor([[[0.6, 0.4], [0.7, 0.3]]]).log(), 4)
    assert tree.token[0, 1:].tolist() == [0, 0, 1, 0]
    assert tree.depth[0].tolist() == [0, 1, 2, 1, 2]
    assert tree.parent[0].tolist() == [-1, 0, 1, 0, 3]


def test_budget_beyond_all_nodes():
    """Two levels of three tokens make twelve nodes, whatever the budget."""
    tree = build(torch.randn(1, 2, 3, generator=torch.Generator().manual_seed(3)), 31)
    assert tree.valid.sum() == 13 and len(set(drafted(tree))) == 12


def test_trees_nest():
    """A smaller budget gives the first nodes of a larger one, in its own bucket and in a larger one."""
    generator = torch.Generator().manual_seed(4)
    for kind in ("normal", "quantised", "flat"):
        logits = random_logits(kind, (1, 5, 6), generator)
        largest = drafted(build(logits, 63))
        for budget in range(63):
            assert drafted(build(logits, budget)) == largest[:budget]
            assert drafted(build(logits, budget, nodes=64)) == largest[:budget]


def test_width_one_is_a_chain():
    logits = torch.randn(1, 127, 50, generator=torch.Generator().manual_seed(5))
    for max_width, width in ((1, 50), (50, 1)):
        tree = build(logits, 127, width, max_width=max_width)
        assert tree.token[0, 1:].tolist() == logits[0].argmax(-1).tolist()
        assert tree.parent[0].tolist() == list(range(-1, 127))
        assert tree.ancestors[0, [62, 63, 64, 127]].tolist() == [[2**63 - 1, 0], [-1, 0], [-1, 1], [-1, -1]]
        check_form(tree, [127], [1], [900])


def test_request_does_not_depend_on_its_batch():
    generator = torch.Generator().manual_seed(6)
    logits = torch.randn(5, 7, 40, generator=generator).round()
    budget, width = torch.tensor([0, 1, 7, 20, 31]), torch.tensor([40, 3, 1, 2, 9])
    together = build(logits, budget, width, 32)
    for b in range(5):
        alone = build(logits[b : b + 1], budget[b], width[b], 32, anchor=torch.tensor([900 + b]))
        assert all(torch.equal(x[b : b + 1], y) for x, y in zip(together, alone, strict=True))


@pytest.mark.parametrize("value", [torch.nan, INF])
def test_non_finite_logits_leave_the_root(value):
    logits = torch.randn(3, 4, 10, generator=torch.Generator().manual_seed(7))
    sound = build(logits, 15)
    logits[1, 2, 5] = value
    tree = build(logits, 15)
    assert tree.valid.sum(1).tolist() == [16, 1, 16]
    check_form(tree, [15] * 3, [10] * 3, [900, 901, 902])
    for x, y in zip(tree, sound, strict=True):
        assert torch.equal(x[[0, 2]], y[[0, 2]])


def test_row_without_tokens_ends_the_tree():
    logits = torch.zeros(1, 3, 2)
    logits[0, 1] = -INF
    assert build(logits, 20).depth.max() == 1 and build(logits, 20).valid.sum() == 3


@pytest.mark.parametrize("size", [(0, 5, 1), (0, 5, 8), (7, 5, 1), (1, 1, 4), (3, 1, 8)])
def test_degenerate_sizes(size):
    depths, vocabulary, nodes = size
    tree = build(torch.zeros(2, depths, vocabulary), nodes - 1, nodes=nodes, max_width=100)
    possible = sum(vocabulary**d for d in range(depths + 1))
    assert tree.valid.sum(1).tolist() == [min(nodes, possible)] * 2
    check_form(tree, [nodes - 1] * 2, [100] * 2, [900, 901])


def test_bfloat16_logits_mean_their_fp32_values():
    logits = torch.randn(2, 7, 300, generator=torch.Generator().manual_seed(8)).bfloat16()
    assert all(torch.equal(x, y) for x, y in zip(build(logits, 31), build(logits.float(), 31), strict=True))


@pytest.mark.parametrize("depths", [0, 7])
def test_opcheck(depths):
    logits = torch.randn(2, depths, 30, generator=torch.Generator().manual_seed(9))
    budget, width = torch.tensor([3, 7]), torch.tensor([1, 30])
    torch.library.opcheck(module.build_tree, (logits, torch.tensor([1, 2]), budget, width, 8, 7))


def test_a_budget_beyond_the_nodes_fills_them():
    logits = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
    beyond, all_ = (build(logits, [most, most], [8, 8], nodes=4) for most in (9, 3))
    assert all(torch.equal(a, b) for a, b in zip(beyond, all_, strict=True))


@pytest.mark.parametrize("budget", [-1, -5, -(2**63)])
def test_a_budget_below_zero_is_one_of_zero(budget):
    def root(most: int) -> tuple[torch.Tensor, ...]:
        one = torch.tensor([3])
        return module.build_tree(torch.zeros(1, 2, 5), one, torch.tensor([most]), one, 8, 4)

    assert all(torch.equal(x, y) for x, y in zip(root(budget), root(0), strict=True))
