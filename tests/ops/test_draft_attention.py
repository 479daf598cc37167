"""The drafter's attention against a dense fp64 reference: grouped heads, windows, causal blocks, pages anywhere.

Every row that holds no committed token is NaN.
"""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from kimi_fx.ops import draft_attention as module

LENGTHS = [0, 1, 63, 64, 65, 200]
WINDOWS = [0, 1, 2, 5, 63, 64, 65, 100, 1000]
HEAD, SCALE = 16, 0.3


class Case(NamedTuple):
    q: Tensor
    pool_k: Tensor
    pool_v: Tensor
    page_table: Tensor
    length: Tensor
    k: Tensor
    v: Tensor


def case(lengths: list[int], slots: int, heads: tuple[int, int] = (4, 2), seed: int = 0, dtype=torch.float32) -> Case:
    generator = torch.Generator().manual_seed(seed)
    B, (H, KV) = len(lengths), heads

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).to(dtype)

    each = max(lengths) // 64 + 2
    pages = torch.randperm(B * each + 3, generator=generator)[: B * each].view(B, each).int()
    pools = torch.full((2, B * each + 3, 64, KV, HEAD), torch.nan, dtype=dtype)
    for b, length in enumerate(lengths):
        for at in range(length):
            pools[:, pages[b, at // 64], at % 64] = normal(2, KV, HEAD)
    block = normal(2, B, slots, KV, HEAD)
    length = torch.tensor(lengths, dtype=torch.int32)
    return Case(normal(B, slots, H, HEAD), pools[0].clone(), pools[1].clone(), pages, length, block[0], block[1])


def dense(c: Case, window: int, causal: bool) -> Tensor:
    """[B, S, H, head] f64, one slot and head at a time."""
    out = torch.empty(c.q.shape, dtype=torch.float64)
    shared = c.q.shape[2] // c.k.shape[2]
    for b, length in enumerate(c.length.tolist()):
        where = [(int(c.page_table[b, at // 64]), at % 64) for at in range(length)]
        keys, values = (
            torch.stack([pool[page, row] for page, row in where] + list(block[b])).double()
            for pool, block in ((c.pool_k, c.k), (c.pool_v, c.v))
        )
        for slot in range(c.q.shape[1]):
            p = length + slot
            seen = [j for j in range(len(keys)) if (not causal or j <= p) and (not window or abs(p - j) < window)]
            for head in range(c.q.shape[2]):
                q, kv = c.q[b, slot, head].double(), head // shared
                weights = (SCALE * (keys[seen, kv] @ q)).softmax(0)
                out[b, slot, head] = weights @ values[seen, kv]
    return out


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", WINDOWS)
def test_every_length_in_one_batch(window: int, causal: bool) -> None:
    c = case(LENGTHS, slots=8, seed=window)
    exact = dense(c, window, causal)
    torch.testing.assert_close(module.reference(*c, SCALE, window, causal).double(), exact, rtol=0, atol=1e-5)


@pytest.mark.parametrize("slots", [1, 2, 3, 7, 17])
def test_any_block(slots: int) -> None:
    for window, causal in ((0, False), (0, True), (4, False), (48, True)):
        c = case([65, 3], slots, seed=slots)
        exact = dense(c, window, causal)
        torch.testing.assert_close(module.reference(*c, SCALE, window, causal).double(), exact, rtol=0, atol=1e-5)


@pytest.mark.parametrize("heads", [(1, 1), (2, 2), (6, 2), (8, 1)])
def test_grouped_heads(heads: tuple[int, int]) -> None:
    c = case([70, 0], 4, heads)
    exact = dense(c, 0, False)
    torch.testing.assert_close(module.reference(*c, SCALE, 0, False).double(), exact, rtol=0, atol=1e-5)


def test_bfloat16() -> None:
    """Against fp64 of the same rounded inputs, values of deviation 1."""
    c = case([70, 5], 8, dtype=torch.bfloat16)
    ours = module.reference(*c, SCALE, 48, True)
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours.double(), dense(c, 48, True), rtol=0, atol=0.03)


def test_what_a_window_hides_may_be_anything() -> None:
    """Pages wholly before the window are not read."""
    c = case([200], 8)
    expected = module.reference(*c, SCALE, 48, True)
    hidden = c.page_table[0, :2].long()  # rows 0..127; slot 0, at 200, sees 153 and on
    c.pool_k[hidden] = c.pool_v[hidden] = torch.nan
    assert torch.equal(module.reference(*c, SCALE, 48, True), expected)


@pytest.mark.parametrize(("window", "causal"), [(0, False), (48, True)])
def test_opcheck(window: int, causal: bool) -> None:
    c = case([65, 0], 4)
    torch.library.opcheck(module.draft_attention, (*c, SCALE, window, causal))
