"""What the benchmarks on a card share: microseconds a layer from graph replays, the card's rates, the report.

A layer has its own buffers, layers together are well past the L2 cache, and all are captured in one CUDA graph, so
that no call is measured alone and none finds its data in a cache.
"""

import json
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from ..config import package_path
from .record import table

REPLAYS, WARM = 15, 3
PAUSE = 0.5  # seconds, for the card to cool down
Layer = TypeVar("Layer")
Cells = list[dict[str, Any]]


@dataclass(frozen=True)
class Rates:
    """What the card does at best."""

    copy: float  # bytes a second, read and written
    read: float  # bytes a second, read only
    matmul: float  # operations a second, bf16


def rates() -> Rates:
    """Of an elementwise kernel and of a sum over 4 GB, and of an 8192-cube product."""
    big = torch.randn(2**31, device="cuda", dtype=torch.bfloat16)
    to = torch.empty_like(big)
    copy = 2 * big.nbytes / per_layer(lambda _: torch.neg(big, out=to), [big] * 4)  # a memcpy node is slower
    words = big.view(torch.int64)
    read = big.nbytes / per_layer(lambda _: words.sum(), [big] * 4)
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return Rates(copy, read, 2 * 8192**3 / per_layer(lambda _: a @ b, [a] * 10))


def per_layer(call: Callable[[Layer], object], layers: Sequence[Layer]) -> float:
    """Seconds a layer: the median of a graph's replays, one behind the other, that calls for every layer."""
    return median(captured(call, layers).replay) / len(layers)


def rested(call: Callable[[Layer], object], layers: Sequence[Layer]) -> float:
    """Seconds a layer of one replay after a pause, before the card slows down to keep within its power."""
    graph = captured(call, layers)
    seconds(graph.replay)
    time.sleep(PAUSE)
    return seconds(graph.replay) / len(layers)


def captured(call: Callable[[Layer], object], layers: Sequence[Layer]) -> torch.cuda.CUDAGraph:
    call(layers[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in layers:
            call(layer)
    return graph


def median(replay: Callable[[], object]) -> float:
    """Seconds of a replay, one behind the other."""
    return statistics.median([seconds(replay) for _ in range(WARM + REPLAYS)][WARM:])


def seconds(replay: Callable[[], object]) -> float:
    """Of one call, on the device."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def given(name: str, known: Sequence[str], overrides: Sequence[str]) -> dict[str, str]:
    """What was given as `key=value`. ValueError for other keys."""
    words = dict(word.partition("=")[::2] for word in overrides)
    if strange := [key for key in words if key not in known]:
        raise ValueError(f"bench {name} takes {', '.join(known[:-1])} and {known[-1]}, found {', '.join(strange)}.")
    return words


def listed(text: str) -> list[str]:
    """The words of `[a,b]`."""
    return [word.strip() for word in text.strip("[]").split(",") if word.strip()]


def asked(name: str, known: Sequence[str], overrides: Sequence[str]) -> tuple[dict[str, list[str]], Path]:
    """The lists given as `key=[a,b]`, and `folder=`. ValueError for other keys, no folder, or no CUDA device."""
    words = given(name, [*known, "folder"], overrides)
    try:
        folder = package_path(wanted := words.pop("folder", "."))
    except ValueError as error:
        raise ValueError(f"folder={wanted}: {error}") from None
    if not torch.cuda.is_available():
        raise ValueError(f"bench {name} needs a CUDA device, none is visible.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"bench {name} cannot make folder={folder}: {error.strerror}.") from error
    return {key: listed(text) for key, text in words.items()}, folder


def numbers(key: str, words: Sequence[str], least: int, most: int, step: int = 1) -> list[int]:
    """A list's numbers, each once. ValueError for anything else, for none, or for one that is out of range."""
    range_ = f"multiples of {step} from {least} to {most}" if step > 1 else f"numbers from {least} to {most}"
    for word in words:
        if not re.fullmatch("[0-9]{1,18}", word) or not least <= int(word) <= most or int(word) % step:
            raise ValueError(f"{key} takes {range_}, found {word}.")
    if not words and key != "peers":
        raise ValueError(f"{key} takes one or more {range_}, found none.")
    return list(dict.fromkeys(map(int, words)))


def some_of(key: str, words: Sequence[str], choices: Sequence[object]) -> list[str]:
    """A list's words, each once. ValueError for none, or for one that is not among the choices."""
    if not words or not set(words) <= set(map(str, choices)):
        raise ValueError(f"{key} takes some of {', '.join(map(str, choices))}, found {', '.join(words) or 'none'}.")
    return list(dict.fromkeys(words))


def result(card: Rates, cells: Cells) -> dict[str, Any]:
    """What a benchmark writes down: cells, machine and versions."""
    versions = {"card": torch.cuda.get_device_name(), "torch": torch.__version__}
    measured = {"copy GB/s": card.copy / 1e9, "read GB/s": card.read / 1e9, "TFLOP/s": card.matmul / 1e12}
    return versions | measured | {"cells": cells}


def report(name: str, found: Mapping[str, Any], heads: Sequence[str], picture: str, folder: Path, note: str) -> None:
    """The table of `heads` on stdout, how it was measured, and `folder`'s JSON and picture."""
    cells: Cells = found["cells"]
    heads = [h for h in heads if any(h in c for c in cells)]
    text = [[f"{c[h]:.1f}" if isinstance(c.get(h), float) else str(c.get(h, "")) for h in heads] for c in cells]
    print(table([list(heads), *text]))
    rate = ", ".join(f"{what} at {found[f'{what} GB/s']:.0f} GB/s" for what in ("copy", "read"))
    print(f"\n{found['card']}, torch {found['torch']}: {rate}, bf16 products at {found['TFLOP/s']:.0f} TFLOP/s")
    print(f"{note}, median of {REPLAYS} replays")
    (folder / f"{name}.json").write_text(json.dumps(found, indent=1))
    (folder / f"{name}.svg").write_text(picture)


def heat_map(cells: Cells, row: str, column: str) -> str:
    """SVG: a square for each cell, darker the further above the floor, its ratio written in it."""
    rows, columns = (list(dict.fromkeys(c[key] for c in cells)) for key in (row, column))
    left, size, shapes = 112, 64, []
    for c in cells:
        x, y = left + size * columns.index(c[column]), size * (rows.index(c[row]) + 1)
        shade = max(90, int(255 - 40 * (c["over floor"] - 1)))
        shapes.append(f'<rect x="{x}" y="{y}" width="{size}" height="{size}" fill="rgb({shade},{shade},255)"/>')
        shapes.append(f'<text x="{x + size / 2}" y="{y + size / 2}">{c["over floor"]:.1f}</text>')
    shapes += [f'<text x="{left + size * (i + 0.5)}" y="40">{label(c)}</text>' for i, c in enumerate(columns)]
    shapes += [f'<text x="{left / 2}" y="{size * (i + 1.5)}">{label(r)}</text>' for i, r in enumerate(rows)]
    width, height = left + size * len(columns), size * (len(rows) + 1)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
    return f'{head} font-family="sans-serif" font-size="14" text-anchor="middle">\n' + "\n".join(shapes) + "\n</svg>\n"


def label(value: int | str) -> str:
    return f"{value:,}" if isinstance(value, int) else value
