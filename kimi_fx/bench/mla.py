"""`kimi-fx bench mla`: tree-verify attention of the CUDA kernels, mask included, as microseconds a layer.

Every cell captures LAYERS layers, each with a pool of its own (together well past the L2 cache), in one CUDA graph and
takes the median of its replays over the layers. The floor is the larger of two times: each byte once at the card's
copy rate, each product once at its matrix rate, both measured in the same run. Two peers in plain PyTorch run in a
few cells: the absorbed form compiled, and `scaled_dot_product_attention` with a mask.
"""

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.mla_tree_verify import mla_schedule, mla_tree_verify, visible
from ..runtime.build import load_kernels
from .record import say, table

LAYERS, REPLAYS, WARM = 61, 15, 3
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
        """Of a tree, which sees the whole prefix; its own rows count whole."""
        return 2 * (2 * L + R) * self.batch * self.nodes * self.heads * (self.context + self.nodes)


@dataclass(frozen=True)
class Rates:
    """What the card does at best."""

    copy: float  # bytes a second, read and written
    matmul: float  # operations a second, bf16

    def floor(self, s: Shape) -> float:
        """Seconds."""
        return max(s.bytes / self.copy, s.operations / self.matmul)


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


def per_layer(call: Callable[[Tensor], object], layers: Sequence[Tensor]) -> float:
    """Seconds a layer: the median replay of a graph that calls for every layer."""
    call(layers[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in layers:
            call(layer)
    times = []
    for _ in range(WARM + REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times[WARM:]) / len(layers)


def ours(s: Shape, x: Inputs) -> float:
    schedule = mla_schedule(x.length, s.nodes, s.heads)
    rest = (x.page_table, x.length, x.rows, x.ancestors, schedule, L, SCALE)
    return per_layer(lambda pool: mla_tree_verify(x.q, pool, *rest), x.pools)


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


def rates() -> Rates:
    big = torch.randn(2**31, device="cuda", dtype=torch.bfloat16)
    to = torch.empty_like(big)
    copy = 2 * big.nbytes / per_layer(lambda _: torch.neg(big, out=to), [big] * 4)  # a memcpy node is slower
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return Rates(copy, 2 * 8192**3 / per_layer(lambda _: a @ b, [a] * 10))


def measure(choice: dict[str, list[int]]) -> dict[str, object]:
    load_kernels(torch.device("cuda"))
    card = rates()
    cells = []
    for batch, heads, context, nodes in product(*(choice[k] for k in ("batch", "heads", "contexts", "nodes"))):
        s = Shape(batch, context, nodes, heads)
        x = inputs(s, causal=nodes > 128)
        seconds, floor = ours(s, x), card.floor(s)
        others = peers(s, x) if context in choice["peers"] and nodes in (16, 64) and batch == 1 else {}
        cells.append(
            asdict(s)
            | {"us": seconds * 1e6, "GB/s": s.bytes / seconds / 1e9, "TFLOP/s": s.operations / seconds / 1e12}
            | {"floor us": floor * 1e6, "over floor": seconds / floor}
            | {f"{name} us": t * 1e6 for name, t in others.items()}
        )
        say(f"batch {batch}, {heads} heads, {context} tokens, {nodes} nodes: {seconds * 1e6:.1f} us")
        del x
    name, version = torch.cuda.get_device_name(), torch.__version__
    return {"card": name, "torch": version, "copy GB/s": card.copy / 1e9, "TFLOP/s": card.matmul / 1e12, "cells": cells}


def picture(cells: list[dict[str, float]]) -> str:
    """SVG: a square for each context and nodes, darker the further above the floor, its ratio written in it."""
    contexts, nodes = (sorted({int(c[k]) for c in cells}) for k in ("context", "nodes"))
    size, shapes = 64, []
    for c in cells:
        x, y = size * (nodes.index(int(c["nodes"])) + 1), size * (contexts.index(int(c["context"])) + 1)
        shade = max(90, int(255 - 40 * (c["over floor"] - 1)))
        shapes.append(f'<rect x="{x}" y="{y}" width="{size}" height="{size}" fill="rgb({shade},{shade},255)"/>')
        shapes.append(f'<text x="{x + size / 2}" y="{y + size / 2}">{c["over floor"]:.1f}</text>')
    shapes += [f'<text x="{size * (i + 1.5)}" y="40">{n}</text>' for i, n in enumerate(nodes)]
    shapes += [f'<text x="32" y="{size * (i + 1.5)}">{n:,}</text>' for i, n in enumerate(contexts)]
    width, height = size * (len(nodes) + 1), size * (len(contexts) + 1)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
    return f'{head} font-family="sans-serif" font-size="14" text-anchor="middle">\n' + "\n".join(shapes) + "\n</svg>\n"


def run(overrides: Sequence[str]) -> int:
    """Takes `contexts=[1000,5500] nodes=[16] batch=[1] heads=[8] peers=[]`, and `folder=` for JSON and picture."""
    words = dict(word.partition("=")[::2] for word in overrides)
    folder = Path(words.pop("folder", "."))
    if not set(words) <= set(DEFAULTS):
        raise ValueError(f"bench mla takes {', '.join(DEFAULTS)} and folder, found {', '.join(words)}.")
    if not torch.cuda.is_available():
        raise ValueError("bench mla needs a CUDA device, none is visible.")
    choice = DEFAULTS | {key: [int(n) for n in text.strip("[]").split(",") if n] for key, text in words.items()}
    result = measure(choice)
    cells: list[dict[str, float]] = result["cells"]  # type: ignore[assignment]
    heads = ["batch", "heads", "context", "nodes", "us", "GB/s", "TFLOP/s", "floor us", "over floor"]
    heads += [name for name in ("compiled torch us", "sdpa us") if any(name in c for c in cells)]
    text = [[f"{c[h]:.1f}" if isinstance(c.get(h), float) else str(c.get(h, "")) for h in heads] for c in cells]
    print(table([heads, *text]))
    print(f"\n{result['card']}, torch {result['torch']}: copies at {result['copy GB/s']:.0f} GB/s, ", end="")
    print(f"multiplies at {result['TFLOP/s']:.0f} TFLOP/s; {LAYERS} layers a graph, median of {REPLAYS} replays")
    (folder / "mla.json").write_text(json.dumps(result, indent=1))
    (folder / "mla.svg").write_text(picture(cells))
    return 0
