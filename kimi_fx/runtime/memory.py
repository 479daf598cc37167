"""What a rank needs of its device, part by part, before anything is loaded: arithmetic over plans and shapes.

Weights are the plan's leaves as a rank computes with them, pool and state are those of `graphs/state.py` on no device;
these are exact. What a step needs beside them is an estimate from above, and what libraries take an allowance. A CPU
gives memory to a pool as it fills, so there only the weights are refused. `available` alone looks at the machine.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.shards import local_leaf
from ..config import PAGE, Config
from ..graphs.params import Leaf, drafter_plan, target_plan
from ..graphs.pytree import tree_leaves
from ..graphs.state import Model, Shape, empty_pool, empty_state
from ..ops import KERNELS
from ..request import Plan
from .buckets import Bucket, buckets, name, tokens
from .pages import pages_for
from .rounds import compiles, recorded

LIBRARIES = 2_000_000_000  # bytes for products' workspaces, NCCL, late kernels, gaps between blocks; not measured
GRAPH = 50_000_000  # bytes of one captured graph's nodes; not measured
META = torch.device("meta")
F32 = 4


@dataclass(frozen=True)
class Ask:
    """What decides how much is needed, the models and the device's kind aside."""

    config: Config
    plan: Plan
    max_len: int

    @property
    def pool(self) -> int:
        """Tokens of the pool, in whole pages."""
        tokens, batch = self.config.cache.tokens, self.config.run.batch
        return PAGE * (pages_for(tokens) if tokens else batch * pages_for(self.max_len))

    def changed(self, group: str, **values: Any) -> "Ask":
        """With other settings of one group."""
        return replace(self, config=replace(self.config, **{group: replace(getattr(self.config, group), **values)}))


@dataclass(frozen=True)
class Weights:
    """Bytes of one rank's share of a model."""

    held: int  # on the device
    stored: int  # in the checkpoint's files
    packing: int  # beside them while the largest leaf is packed


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank, part by part."""

    target: Weights
    drafter: Weights
    pool: int  # tokens
    row: int  # bytes of one token in the target's pool
    draft_row: int  # and in the drafter's
    state: int
    steps: tuple[tuple[str, int], ...]  # what each bucket computes in, an estimate
    workspace: int
    libraries: int
    on_cuda: bool

    @property
    def weights(self) -> int:
        return self.target.held + self.drafter.held

    @property
    def kv(self) -> int:
        return self.pool * (self.row + self.draft_row)

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.state + self.workspace + self.libraries

    def fits(self, available: float) -> bool:
        return (self.total if self.on_cuda else self.weights) <= available


def memory(ask: Ask, model: Model, dtype: torch.dtype, device: torch.device) -> Memory:
    """What a rank needs. Raises ValueError for buckets that cannot be had."""
    on_cuda, batch = device.type == "cuda", ask.config.run.batch
    target, drafter = weights(model, dtype, on_cuda)
    page, state = empty_pool(model, 1, dtype, META), empty_state(batch, pages_for(ask.max_len), model.target.V, META)
    asked = buckets(ask.config, model, ask.plan)
    needs = {bucket: workspace(bucket, model, dtype, on_cuda, ask.max_len) for bucket in asked}
    step = max(needs.values())
    captured = recorded(device, dtype) and compiles(ask.config, device, dtype)  # into memory of the graphs' own
    return Memory(
        target=target,
        drafter=drafter,
        pool=ask.pool,
        row=page.target.nbytes // PAGE,
        draft_row=(page.draft_k.nbytes + page.draft_v.nbytes) // PAGE,
        state=sum(leaf.nbytes for leaf in tree_leaves(state)),
        steps=tuple((name(bucket), n) for bucket, n in needs.items()),
        workspace=max(target.packing, 2 * step if captured else step),  # each is tried before
        libraries=LIBRARIES + GRAPH * len(asked) * captured if on_cuda else 0,
        on_cuda=on_cuda,
    )


@cache  # a plan of Kimi K2.6 names every expert's tensors, which takes a second
def weights(model: Model, dtype: torch.dtype, on_cuda: bool) -> tuple[Weights, Weights]:
    """A rank's share of target and drafter."""
    drafter = tree_leaves(drafter_plan(model.drafter, model.ranks)) if model.drafter else []
    both = (tree_leaves(target_plan(model.target, model.ranks)), drafter)
    target, drafts = (share([local_leaf(leaf, model.ranks) for leaf in leaves], dtype, on_cuda) for leaves in both)
    return target, drafts


def share(leaves: list[Leaf], dtype: torch.dtype, on_cuda: bool) -> Weights:
    words = [prod(leaf.shape) * leaf.stored.itemsize for leaf in leaves if leaf.init == "words"]
    return Weights(
        held=sum(leaf_bytes(leaf, dtype, on_cuda) for leaf in leaves),
        stored=sum(prod(leaf.shape) * leaf.stored.itemsize for leaf in leaves if leaf.sources),
        packing=2 * max(words, default=0),  # its parts before they are joined, and the codes of some experts
    )


def leaf_bytes(leaf: Leaf, dtype: torch.dtype, on_cuda: bool) -> int:
    """As computed with: a CPU unpacks the experts."""
    if leaf.init == "words" and not on_cuda:
        return 8 * prod(leaf.shape) * dtype.itemsize
    if leaf.init == "scales" and not on_cuda:
        return 0
    return prod(leaf.shape) * (leaf.dtype or dtype).itemsize


def workspace(bucket: Bucket, model: Model, dtype: torch.dtype, on_cuda: bool, context: int) -> int:
    """Bytes of intermediate results while a bucket's step runs, each counted as long as any form of the step keeps it:
    every layer's output and rows to the end, and the widest of draft, layer and sampling beside them."""
    t, T, size = model.target, tokens(bucket), dtype.itemsize
    kept = t.layers * T * (t.D + 2 * t.row) + T * t.D * (4 + 2 * len(model.taps))
    layer = max(attention(model, T), moe(model, T), 3 * T * t.dense // model.ranks)
    slow = 0 if on_cuda and model.ops is KERNELS and dtype == torch.bfloat16 else attention_reference(bucket, model)
    drafting = 0
    if isinstance(bucket, Shape) and bucket.nodes > 1 and model.drafter:
        drafting = draft(bucket, model, size)
        drafting += draft_reference(bucket, model, size, context) if slow else 0
    step = size * (kept + layer) + slow * context * (2 * F32 + size)
    return max(drafting, step, size * kept + head(bucket, model, size))


def attention(model: Model, T: int) -> int:
    """Elements: queries before and after absorption, the result in latents and in values, what is projected."""
    t = model.target
    each = 3 * (t.nope + t.R) + 3 * t.row + 2 * t.L + 2 * t.value
    return T * (t.H // model.ranks * each + 3 * t.q_lora + 4 * t.row)


def moe(model: Model, T: int) -> int:
    """Elements: rows of all pairs of token and expert in and out, twice in fp32, and the router's input in fp32."""
    t = model.target
    return T * (t.K * (6 * t.D + 4 * t.I // model.ranks) + 4 * t.E + 3 * t.D)


def head(bucket: Bucket, model: Model, size: int) -> int:
    """Bytes: logits as computed and in fp32, and copies of a row for each request. Several ranks have their columns of
    all rows before and after an exchange, their rows whole, and of each row the counts and biases it is drawn with."""
    V, rows, batch = model.target.V, *((tokens(bucket), bucket.batch) if isinstance(bucket, Shape) else (1, 1))
    drawing = batch * V * 8 * F32
    if model.ranks == 1:
        return rows * V * (size + F32) + drawing
    return rows * V // model.ranks * 3 * size + -(-rows // model.ranks) * V * (size + 5 * F32 + 3) + drawing


def draft(shape: Shape, model: Model, size: int) -> int:
    """Bytes: the block's marginals over the whole vocabulary, gathered, in fp32 and ranked, and its layers."""
    d, slots = model.drafter, shape.batch * shape.block
    assert d is not None
    marginals = (slots - shape.batch) * model.target.V * 3 * (size + F32)
    inner = 3 * d.inner // model.ranks + (3 * d.H // model.ranks + 4 * d.kv_heads(model.ranks)) * d.head
    return marginals + slots * size * (6 * d.D + inner)


def attention_reference(bucket: Bucket, model: Model) -> int:
    """Elements for each token of context, of one request at a time: scores of all heads, and keys."""
    t, nodes = model.target, bucket.nodes if isinstance(bucket, Shape) else bucket.tokens
    return nodes * t.H // model.ranks + t.row


def draft_reference(shape: Shape, model: Model, size: int, context: int) -> int:
    """Bytes: keys and values of one request gathered, joined and repeated for every head, and their scores."""
    d = model.drafter
    assert d is not None
    seen = max(min(context, window or context) for window in d.windows)
    heads, kv = d.H // model.ranks, d.kv_heads(model.ranks)
    return seen * (2 * d.head * size * (2 * kv + heads) + shape.block * heads * 2 * F32)


def table(m: Memory, available: float | None, where: str) -> str:
    """Part by part, a line each; a bucket's own line is inside the workspace."""
    lines = [
        line("target weights", m.target.held, f"{gb(m.target.stored)} in the files"),
        line("drafter weights", m.drafter.held, f"{gb(m.drafter.stored)} in the files") if m.drafter.held else "",
        line("target KV", m.pool * m.row, f"{m.pool:,} tokens of {m.row:,} B"),
        line("drafter KV", m.pool * m.draft_row, f"as many of {m.draft_row:,} B") if m.draft_row else "",
        line("state", m.state),
        line("workspace", m.workspace, "estimated: the most of these, of captured steps twice"),
        *(line(f"  {step}", size) for step, size in m.steps),
        line("  packing experts", m.target.packing, "while loading") if m.on_cuda else "",
        line("libraries, graphs", m.libraries, "allowed for") if m.on_cuda else "",
        line("all", m.total, "if the pool is full"),
    ]
    if available is not None:
        lines.append(line("rest", available - m.total, f"of {gb(available)} {where}"))
    return "\n".join(filter(None, lines))


def line(what: str, size: float, note: str = "") -> str:
    return f"  {what:<42}{size / 1e9:>10.2f} GB   {note}".rstrip()


def gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def check_memory(ask: Ask, model: Model, dtype: torch.dtype, device: torch.device, available: float | None) -> Memory:
    """What a rank needs. Raises ValueError, with the settings that would fit, where that is more than there is."""
    needed = memory(ask, model, dtype, device)
    if available is None or needed.fits(available):
        return needed

    def fits(other: Ask) -> bool:
        return memory(other, model, dtype, device).fits(available)

    if not needed.on_cuda:
        room, most = gb(available), gb(needed.weights)
        raise ValueError(f"a rank has {room} and its weights take {most}: use a machine or a device of more memory.")
    beside = needed.total - needed.weights - needed.kv
    ways = " or ".join(smaller(ask, fits))
    otherwise = "raise mesh.tp" if beside < available else "what is beside weights and pool does not fit by itself"
    raise ValueError(
        f"a rank has {gb(available)} and needs {gb(needed.total)}: weights {gb(needed.weights)}, pool {gb(needed.kv)}, "
        f"state, steps and libraries {gb(beside)}: "
        + (f"use {ways}." if ways else f"no context, batch or budget is small enough, {otherwise}.")
    )


def smaller(ask: Ask, fits: Callable[[Ask], bool]) -> Iterator[str]:
    """The largest context, batch and budget that fit, each with all else as asked."""
    cache, batch, budget = ask.config.cache, ask.config.run.batch, ask.plan.budget

    def shorter(pages: int) -> Ask:
        return replace(ask, max_len=pages * PAGE) if not cache.tokens else ask.changed("cache", tokens=pages * PAGE)

    def drafting(nodes: int) -> Ask:
        return replace(ask, plan=replace(ask.plan, budget=nodes, width=min(ask.plan.width, max(nodes, 1))))

    if pages := largest((cache.tokens or ask.max_len) // PAGE, lambda n: fits(shorter(n))):
        yield f"cache.{'tokens' if cache.tokens else 'max_len'}={pages * PAGE}"
    if slots := largest(batch - 1, lambda n: fits(ask.changed("run", batch=n))):
        yield f"run.batch={slots}"
    if not ask.config.run.nodes and (nodes := largest(budget - 1, lambda n: fits(drafting(n)))):
        yield f"step.budget={nodes}"


def largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest of 1 to `most` that fits, 0 where none does; what is smaller fits, too."""
    low, high = 0, max(most, 0)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def available(device: torch.device, ranks: int) -> tuple[float | None, str]:
    """Bytes that a rank can have on its device now, None if that is not known, and what they are."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        own = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + own, f"free on {device}"
    try:
        found = Path("/proc/meminfo").read_text().split("MemAvailable:")[1]
    except (OSError, IndexError):
        return None, ""
    return 1024 * int(found.split()[0]) / ranks, "available" + (f", one of {ranks} parts" if ranks > 1 else "")
