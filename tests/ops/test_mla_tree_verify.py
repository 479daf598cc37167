"""Latent attention of tree nodes and of causal chunks against a dense fp64 reference.

Pages lie anywhere; every row that holds no committed token is NaN.
"""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kimi_fx.ops import mla_tree_verify as module

LENGTHS = [0, 1, 63, 64, 65, 200]
HEADS, LATENT, ROPE, SCALE = 3, 24, 8, 0.17


class Case(NamedTuple):
    q: Tensor
    pool: Tensor
    page_table: Tensor
    length: Tensor
    rows: Tensor
    ancestors: Tensor | None


def random_parents(nodes: int, generator: torch.Generator) -> list[int]:
    return [-1] + [int(torch.randint(node, (), generator=generator)) for node in range(1, nodes)]


def sight(parents: list[int]) -> Tensor:
    """[N, N]: node i sees itself and what its parent sees."""
    sees = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            sees[node] |= sees[parent]
    return sees


def words(sees: Tensor) -> Tensor:
    """[N, 2] i64: bit j % 64 of word j // 64."""
    whole = [sum(1 << j for j, seen in enumerate(row) if seen) for row in sees.tolist()]
    halves = [[bits % 2**64, bits >> 64] for bits in whole]
    return torch.tensor([[half - 2**64 if half >= 2**63 else half for half in pair] for pair in halves])


def case(
    lengths: list[int],
    parents: list[list[int]] | int,  # of each request's nodes; a number of causal tokens
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    widths: tuple[int, int, int] = (HEADS, LATENT, ROPE),
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    B, N, (H, L, R) = len(lengths), parents if isinstance(parents, int) else len(parents[0]), widths

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).to(dtype)

    each = max(lengths) // 64 + 2  # one reserved at least
    pages = torch.randperm(B * each + 3, generator=generator)[: B * each].view(B, each).int()
    pool = torch.full((B * each + 3, 64, L + R), torch.nan, dtype=dtype)
    for b, length in enumerate(lengths):
        for at in range(length):
            pool[pages[b, at // 64], at % 64] = normal(L + R)
    bits = None if isinstance(parents, int) else torch.stack([words(sight(p)) for p in parents])
    length = torch.tensor(lengths, dtype=torch.int32)
    return Case(normal(B, N, H, L + R), pool, pages, length, normal(B, N, L + R), bits)


def attend(c: Case, latent: int = LATENT) -> Tensor:
    schedule = module.schedule_reference(c.length, c.q.shape[1], c.q.shape[2])
    return module.verify_reference(*c, schedule, latent, SCALE)


def dense(c: Case, sees: list[Tensor], latent: int = LATENT) -> Tensor:
    """[B, N, H, L] f64: softmax over each node's own keys, one node and head at a time."""
    out = torch.empty(*c.q.shape[:3], latent, dtype=torch.float64)
    for b, length in enumerate(c.length.tolist()):
        prefix = [c.pool[c.page_table[b, at // 64], at % 64] for at in range(length)]
        for node, seen in enumerate(sees[b]):
            keys = torch.stack(prefix + [row for row, s in zip(c.rows[b], seen, strict=True) if s]).double()
            for head, q in enumerate(c.q[b, node].double()):
                out[b, node, head] = (SCALE * (keys @ q)).softmax(0) @ keys[:, :latent]
    return out


def assert_equal(ours: Tensor, exact: Tensor, atol: float = 1e-5) -> None:
    torch.testing.assert_close(ours.double(), exact, rtol=0, atol=atol)


@pytest.mark.parametrize("nodes", [1, 2, 8, 17])
def test_random_trees_at_every_length_in_one_batch(nodes: int) -> None:
    generator = torch.Generator().manual_seed(nodes)
    parents = [random_parents(nodes, generator) for _ in LENGTHS]
    c = case(LENGTHS, parents, seed=nodes)
    assert_equal(attend(c), dense(c, [sight(p) for p in parents]))


@pytest.mark.parametrize("tokens", range(1, 18))
def test_causal_chunk(tokens: int) -> None:
    c = case([1, 63, 64, 65, 0], tokens, seed=tokens)
    assert_equal(attend(c), dense(c, [torch.ones(tokens, tokens).tril().bool()] * 5))


def test_a_chain_of_ancestors_is_causal() -> None:
    tree = case([65, 3], [list(range(-1, 8))] * 2)
    assert_equal(attend(tree._replace(ancestors=None)), attend(tree).double(), atol=1e-6)


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_any_tree_and_length(data: st.DataObject) -> None:
    """Padding among the nodes as well: it sees itself only and nobody sees it."""
    nodes = data.draw(st.integers(1, 17))
    parents = [[-1] + [data.draw(st.integers(-1, node - 1)) for node in range(1, nodes)] for _ in range(2)]
    lengths = data.draw(st.lists(st.integers(0, 200), min_size=2, max_size=2))
    c = case(lengths, parents, seed=data.draw(st.integers(0, 999)))
    assert_equal(attend(c), dense(c, [sight(p) for p in parents]))


def test_nodes_of_the_second_word() -> None:
    generator = torch.Generator().manual_seed(5)
    deep = [random_parents(128, generator)]
    c = case([10], deep, widths=(1, 8, 4))
    assert c.ancestors is not None and c.ancestors[0, :, 1].unique().numel() > 30
    assert_equal(attend(c, 8), dense(c, [sight(deep[0])], 8))


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
def test_the_published_widths(dtype: torch.dtype, atol: float) -> None:
    """576 columns as Kimi has them; in bf16 against fp64 of the same rounded rows, values of deviation 1."""
    parents = [random_parents(8, torch.Generator().manual_seed(6))] * 2
    c = case([70, 5], parents, dtype=dtype, widths=(8, 512, 64))
    c = c._replace(q=c.q * 0.25)
    ours = attend(c, 512)
    assert ours.dtype == dtype
    assert_equal(ours, dense(c, [sight(parents[0])] * 2, 512), atol)


def test_each_request_as_alone() -> None:
    parents = [random_parents(8, torch.Generator().manual_seed(b)) for b in range(3)]
    c = case([64, 0, 130], parents)
    together = attend(c)
    for b in range(3):
        alone = Case(*(x if x is c.pool else x[b : b + 1] for x in c))
        assert torch.equal(attend(alone)[0], together[b])


@pytest.mark.parametrize("causal", [False, True])
def test_opcheck(causal: bool) -> None:
    c = case([65, 0], [[-1, 0, 0, 1]] * 2)
    c = c._replace(ancestors=None) if causal else c
    torch.library.opcheck(module.mla_schedule, (c.length, 4, HEADS))
    schedule = module.mla_schedule(c.length, 4, HEADS)
    torch.library.opcheck(module.mla_tree_verify, (*c, schedule, LATENT, SCALE))
    assert torch.equal(module.mla_tree_verify(*c, schedule, LATENT, SCALE), attend(c))


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("length", lambda x: x[:1], r"length of shape \[B\] = \[2\] in torch.int32, found \[1\]"),
        ("length", lambda x: x.long(), "length .* in torch.int32, found .* in torch.int64"),
        ("page_table", lambda x: x[:1], r"page_table of shape \[B, pages\] = \[2, 3\] .* found \[1, 3\]"),
        ("rows", lambda x: x[:, :2], r"rows of shape .* found \[2, 2, "),
        ("pool", lambda x: x[:, :32], r"pool of shape .* found \[\d+, 32, "),
        ("ancestors", lambda x: x[:, :2], r"ancestors of shape \[B, N, 2\] = \[2, 4, 2\] .* found \[2, 2, 2\]"),
        ("ancestors", lambda x: x.int(), "ancestors .* in torch.int32"),
    ],
)
def test_arguments_that_disagree(name: str, change: Callable[[Tensor], Tensor], said: str) -> None:
    c = case([65, 0], [[-1, 0, 0, 1]] * 2)
    wrong = c._replace(**{name: change(getattr(c, name))})
    schedule = module.mla_schedule(c.length, 4, HEADS)
    for device in ("cpu", "meta"):
        moved = (x if x is None else x.to(device) for x in (*wrong, schedule))
        with pytest.raises(ValueError, match=said):
            module.mla_tree_verify(*moved, LATENT, SCALE)


@pytest.mark.parametrize(("nodes", "heads"), [(0, 8), (8, 0), (-1, 8)])
def test_a_schedule_of_nothing(nodes: int, heads: int) -> None:
    with pytest.raises(ValueError, match="one or more nodes and heads"):
        module.mla_schedule(torch.zeros(1, dtype=torch.int32), nodes, heads)
