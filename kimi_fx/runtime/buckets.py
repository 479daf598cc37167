"""Which shapes are compiled, and which of them holds a step.

A round's bucket is a `Shape`; a prefill's is a `Chunk`. A step runs in the least bucket that holds it: slots, nodes
and tokens beyond its own are padding and change no result. Knows nothing of compiling.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ..config import NODE_BUCKETS, PAGE, Config
from ..graphs.state import Model, Shape
from ..request import Plan


@dataclass(frozen=True)
class Chunk:
    """A prefill of one request."""

    tokens: int  # C


Bucket = Shape | Chunk
B = TypeVar("B", Shape, Chunk)


def shape_for(config: Config, model: Model, batch: int, plans: Sequence[Plan]) -> Shape:
    """The shape of a round for requests that draft so."""
    nodes, wide = holding(max(p.budget for p in plans)), max(p.width for p in plans) > 1
    return shape_of(config, model, batch, nodes, wide)


def shape_of(config: Config, model: Model, batch: int, nodes: int, wide: bool) -> Shape:
    """The shape of a round; `wide`: more than the best token of a depth is considered."""
    block = config.step.block or (model.drafter.block if model.drafter else 1)
    width = min(nodes - 1, model.target.V) if wide else 1
    return Shape(batch, nodes, block, width) if nodes > 1 else Shape(batch, 1, 1, 1)


def buckets(config: Config, model: Model, plan: Plan) -> tuple[Bucket, ...]:
    """All that the configuration asks for, largest first. Raises ValueError for nodes that cannot be had."""
    nodes = sorted({1, holding(plan.budget)}) if config.run.nodes is None else config.run.nodes
    if not nodes:
        raise ValueError("run.nodes=[] compiles no round: name some, or leave it out.")
    strange = set(nodes) - set(NODE_BUCKETS)
    if strange:
        raise ValueError(f"run.nodes has {min(strange)}: nodes are compiled for {', '.join(map(str, NODE_BUCKETS))}.")
    if model.drafter is None and max(nodes) > 1:
        raise ValueError(f"run.nodes has {max(nodes)}, but without a drafter every round has 1 node.")
    wide = plan.mode != "chain"
    rounds = {shape_of(config, model, b, n, wide) for n in nodes for b in batches(config.run.batch)}
    if config.drafter.backend == "tensorrt" and not any(min(s.nodes, s.block) > 1 for s in rounds):
        raise ValueError("drafter.backend=tensorrt makes what drafts, and no compiled round here does: leave it out.")
    chunks = {Chunk(min(PAGE, config.run.chunk)), Chunk(config.run.chunk)}
    return tuple(sorted(rounds | chunks, key=tokens, reverse=True))


def holding(budget: int) -> int:
    """Nodes of the least bucket for that many drafted ones."""
    return next(n for n in NODE_BUCKETS if n > budget)


def batches(most: int) -> list[int]:
    """Powers of two, and the most there can be."""
    return [2**i for i in range((most - 1).bit_length())] + [most]


def tokens(bucket: Bucket) -> int:
    """That one pass computes."""
    return bucket.tokens if isinstance(bucket, Chunk) else bucket.batch * bucket.nodes


def fit(wanted: B, built: Iterable[Bucket]) -> B | None:
    """The least of `built` that holds `wanted`, or None."""
    large = (b for b in built if isinstance(b, type(wanted)) and all(map(int.__ge__, sizes(b), sizes(wanted))))
    return min(large, key=lambda b: (tokens(b), sizes(b)), default=None)


def sizes(bucket: Bucket) -> tuple[int, ...]:
    return tuple(vars(bucket).values())


def name(bucket: Bucket) -> str:
    """As files and messages have it."""
    if isinstance(bucket, Chunk):
        return f"prefill-{bucket.tokens}"
    return f"round-batch{bucket.batch}-nodes{bucket.nodes}-block{bucket.block}-width{bucket.width}"
