"""A folder in Kimi K2.6's format without its data: every name, shape and dtype in headers, and sparse files behind."""

import json
import re
import shutil
from collections import defaultdict
from math import prod
from pathlib import Path

from kimi_fx.checkpoint.configs import read_target
from kimi_fx.checkpoint.files import DTYPES, INDEX
from kimi_fx.checkpoint.preflight import needed
from kimi_fx.graphs.params import target_plan

FILES = 64  # the layers, embedding and head, the projector, the vision tower
VISION = {
    "mm_projector.pre_norm.weight": [1152],
    "mm_projector.proj.0.weight": [4608, 4608],
    "vision_tower.patch_embed.proj.weight": [1152, 3, 14, 14],
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def shard(number: int) -> str:
    return f"model-{number:05}-of-{FILES:06}.safetensors"


def place(name: str) -> int:
    """The number of the file that a tensor is in."""
    if layer := re.search(r"\.layers\.(\d+)\.", name):
        return int(layer[1]) + 1
    return 64 if name.startswith("vision_tower") else 63 if name.startswith("mm_projector") else 62


def write_sparse(folder: Path, config: Path) -> None:
    """The text model that a config.json describes, and some tensors of the vision tower and its projector."""
    folder.mkdir()
    shutil.copy(config, folder / "config.json")
    headers: dict[int, dict[str, object]] = defaultdict(dict)
    ends: dict[int, int] = defaultdict(int)

    def add(name: str, shape: list[int], dtype: str, size: int) -> None:
        number = place(name)
        start, ends[number] = ends[number], ends[number] + size
        headers[number][name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, ends[number]]}

    for tensor in needed(target_plan(read_target(folder, None))):
        add("language_model." + tensor.name, list(tensor.shape), NAMES[tensor.dtypes[0]], tensor.bytes)
    for name, shape in VISION.items():
        add(name, shape, "BF16", 2 * prod(shape))
    for number, header in headers.items():
        write_header(folder / shard(number), header, ends[number])
    index = {name: shard(number) for number, header in headers.items() for name in header}
    total = sum(ends.values())
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": index}))


def write_header(file: Path, header: dict[str, object], size: int) -> None:
    """A file of that header and as many bytes of nothing."""
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        out.truncate(8 + len(text) + size)


def read_header(file: Path) -> tuple[dict[str, dict[str, object]], int]:
    """A file's header and the size of its data, to be changed and written again."""
    with file.open("rb") as data:
        length = int.from_bytes(data.read(8), "little")
        return json.loads(data.read(length)), file.stat().st_size - 8 - length
