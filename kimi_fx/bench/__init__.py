"""Benchmarks, `kimi-fx bench <name> [key=value …]`. Each prints ratios within one run, and how to repeat it.

A name is that of the file whose `run` it calls, which only then is imported.
"""

from collections.abc import Sequence
from importlib import import_module
from inspect import cleandoc
from textwrap import fill

from ..rules import nearest

BENCHES = ("demo", "acceptance", "cpu", "draft", "layer", "mla", "moe", "step", "sums")


def run(args: Sequence[str]) -> int:
    """Run the named benchmark; ValueError for an unknown one."""
    if not args or args[0] not in BENCHES:
        near = nearest(args[0], BENCHES) if args else None
        hint = f"; did you mean {near}?" if near else "."
        raise ValueError(f"kimi-fx bench needs one of {', '.join(BENCHES)}{hint}")
    code: int = import_module(f".{args[0]}", __name__).run(args[1:])
    return code


def usage(name: str) -> str:
    """What a benchmark measures, the keys it takes, and their defaults."""
    module = import_module(f".{name}", __name__)
    measures = cleandoc(module.__doc__ or name)
    but = ", ".join(getattr(module, "UNUSED", {}))
    takes = cleandoc(module.run.__doc__ or fill(f"Takes the keys that `kimi-fx config` prints, but {but}.", 120))
    own = getattr(module, "DEFAULTS", {})
    lists = [f"{key}={value}".replace(" ", "").replace("'", "") for key, value in own.items()]
    return "\n  ".join([f"{measures}\n\n{takes}\nDefaults of its own:", *(lists or module.USUAL)])
