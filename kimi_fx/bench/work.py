"""What a round has to read and compute, part by part, and the time below which no kernel does it.

Weights and cache rows count once, in bf16 where the plan does not say otherwise, results only where they are large.
All numbers are of the geometry that is passed, one rank's or the whole model's.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import torch

from ..config import DrafterModel, TargetModel
from ..graphs.params import Leaf, MoE, drafter_plan, target_plan
from ..graphs.pytree import tree_leaves
from ..graphs.state import Model, Shape
from .device import Rates

PARTS = ("draft", "tree", "attention", "experts", "rest", "sample", "commit")
BF16, F32 = 2, 4

plan_of = cache(target_plan)  # it names every expert's tensors, which takes a while


@dataclass(frozen=True)
class Work:
    bytes: float = 0
    operations: float = 0

    def __add__(self, other: "Work") -> "Work":
        return Work(self.bytes + other.bytes, self.operations + other.operations)

    def floor(self, card: Rates) -> float:
        """Seconds."""
        return max(self.bytes / card.read, self.operations / card.matmul)


def round_work(model: Model, s: Shape, context: int, hits: float) -> dict[str, Work]:
    """Of each part of a round over that much context, if a layer's tokens visit `hits` experts."""
    t, d = model.target, model.drafter if s.nodes > 1 else None
    return {
        "draft": draft(d, t, s, context) if d else Work(),
        "tree": Work(s.batch * (s.block - 1) * t.V * F32),
        "attention": attention(t, s, context),
        "experts": experts(t, s.batch * s.nodes, hits),
        "rest": products(rest(t), s.batch * s.nodes),
        "sample": Work(s.batch * t.V * F32),  # the root's row: what a walk that ends at once reads
        "commit": products(context_leaves(d), s.batch * (s.depth + 1)) if d else Work(),
    }


def draft(d: DrafterModel, t: TargetModel, s: Shape, context: int) -> Work:
    """The drafter's block: its layers, the keys and values of all of them, its context, the target's head."""
    plan, slots = drafter_plan(d), s.batch * s.block
    seen = [min(context, window or context) for window in d.windows]
    rows = Work(
        s.batch * sum(seen) * 2 * d.KV * d.head * BF16,
        4 * s.batch * s.block * d.H * d.head * sum(n + s.block for n in seen),
    )
    head = plan_of(t).lm_head
    return products([*tree_leaves(plan.layers), plan.kv], slots) + products([head], slots - s.batch) + rows


def context_leaves(d: DrafterModel) -> list[Leaf]:
    """What turns accepted tokens' features into the drafter's context."""
    plan = drafter_plan(d)
    return [plan.fc, plan.kv]


def attention(t: TargetModel, s: Shape, context: int) -> Work:
    """Absorbed MLA over all layers: pool rows and the tree's own, queries, and latents out."""
    keys, rows = context + s.nodes, s.batch * s.nodes * t.H
    width = t.row + t.L
    return Work(t.layers * BF16 * (s.batch * keys * t.row + rows * width), t.layers * 2 * width * rows * keys)


def experts(t: TargetModel, tokens: int, hits: float) -> Work:
    """The experts hit, words and scales, of all layers that have any."""
    layers = t.layers - t.dense_layers
    return Work(layers * hits * expert_bytes(t), layers * 2 * 3 * t.D * t.I * t.K * tokens)


def expert_bytes(t: TargetModel) -> int:
    """Words of half a byte a weight, and bf16 scales."""
    weights = 3 * t.D * t.I
    return weights // 2 + weights // t.group * BF16


def rest(t: TargetModel) -> Iterator[Leaf]:
    """Every weight that all tokens go through: not the embedding, which is looked up, nor the experts."""
    plan = plan_of(t)
    yield plan.lm_head
    for layer in plan.layers:
        yield from tree_leaves((layer.attention, layer.norm))
        mlp = layer.mlp
        yield from tree_leaves((mlp.router, mlp.bias, mlp.shared) if isinstance(mlp, MoE) else mlp)


def products(leaves: Any, rows: int) -> Work:
    """Each weight read once and multiplied with every row."""
    sizes = [(prod(leaf.shape), leaf_bytes(leaf)) for leaf in leaves]
    return Work(sum(size for _, size in sizes), 2 * rows * sum(weights for weights, _ in sizes))


def leaf_bytes(leaf: Leaf) -> int:
    return prod(leaf.shape) * (leaf.dtype or torch.bfloat16).itemsize
