"""A rank under test: what its shards are and what logits it drew from, and on rank 0 what the engine made of it.

Started as torchrun would, with its variables set: `python ranks.py FOLDER OVERRIDES…`.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import kimi_fx.runtime.load
from kimi_fx.engine import Engine
from kimi_fx.follow import follow
from kimi_fx.graphs import sampling
from kimi_fx.graphs.pytree import tree_leaves, tree_map
from kimi_fx.runtime.ranks import launched_place

PROMPTS = [[3840, 100, 200, 300, 55], [3840, 7, 8, 9]]
ASKED = [
    {"temperature": 0.0, "logprobs": 5, "max_tokens": 8, "ignore_eos": True},
    {
        "temperature": 0.9, "top_p": 0.95, "seed": 11, "logprobs": 3, "max_tokens": 8, "ignore_eos": True,
        "presence_penalty": 0.5, "repetition_penalty": 1.2, "min_tokens": 3,
    },
]  # fmt: skip
MODES = ("plain", "chain", "tree")


def texts(engine: Engine) -> dict[str, list[dict[str, Any]]]:
    """What a greedy and a seeded request give side by side, per mode."""
    runs = {mode: engine.generate(PROMPTS, ASKED, mode=mode) for mode in MODES}
    return {
        mode: [
            {
                "ids": r.outputs[0].token_ids,
                "logprobs": [(t.logprob, *(p for _, p in t.top)) for t in r.outputs[0].logprobs],
                "alternatives": [[i for i, _ in t.top] for t in r.outputs[0].logprobs],
                "finish": r.outputs[0].finish_reason,
                "steps": r.stats.steps,
                "drafted": r.stats.drafted,
            }
            for r in results
        ]
        for mode, results in runs.items()
    }


def main(folder: Path, overrides: list[str]) -> int:
    torch.set_num_threads(1)
    place = launched_place()
    assert place is not None
    placed: list[Any] = []
    drawn: list[Tensor] = []
    local, rows_of_columns = kimi_fx.runtime.load.local, sampling.rows_of_columns

    def seen_local(params: Any) -> Any:
        placed.append(tree_map(lambda leaf: leaf.placements if isinstance(leaf, DTensor) else "packed", params))
        own = local(params)
        placed.append([(tuple(leaf.shape), leaf.nbytes) for leaf in tree_leaves(own) if leaf is not None])
        return own

    def seen_rows(*args: Any) -> Tensor:
        drawn.append(rows_of_columns(*args))
        return drawn[-1]

    kimi_fx.runtime.load.local, sampling.rows_of_columns = seen_local, seen_rows
    result, code = None, 0
    if place.rank:
        code = follow(place)
    else:
        engine = Engine.load(overrides, progress=False)
        result = texts(engine)
        engine.ranks.close()
    torch.save(
        {"placements": placed[0], "shapes": placed[1], "logits": drawn, "texts": result}, folder / f"{place.rank}.pt"
    )
    return code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
