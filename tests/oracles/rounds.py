"""Rounds by hand: requests prefilled into a poisoned pool, one round with its logits, and what plain decoding says.

Every row of the pool that no commit wrote is NaN, so that a read of one shows in any comparison. The plain side
never sees a pool, a tree or a commit: one causal forward over whole sequences.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kimi_fx.compose import load_config
from kimi_fx.engine import Engine
from kimi_fx.graphs import drafter, target
from kimi_fx.graphs.pytree import tree_map
from kimi_fx.graphs.state import Emitted, KVPool, Model, Shape, StepState, Tree, empty_pool, empty_state
from kimi_fx.graphs.step import ddtree_step, prefill_step
from kimi_fx.runtime.load import load
from kimi_fx.runtime.pages import pages_for
from oracles.write_checkpoint import drafter_config, target_config, write_drafter, write_target

ROOM = 128  # tokens a request's pages hold beyond its prompt


def random_engine(folder: Path, target: dict[str, Any] | None = None, drafter: dict[str, Any] | None = None) -> Engine:
    """An fp32 engine over a random checkpoint pair written into `folder`; the dicts change its configs."""
    write_target(folder / "target", target_config(**target or {}))
    write_drafter(folder / "drafter", drafter_config(**drafter or {}), folder / "target")
    config = load_config(
        [f"target={folder / 'target'}", f"drafter={folder / 'drafter'}", "dtype=float32", "device=cpu"]
    )
    return Engine(config, load(config, progress=False))


def with_ops(engine: Engine, **operators: Callable[..., Any]) -> Engine:
    """An engine as configured, over the same weights, with some operators replaced."""
    model = replace(engine.model, ops=replace(engine.model.ops, **operators))
    return Engine(engine.config, replace(engine.loaded, model=model))


def unseated(engine: Engine, batch: int, pages: int) -> tuple[KVPool, StepState]:
    """A pool of NaN and a state of idle greedy slots without an end, their page tables shuffled and disjoint."""
    loaded, vocabulary = engine.loaded, engine.model.target.V
    pool = tree_map(lambda leaf: leaf.fill_(torch.nan), empty_pool(engine.model, batch * pages, loaded.dtype, "cpu"))
    state = empty_state(batch, pages, vocabulary, torch.device("cpu"))
    shuffled = torch.randperm(batch * pages, generator=torch.Generator().manual_seed(0))
    state.page_table.copy_(shuffled.view(batch, pages))
    s = state.sampling
    for leaf, value in ((s.top_k, vocabulary), (s.top_p, 1), (s.repetition, 1), (s.stop_ids, -1), (s.logprobs, -1)):
        leaf.fill_(value)
    s.remaining.fill_(10**6)
    return pool, state


def prefill(
    engine: Engine,
    pool: KVPool,
    state: StepState,
    slot: int,
    prompt: Sequence[int],
    chunk: int = 512,
    seen: list[Tensor] | None = None,  # gets each chunk's last logits
) -> None:
    """One request's whole prompt, chunk by chunk; its slot is active afterwards."""
    model = listening(engine.model, [] if seen is None else seen)
    row = tree_map(lambda leaf: leaf[slot : slot + 1], state)
    for start in range(0, len(prompt), chunk):
        part = torch.tensor([prompt[start : start + chunk]])
        final = torch.tensor([start + chunk >= len(prompt)])
        prefill_step(engine.loaded.params, pool, row, part, torch.tensor([part.shape[1]]), final, model)


def prefilled(
    engine: Engine, prompts: Sequence[Sequence[int]], budgets: Sequence[int], widths: Sequence[int] | None = None
) -> tuple[KVPool, StepState]:
    """Greedy requests that have their first token, one a slot."""
    pool, state = unseated(engine, len(prompts), pages_for(max(map(len, prompts)) + ROOM))
    state.budget.copy_(torch.tensor(budgets))
    state.width.copy_(torch.tensor(widths or budgets))
    for slot, prompt in enumerate(prompts):
        prefill(engine, pool, state, slot, prompt)
    return pool, state


def shape(engine: Engine, nodes: int, batch: int = 1) -> Shape:
    """As the engine would choose it for a tree."""
    return Shape(batch, nodes, engine.model.drafter.block if nodes > 1 else 1, max(nodes - 1, 1))


def listening(model: Model, seen: list[Tensor], **operators: Callable[..., Any]) -> Model:
    """A model whose logits go into `seen` when a step draws from them; `operators` stand in for its own."""
    ops = replace(model.ops, **operators)

    def walk(logits: Tensor, *rest: Any) -> Any:
        seen.append(logits)
        return ops.sample_and_walk(logits, *rest)

    return replace(model, ops=replace(ops, sample_and_walk=walk))


def one_round(
    engine: Engine, pool: KVPool, state: StepState, shape: Shape, **operators: Callable[..., Any]
) -> tuple[Tree, Emitted, Tensor]:
    """`ddtree_step` and the logits [B, N, V] that it drew from; `operators` stand in for the engine's own."""
    seen: list[Tensor] = []
    model = listening(engine.model, seen, **operators)
    _, tree, emitted = ddtree_step(engine.loaded.params, pool, state, shape, model)
    return tree, emitted, seen[0]


def drafting(engine: Engine, marginals: Tensor) -> Callable[..., Any]:
    """`build_tree` from these marginals [B, S - 1, V] in place of the drafter's."""
    return lambda _, *rest: engine.model.ops.build_tree(marginals, *rest)


def few_tokens(engine: Engine, batch: int, choices: int, seed: int) -> Tensor:
    """Marginals with mass on some tokens only, at most half of it on one: trees with siblings at every depth."""
    generator = torch.Generator().manual_seed(seed)
    size = batch, engine.model.drafter.block - 1, engine.model.target.V
    chosen = torch.rand(size, generator=generator).topk(choices).indices
    return torch.full(size, -torch.inf).scatter(2, chosen, torch.rand(chosen.shape, generator=generator))


def path(tree: Tree, b: int, node: int) -> list[int]:
    """Nodes from the root to `node`, by parents alone."""
    up = [node]
    while (parent := int(tree.parent[b, up[-1]])) >= 0:
        up.append(parent)
    return up[::-1]


def forward(
    engine: Engine, sequences: Sequence[Sequence[int]], taps: Sequence[int] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, pool rows and features of whole sequences, as `target.forward`; short ones are padded behind."""
    m, device, length = engine.model, engine.loaded.device, max(map(len, sequences))
    tokens = torch.tensor([[*s, *[0] * (length - len(s))] for s in sequences], device=device)
    place = torch.arange(length, device=device).expand_as(tokens)
    pool = torch.zeros(m.target.layers, 1, 64, m.target.row, device=device, dtype=engine.loaded.dtype)
    table, none = (torch.zeros(len(sequences), *w, dtype=torch.int32, device=device) for w in ((1,), ()))
    params = engine.loaded.params.target
    tapped = m.taps if taps is None else tuple(taps)
    return target.forward(params, m.target, m.ops, tokens, place, place >= 0, pool, table, none, None, tapped)


def plain_logits(engine: Engine, sequences: Sequence[Sequence[int]], start: int) -> Tensor:
    """[sequences, length - start, V]: what each prefix of more than `start` tokens predicts."""
    hidden, _, _ = forward(engine, sequences)
    return target.logits(engine.loaded.params.target, engine.model.target, engine.model.ops, hidden[:, start:])


def plain_rows(engine: Engine, tokens: Sequence[int]) -> KVPool:
    """What one prefill of the tokens writes: leaves as the pool's, [layers, tokens, …]."""
    _, rows, features = forward(engine, [tokens])
    positions = torch.arange(len(tokens)).unsqueeze(0)
    k, v = drafter.context_kv(engine.loaded.params.drafter, engine.model.drafter, engine.model.ops, features, positions)
    return KVPool(rows[:, 0], k[:, 0], v[:, 0])


def live_rows(pool: KVPool, pages: Sequence[int], length: int) -> KVPool:
    """A copy of one request's rows, in sequence order."""
    return tree_map(lambda leaf: leaf[:, torch.as_tensor(pages).long()].flatten(1, 2)[:, :length].clone(), pool)
