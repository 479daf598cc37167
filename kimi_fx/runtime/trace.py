"""One JSON line a request and round: what was drafted, the tree, the path taken, the tokens emitted."""

import json
import sys
from collections.abc import Sequence
from typing import Any

from ..config import package_path
from ..graphs.pytree import tree_map
from ..graphs.state import Emitted, Tree
from ..request import Request


class Trace:
    """A trace file: one JSON object a request and verify step. The prefill's token is not in it.

    request, prompt and sample say whose; mode and round which step. Of each node, the anchor first: tokens, parents,
    depths, scores (log-probabilities of the drafter). path: nodes whose rows were kept; emitted: the tokens drawn along
    it. Raises ValueError where the file cannot be written; what it held goes with the first line.
    """

    def __init__(self, path: str) -> None:
        self.path, self.mode = package_path(path), "w"
        try:
            self.path.open("a").close()
        except OSError as error:
            raise ValueError(f"run.trace={path} cannot be written: {error.strerror}.") from None

    def write(self, rows: Sequence[tuple[int, Request]], tree: Tree, emitted: Emitted) -> None:
        t: Any = tree_map(lambda leaf: leaf.tolist(), tree)
        e: Any = tree_map(lambda leaf: leaf.tolist(), emitted)
        try:
            with self.path.open(self.mode) as file:
                file.writelines(json.dumps(_line(request, t, e, i)) + "\n" for i, request in rows)
            self.mode = "a"
        except OSError as error:  # no reason to end requests
            print(f"run.trace={self.path}: a round is not in it: {error.strerror}", file=sys.stderr)


def _line(request: Request, t: Any, e: Any, i: int) -> dict[str, Any]:
    n, count = e.nodes[i], e.count[i]
    return {
        "request": request.id,
        "prompt": request.place,
        "sample": request.sample,
        "mode": request.plan.mode,
        "round": len(request.emitted),
        "tokens": t.token[i][:n],
        "parents": t.parent[i][:n],
        "depths": t.depth[i][:n],
        "scores": t.score[i][:n],
        "path": e.path[i][:count],
        "emitted": e.tokens[i][:count],
    }
