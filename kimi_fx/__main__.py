"""`python -m kimi_fx` or `kimi-fx`: the command line as a process, which a signal ends with a word and its code."""

import signal
import sys
from collections.abc import Sequence

from .signals import Stopped, handle, listen


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code."""
    listen()
    try:
        from .cli import main

        return main(argv)
    except Stopped as stopped:
        handle(signal.SIG_IGN)
        print(f"kimi-fx: {stopped}", file=sys.stderr)
        return stopped.code


if __name__ == "__main__":
    raise SystemExit(main())
