"""`kimi-fx bench acceptance prompts=FILE budgets=[7,15]`: tokens a verify step, by mode and budget.

Greedy, ignore_eos, `sampling.max_tokens` (256) tokens each, pooled over all steps of all prompts; tokens cut at
the limit are not counted.
"""

from collections.abc import Sequence
from typing import Any

from ..compose import load_config
from ..engine import Engine
from ..inputs import read_prompts
from ..results import Result
from ..runtime.load import load
from .record import record, say, table


def run(overrides: Sequence[str]) -> int:
    config = load_config(overrides)
    prompts = [prompt for prompt, _ in read_prompts(config)]
    engine = Engine(config, load(config))
    cases: list[tuple[str, dict[str, Any]]] = [("plain", {"mode": "plain"}), ("chain", {"mode": "chain"})]
    cases += [(f"{n + 1} nodes", {"mode": "tree", "budget": n}) for n in config.budgets]
    rows = [["", "acceptance", "by depth", "nodes a step", "tokens/s"]]
    for name, how in cases:
        say(f"{name}: {len(prompts)} prompts")
        rows.append([name, *measure(engine, prompts, **how)])
    print(table(rows))
    print(f"\nacceptance: tokens emitted a verify step, bonus included. {record(config, engine.loaded)}")
    return 0


def measure(engine: Engine, prompts: list[Any], **how: Any) -> list[str]:
    results = engine.generate(prompts, temperature=0, ignore_eos=True, **how)
    p = pool(results)
    return [
        f"{p['acceptance']:.3f}",
        " ".join(f"{a:.2f}" for a in p["by_depth"]),
        f"{p['nodes']:.1f}",
        f"{p['tokens_per_second']:.1f}",
    ]


def pool(results: Sequence[Result]) -> dict[str, Any]:
    """Statistics over all steps of all results; tokens_per_second is of the whole batch."""
    stats = [r.stats for r in results]
    steps = sum(s.steps for s in stats)
    depth = max(len(s.acceptance_by_depth) for s in stats)
    reached = [
        sum(s.steps * s.acceptance_by_depth[d] for s in stats if d < len(s.acceptance_by_depth)) for d in range(depth)
    ]
    tokens = sum(len(r.outputs[0].token_ids) for r in results)
    return {
        "acceptance": sum(s.steps * s.acceptance_length for s in stats) / steps,
        "by_depth": [r / steps for r in reached],
        "nodes": sum(s.steps * s.nodes_per_step for s in stats) / steps,
        "tokens_per_second": tokens / max(s.total_time for s in stats),
    }
