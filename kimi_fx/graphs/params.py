"""Weights as pytrees, and their plan: the same classes filled with leaf specs.

Checking a checkpoint, loading it, random weights, byte counts and sharding are tree-maps over a plan. Names are
the checkpoint's, shortened; shapes here are logical, before packing. Does not read files.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ..config import DrafterModel, Rope, TargetModel
from .layers import inverse_frequencies
from .pytree import pytree


@dataclass(frozen=True)
class Source:
    """One tensor on disk and the part of it that a leaf takes."""

    name: str
    shape: tuple[int, ...]
    view: tuple[int, ...] | None = None  # the tensor seen as this shape first
    part: tuple[int, int, int] | None = None  # (dim, start, size) of the view


@dataclass(frozen=True)
class Leaf:
    """One weight: its sources' parts concatenated along dim 0, then seen as `shape`."""

    shape: tuple[int, ...]
    sources: tuple[Source, ...]
    axes: tuple[str | None, ...]  # mesh axis that shards each dim
    stored: torch.dtype = torch.bfloat16
    dtype: torch.dtype | None = None  # as computed with; None: the run's compute type
    init: Literal["normal", "ones", "words", "scales"] = "normal"
    repeat: int = 1  # how often each stored index of the sharded dim stands: ranks have the same
    make: Callable[[], Tensor] | None = None  # for a leaf that is not on disk

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape without repetition."""
        return tuple(n // (self.repeat if axis else 1) for n, axis in zip(self.shape, self.axes, strict=True))


@pytree
class Attention:
    norm: Any  # [D]
    qkv_a: Any  # [q_lora + L + R, D]
    q_a_norm: Any  # [q_lora]
    kv_a_norm: Any  # [L]
    q_b: Any  # [H, nope + R, q_lora]
    w_uk: Any  # [H, nope, L]
    w_uv: Any  # [H, value, L]
    o: Any  # [D, H, value]


@pytree
class MLP:
    gate_up: Any  # [2, inner, D]
    down: Any  # [D, inner]


@pytree
class Experts:
    """Logical: INT4 words and scales as below. Packed: see `pack_experts`."""

    w13: Any  # [E, 2, I, D / 8] i32
    s13: Any  # [E, 2, I, D / group] bf16
    w2: Any  # [E, D, I / 8] i32
    s2: Any  # [E, D, I / group] bf16


@pytree
class MoE:
    router: Any  # [E, D]
    bias: Any  # [E] f32
    experts: Experts
    shared: MLP


@pytree
class Layer:
    attention: Attention
    norm: Any  # [D]
    mlp: MLP | MoE


@pytree
class TargetParams:
    embed: Any  # [V, D]
    layers: tuple[Layer, ...]
    norm: Any  # [D]
    lm_head: Any  # [V, D]
    inv_freq: Any  # [R / 2] f32
    rank: Any  # [ranks] i64, a rank has its own


@pytree
class DrafterLayer:
    attention_norm: Any  # [D]
    q: Any  # [H, head, D]
    q_norm: Any  # [head]
    o: Any  # [D, H, head]
    mlp_norm: Any  # [D]
    mlp: MLP


@pytree
class DrafterParams:
    fc: Any  # [D, taps * D]
    feature_norm: Any  # [D]
    kv: Any  # [layers, 2, KV, head, D] keys and values of all layers, one matrix product
    k_norm: Any  # [layers, head]
    layers: tuple[DrafterLayer, ...]
    norm: Any  # [D]
    inv_freq: Any  # [head / 2] f32
    rank: Any  # [ranks] i64, a rank has its own


@pytree
class Params:
    """What a round closes over nothing of and reads everything from."""

    target: TargetParams
    drafter: DrafterParams | None


def target_plan(m: TargetModel, ranks: int = 1) -> TargetParams:
    """The plan of a Kimi K2.x text model; source names carry no wrapper prefix."""
    return TargetParams(
        embed=_leaf("model.embed_tokens.weight", (m.V, m.D), ("tp", None)),
        layers=tuple(_layer_plan(m, i) for i in range(m.layers)),
        norm=_norm("model.norm.weight", m.D),
        lm_head=_leaf("lm_head.weight", (m.V, m.D), ("tp", None)),
        inv_freq=_frequencies(m.rope, m.R),
        rank=_rank(ranks),
    )


def _layer_plan(m: TargetModel, i: int) -> Layer:
    at = f"model.layers.{i}."
    return Layer(
        attention=_attention_plan(m, at),
        norm=_norm(at + "post_attention_layernorm.weight", m.D),
        mlp=_mlp_plan(at + "mlp.", m.D, m.dense) if i < m.dense_layers else _moe_plan(m, at + "mlp."),
    )


def _attention_plan(m: TargetModel, at: str) -> Attention:
    a = at + "self_attn."
    kv_b = (a + "kv_b_proj.weight", (m.H * (m.nope + m.value), m.L), (m.H, m.nope + m.value, m.L))
    q_b = Source(a + "q_b_proj.weight", (m.H * (m.nope + m.R), m.q_lora), (m.H, m.nope + m.R, m.q_lora))
    o = Source(a + "o_proj.weight", (m.D, m.H * m.value), (m.D, m.H, m.value))
    a_proj = (Source(a + "q_a_proj.weight", (m.q_lora, m.D)), Source(a + "kv_a_proj_with_mqa.weight", (m.row, m.D)))
    return Attention(
        norm=_norm(at + "input_layernorm.weight", m.D),
        qkv_a=Leaf((m.q_lora + m.row, m.D), a_proj, (None, None)),
        q_a_norm=_norm(a + "q_a_layernorm.weight", m.q_lora),
        kv_a_norm=_norm(a + "kv_a_layernorm.weight", m.L),
        q_b=Leaf((m.H, m.nope + m.R, m.q_lora), (q_b,), ("tp", None, None)),
        w_uk=Leaf((m.H, m.nope, m.L), (Source(*kv_b, (1, 0, m.nope)),), ("tp", None, None)),
        w_uv=Leaf((m.H, m.value, m.L), (Source(*kv_b, (1, m.nope, m.value)),), ("tp", None, None)),
        o=Leaf((m.D, m.H, m.value), (o,), (None, "tp", None)),
    )


def _mlp_plan(at: str, D: int, inner: int) -> MLP:
    gate_up = tuple(Source(f"{at}{name}_proj.weight", (inner, D)) for name in ("gate", "up"))
    return MLP(
        gate_up=Leaf((2, inner, D), gate_up, (None, "tp", None)),
        down=_leaf(at + "down_proj.weight", (D, inner), (None, "tp")),
    )


def _moe_plan(m: TargetModel, at: str) -> MoE:
    def experts(shape: tuple[int, ...], names: tuple[str, ...], axes: tuple[str | None, ...], words: bool) -> Leaf:
        kind, stored = ("packed", torch.int32) if words else ("scale", torch.bfloat16)
        sources = tuple(
            Source(f"{at}experts.{e}.{name}_proj.weight_{kind}", shape[-2:]) for e in range(m.E) for name in names
        )
        return Leaf(shape, sources, axes, stored, stored, "words" if words else "scales")

    w13, s13 = ((m.E, 2, m.I, m.D // n) for n in (8, m.group))
    w2, s2 = ((m.E, m.D, m.I // n) for n in (8, m.group))
    columns, rows = (None, None, "tp", None), (None, None, "tp")
    return MoE(
        router=_leaf(at + "gate.weight", (m.E, m.D), (None, None)),
        bias=_leaf(at + "gate.e_score_correction_bias", (m.E,), (None,), stored=torch.float32, dtype=torch.float32),
        experts=Experts(
            w13=experts(w13, ("gate", "up"), columns, words=True),
            s13=experts(s13, ("gate", "up"), columns, words=False),
            w2=experts(w2, ("down",), rows, words=True),
            s2=experts(s2, ("down",), rows, words=False),
        ),
        shared=_mlp_plan(at + "shared_experts.", m.D, m.shared * m.I),
    )


def drafter_plan(m: DrafterModel, ranks: int = 1) -> DrafterParams:
    """The plan of a DFlash drafter; it has no embedding and no head of its own."""
    kv = tuple(
        Source(f"layers.{i}.self_attn.{name}_proj.weight", (m.KV * m.head, m.D))
        for i in range(m.layers)
        for name in ("k", "v")
    )
    heads = ranks * m.kv_heads(ranks)
    k_norm = tuple(Source(f"layers.{i}.self_attn.k_norm.weight", (m.head,)) for i in range(m.layers))
    return DrafterParams(
        fc=_leaf("fc.weight", (m.D, len(m.taps) * m.D), (None, "tp")),
        feature_norm=_norm("hidden_norm.weight", m.D),
        kv=Leaf((m.layers, 2, heads, m.head, m.D), kv, (None, None, "tp", None, None), repeat=heads // m.KV),
        k_norm=Leaf((m.layers, m.head), k_norm, (None, None), init="ones"),
        layers=tuple(_drafter_layer_plan(m, f"layers.{i}.") for i in range(m.layers)),
        norm=_norm("norm.weight", m.D),
        inv_freq=_frequencies(m.rope, m.head),
        rank=_rank(ranks),
    )


def _drafter_layer_plan(m: DrafterModel, at: str) -> DrafterLayer:
    q = Source(at + "self_attn.q_proj.weight", (m.H * m.head, m.D))
    o = Source(at + "self_attn.o_proj.weight", (m.D, m.H * m.head))
    return DrafterLayer(
        attention_norm=_norm(at + "input_layernorm.weight", m.D),
        q=Leaf((m.H, m.head, m.D), (q,), ("tp", None, None)),
        q_norm=_norm(at + "self_attn.q_norm.weight", m.head),
        o=Leaf((m.D, m.H, m.head), (o,), (None, "tp", None)),
        mlp_norm=_norm(at + "post_attention_layernorm.weight", m.D),
        mlp=_mlp_plan(at + "mlp.", m.D, m.inner),
    )


def _leaf(name: str, shape: tuple[int, ...], axes: tuple[str | None, ...], **kind: torch.dtype) -> Leaf:
    return Leaf(shape, (Source(name, shape),), axes, **kind)  # type: ignore[arg-type]


def _norm(name: str, width: int) -> Leaf:
    return Leaf((width,), (Source(name, (width,)),), (None,), init="ones")


def _frequencies(rope: Rope, width: int) -> Leaf:
    f32 = torch.float32
    return Leaf((width // 2,), (), (None,), f32, f32, make=lambda: inverse_frequencies(rope, width))


def _rank(ranks: int) -> Leaf:
    i64 = torch.int64
    return Leaf((ranks,), (), ("tp",), i64, i64, make=lambda: torch.arange(ranks))
