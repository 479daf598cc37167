"""`kimi-fx bench layer`: a layer of one Kimi K2 rank without attention and routed experts, as microseconds a layer.

Every cell captures LAYERS layers in one CUDA graph, each with weights of its own (68 MB, together far past the L2
cache), and takes the median of its replays over the layers. Attention's output and the routed experts' sum are inputs
that stand ready, and only where launches are counted they run too. Operators are also timed one by one, each alone in
its graph, where launches and waits show that a whole layer hides, and the layer once more without overlapped launches
("apart"). The floor is the weights read once at the card's read rate, measured in the same run. The peer is the same
layer in compiled PyTorch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from ..config import with_environment
from ..ops import KERNELS, REFERENCE, Ops
from ..ops.norm_route import counters_of
from ..runtime.build import load_kernels
from . import mla
from .device import Cells, Rates, asked, heat_map, numbers, per_layer, rates, report, result
from .moe import random_experts
from .record import say

LAYERS = 60
HEADS = 4  # copies of the vocabulary's head
D, Q_LORA, L, R, NOPE, VALUE, E, K = 7168, 1536, 512, 64, 128, 128, 384, 8  # Kimi K2
H, INNER, VOCABULARY = 8, 256, 163_840 // 8  # a rank's share of 64 heads, 2048 columns and the ids, over 8 ranks
SCALE, EPS = 2.827, 1e-5
ROWS = [1, 8, 16, 32, 64, 128]
DEFAULTS = {"rows": ROWS, "peers": [1, 16, 64]}


@dataclass(frozen=True)
class Weights:
    """Of one layer."""

    attention_norm: Tensor  # [D]
    qkv_a: Tensor  # [Q_LORA + L + R, D]
    q_norm: Tensor  # [Q_LORA]
    kv_norm: Tensor  # [L]
    q_b: Tensor  # [H, NOPE + R, Q_LORA]
    w_uk: Tensor  # [H, NOPE, L]
    w_uv: Tensor  # [H, VALUE, L]
    o: Tensor  # [D, H * VALUE]
    norm: Tensor  # [D]
    router: Tensor  # [E, D]
    gate_up: Tensor  # [2, INNER, D]
    down: Tensor  # [D, INNER]

    @property
    def bytes(self) -> int:
        return sum(getattr(self, field.name).nbytes for field in fields(self))


@dataclass(frozen=True)
class Inputs:
    """What all layers of one pass share, and what stands for attention and experts."""

    x: Tensor  # [T, D]
    cos: Tensor  # [T, R] f32
    sin: Tensor
    o: Tensor  # [T, H, L]
    routed: Tensor  # [T, D]
    bias: Tensor  # [E] f32
    valid: Tensor  # [T] bool
    counters: Tensor  # i32


def normal(*size: int) -> Tensor:
    return torch.randn(*size, device="cuda", dtype=torch.bfloat16)


def weights() -> Weights:
    def matrix(*size: int) -> Tensor:
        return normal(*size) * size[-1] ** -0.5

    return Weights(
        *(normal(D), matrix(Q_LORA + L + R, D), normal(Q_LORA), normal(L), matrix(H, NOPE + R, Q_LORA)),
        *(matrix(H, NOPE, L), matrix(H, VALUE, L), matrix(D, H * VALUE)),
        *(normal(D), matrix(E, D), matrix(2, INNER, D), matrix(D, INNER)),
    )


def inputs(rows: int) -> Inputs:
    angle = torch.rand(rows, R, device="cuda")
    bias, valid = torch.zeros(E, device="cuda"), torch.ones(rows, dtype=torch.bool, device="cuda")
    counters = torch.zeros(counters_of(rows, E, K), dtype=torch.int32, device="cuda")
    o, routed = normal(rows, H, L), normal(rows, D)
    return Inputs(normal(rows, D), angle.cos(), angle.sin(), o, routed, bias, valid, counters)


def up(ops: Ops, w: Weights, i: Inputs, qkv: Tensor) -> tuple[Tensor, Tensor]:
    return ops.q_up_absorb(qkv, w.q_norm, w.kv_norm, w.q_b, w.w_uk, i.cos, i.sin, i.counters, EPS)


def route(ops: Ops, w: Weights, i: Inputs, x: Tensor, squares: Tensor) -> tuple[Tensor, ...]:
    return ops.norm_route(x, squares, i.counters, w.norm, w.router, i.bias, w.gate_up, i.valid, K, SCALE, EPS)


Part = Callable[..., Tensor]


def layer(ops: Ops, w: Weights, i: Inputs, attend: Part | None = None, mix: Part | None = None) -> tuple[Tensor, ...]:
    """`attend` and `mix` are attention and experts, where they run."""
    qkv = ops.norm_linear(i.x, w.attention_norm, w.qkv_a, EPS, False)
    q, rows = up(ops, w, i, qkv)
    o = attend(q, rows) if attend else i.o
    x, squares = ops.v_up_o(o, w.w_uv, w.o, i.x, i.counters)
    h, shared, ids, *routing = route(ops, w, i, x, squares)
    routed = mix(h, *routing) if mix else i.routed
    return ops.linear_add(shared, w.down, x, routed), q, rows, h, ids, *routing


def count_launches(w: Weights, i: Inputs) -> int:
    """Kernels of a whole layer, attention over 1,000 tokens and routed experts included."""
    a, e = mla.inputs(mla.Shape(1, 1000, len(i.x), H)), random_experts(INNER)
    schedule = KERNELS.mla_schedule(a.length, len(i.x), H)

    def attend(q: Tensor, rows: Tensor) -> Tensor:
        own = rows.unsqueeze(0), a.ancestors, schedule, L, mla.SCALE
        return KERNELS.mla_tree_verify(q.unsqueeze(0), a.pools[0], a.page_table, a.length, *own).flatten(0, 1)

    def mix(h: Tensor, *routing: Tensor) -> Tensor:
        return KERNELS.marlin_moe(h, e.w13, e.s13, e.w2, e.s2, *routing, i.counters)

    return len(launches(lambda: layer(KERNELS, w, i, attend, mix)))


def parts(i: Inputs) -> dict[str, Callable[[Weights], object]]:
    """The layer's operators, each on inputs of its own."""
    rows = len(i.x)
    qkv, shared = normal(rows, Q_LORA + L + R), normal(rows, INNER)
    squares = i.x.float().square().sum(1, keepdim=True)
    ops = KERNELS
    return {
        "norm_qkv_a": lambda w: ops.norm_linear(i.x, w.attention_norm, w.qkv_a, EPS, False),
        "q_up_absorb": lambda w: up(ops, w, i, qkv),
        "v_up_o": lambda w: ops.v_up_o(i.o, w.w_uv, w.o, i.x, i.counters),
        "norm_route": lambda w: route(ops, w, i, i.x, squares),
        "shared_down": lambda w: ops.linear_add(shared, w.down, i.x, i.routed),
    }


def launches(call: Callable[[], object]) -> list[str]:
    """The kernels of one call by name, and copies."""
    call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        call()
        torch.cuda.synchronize()
    on_device = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return [name for name in on_device if not name.endswith(" Sync")]  # the profiler's wait at its end, and ours


def measure_rows(
    rows: int, layers: Sequence[Weights], heads: Sequence[Tensor], card: Rates, peer: bool
) -> dict[str, Any]:
    i = inputs(rows)
    seconds, floor = per_layer(lambda w: layer(KERNELS, w, i), layers), layers[0].bytes / card.read
    cell = {"rows": rows, "part": "layer", "us": seconds * 1e6, "floor us": floor * 1e6, "over floor": seconds / floor}
    with with_environment({"KIMI_FX_OVERLAP": "0"}):
        cell["apart us"] = per_layer(lambda w: layer(KERNELS, w, i), layers) * 1e6
    cell |= {name: per_layer(call, layers) * 1e6 for name, call in parts(i).items()}
    cell["lm_head"] = per_layer(lambda w: KERNELS.norm_linear(i.x, layers[0].norm, w, EPS, True), heads) * 1e6
    cell["launches"] = count_launches(layers[0], i)
    if peer:
        compiled = torch.compile(lambda w: layer(REFERENCE, w, i))
        slow = per_layer(compiled, layers[:16])
        cell |= {"compiled torch us": slow * 1e6, "torch over ours": slow / seconds}
    say(f"{rows} rows: {seconds * 1e6:.1f} us a layer")
    return cell


def measure(choice: dict[str, list[int]]) -> dict[str, Any]:
    load_kernels(torch.device("cuda"))
    torch.manual_seed(0)
    card = rates()
    torch.cuda.empty_cache()
    layers = [weights() for _ in range(LAYERS)]
    heads = [normal(VOCABULARY, D) * D**-0.5 for _ in range(HEADS)]
    cells: Cells = [measure_rows(rows, layers, heads, card, rows in choice["peers"]) for rows in choice["rows"]]
    return result(card, cells)


def run(overrides: Sequence[str]) -> int:
    """Takes `rows=[1,16] peers=[]`, and `folder=.` for JSON and picture."""
    given, folder = asked("layer", list(DEFAULTS), overrides)
    found = measure(DEFAULTS | {key: numbers(key, words, 1, 128) for key, words in given.items()})
    heads = ["rows", "us", "apart us", "floor us", "over floor", "launches", "norm_qkv_a", "q_up_absorb", "v_up_o"]
    heads += ["norm_route", "shared_down", "lm_head", "compiled torch us", "torch over ours"]
    report("layer", found, heads, heat_map(found["cells"], "part", "rows"), folder, f"{LAYERS} layers in a graph")
    return 0
