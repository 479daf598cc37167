"""One JSON line a request and round: what was drafted, the tree, the path taken, the tokens emitted."""

import json
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from ..config import package_path
from ..graphs.pytree import tree_map
from ..graphs.state import Emitted, Tree
from ..request import Request


class Trace:
    """A trace file: one JSON object a request and verify step. The prefill's token is not in it.

    request, prompt and sample say whose; mode and round which step. Of each node, the anchor first: tokens, parents,
    depths, scores (log-probabilities of the drafter). path: nodes whose rows were kept; emitted: the tokens drawn along
    it. Raises ValueError where the file cannot be written; what it held goes with the first line. Ends, with a word on
    stderr and its last line whole, where that fails later.
    """

    def __init__(self, path: str) -> None:
        self.path, self.mode, self.size, self.ended = package_path(path), "wb", 0, False
        try:
            self.path.open("a").close()
        except OSError as error:
            raise ValueError(f"run.trace={path} cannot be written: {error.strerror}.") from None

    def write(self, rows: Sequence[tuple[int, Request]], tree: Tree, emitted: Emitted) -> None:
        if self.ended:
            return
        t: Any = tree_map(lambda leaf: leaf.tolist(), tree)
        e: Any = tree_map(lambda leaf: leaf.tolist(), emitted)
        lines = "".join(json.dumps(_line(request, t, e, i)) + "\n" for i, request in rows).encode()
        try:
            with self.path.open(self.mode) as file:
                file.write(lines)
            self.mode, self.size = "ab", self.size + len(lines)
        except OSError as error:  # no reason to end requests
            self.ended = True
            print(f"run.trace={self.path} ends here, it cannot be written: {error.strerror}", file=sys.stderr)
            with suppress(OSError):
                os.truncate(self.path, self.size)


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
