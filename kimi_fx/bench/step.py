"""`kimi-fx bench step`: the whole round of Kimi K2.6, as one of eight tensor-parallel ranks on one card.

61 layers and the drafter with random weights of a rank's shapes (`rank.py`), compiled ahead, captured and replayed as
the engine does it; the sums over the ranks are left out. One node is plain decoding without the drafter. A round's time
is that of ROUNDS replays in a row, which the host launches ahead; its parts are a traced replay's shares of it
(`trace.py`), beside what each has to read (`work.py`). The floor is the sum of the parts' floors: the larger of bytes
at the card's read rate and products at its matrix rate, both measured in the same run. The experts hit are counted in
one round that runs op by op; expected are those of independent tokens. Idle is the time between two rounds, results
being copied out as the engine does it.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.configs import read_drafter, read_target
from ..compose import conf_folder, load_config
from ..config import NODE_BUCKETS, PAGE, Config
from ..graphs.state import Model, Shape, slots
from ..graphs.step import ddtree_step
from ..ops import KERNELS
from ..runtime.buckets import shape_of, tokens
from ..runtime.build import load_kernels
from ..runtime.builders import build_all
from ..runtime.flight import Flight, copied
from .bars import bars
from .device import Cells, Rates, asked, median, numbers, rates, report, result, some_of
from .rank import (
    INIT,
    Rank,
    Room,
    device_bytes,
    make_rank,
    seat_all,
    set_router_bias,
    share_of_drafter,
    share_of_target,
    without_drafter,
)
from .record import say
from .routing import KINDS, chances, expected_hits, router_bias
from .trace import shares, traced
from .work import PARTS, round_work

RANKS = 8
ROUNDS = 4  # replays timed together
MOST = 262_144  # tokens of context in the pool, all requests together
BESIDE = 6e9  # bytes for graphs, for making weights, and what else is not weights or pool
DEFAULTS: dict[str, list[Any]] = {
    "batch": [1, 8],
    "nodes": [1, 8, 16, 32, 64],
    "context": [1000, 5500, 32_000, 200_000],
    "routing": list(KINDS),
    "acceptance": [4],
}
LIMITS = {"batch": (1, 64), "context": (1, MOST)}


@dataclass(frozen=True)
class Cell:
    batch: int
    nodes: int
    context: int
    routing: str

    def __str__(self) -> str:
        return f"batch {self.batch}, {self.nodes} nodes, {self.context:,} tokens, {self.routing}"


def chosen(given: dict[str, list[str]], block: int) -> tuple[list[Cell], float]:
    """Cells, those of one compiled round together, and tokens a round to reckon with. Says which cells are too large.
    ValueError for what cannot be. `block`: the drafter's slots, so many tokens a round can give."""
    words = {key: list(map(str, values)) for key, values in DEFAULTS.items()} | given
    batch, context = (numbers(key, words[key], *limits) for key, limits in LIMITS.items())
    nodes = list(map(int, some_of("nodes", words["nodes"], NODE_BUCKETS)))
    routing = some_of("routing", words["routing"], KINDS)
    most = min(block, max(nodes))
    try:
        (acceptance,) = map(float, given.get("acceptance", [min(DEFAULTS["acceptance"][0], most)]))
    except ValueError:
        acceptance = 0.0
    if not 1 <= acceptance <= most:
        found = ", ".join(words["acceptance"]) or "none"
        raise ValueError(f"acceptance is one number from 1 to {most}, tokens a round, found {found}.")
    large = [f"{b} x {c:,}" for b, c in product(batch, context) if b * c > MOST]
    cells = [Cell(*values) for values in product(batch, nodes, context, routing) if values[0] * values[2] <= MOST]
    if not cells:
        raise ValueError(f"bench step holds {MOST:,} tokens, no batch x context is that small: lower one of them.")
    if large:
        say(f"left out, as bench step holds {MOST:,} tokens: batch x context of {', '.join(large)}")
    return cells, acceptance


def geometry() -> tuple[Config, Model]:
    """Kimi K2.6 and its drafter as one rank has them."""
    config = load_config(["target=kimi_k2_6", "drafter=kimi_k2_6_dflash"])
    whole = read_target(conf_folder() / "target/kimi_k2_6", config.target.lora_norm_eps)
    d = config.drafter
    drafter = read_drafter(conf_folder() / "drafter/kimi_k2_6_dflash", whole, d.window, d.rope_amplitude)
    target = share_of_target(whole, RANKS)
    return config, Model(target, share_of_drafter(drafter, target.V, RANKS), KERNELS)


def room_for(cells: Sequence[Cell]) -> Room:
    """The least that holds each cell."""
    each = {cell: cell.context // PAGE + 2 for cell in cells}
    return Room(max(c.batch for c in cells), max(each.values()), max(c.batch * n for c, n in each.items()))


def check_fits(needed: float, free: float) -> None:
    if needed + BESIDE > free:
        raise ValueError(
            f"bench step needs {(needed + BESIDE) / 1e9:.0f} GB on the device for weights, pool and graphs, and "
            f"{free / 1e9:.0f} GB are free: ask for a smaller batch or context."
        )


def measure(
    cells: Sequence[Cell], config: Config, model: Model, card: Rates, acceptance: float, device: torch.device
) -> Iterator[dict[str, Any]]:
    """Each cell's numbers as they come."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config = replace(config, run=replace(config.run, nodes=tuple({cell.nodes for cell in cells})))
    room = room_for(cells)
    rank = make_rank(config, model, room, device, dtype)
    plain = without_drafter(rank, config)
    pages = torch.randperm(room.pages, device=device).int()
    of = {cell: rank if cell.nodes > 1 else plain for cell in cells}
    shapes = {cell: shape_of(config, one.model, cell.batch, cell.nodes, wide=True) for cell, one in of.items()}
    for one in (rank, plain):
        if wanted := {shapes[cell] for cell in cells if of[cell] is one}:
            get_ready(one, wanted)
    for cell in cells:
        found = measure_cell(cell, of[cell], shapes[cell], pages, card)
        emitted = cell.batch * (acceptance if cell.nodes > 1 else 1)
        yield asdict(cell) | found | {"tokens/s": emitted / found["us"] * 1e6}


def get_ready(rank: Rank, shapes: set[Shape]) -> None:
    """Build the rounds that are not in the store, load all and capture them, largest first, as the engine starts."""
    rank.rounds.buckets = tuple(sorted(shapes, key=tokens, reverse=True))
    build_all(rank.rounds, rank.params)
    start = time.perf_counter()
    rank.rounds.load_all(rank.params, rank.pool, rank.state)
    say(f"{len(shapes)} rounds loaded and captured in {time.perf_counter() - start:.1f} s")


def measure_cell(cell: Cell, rank: Rank, shape: Shape, pages: Tensor, card: Rates) -> dict[str, Any]:
    """Microseconds of the round and its parts, megabytes and floors of each."""
    m = rank.model.target
    chance = chances(cell.routing, m.E, m.K)
    set_router_bias(rank.params, router_bias(chance, INIT * sqrt(m.D)))
    seat_all(rank.state, cell.batch, cell.context, cell.nodes, pages)
    hits = experts_hit(rank, shape)
    replay = rank.rounds.call(shape, rank.params, rank.pool, rank.state)

    def again() -> object:
        rank.state.length.fill_(cell.context)
        return replay()

    seconds = median(lambda: [again() for _ in range(ROUNDS)]) / ROUNDS
    rank.state.length.fill_(cell.context)
    kernels, idle = traced(lambda: copied(Flight([], replay()[2])))
    share = shares(kernels)
    if not rank.state.active[: cell.batch].all():
        raise RuntimeError(f"{cell}: a request ended, so its logits were not finite and nothing was measured.")
    work = round_work(rank.model, shape, cell.context, hits)
    floors = {part: work[part].floor(card) for part in PARTS}
    floor = sum(floors.values())
    found = {"experts": hits, "expected": expected_hits(chance, cell.batch * cell.nodes)}
    found |= {"us": seconds * 1e6, "floor us": floor * 1e6, "over floor": seconds / floor, "idle us": idle * 1e6}
    for part in PARTS:
        found[f"{part} us"] = share[part] * seconds * 1e6
        found[f"{part} floor us"] = floors[part] * 1e6
        found[f"{part} MB"] = work[part].bytes / 1e6
    return found


def experts_hit(rank: Rank, shape: Shape) -> float:
    """Experts that a layer's tokens visit, the mean over the layers of one round run op by op."""
    hits: list[Tensor] = []

    def route(*arguments: Any) -> Any:
        routed = rank.model.ops.norm_route(*arguments)
        hits.append((routed[5].diff() > 0).sum())
        return routed

    model = replace(rank.model, ops=replace(rank.model.ops, norm_route=route))
    ddtree_step(rank.params, rank.pool, slots(rank.state, shape.batch), shape, model)
    return float(torch.stack(hits).double().mean())


def picture(cells: Cells) -> str:
    rows = []
    for c in cells:
        label = f"{c['batch']} x {c['context']:,}, {c['nodes']} nodes, {c['routing']}"
        seconds, floors = ({part: c[f"{part} {what}us"] for part in PARTS} for what in ("", "floor "))
        rows.append((label, f"{c['us'] / 1e3:.2f} ms, {c['over floor']:.1f}x", seconds, floors))
    return bars(rows)


def each_line(found: Iterator[dict[str, Any]], write: Callable[[str], object]) -> Iterator[dict[str, Any]]:
    """The same cells, each written down before the next is measured."""
    for cell in found:
        write(json.dumps(cell) + "\n")
        named = Cell(cell["batch"], cell["nodes"], cell["context"], cell["routing"])
        say(
            f"{named}: {cell['us'] / 1e3:.2f} ms, {cell['over floor']:.2f}x the floor, {cell['tokens/s']:.0f} "
            f"tokens/s, {cell['experts']:.1f} experts a layer ({cell['expected']:.1f} expected), {cell['idle us']:.1f} "
            "us idle between rounds"
        )
        yield cell


@torch.no_grad()
def run(overrides: Sequence[str]) -> int:
    """Takes `batch=[1] nodes=[16,64] context=[5500] routing=[uniform]`, `acceptance=4` tokens a round for tokens/s,
    and `folder=.` for step.jsonl, a line a cell as it comes, and step.json and step.svg at the end."""
    given, folder = asked("step", list(DEFAULTS), overrides)
    config, model = geometry()
    assert model.drafter
    cells, acceptance = chosen(given, model.drafter.block)
    check_fits(device_bytes(model, room_for(cells)), torch.cuda.mem_get_info()[0])
    device = torch.device("cuda")
    load_kernels(device)
    card = rates()
    torch.cuda.empty_cache()
    with (folder / "step.jsonl").open("w", buffering=1) as lines:
        lines.write(json.dumps(result(card, []) | {"acceptance": acceptance}) + "\n")
        found = list(each_line(measure(cells, config, model, card, acceptance, device), lines.write))
    whole = result(card, found) | {"acceptance": acceptance}
    heads = ["batch", "nodes", "context", "routing", "experts", "expected"]
    heads += ["us", "floor us", "over floor", "idle us", "tokens/s"]
    heads += [f"{part} us" for part in PARTS]
    note = f"one of {RANKS} ranks without its sums over the ranks, {acceptance:g} tokens a round where it drafts"
    report("step", whole, heads, picture(found), folder, note)
    return 0
