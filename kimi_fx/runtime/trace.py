"""One JSON line a request and round: what was drafted, the tree, the path taken, the tokens emitted."""

import json
from collections.abc import Sequence
from typing import Any

from ..graphs.pytree import tree_map
from ..graphs.state import Emitted, Tree
from ..request import Request


class Trace:
    """An open trace file. Keys: request, round, anchor, tokens, parents, depths, scores, path, emitted."""

    def __init__(self, path: str) -> None:
        self.file = open(path, "w", buffering=1)  # noqa: SIM115

    def write(self, rows: Sequence[tuple[int, Request]], tree: Tree, emitted: Emitted) -> None:
        t: Any = tree_map(lambda leaf: leaf.tolist(), tree)
        e: Any = tree_map(lambda leaf: leaf.tolist(), emitted)
        for i, request in rows:
            n, count = e.nodes[i], e.count[i]
            line = {
                "request": request.id,
                "round": len(request.emitted),
                "tokens": t.token[i][:n],
                "parents": t.parent[i][:n],
                "depths": t.depth[i][:n],
                "scores": t.score[i][:n],
                "path": e.path[i][:count],
                "emitted": e.tokens[i][:count],
            }
            self.file.write(json.dumps(line) + "\n")
