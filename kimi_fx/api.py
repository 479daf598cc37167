"""One-call generation: load an engine from overrides, generate, drop it."""

from collections.abc import Sequence
from typing import Any

from .engine import Engine


def generate(prompts: Any = None, sampling_params: Any = None, *, overrides: Sequence[str] = (), **rest: Any) -> Any:
    """`Engine.load(overrides).generate(…)` in one call, with the shipped checkpoint pair unless overridden.

    Takes what `Engine.generate` takes: texts, ids or `messages`, sampling fields, `stream`, `mode`, `budget`. For
    more than one call load an `Engine` once.
    """
    return Engine.load(overrides, progress=False).generate(prompts, sampling_params, **rest)
