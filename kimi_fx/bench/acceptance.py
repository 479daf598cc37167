"""`kimi-fx bench acceptance budgets=[7,15] limit=16`: tokens a verify step, by mode and budget.

256 tokens a prompt, greedy and past the end of text unless overridden, pooled over all steps of all prompts; tokens cut
at the limit are not counted. The prompts are 96 held-out ones shipped with kimi-nano, or a file of your own. Where
rounds are compiled there is a bucket for each budget, and what is missing is compiled before the clock starts.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tqdm import tqdm

from ..compose import check_used, load_config
from ..config import LIMIT_NAMES
from ..engine import Engine
from ..inputs import check_each, read_plain
from ..results import Result
from ..runtime.buckets import holding
from ..runtime.load import pick_device, pick_dtype
from ..runtime.rounds import compiles
from .record import record, table

CHAIN = 7  # tokens that a chain drafts, with a block of 8
USUAL = [
    "prompts=kimi_fx:nano/acceptance-prompts.safetensors",
    "sampling.temperature=0",
    "sampling.ignore_eos=true",
    "sampling.max_tokens=256",
]
OWN = dict.fromkeys(("step", "step.mode", "step.budget", "output", "sampling.n"), "leave it out")  # each has its own
OWN |= dict.fromkeys((f"sampling.{name}" for name in LIMIT_NAMES[1:]), "give sampling.max_tokens")
UNUSED = OWN | dict.fromkeys(("prompt", "ids", "messages"), "give prompts=FILE")


def run(overrides: Sequence[str]) -> int:
    check_used("bench acceptance", overrides, UNUSED)
    config = load_config([*USUAL, *overrides])
    read = read_plain(config)
    prompts = [prompt.value for prompt in read]
    if (config.sampling.limit or 0) < 2:
        raise ValueError(f"sampling.max_tokens={config.sampling.limit} leaves no verify step to count: give 2 or more.")
    device = pick_device(config.device)
    if config.run.nodes is None and compiles(config, device, pick_dtype(config.dtype, device)):
        nodes = tuple(sorted({1, *map(holding, (CHAIN, *config.budgets))}))
        config = replace(config, run=replace(config.run, nodes=nodes))
    engine = Engine.open(config, check=lambda engine: check_each(read, engine.check))
    cases: list[tuple[str, dict[str, Any]]] = [("plain", {"mode": "plain"}), ("chain", {"mode": "chain"})]
    cases += [(f"tree of {n} ({n + 1} nodes)", {"mode": "tree", "budget": n}) for n in config.budgets]
    rows, plain = [["", "acceptance", "by depth", "nodes a step", "tokens/s", "over plain"]], 0.0
    for name, how in cases:
        engine.generate(prompts[: config.run.batch], max_tokens=2, **how)  # first calls are slow: not timed
        begun = time.perf_counter()
        results = generate(engine, prompts, name, **how)
        pace = sum(len(r.outputs[0].token_ids) for r in results) / (time.perf_counter() - begun)
        plain = plain or pace
        rows.append([name, *row(results), f"{pace:.1f}", f"{pace / plain:.2f}x"])
    print(table(rows))
    print(f"\nacceptance: tokens emitted a verify step, bonus included; {len(prompts)} prompts")
    print(f"{engine.settings()}\n{record(config, engine.loaded)}")
    return 0


def generate(engine: Engine, prompts: list[Any], name: str, **how: Any) -> list[Result]:
    """Every prompt's result, some batches at a time for the sake of a progress bar, if a terminal is there."""
    size, results = 4 * engine.config.run.batch, list[Result]()
    with tqdm(total=len(prompts), desc=name, unit="prompt", disable=None) as bar:
        while len(results) < len(prompts):
            results += engine.generate(prompts[len(results) : len(results) + size], **how)
            bar.update(len(results) - bar.n)
    return results


def row(results: Sequence[Result]) -> list[str]:
    p = pool(results)
    by_depth = " ".join(f"{a:.2f}" for a in p["by_depth"])
    return [f"{p['acceptance']:.3f}", by_depth, f"{p['nodes']:.1f}"]


def pool(results: Sequence[Result]) -> dict[str, Any]:
    """Acceptance length, share of steps by accepted depth, and nodes a step, over all steps of all results."""
    stats = [r.stats for r in results]
    steps = sum(s.steps for s in stats)
    depth = max(len(s.acceptance_by_depth) for s in stats)
    reached = [
        sum(s.steps * s.acceptance_by_depth[d] for s in stats if d < len(s.acceptance_by_depth)) for d in range(depth)
    ]
    return {
        "acceptance": sum(s.steps * s.acceptance_length for s in stats) / steps,
        "by_depth": [r / steps for r in reached],
        "nodes": sum(s.steps * s.nodes_per_step for s in stats) / steps,
    }
