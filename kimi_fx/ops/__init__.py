"""The leaf operators of a round: one file each holds schema, fake and reference.

`KERNELS` goes through the dispatcher, which picks by device, and for more rows than a kernel takes is the reference's
own steps; `REFERENCE` is the plain PyTorch meaning on any device. Both are handed to the graphs as data.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import (
    build_tree,
    commit,
    draft_attention,
    linear,
    marlin_moe,
    mla_tree_verify,
    norm_route,
    q_up_absorb,
    sample_and_walk,
    v_up_o,
)
from .linear import by_rows

Operator = Callable[..., Any]


@dataclass(frozen=True)
class Ops:
    norm_linear: Operator
    linear_add: Operator
    norm_gate_up: Operator
    q_up_absorb: Operator
    mla_schedule: Operator
    mla_tree_verify: Operator
    v_up_o: Operator
    norm_route: Operator
    marlin_moe: Operator
    build_tree: Operator
    draft_attention: Operator
    sample_and_walk: Operator
    commit: Operator
    draft_project: Operator | None = None  # these two: a part of the drafter whole, None: composed of those above
    draft_finish: Operator | None = None


KERNELS = Ops(
    norm_linear=by_rows(linear.norm_linear, linear.norm_linear_reference),
    linear_add=by_rows(linear.linear_add, linear.linear_add_reference),
    norm_gate_up=by_rows(linear.norm_gate_up, linear.norm_gate_up_reference),
    q_up_absorb=by_rows(q_up_absorb.q_up_absorb, q_up_absorb.reference),
    mla_schedule=mla_tree_verify.mla_schedule,
    mla_tree_verify=mla_tree_verify.mla_tree_verify,
    v_up_o=by_rows(v_up_o.v_up_o, v_up_o.reference),
    norm_route=by_rows(norm_route.norm_route, norm_route.reference),
    marlin_moe=marlin_moe.marlin_moe,
    build_tree=build_tree.build_tree,
    draft_attention=draft_attention.draft_attention,
    sample_and_walk=sample_and_walk.sample_and_walk,
    commit=commit.commit,
)

REFERENCE = Ops(
    norm_linear=linear.norm_linear_reference,
    linear_add=linear.linear_add_reference,
    norm_gate_up=linear.norm_gate_up_reference,
    q_up_absorb=q_up_absorb.reference,
    mla_schedule=mla_tree_verify.schedule_reference,
    mla_tree_verify=mla_tree_verify.verify_reference,
    v_up_o=v_up_o.reference,
    norm_route=norm_route.reference,
    marlin_moe=marlin_moe.reference,
    build_tree=build_tree.reference,
    draft_attention=draft_attention.reference,
    sample_and_walk=sample_and_walk.reference,
    commit=commit.reference,
)
