"""The text of `kimi-fx inspect`: what a checkpoint pair holds, after every check that needs no tensor data.

Reads configs and headers only. Tokenizer and stop ids are reported by the caller.
"""

import textwrap
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..config import DrafterModel, TargetModel
from ..graphs.params import drafter_plan, target_plan
from .configs import read_drafter, read_target
from .files import read_entries
from .preflight import DRAFTER, TARGET, Layout, check

# A tensor counts to the first group with a part of its name.
GROUPS = {
    "experts": (".experts.",),
    "shared experts": (".shared_experts.",),
    "router": (".mlp.gate.",),
    "dense MLP": (".mlp.",),
    "attention": ("layers.",),
    "embedding": ("embed_tokens",),
    "features": ("fc.", "hidden_norm."),
    "head": ("",),
}


def inspect(
    target: Path,
    drafter: Path | None,
    lora_norm_eps: float | None,
    window: int | None,
    rope_amplitude: float | None,
) -> str:
    """Report on a target folder and, if given, its drafter's; the settings are those of the config groups.

    Raises CheckpointError with everything that would keep the first faulty folder from loading.
    """
    model = read_target(target, lora_norm_eps)
    parts = [_describe("target", target, target_plan(model), TARGET, model)]
    if drafter is not None:
        draft = read_drafter(drafter, model, window, rope_amplitude)
        parts.append(_describe("drafter", drafter, drafter_plan(draft), DRAFTER, draft))
    return "\n\n".join(parts)


def _describe(role: str, folder: Path, plan: Any, layout: Layout, model: TargetModel | DrafterModel) -> str:
    entries = read_entries(folder)
    report = check(plan, entries, layout, str(folder))
    groups: dict[str, list[int]] = defaultdict(list)
    for tensor in report.needed:
        group = next(g for g, parts in GROUPS.items() if any(part in tensor.name for part in parts))
        groups[group].append(tensor.bytes)
    files = len({entry.file for entry in entries.values()})
    named = f", names begin with {report.prefix}" if report.prefix else ""
    lines = [f"{role}: {folder}"]
    lines.append(f"  {files:,} files, {len(report.needed):,} tensors, {report.bytes:,} bytes{named}")
    lines += [f"  {g:<16}{len(sizes):>9,} tensors{sum(sizes):>20,} bytes" for g, sizes in groups.items()]
    lines += [f"  skipped: {count:,} tensors of {group}" for group, count in report.skipped.items()]
    settings = ", ".join(f"{key}={value}".replace(" ", "") for key, value in _flat(asdict(model)).items())
    lines.append(textwrap.fill(settings, 100, initial_indent="  geometry: ", subsequent_indent="    "))
    return "\n".join(lines)


def _flat(settings: dict[str, Any]) -> dict[str, Any]:
    rope = settings.pop("rope")
    return settings | {f"rope.{key}": value for key, value in rope.items()}
