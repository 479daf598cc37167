"""What a number needs to be repeated: machine, versions, checkpoint, settings."""

import platform
import sys

import torch

from .. import __version__
from ..config import Config
from ..runtime.load import Loaded


def record(config: Config, loaded: Loaded) -> str:
    """A line for under a table."""
    machine = torch.cuda.get_device_name(loaded.device) if loaded.device.type == "cuda" else platform.processor()
    return (
        f"kimi_fx {__version__}, torch {torch.__version__}, Python {platform.python_version()}, "
        f"{machine or platform.machine()}, {torch.get_num_threads()} threads, "
        f"{str(loaded.dtype).removeprefix('torch.')}, target {config.target.path}, drafter {config.drafter.path}"
    )


def table(rows: list[list[str]]) -> str:
    """Rows as aligned columns, the first a heading; Markdown."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["| " + " | ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) + " |" for row in rows]
    lines.insert(1, "|" + "|".join("-" * (w + 1) + ":" for w in widths) + "|")
    return "\n".join(lines)


def say(text: str) -> None:
    """Progress, on stderr."""
    print(text, file=sys.stderr, flush=True)
