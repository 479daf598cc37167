"""`kimi-fx bench draft`: the drafter's block of Kimi K2.6 as one of eight ranks, with our kernels and with TensorRT.

Embedding, layers over the context, and the head, as a compiled round has them: the same function compiled twice
(`drafter.backend`), captured alone and replayed. Weights and pool are random ones of a rank's shapes, 1.1 GB that no
cache holds. "off" is the largest difference of the logits from those of our kernels, over their deviation. The floor
reads every weight and row once at the card's read rate, measured in the same run. Without torch_tensorrt its column is
left out.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.load import random_params
from ..config import PAGE
from ..graphs import drafter
from ..graphs.params import Params, drafter_plan
from ..graphs.state import KVPool, Model, Shape, StepState, empty_pool, empty_state
from ..runtime import tensorrt
from ..runtime.build import load_kernels
from .device import Rates, asked, captured, heat_map, median, numbers, rates, report, result
from .rank import seat_all
from .record import say
from .step import geometry
from .work import draft as work
from .work import plan_of

DEFAULTS = {"batch": [1, 8], "context": [1024]}
LIMITS = {"batch": (1, 64), "context": (1, 65_536)}


@dataclass(frozen=True)
class Inputs:
    params: Params
    pool: KVPool
    state: StepState


def inputs(model: Model, batch: int, context: int) -> Inputs:
    device, bf16 = torch.device("cuda"), torch.bfloat16
    assert model.drafter
    target = replace(plan_of(model.target), layers=())
    params = Params(random_params(target, 0, device, bf16), random_params(drafter_plan(model.drafter), 1, device, bf16))
    each = context // PAGE + 2
    pool = empty_pool(replace(model, target=replace(model.target, layers=0)), batch * each, bf16, device)
    for rows in (pool.draft_k, pool.draft_v):
        rows.normal_()
    state = empty_state(batch, each, model.target.V, device)
    seat_all(state, batch, context, 16, torch.randperm(batch * each, device=device).int())
    return Inputs(params, pool, state)


def block(model: Model, s: Shape, x: Inputs, backend: str, folder: Path) -> tuple[float, Tensor]:
    """Seconds of a replay, and the logits."""
    ops, m, p = tensorrt.operators(backend), model.drafter, x.params
    assert m and p.drafter
    start = time.perf_counter()
    tensorrt.load_engines((p, x.pool, x.state, s, replace(model, ops=ops)), folder)
    torch.compiler.reset()
    call = partial(drafter.draft, p.drafter, p.target, m, ops, x.pool, x.state, s.block)
    compiled = torch.compile(lambda: call(), fullgraph=True, dynamic=False)
    logits = compiled().clone()
    say(f"{backend}: batch {s.batch} built in {time.perf_counter() - start:.1f} s")
    return median(captured(lambda _: compiled(), [None]).replay), logits


def measure_cell(model: Model, card: Rates, batch: int, context: int, backends: Sequence[str]) -> dict[str, Any]:
    assert model.drafter
    s = Shape(batch, 16, model.drafter.block, 15)
    x = inputs(model, batch, context)
    floor = work(model.drafter, model.target, s, context).floor(card)
    with TemporaryDirectory() as folder:
        found = {backend: block(model, s, x, backend, Path(folder)) for backend in backends}
    seconds, logits = found["inductor"]
    cell: dict[str, Any] = {"batch": batch, "block": s.block, "context": context, "floor us": floor * 1e6}
    cell |= {"us": seconds * 1e6, "over floor": seconds / floor}
    if "tensorrt" in found:
        other, theirs = found["tensorrt"]
        off = float((theirs - logits).abs().max() / logits.std())
        cell |= {"tensorrt us": other * 1e6, "tensorrt / ours": f"{other / seconds:.2f}", "off": f"{off:.3f}"}
    return cell


@torch.no_grad()
def measure(choice: dict[str, list[int]]) -> dict[str, Any]:
    load_kernels(torch.device("cuda"))
    torch.manual_seed(0)
    backends = ["inductor", "tensorrt"]
    try:
        tensorrt.packages()
    except ValueError as error:
        say(str(error))
        backends.pop()
    card, (_, model) = rates(), geometry()
    cells = [measure_cell(model, card, *sizes, backends) for sizes in product(choice["batch"], choice["context"])]
    return result(card, cells)


def run(overrides: Sequence[str]) -> int:
    """Takes `batch=[1,8] context=[1024]`, and `folder=.` for JSON and picture."""
    given, folder = asked("draft", list(DEFAULTS), overrides)
    found = measure(DEFAULTS | {key: numbers(key, words, *LIMITS[key]) for key, words in given.items()})
    heads = ["batch", "block", "context", "floor us", "us", "over floor", "tensorrt us", "tensorrt / ours", "off"]
    report("draft", found, heads, heat_map(found["cells"], "context", "batch"), folder, "a block in a graph")
    return 0
