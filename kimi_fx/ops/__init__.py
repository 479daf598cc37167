"""The leaf operators of a round: one file each holds schema, fake and reference.

`KERNELS` goes through the dispatcher, which picks by device; `REFERENCE` is the plain PyTorch meaning on any
device. Both are handed to the graphs as data.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import build_tree, commit, draft_attention, marlin_moe, mla_tree_verify, moe_route, sample_and_walk

Operator = Callable[..., Any]


@dataclass(frozen=True)
class Ops:
    mla_schedule: Operator
    mla_tree_verify: Operator
    moe_route: Operator
    marlin_moe: Operator
    build_tree: Operator
    draft_attention: Operator
    sample_and_walk: Operator
    commit: Operator


KERNELS = Ops(
    mla_schedule=mla_tree_verify.mla_schedule,
    mla_tree_verify=mla_tree_verify.mla_tree_verify,
    moe_route=moe_route.moe_route,
    marlin_moe=marlin_moe.marlin_moe,
    build_tree=build_tree.build_tree,
    draft_attention=draft_attention.draft_attention,
    sample_and_walk=sample_and_walk.sample_and_walk,
    commit=commit.commit,
)

REFERENCE = Ops(
    mla_schedule=mla_tree_verify.schedule_reference,
    mla_tree_verify=mla_tree_verify.verify_reference,
    moe_route=moe_route.reference,
    marlin_moe=marlin_moe.reference,
    build_tree=build_tree.reference,
    draft_attention=draft_attention.reference,
    sample_and_walk=sample_and_walk.reference,
    commit=commit.reference,
)
