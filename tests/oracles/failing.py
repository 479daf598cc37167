"""Two ranks of which the second fails in its third round: `python failing.py HOW FILE OVERRIDES…` is the first.

FILE gets the second rank's process id, and a line when it fails.
"""

import os
import signal
import sys
import time
from dataclasses import replace
from typing import Any

import kimi_fx.engine
from kimi_fx.__main__ import main
from kimi_fx.follow import follow
from kimi_fx.runtime import ranks
from kimi_fx.runtime.rounds import Rounds


def follower(place: dict[str, Any], how: str, file: str) -> int:
    with open(file, "w") as out:
        out.write(f"{os.getpid()}\n")
    step, decode, rounds = kimi_fx.engine.ddtree_step, Rounds.decode, []

    def fail() -> None:
        rounds.append(None)
        if len(rounds) == 3 and how not in ("interrupted", "terminated"):
            with open(file, "a") as out:
                out.write(f"{time.time()}\n")
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
            if how == "raises":
                raise MemoryError("no room for an egg")
            if how == "hangs":
                time.sleep(100)

    def compiled(*args: Any) -> Any:
        fail()
        return decode(*args)

    def failing(*args: Any) -> Any:
        fail()
        state, tree, emitted = step(*args)
        if len(rounds) == 3 and how == "differs":
            tree = replace(tree, score=tree.score + 1)
        return state, tree, emitted

    kimi_fx.engine.ddtree_step, Rounds.decode = failing, compiled  # type: ignore[method-assign]
    return follow(ranks.Place(**place))


if __name__ == "__main__":
    how, file, *overrides = sys.argv[1:]
    call = f"from failing import follower; sys.exit(follower({{place!r}}, {how!r}, {file!r}))"
    ranks.FOLLOW = "import sys; sys.path[:] = {path!r}; " + call
    sys.exit(main(["generate", *overrides]))
