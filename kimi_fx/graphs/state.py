"""What a round reads and leaves behind: the pool, the requests' state, a tree, what was emitted.

Only `ops.commit` writes a pool or a state, in place; everything else passes them through.
"""

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from ..config import PAGE, STOP_SLOTS, DrafterModel, TargetModel
from ..ops import Ops
from .axis import Axis
from .pytree import pytree, tree_map


@dataclass(frozen=True)
class Model:
    """The static half of a round: geometry and operators, closed over, never a leaf."""

    target: TargetModel
    drafter: DrafterModel | None
    ops: Ops
    axis: Axis | None = None  # ranks that share heads, experts' width and vocabulary; None: there is one

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers whose outputs the drafter reads."""
        return self.drafter.taps if self.drafter else ()

    @property
    def ranks(self) -> int:
        """Ranks of the axis."""
        return self.axis.size if self.axis else 1


@dataclass(frozen=True)
class Shape:
    """All that is static of a round. Plain decoding is 1 node; a chain is a tree of width 1."""

    batch: int  # B
    nodes: int  # N, the root included
    block: int  # S, the anchor included
    width: int  # best tokens considered at each depth

    @property
    def depth(self) -> int:
        """Edges from the root to the deepest possible node."""
        return min(self.block, self.nodes) - 1


@pytree
class KVPool:
    """Rows of committed tokens. Target and drafter share page ids."""

    target: Tensor  # [layers, P, 64, L + R] latent after its norm | rope after rotation
    draft_k: Tensor  # [drafter layers, P, 64, KV, head]; 0 layers without a drafter
    draft_v: Tensor  # [drafter layers, P, 64, KV, head]


@pytree
class Sampling:
    """Sampling parameters and the counts that penalties need, one row a request."""

    temperature: Tensor  # [B] f32; 0: greedy
    top_k: Tensor  # [B] i64; V: all
    top_p: Tensor  # [B] f32
    min_p: Tensor  # [B] f32
    presence: Tensor  # [B] f32
    frequency: Tensor  # [B] f32
    repetition: Tensor  # [B] f32
    bias: Tensor  # [B, V] f32
    counts: Tensor  # [B, V] i32 times emitted
    seen: Tensor  # [B, V] bool in prompt or output
    seed: Tensor  # [B, 2] i64 low and high 32 bits
    sample: Tensor  # [B] i64 which of the prompt's n samples
    logprobs: Tensor  # [B] i32 alternatives wanted; -1: none, not even the chosen one's
    stop_ids: Tensor  # [B, 8] i64, -1 pads
    remaining: Tensor  # [B] i64 tokens still to emit
    min_remaining: Tensor  # [B] i64 tokens before a stop is allowed


@pytree
class StepState:
    """Every request's state, one row a slot. The host keeps slots dense; inactive rows are padding."""

    anchor: Tensor  # [B] i64 last committed token, not yet in the pool
    length: Tensor  # [B] i32 committed tokens in the pool
    page_table: Tensor  # [B, pages] i32
    budget: Tensor  # [B] i64 nodes drafted at most, root excluded
    width: Tensor  # [B] i64 best tokens of a depth used; 1: a chain
    active: Tensor  # [B] bool
    sampling: Sampling


@pytree
class Tree:
    """The drafted tree. Node 0 is the root (the anchor); parents come before children."""

    token: Tensor  # [B, N] i64
    parent: Tensor  # [B, N] i64; root and padding: -1
    depth: Tensor  # [B, N] i64; padding: 0
    score: Tensor  # [B, N] f32 sum of log-probabilities; padding: -inf
    ancestors: Tensor  # [B, N, 2] i64 128 bits, self included; padding sees itself only
    valid: Tensor  # [B, N] bool


@pytree
class Emitted:
    """What one round hands to the host."""

    tokens: Tensor  # [B, A] i64; -1 past count
    count: Tensor  # [B] i64
    path: Tensor  # [B, A] i64 nodes whose rows were committed; 0 past count
    finish: Tensor  # [B] i64: RUNS, STOP, LENGTH or NON_FINITE of ops/sample_and_walk
    logprob: Tensor  # [B, A] f32 of each token under the raw logits
    top_ids: Tensor  # [B, A, 20] i64
    top_logprobs: Tensor  # [B, A, 20] f32
    nodes: Tensor  # [B] i64 nodes verified, the root included


@dataclass(frozen=True)
class Context:
    """What every attention layer of one target pass shares."""

    page_table: Tensor  # [B, pages] i32
    length: Tensor  # [B] i32
    ancestors: Tensor | None  # [B, N, 2] i64; None: causal
    schedule: Tensor  # i32, from `mla_schedule`
    cos: Tensor  # [T, R] f32, from `pair_angles`
    sin: Tensor
    counters: Tensor  # i32 zero, `counters_of` them: blocks of a launch tell each other there and leave it so


def empty_pool(m: Model, pages: int, dtype: torch.dtype, device: torch.device) -> KVPool:
    """A pool of `pages` pages; every leaf owns its storage. MemoryError, with sizes, where it does not fit."""
    t, d = m.target, m.drafter
    target = (t.layers, pages, PAGE, t.row)
    draft = (d.layers, pages, PAGE, d.kv_heads(m.ranks), d.head) if d else (0, pages, PAGE, 1, 1)
    try:
        return KVPool(*(torch.zeros(shape, dtype=dtype, device=device) for shape in (target, draft, draft)))
    except RuntimeError:
        size = (prod(target) + 2 * prod(draft)) * dtype.itemsize
        raise MemoryError(
            f"The pool of {pages * PAGE:,} tokens needs {size / 1e9:.1f} GB on {device} and they are not free: "
            f"lower cache.tokens, cache.max_len or run.batch."
        ) from None


def empty_state(batch: int, pages: int, vocab: int, device: torch.device) -> StepState:
    """`batch` inactive slots, each with room for `pages` page ids."""

    def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(batch, *shape, dtype=dtype, device=device)

    i64 = torch.int64
    return StepState(
        anchor=zeros(dtype=i64),
        length=zeros(dtype=torch.int32),
        page_table=zeros(pages, dtype=torch.int32),
        budget=zeros(dtype=i64),
        width=zeros(dtype=i64),
        active=zeros(dtype=torch.bool),
        sampling=Sampling(
            temperature=zeros(),
            top_k=zeros(dtype=i64),
            top_p=zeros(),
            min_p=zeros(),
            presence=zeros(),
            frequency=zeros(),
            repetition=zeros(),
            bias=zeros(vocab),
            counts=zeros(vocab, dtype=torch.int32),
            seen=zeros(vocab, dtype=torch.bool),
            seed=zeros(2, dtype=i64),
            sample=zeros(dtype=i64),
            logprobs=zeros(dtype=torch.int32),
            stop_ids=zeros(STOP_SLOTS, dtype=i64),
            remaining=zeros(dtype=i64),
            min_remaining=zeros(dtype=i64),
        ),
    )


def slots(state: StepState, batch: int) -> StepState:
    """The first `batch` rows of every leaf, as views."""
    return tree_map(lambda leaf: leaf[:batch], state)
