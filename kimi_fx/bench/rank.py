"""One rank of a tensor-parallel model alone on its device: its share of both geometries, random weights, a pool.

It has its part of the heads, of every width between two sums over the ranks and of the vocabulary, embedding and head
alike, and computes as one rank does, but nothing is summed or gathered. So where a rank draws from whole rows of its
part of the nodes, this one walks over a part of every row, and its drafter's tree ranks a part of the vocabulary. A
rank's part of the drafter's `fc` is rounded up to whole tapped layers.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..checkpoint.load import random_params
from ..checkpoint.shards import check_divides
from ..config import PAGE, Config, DrafterModel, TargetModel
from ..graphs.params import MoE, Params, drafter_plan
from ..graphs.pytree import tree_leaves
from ..graphs.state import KVPool, Model, StepState, empty_pool, empty_state
from ..ops import KERNELS
from ..request import Plan
from ..runtime.load import Loaded, Text
from ..runtime.rounds import Rounds
from .work import BF16, leaf_bytes, plan_of

INIT = 0.02  # deviation of random weights
EMBED = 64.0  # of embeddings: layers add little to it, so that hidden states are as independent as tokens are


@dataclass(frozen=True)
class Rank:
    model: Model
    params: Params
    pool: KVPool
    state: StepState
    rounds: Rounds


@dataclass(frozen=True)
class Room:
    batch: int
    table: int  # pages of a request
    pages: int  # of the pool


def share_of_target(m: TargetModel, ranks: int) -> TargetModel:
    """One rank's letters. ValueError where the ranks cannot share a size."""
    check_divides(m, None, ranks)
    return replace(m, H=m.H // ranks, V=m.V // ranks, dense=m.dense // ranks, I=m.I // ranks)


def share_of_drafter(d: DrafterModel, V: int, ranks: int) -> DrafterModel:
    """One rank's letters; a key/value head is on as many ranks as it has to be."""
    taps, kv = d.taps[: -(-len(d.taps) // ranks)], max(1, d.KV // ranks)
    return replace(d, H=d.H // ranks, KV=kv, inner=d.inner // ranks, taps=taps, mask_id=V - 1)


def device_bytes(model: Model, room: Room) -> int:
    """Weights and pool in bf16."""
    t, d = model.target, model.drafter
    leaves = [*tree_leaves(plan_of(t)), *(tree_leaves(drafter_plan(d)) if d else [])]
    row = t.layers * t.row + (2 * d.layers * d.KV * d.head if d else 0)
    return sum(map(leaf_bytes, leaves)) + room.pages * PAGE * row * BF16


def make_rank(config: Config, model: Model, room: Room, device: torch.device, dtype: torch.dtype) -> Rank:
    """Weights are made where they stay, leaf by leaf; the pool is normal. Every call draws the same."""
    torch.manual_seed(0)
    t, d = model.target, model.drafter
    drafter = random_params(drafter_plan(d), 1, device, dtype) if d else None
    params = Params(random_params(plan_of(t), 0, device, dtype), drafter)
    params.target.embed.mul_(EMBED / INIT)
    if d:
        params.target.embed[d.mask_id] = 0  # else it outweighs the context, and all requests draft the same tokens
    pool = empty_pool(model, room.pages, dtype, device)
    for leaf in tree_leaves(pool):
        leaf.normal_()
    state = empty_state(room.batch, room.table, t.V, device)
    return Rank(model, params, pool, state, rounds_of(config, model, params, device, dtype))


def without_drafter(rank: Rank, config: Config) -> Rank:
    """The same target over the same rows, for plain decoding."""
    model, rows = replace(rank.model, drafter=None), rank.pool.target
    params = replace(rank.params, drafter=None)
    none = (rows.new_zeros(0, rows.shape[1], PAGE, 1, 1) for _ in range(2))
    rounds = rounds_of(config, model, params, rows.device, rows.dtype)
    return Rank(model, params, KVPool(rows, *none), rank.state, rounds)


def rounds_of(config: Config, model: Model, params: Params, device: torch.device, dtype: torch.dtype) -> Rounds:
    """Where the rank's compiled rounds come from: the artefact store or the compiler."""
    nodes = config.run.nodes if model.drafter else (1,)
    budget = max(nodes or (1,)) - 1
    loaded = Loaded(params, replace(model, ops=KERNELS), device, dtype, Text())
    config = replace(config, run=replace(config.run, nodes=nodes))
    return Rounds(config, loaded, Plan("tree" if budget else "plain", budget, max(1, budget)))


def seat_all(state: StepState, batch: int, context: int, nodes: int, pages: Tensor) -> None:
    """Every request of the batch with that much context on pages of its own, drawing at temperature 1, without end.

    pages: [P] i32, those of the pool in any order
    """
    each, V, s = context // PAGE + 2, state.sampling.bias.shape[1], state.sampling
    state.page_table.zero_()
    state.page_table[:batch, :each] = pages[: batch * each].view(batch, each)
    state.anchor.random_(V)
    state.budget.fill_(nodes - 1)
    state.width.fill_(max(1, nodes - 1))
    for leaf, value in ((state.length, context), (state.active, True), (s.temperature, 1), (s.top_k, V), (s.top_p, 1)):
        leaf.fill_(value)
    for leaf, value in ((s.repetition, 1), (s.logprobs, -1), (s.stop_ids, -1), (s.remaining, 2**40)):
        leaf.fill_(value)


def set_router_bias(
    params: Params,
    bias: Tensor,  # [E]
) -> None:
    """Every layer gets it in another order."""
    torch.manual_seed(0)
    for layer in params.target.layers:
        if isinstance(layer.mlp, MoE):
            layer.mlp.bias.copy_(bias[torch.randperm(len(bias))])
