"""The CUDA draft tree against a plain best-first search.

A kernel adds up exponentials in its own order, so a row's log-sum-exp is known only to some last bits. Exact equality,
ties and all, is asked of rows whose log-sum-exp is exact in any order: one logit at the top, the others at least 120
below it. Elsewhere trees may differ only where two scores lie within 1e-4.
"""

import heapq

import numpy as np
import pytest
import torch
from torch import Tensor

from kimi_fx.ops.build_tree import build_tree
from kimi_fx.runtime.build import load_kernels

pytestmark = pytest.mark.gpu

V = 163_840  # Kimi K2's
INF = torch.inf


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    load_kernels(torch.device("cuda"))


def build(logits: Tensor, budget: list[int], width: list[int], nodes: int) -> list[Tensor]:
    """On the device over poisoned memory, twice and bit-equal; the fields back on the CPU."""
    batch = len(logits)
    call = [logits.cuda(), *(torch.tensor(x).cuda() for x in (range(900, 900 + batch), budget, width))]
    runs = []
    for _ in range(2):
        junk = [torch.full((n,), -1, device="cuda") for n in (1 << 20, 1 << 16, 4096, 512, batch * nodes)]
        del junk
        runs.append([x.cpu() for x in build_tree(*call, nodes, nodes)])
    assert all(torch.equal(x, y) for x, y in zip(*runs, strict=True))
    return runs[0]


def heap_tree(logits: Tensor, total: Tensor, budget: int, width: int) -> list[tuple[int, int, int, float]]:
    """(token, parent, depth, score) of each node below the root, in fp32; a popped node pushes all its children."""
    rows = logits.float().numpy()
    ranks = [np.lexsort((np.arange(len(row)), -row))[:width].tolist() for row in rows]
    nodes, heap = [(0, -1, 0, np.float32(0))], []

    def push_children(parent: int) -> None:
        depth, score = nodes[parent][2:]
        for rank, token in enumerate(ranks[depth] if depth < len(rows) else []):
            logit = rows[depth][token]
            if logit > -np.inf:
                log_prob = min(logit - np.float32(total[depth]), np.float32(0))
                heapq.heappush(heap, (-(score + log_prob), depth + 1, parent, rank))

    push_children(0)
    while heap and len(nodes) <= budget:
        cost, depth, parent, rank = heapq.heappop(heap)
        nodes.append((ranks[depth - 1][rank], parent, depth, -cost))
        push_children(len(nodes) - 1)
    return nodes[1:]


def drafted(fields: list[Tensor], b: int) -> list[tuple[int, int, int, float]]:
    token, parent, depth, score, _, valid = (x[b, 1:].tolist() for x in fields)
    rows = zip(token, parent, depth, score, valid, strict=True)
    return [row[:4] for row in rows if row[4]]


def assert_near(ours: list[tuple[int, int, int, float]], exact: list[tuple[int, int, int, float]]) -> None:
    """Every score within 1e-4, and the same nodes up to the first two scores that tie as nearly."""
    assert [x[3] for x in ours] == pytest.approx([x[3] for x in exact], abs=1e-4)
    differs = [i for i, (x, y) in enumerate(zip(ours, exact, strict=True)) if x[:3] != y[:3]]
    scores = [x[3] for x in exact] + [-INF]
    assert not differs or scores[differs[0]] - scores[differs[0] + 1] < 1e-4


def check_form(fields: list[Tensor], budget: list[int]) -> None:
    """Root, parents first, the path's bits, inert padding."""
    token, parent, depth, score, ancestors, valid = (x.tolist() for x in fields)
    for b, most in enumerate(budget):
        count = sum(valid[b])
        assert valid[b] == [True] * count + [False] * (len(valid[b]) - count) and 1 <= count <= most + 1
        words = [(low % 2**64) | (high % 2**64) << 64 for low, high in ancestors[b]]
        assert (token[b][0], parent[b][0], depth[b][0], score[b][0], words[0]) == (900 + b, -1, 0, 0, 1)
        for i in range(1, count):
            assert 0 <= parent[b][i] < i and depth[b][i] == depth[b][parent[b][i]] + 1
            assert words[i] == words[parent[b][i]] | 1 << i
        for i in range(count, len(words)):
            assert (token[b][i], parent[b][i], depth[b][i], score[b][i], words[i]) == (0, -1, 0, -INF, 1 << i)


def exact_rows(batch: int, depths: int, vocabulary: int, values: int, seed: int) -> tuple[Tensor, Tensor]:
    """Logits on a coarse grid, many of them equal, and their log-sum-exps."""
    generator = torch.Generator().manual_seed(seed)
    total = torch.randint(-20, 20, (batch, depths), generator=generator).float()
    logits = total[..., None] - 120 - torch.randint(values, (batch, depths, vocabulary), generator=generator)
    logits[torch.rand(logits.shape, generator=generator) < 0.2] = -INF
    place = torch.randint(vocabulary, (batch, depths, 1), generator=generator)
    return logits.scatter(2, place, total[..., None]), total


@pytest.mark.parametrize("vocabulary", [1, 7, 130, 4096, 8193, 32_001, V])
@pytest.mark.parametrize(("depths", "nodes"), [(1, 2), (7, 64), (15, 128), (3, 8), (7, 16)])
def test_equals_the_heap_exactly(vocabulary: int, depths: int, nodes: int) -> None:
    rng = np.random.default_rng(vocabulary + nodes)
    budget, width = rng.integers(0, nodes, 3).tolist(), rng.integers(1, nodes + 2, 3).tolist()
    budget[0], width[0] = nodes - 1, nodes
    for values in (3, 500, 100_000):
        logits, total = exact_rows(3, depths, vocabulary, values, seed=values)
        fields = build(logits, budget, width, nodes)
        check_form(fields, budget)
        for b in range(3):
            most = min(width[b], nodes)
            assert drafted(fields, b) == heap_tree(logits[b], total[b], budget[b], most), (values, b)


@pytest.mark.parametrize("scale", [0.1, 1.0, 4.0])
@pytest.mark.parametrize(("depths", "nodes"), [(7, 64), (15, 128)])
def test_equals_the_heap_on_random_rows(scale: float, depths: int, nodes: int) -> None:
    logits = torch.randn(4, depths, V, generator=torch.Generator().manual_seed(depths)) * scale
    logits[..., :2000] += 8 * torch.rand(4, depths, 2000, generator=torch.Generator().manual_seed(1))
    total = logits.double().logsumexp(-1)
    fields = build(logits, [nodes - 1] * 4, [nodes] * 4, nodes)
    check_form(fields, [nodes - 1] * 4)
    for b in range(4):
        assert_near(drafted(fields, b), heap_tree(logits[b], total[b], nodes - 1, nodes))


def test_equal_rows_and_rows_in_order() -> None:
    """All logits equal; and descending or ascending with the id, where a few threads hold all the best."""
    rows = torch.stack((torch.zeros(V), -torch.arange(V).float(), torch.arange(V).float() - V))
    logits = rows[:, None].expand(3, 2, V).contiguous()
    fields = build(logits, [100] * 3, [128] * 3, 128)
    check_form(fields, [100] * 3)
    total = logits.double().logsumexp(-1)
    for b in range(3):
        assert_near(drafted(fields, b), heap_tree(logits[b], total[b], 100, 128))


@pytest.mark.parametrize("value", [torch.nan, -torch.nan, INF])
def test_non_finite_logits_leave_the_root(value: float) -> None:
    logits = torch.randn(3, 4, 20_000, generator=torch.Generator().manual_seed(7))
    sound = build(logits, [15] * 3, [16] * 3, 16)
    logits[1, 2, 17_000] = value
    fields = build(logits, [15] * 3, [16] * 3, 16)
    assert fields[5].sum(1).tolist() == [16, 1, 16]
    check_form(fields, [15] * 3)
    assert all(torch.equal(x[[0, 2]], y[[0, 2]]) for x, y in zip(fields, sound, strict=True))


def test_impossible_rows_end_the_tree() -> None:
    logits = torch.zeros(2, 3, 9000)
    logits[0, 1] = -INF
    logits[1] = -INF
    fields = build(logits, [60, 60], [5, 5], 64)
    assert fields[5].sum(1).tolist() == [6, 1]


def test_degenerate_sizes() -> None:
    assert [x[5].sum().item() for x in (build(torch.zeros(2, 0, 50), [0, 0], [1, 1], 1),)] == [2]
    assert build(torch.zeros(1, 0, 50), [7], [8], 8)[5].sum() == 1
    assert build(torch.zeros(1, 5, 1), [7], [8], 8)[5].sum() == 6


def test_a_negative_budget_leaves_the_root() -> None:
    fields = build(torch.zeros(2, 3, 50), [-5, 2], [4, 4], 8)
    assert fields[5].sum(1).tolist() == [1, 3]
    check_form(fields, [0, 2])


@pytest.mark.parametrize("depths", [0, 7])
def test_no_request_makes_no_tree(depths: int) -> None:
    none = torch.zeros(0, dtype=torch.long, device="cuda")
    fields = build_tree(torch.zeros(0, depths, 50, device="cuda"), none, none, none, 8, 8)
    assert [x.shape for x in fields] == [(0, 8)] * 4 + [(0, 8, 2), (0, 8)]


@pytest.mark.parametrize("which", ["anchor", "budget", "width"])
def test_shapes_that_disagree_are_refused(which: str) -> None:
    call = {name: torch.ones(2, dtype=torch.long, device="cuda") for name in ("anchor", "budget", "width")}
    call[which] = call[which].repeat(2)
    with pytest.raises(ValueError, match=rf"takes {which} of shape \[B\] = \[2\] .* found \[4\]"):
        build_tree(torch.zeros(2, 3, 50, device="cuda"), *call.values(), 8, 8)


def test_peaked_rows_go_deep() -> None:
    """One chunk or one token holds nearly all: levels with many equal scores, lists that end early."""
    logits = torch.full((3, 15, V), -INF)
    logits[0, :, :300] = torch.arange(300).float().neg()
    logits[1, :, 7::9000] = 0.0
    logits[2, :, 5] = 0.0
    fields = build(logits, [127] * 3, [128, 20, 3], 128)
    check_form(fields, [127] * 3)
    total = logits.double().logsumexp(-1)
    for b, width in enumerate((128, 20, 3)):
        assert_near(drafted(fields, b), heap_tree(logits[b], total[b], 127, width))


def test_bfloat16_logits_mean_their_fp32_values() -> None:
    logits = torch.randn(2, 7, 5000, generator=torch.Generator().manual_seed(8)).bfloat16()
    pair = (build(x, [31, 9], [32, 3], 32) for x in (logits, logits.float()))
    assert all(torch.equal(x, y) for x, y in zip(*pair, strict=True))


def test_request_does_not_depend_on_its_batch() -> None:
    logits = torch.randn(64, 7, 9000, generator=torch.Generator().manual_seed(6)).mul(3).round()
    budget, width = [i % 32 for i in range(64)], [1 + i % 40 for i in range(64)]
    together = build(logits, budget, width, 32)
    for b in (0, 1, 33, 63):
        alone = build(logits[b : b + 1], budget[b : b + 1], width[b : b + 1], 32)
        assert all(torch.equal(x[b, 1:], y[0, 1:]) for x, y in zip(together, alone, strict=True))


def test_a_captured_graph_follows_its_inputs() -> None:
    logits = torch.randn(2, 7, V, device="cuda")
    anchor, budget, width = (torch.tensor(x, device="cuda") for x in ([1, 2], [63, 63], [63, 63]))
    build_tree(logits, anchor, budget, width, 64, 64)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = build_tree(logits, anchor, budget, width, 64, 64)
    for seed in range(5):
        logits.copy_(torch.randn(2, 7, V, generator=torch.Generator().manual_seed(seed)))
        budget.fill_(13 * seed)
        graph.replay()
        eager = build_tree(logits, anchor, budget, width, 64, 64)
        assert all(torch.equal(x, y) for x, y in zip(out, eager, strict=True))


def test_opcheck() -> None:
    call = (torch.randn(2, 7, 300, device="cuda"), *(torch.tensor(x, device="cuda") for x in ([1, 2], [3, 7], [1, 30])))
    torch.library.opcheck(build_tree, (*call, 8, 7))
