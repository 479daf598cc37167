"""`kimi-fx bench demo`: one prompt from the shipped pair, plain and as a tree, streamed, with the ratio."""

import time
from collections.abc import Sequence

from ..compose import check_used, load_config
from ..config import Mode
from ..engine import Engine
from ..results import Delta
from .acceptance import OWN
from .record import record

PROMPT = 'class Stack:\n    """A simple LIFO stack."""\n\n    def __init__(self):\n'
BUDGET = 7
USUAL = ["sampling.temperature=0", "sampling.max_tokens=160", "run.threads=1"]  # threads do not help one stream
UNUSED = OWN | dict.fromkeys(("prompts", "ids", "messages", "limit"), "give prompt=") | {"budgets": "leave it out"}


def run(overrides: Sequence[str]) -> int:
    check_used("bench demo", overrides, UNUSED)
    config = load_config([*USUAL, *overrides])
    if (config.sampling.limit or 0) < 2:
        raise ValueError(f"sampling.max_tokens={config.sampling.limit} leaves nothing to time: give 2 or more.")
    engine = Engine.open(config)
    prompt = config.prompt or PROMPT
    plain, tree = stream(engine, prompt, "plain", None), stream(engine, prompt, "tree", BUDGET)
    assert plain.stats and tree.stats
    print(
        f"\ntree over plain: {tree.stats.tokens_per_second / plain.stats.tokens_per_second:.2f}x tokens/s, "
        f"{plain.stats.steps} steps against {tree.stats.steps}\n{record(config, engine.loaded)}"
    )
    return 0


def stream(engine: Engine, prompt: str, mode: Mode, budget: int | None) -> Delta:
    """Print the text as it comes; the last delta."""
    print(f"\n--- {mode}{f', {budget} drafted nodes a step' if budget else ''}\n{prompt}", end="", flush=True)
    engine.generate(prompt, mode=mode, budget=budget, max_tokens=8)  # first calls are slow: not timed
    begun = time.perf_counter()
    for delta in engine.generate(prompt, mode=mode, budget=budget, stream=True):
        print(delta.text, end="", flush=True)
    assert delta.stats
    s = delta.stats
    print(
        f"\n[{s.tokens_per_second:.0f} tokens/s, acceptance length {s.acceptance_length:.2f} tokens a verify step, "
        f"{time.perf_counter() - begun:.2f} s]"
    )
    return delta
