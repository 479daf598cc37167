"""One JSON line a request and round: what was drafted, the tree, the path taken, the tokens emitted."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..graphs.pytree import tree_map
from ..graphs.state import Emitted, Tree
from ..request import Request


class Trace:
    """A trace file. Keys: request, round, tokens (the anchor first), parents, depths, scores, path, emitted.

    Raises ValueError where the file cannot be written. An older file of that name is emptied.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path).expanduser()
        try:
            self.path.write_text("")
        except OSError as error:
            raise ValueError(f"run.trace={path} cannot be written: {error.strerror}.") from None

    def write(self, rows: Sequence[tuple[int, Request]], tree: Tree, emitted: Emitted) -> None:
        t: Any = tree_map(lambda leaf: leaf.tolist(), tree)
        e: Any = tree_map(lambda leaf: leaf.tolist(), emitted)
        lines = []
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
            lines.append(json.dumps(line) + "\n")
        with self.path.open("a") as file:
            file.writelines(lines)
