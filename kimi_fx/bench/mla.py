"""`kimi-fx bench mla`: tree-verify attention of the CUDA kernels, mask included, as microseconds a layer.

Every cell captures LAYERS layers, each with a pool of its own (together well past the L2 cache), in one CUDA graph and
takes the median of its replays over the layers; long contexts are also timed once after a pause ("rested"), since
back to back they bring the card to its power limit. The floor is the larger of two times: each byte once at the card's
copy rate, each product once at its matrix rate, both measured in the same run. Two peers in plain PyTorch run in a
few cells: the absorbed form compiled, and `scaled_dot_product_attention` with a mask.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.mla_tree_verify import mla_schedule, mla_tree_verify, visible
from ..runtime.build import load_kernels
from .device import Rates, asked, heat_map, numbers, per_layer, rates, report, rested, result
from .record import say

LAYERS = 61
TREE = 128  # nodes at most; more are a causal chunk
LONG = 32_000  # contexts from which on the card may slow down to keep within its power
L, R, PAGE = 512, 64, 64
SCALE = 0.1352  # Kimi K2: (128 + 64)^-0.5 times YaRN's factor squared
POOL_BYTES = 48e9  # of all layers together, at most
DEFAULTS = {
    "contexts": [1000, 5500, 32_000, 200_000],
    "nodes": [1, 8, 16, 17, 32, 33, 64, 65, 128],
    "batch": [1],
    "heads": [8],
    "peers": [5500],  # contexts at which the peers run too
}
LIMITS = {"contexts": (0, 262_144), "nodes": (1, 4096), "batch": (1, 64), "heads": (1, 128), "peers": (0, 262_144)}


@dataclass(frozen=True)
class Shape:
    batch: int
    context: int
    nodes: int
    heads: int

    @property
    def bytes(self) -> int:
        rows = self.batch * self.nodes * self.heads
        return 2 * (self.batch * (self.context + self.nodes) * (L + R) + rows * (2 * L + R))

    @property
    def operations(self) -> int:
        """A tree's own rows count whole, a causal chunk's for what each token sees."""
        own = self.nodes if self.nodes <= TREE else (self.nodes + 1) / 2
        return int(2 * (2 * L + R) * self.batch * self.nodes * self.heads * (self.context + own))

    def floor(self, card: Rates) -> float:
        """Seconds."""
        return max(self.bytes / card.copy, self.operations / card.matmul)


@dataclass(frozen=True)
class Inputs:
    q: Tensor
    pools: list[Tensor]  # a layer each
    page_table: Tensor
    length: Tensor
    rows: Tensor
    ancestors: Tensor | None


def inputs(s: Shape, causal: bool = False) -> Inputs:
    """Random values, pages in random order, and a random tree (each node's parent is any earlier one)."""
    torch.manual_seed(0)
    each = s.context // PAGE + 2
    layers = max(2, min(LAYERS, int(POOL_BYTES / (s.batch * each * PAGE * (L + R) * 2))))

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, device="cuda", dtype=torch.bfloat16)

    parent = [int(torch.randint(max(n, 1), ())) for n in range(s.nodes)]
    bits = [1]
    for node in range(1, s.nodes):
        bits.append(bits[parent[node]] | 1 << node)
    halves = [[b % 2**64, b >> 64] for b in bits] if not causal else []
    words = torch.tensor([[h - 2**64 if h >> 63 else h for h in pair] for pair in halves])
    return Inputs(
        normal(s.batch, s.nodes, s.heads, L + R),
        [normal(s.batch * each, PAGE, L + R) for _ in range(layers)],
        torch.randperm(s.batch * each).view(s.batch, each).int().cuda(),
        torch.full((s.batch,), s.context, dtype=torch.int32, device="cuda"),
        normal(s.batch, s.nodes, L + R),
        None if causal else words.cuda().expand(s.batch, -1, -1).contiguous(),
    )


def ours(s: Shape, x: Inputs) -> dict[str, float]:
    """Seconds by how they were taken: back to back, and for long contexts after a pause."""
    schedule = mla_schedule(x.length, s.nodes, s.heads)
    rest = (x.page_table, x.length, x.rows, x.ancestors, schedule, L, SCALE)
    ways = {"": per_layer, "rested ": rested} if s.context >= LONG else {"": per_layer}
    return {name: way(lambda pool: mla_tree_verify(x.q, pool, *rest), x.pools) for name, way in ways.items()}


def peers(s: Shape, x: Inputs) -> dict[str, float]:
    """The same attention over a dense cache [B, context + N, 576] with a mask of bytes."""
    hidden = torch.zeros(s.batch, s.nodes, s.context + s.nodes, dtype=torch.bool, device="cuda")
    if x.ancestors is not None:
        hidden[..., s.context :] = ~visible(x.ancestors, s.nodes)
    bias = torch.zeros(hidden.shape, dtype=torch.bfloat16, device="cuda").masked_fill_(hidden, -torch.inf)
    bias = bias.repeat_interleave(s.heads, 1)
    q = x.q.flatten(1, 2)

    def dense(pool: Tensor) -> Tensor:
        return torch.cat((pool.view(s.batch, -1, L + R)[:, : s.context], x.rows), 1)

    def absorbed(keys: Tensor) -> Tensor:
        return ((q @ keys.mT * SCALE + bias).float().softmax(-1).to(q.dtype)) @ keys[..., :L]

    def fused(keys: Tensor) -> Tensor:
        k, v = keys[:, None], keys[:, None, :, :L]
        return F.scaled_dot_product_attention(q[:, None], k, v, bias[:, None], scale=SCALE)

    caches = [dense(pool) for pool in x.pools[:8]]
    return {"compiled torch": per_layer(torch.compile(absorbed), caches), "sdpa": per_layer(fused, caches)}


def measure(choice: dict[str, list[int]]) -> dict[str, Any]:
    load_kernels(torch.device("cuda"))
    card = rates()
    cells = []
    for batch, heads, context, nodes in product(*(choice[k] for k in ("batch", "heads", "contexts", "nodes"))):
        s = Shape(batch, context, nodes, heads)
        x = inputs(s, causal=nodes > TREE)
        times, floor = ours(s, x), s.floor(card)
        seconds = times[""]
        others = peers(s, x) if context in choice["peers"] and nodes in (16, 64) and batch == 1 else {}
        cells.append(
            asdict(s)
            | {"requests": f"{batch} x {context:,}" + (f", {heads} heads" if heads != 8 else "")}
            | {"GB/s": s.bytes / seconds / 1e9, "TFLOP/s": s.operations / seconds / 1e12}
            | {"floor us": floor * 1e6, "over floor": seconds / floor}
            | {f"{name}us": t * 1e6 for name, t in times.items()}
            | {f"{name} / ours": t / seconds for name, t in others.items()}
        )
        say(f"batch {batch}, {heads} heads, {context} tokens, {nodes} nodes: {seconds * 1e6:.1f} us")
        del x
    return result(card, cells)


def chosen(given: dict[str, list[str]]) -> dict[str, list[int]]:
    """The lists to measure. ValueError for numbers that the operator does not take."""
    lists = DEFAULTS | {key: numbers(key, words, *LIMITS[key]) for key, words in given.items()}
    batch, nodes = max(lists["batch"]), max(lists["nodes"])
    if batch * nodes > 4096 or (nodes > TREE and batch > 1):
        raise ValueError(f"batch={batch} with nodes={nodes} is more than 4096 rows, or a chunk of several requests.")
    return lists


def run(overrides: Sequence[str]) -> int:
    """Takes `contexts=[1000,5500] nodes=[16] batch=[1] heads=[8] peers=[]`, and `folder=.` for JSON and picture."""
    given, folder = asked("mla", list(DEFAULTS), overrides)
    found = measure(chosen(given))
    heads = ["batch", "heads", "context", "nodes", "us", "rested us", "GB/s", "TFLOP/s", "floor us", "over floor"]
    heads += ["compiled torch / ours", "sdpa / ours"]
    picture = heat_map(found["cells"], "requests", "nodes")
    report("mla", found, heads, picture, folder, f"at most {LAYERS} layers in a graph")
    return 0
