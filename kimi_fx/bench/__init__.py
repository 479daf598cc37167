"""Benchmarks, `kimi-fx bench <name> [key=value …]`. Each prints ratios within one run, and how to repeat it."""

from collections.abc import Callable, Sequence

from ..rules import nearest
from . import acceptance, cpu, demo, draft, layer, mla, moe, step, sums

BENCHES: dict[str, Callable[[Sequence[str]], int]] = {
    "demo": demo.run,
    "acceptance": acceptance.run,
    "cpu": cpu.run,
    "draft": draft.run,
    "layer": layer.run,
    "mla": mla.run,
    "moe": moe.run,
    "step": step.run,
    "sums": sums.run,
}


def run(args: Sequence[str]) -> int:
    """Run the named benchmark; ValueError for an unknown one."""
    if not args or args[0] not in BENCHES:
        near = nearest(args[0], BENCHES) if args else None
        hint = f"; did you mean {near}?" if near else "."
        raise ValueError(f"kimi-fx bench needs one of {', '.join(BENCHES)}{hint}")
    return BENCHES[args[0]](args[1:])
