"""The write of a round against a model in plain Python: pools as dictionaries of rows, state as numbers."""

import random
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kimi_fx.ops import commit as module

LAYERS, DRAFT_LAYERS, PAGES, ROW, KV, HEAD, V = 2, 3, 3, 5, 2, 4, 11
MUTATED = ("pool", "draft_k", "draft_v", "anchor", "length", "active", "counts", "seen", "remaining", "min_remaining")


def case(batch: int, nodes: int, rows: int, rng: random.Random, prefill: bool = False) -> dict[str, Tensor]:
    """Arguments by name: requests anywhere in their pages, some idle, some ending."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31))

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    def numbers(*values: Any, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype)

    total = batch * PAGES + 2
    pages = rng.sample(range(total), batch * PAGES)
    running = [rng.random() < 0.7 for _ in range(batch)]
    count = [rng.randint(0, rows) if r else 0 for r in running]
    kept = [rng.randint(0, rows) if prefill else n for n in count]
    start = [rng.choice([0, 1, 62, 63, 64, 100, PAGES * 64 - rows]) for _ in range(batch)]
    path = [rng.sample(range(nodes), n) + [0] * (rows - n) for n in kept]
    tokens = [[rng.randrange(V) for _ in range(n)] + [-1] * (rows - n) for n in count]
    return {
        "pool": normal(LAYERS, total, 64, ROW),
        "draft_k": normal(DRAFT_LAYERS, total, 64, KV, HEAD),
        "draft_v": normal(DRAFT_LAYERS, total, 64, KV, HEAD),
        "anchor": numbers(*(rng.randrange(V) for _ in range(batch))),
        "length": numbers(*start, dtype=torch.int32),
        "active": numbers(*running, dtype=torch.bool),
        "counts": torch.randint(0, 3, (batch, V), generator=generator, dtype=torch.int32),
        "seen": torch.rand(batch, V, generator=generator) < 0.5,
        "remaining": numbers(*(n + rng.randrange(3) for n in count)),
        "min_remaining": numbers(*(rng.randrange(6) for _ in range(batch))),
        "page_table": numbers(*pages, dtype=torch.int32).view(batch, PAGES),
        "rows": normal(LAYERS, batch, nodes, ROW),
        "k": normal(DRAFT_LAYERS, batch, rows, KV, HEAD),
        "v": normal(DRAFT_LAYERS, batch, rows, KV, HEAD),
        "path": numbers(*path).view(batch, rows),
        "kept": numbers(*kept),
        "tokens": numbers(*tokens).view(batch, rows),
        "count": numbers(*count),
        "finish": numbers(*(rng.choice([0, 0, 1, 2]) for _ in range(batch))),
        "running": numbers(*running, dtype=torch.bool),
    }


def by_hand(a: dict[str, Tensor]) -> dict[str, Any]:
    """Every mutated argument afterwards, as nested lists."""
    old = {name: a[name].tolist() for name in a}
    new = {name: a[name].tolist() for name in MUTATED}
    for b, n in enumerate(old["kept"]):
        for i in range(n):
            at = old["length"][b] + i
            page, row = old["page_table"][b][at // 64], at % 64
            for layer in range(LAYERS):
                new["pool"][layer][page][row] = old["rows"][layer][b][old["path"][b][i]]
            for layer in range(DRAFT_LAYERS):
                new["draft_k"][layer][page][row] = old["k"][layer][b][i]
                new["draft_v"][layer][page][row] = old["v"][layer][b][i]
        for token in old["tokens"][b][: old["count"][b]]:
            new["anchor"][b] = token
            new["counts"][b][token] += 1
            new["seen"][b][token] = True
            new["remaining"][b] -= 1
            new["min_remaining"][b] = max(new["min_remaining"][b] - 1, 0)
        new["length"][b] += n
        new["active"][b] = old["running"][b] and old["finish"][b] == 0
    return new


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 4), st.integers(1, 9), st.booleans(), st.randoms(use_true_random=False))
def test_equals_plain_python(batch: int, nodes: int, prefill: bool, rng: random.Random) -> None:
    """Rounds, where what enters the pool is what was emitted, and chunks, where it is not."""
    a = case(batch, nodes, rng.randint(1, nodes), rng, prefill)
    before = {name: value.clone() for name, value in a.items()}
    expected = by_hand(a)
    module.reference(**a)
    for name in a:
        assert a[name].tolist() == expected.get(name, before[name].tolist()), name


def test_without_a_drafter() -> None:
    a = case(2, 4, 3, random.Random(0))
    a |= {name: a[name][:0] for name in ("draft_k", "draft_v", "k", "v")}
    before = a["length"].clone()
    module.reference(**a)
    assert torch.equal(a["length"], before + a["kept"])


def test_opcheck() -> None:
    """What it changes it declares; the dispatched operator does the same."""
    a = case(3, 8, 5, random.Random(1))
    torch.library.opcheck(module.commit, tuple(value.clone() for value in a.values()))
    expected = by_hand(a)
    module.commit(*a.values())
    assert all(a[name].tolist() == expected[name] for name in MUTATED)
