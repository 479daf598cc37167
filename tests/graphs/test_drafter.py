"""The drafter against a dense one that shares no code with it; what it is fed; how long its context is."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from checks import check_draft
from kimi_fx.engine import Engine
from kimi_fx.graphs import drafter
from oracles.dflash import DFlash
from oracles.rounds import one_round, prefilled, random_engine, shape

NANO = Path(drafter.__file__).parents[1] / "nano" / "kimi-nano-dflash"


def dense(engine: Engine, folder: Path) -> DFlash:
    return DFlash(folder, engine.loaded.params.target.embed, engine.loaded.params.target.lm_head)


@pytest.mark.parametrize("length", [1, 63, 64, 65, 128])
def test_marginals_of_the_shipped_pair(make_engine: Any, held_out: list[list[int]], length: int) -> None:
    engine = make_engine()
    check_draft(engine, dense(engine, NANO), held_out[0][:length])


@pytest.mark.parametrize("length", [1, 40, 130])
def test_marginals_of_another_geometry(tmp_path: Path, length: int) -> None:
    """A sliding, causal layer under and over its window of 48; taps out of order; other rope."""
    engine = random_engine(tmp_path)
    assert (engine.model.drafter.windows, engine.model.drafter.causal) == ((48, 0), (True, False))
    prompt = torch.randint(0, 320, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    check_draft(engine, dense(engine, tmp_path / "drafter"), prompt)


def test_block_is_the_last_committed_token_and_masks(
    make_engine: Any, golden: list[dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And its context is the committed tokens, after every round whatever was accepted."""
    engine = make_engine()
    blocks: list[Tensor] = []
    lengths: list[Tensor] = []

    def embed(tokens: Tensor, weight: Tensor, *rest: Any) -> Tensor:
        blocks.append(tokens)
        return F.embedding(tokens, weight)

    def draft_attention(q: Tensor, k: Tensor, v: Tensor, table: Tensor, length: Tensor, *rest: Any) -> Tensor:
        lengths.append(length.clone())
        return engine.model.ops.draft_attention(q, k, v, table, length, *rest)

    monkeypatch.setattr(drafter, "embed", embed)
    prompts = [g["prompt"].tolist() for g in golden[:2]]
    texts = [prompt + g["greedy"].tolist() for prompt, g in zip(prompts, golden, strict=False)]
    pool, state = prefilled(engine, prompts, [15, 15])
    committed, counts = [len(p) for p in prompts], set()
    for _ in range(12):
        _, emitted, _ = one_round(engine, pool, state, shape(engine, 16, 2), draft_attention=draft_attention)
        assert blocks.pop().tolist() == [[t[n]] + [4093] * 7 for t, n in zip(texts, committed, strict=True)]
        assert not blocks and [x.tolist() for x in lengths] == [committed] * engine.model.drafter.layers
        lengths.clear()
        counts |= set(emitted.count.tolist())
        committed = [n + count for n, count in zip(committed, emitted.count.tolist(), strict=True)]
        assert state.length.tolist() == committed
    assert len(counts) > 3
