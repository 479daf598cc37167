"""`kimi-fx bench moe`: the routed experts of one Kimi K2 rank, as microseconds a layer.

A layer is everything from hidden states and the router's choice to the summed output, `marlin_moe`, with weights of its
own (random words are valid INT4) and its own draw of logits; what the choice takes is in `kimi-fx bench layer`. The
floor is the larger of two times: the experts that were hit read once at the card's read rate, and the products at its
matrix rate, both measured in the same run. Plain PyTorch, which dequantises those experts and multiplies every token by
each of them, runs in a few.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby, product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.marlin import GROUP
from ..ops.marlin_moe import marlin_moe
from ..ops.norm_route import choose, counters_of
from ..runtime.build import load_kernels
from .device import Cells, Rates, asked, heat_map, numbers, per_layer, rates, report, result, some_of
from .record import say

E, K, D = 384, 8, 7168  # Kimi K2
SCALE = 2.827
LAYERS, WEIGHT_BYTES = 8, 40e9  # at most, at least 4 layers
VERIFY, PREFILL = [1, 8, 16, 32, 64, 128, 256], [512, 2048]
ROUTINGS = ["uniform", "zipf"]
DEFAULTS: dict[str, list[Any]] = {
    "tokens": VERIFY,
    "inner": [256],  # a rank's share of I = 2048: over 8 ranks
    "routing": ["uniform"],
    "peers": [16, 64],  # tokens at which plain PyTorch runs too, inner 256 and uniform
}
LIMITS = {"tokens": (1, 4096), "inner": (64, 2048, 64), "peers": (1, 4096)}


@dataclass(frozen=True)
class Shape:
    tokens: int
    inner: int
    routing: str

    @property
    def expert_bytes(self) -> int:
        """Words of half a byte a weight and bf16 scales."""
        return 3 * D * self.inner // 2 + 2 * 3 * D * self.inner // GROUP

    @property
    def operations(self) -> int:
        return 2 * 3 * D * self.inner * self.tokens * K

    def floor(self, hit: float, card: Rates) -> float:
        """Seconds."""
        return max(hit * self.expert_bytes / card.read, self.operations / card.matmul)


STANDARD = [
    *(Shape(tokens, 256, "uniform") for tokens in VERIFY + PREFILL),
    *(Shape(tokens, 256, "zipf") for tokens in VERIFY),
    *(Shape(tokens, inner, "uniform") for inner in (512, 1024, 2048) for tokens in (16, 64)),
]


@dataclass(frozen=True)
class Experts:
    """One layer's, packed; random."""

    w13: Tensor  # [E, D/16, 4I] i32
    s13: Tensor  # [E, D/32, 2I] bf16
    w2: Tensor  # [E, I/16, 2D] i32
    s2: Tensor  # [E, I/32, D] bf16


@dataclass(frozen=True)
class Layer:
    experts: Experts
    x: Tensor  # [T, D] bf16
    ids: Tensor  # [T, K] i32
    weights: Tensor  # [T, K] f32
    order: Tensor  # [T * K] i32
    offsets: Tensor  # [E + 1] i32
    counters: Tensor  # i32, the same for all layers


def random_experts(inner: int) -> Experts:
    def words(*size: int) -> Tensor:
        return torch.randint(-(2**31), 2**31, size, dtype=torch.int32, device="cuda")

    def scales(*size: int) -> Tensor:
        return torch.rand(size, dtype=torch.bfloat16, device="cuda") / 128

    return Experts(
        words(E, D // 16, 4 * inner),
        scales(E, D // GROUP, 2 * inner),
        words(E, inner // 16, 2 * D),
        scales(E, inner // GROUP, D),
    )


def draw_logits(tokens: int, routing: str) -> Tensor:
    """[T, E]: the K largest are experts drawn evenly, or with chances of 1, 1/2, 1/3 … in a random order."""
    if routing == "uniform":
        return torch.randn(tokens, E, device="cuda")
    chance = 1 / (1 + torch.randperm(E, device="cuda"))
    return chance.log() - torch.rand(tokens, E, device="cuda").clamp_min(1e-20).log().neg().log()  # Gumbel's


def layers_of(s: Shape, experts: Sequence[Experts]) -> list[Layer]:
    x = torch.randn(len(experts), s.tokens, D, device="cuda", dtype=torch.bfloat16)
    bias, valid = torch.zeros(E, device="cuda"), torch.ones(s.tokens, dtype=torch.bool, device="cuda")
    chosen = (choose(draw_logits(s.tokens, s.routing), bias, valid, K, SCALE) for _ in experts)
    counters = torch.zeros(counters_of(s.tokens, E, K), dtype=torch.int32, device="cuda")
    return [Layer(e, row, *choice, counters) for e, row, choice in zip(experts, x, chosen, strict=True)]


def ours(layer: Layer) -> Tensor:
    e = layer.experts
    return marlin_moe(layer.x, e.w13, e.s13, e.w2, e.s2, layer.weights, layer.order, layer.offsets, layer.counters)


def plain(
    x: Tensor,  # [T, D]
    e: Experts,
    hit: Tensor,  # [h] the experts that any token visits
    mix: Tensor,  # [T, h] their weights
) -> Tensor:
    """The same amount of work in PyTorch; the words are read in the plain order, 8 inputs a word."""

    def matrix(words: Tensor, scales: Tensor) -> Tensor:  # [h, in, out]
        shifts = torch.arange(0, 32, 4, device="cuda").view(8, 1)
        codes = words.view(E, -1, 1, scales.shape[2])[hit] >> shifts & 15
        return ((codes - 8).view(len(hit), -1, GROUP, scales.shape[2]) * scales[hit].unsqueeze(2)).flatten(1, 2)

    gate, up = (x @ matrix(e.w13, e.s13)).chunk(2, dim=2)
    return torch.einsum("th,htd->td", mix, F.silu(gate) * up @ matrix(e.w2, e.s2))


def peer(layers: Sequence[Layer]) -> float:
    """Seconds a layer; the first layer's routing serves all, known beforehand."""
    weights = layers[0].weights
    mix = weights.new_zeros(len(weights), E).scatter_(1, layers[0].ids.long(), weights)
    hit = mix.any(0).nonzero().squeeze(1)
    compiled = torch.compile(plain)
    mix = mix[:, hit].bfloat16()
    return per_layer(lambda layer: compiled(layer.x, layer.experts, hit, mix), layers[:4])


def measure(shapes: Sequence[Shape], peers: Sequence[int]) -> dict[str, Any]:
    load_kernels(torch.device("cuda"))
    torch.manual_seed(0)
    card = rates()
    cells: Cells = []
    for inner, alike in groupby(shapes, lambda s: s.inner):
        torch.cuda.empty_cache()  # blocks of another width
        same = list(alike)
        count = max(4, min(LAYERS, int(WEIGHT_BYTES / (E * same[0].expert_bytes))))
        cells += measure_width(same, [random_experts(inner) for _ in range(count)], card, peers)
    return result(card, cells)


def measure_width(
    shapes: Sequence[Shape], experts: Sequence[Experts], card: Rates, peers: Sequence[int]
) -> Iterator[dict[str, Any]]:
    for s in shapes:
        layers = layers_of(s, experts)
        hit = sum(int((layer.offsets.diff() > 0).sum()) for layer in layers) / len(layers)
        seconds = per_layer(ours, layers)
        floor = s.floor(hit, card)
        cell = asdict(s) | {"width": f"{s.inner} {s.routing}", "layers": len(layers), "experts": hit}
        cell |= {"us": seconds * 1e6, "floor us": floor * 1e6, "over floor": seconds / floor}
        cell |= {"GB/s": hit * s.expert_bytes / seconds / 1e9, "TFLOP/s": s.operations / seconds / 1e12}
        if s.tokens in peers and (s.inner, s.routing) == (256, "uniform"):
            slow = peer(layers)
            cell |= {"compiled torch us": slow * 1e6, "torch over ours": slow / seconds}
        say(f"{s.tokens} tokens, inner {s.inner}, {s.routing}: {seconds * 1e6:.1f} us")
        yield cell


def chosen(given: dict[str, list[str]]) -> tuple[list[Shape], list[int]]:
    """What to measure, and at which tokens the peer runs; without lists the standard cells."""
    lists = DEFAULTS | {key: numbers(key, given[key], *LIMITS[key]) for key in LIMITS if key in given}
    lists |= {"routing": some_of("routing", given.get("routing", DEFAULTS["routing"]), ROUTINGS)}
    if not set(given) - {"peers"}:
        return STANDARD, lists["peers"]
    return [Shape(t, i, r) for i, r, t in product(*(lists[key] for key in ("inner", "routing", "tokens")))], lists[
        "peers"
    ]


def run(overrides: Sequence[str]) -> int:
    """Takes `tokens=[16,64] inner=[256] routing=[uniform,zipf] peers=[]`, and `folder=.` for JSON and picture."""
    given, folder = asked("moe", list(DEFAULTS), overrides)
    found = measure(*chosen(given))
    heads = ["tokens", "inner", "routing", "experts", "us", "floor us", "over floor", "GB/s", "TFLOP/s"]
    heads += ["compiled torch us", "torch over ours"]
    report("moe", found, heads, heat_map(found["cells"], "width", "tokens"), folder, f"4 to {LAYERS} layers in a graph")
    return 0
