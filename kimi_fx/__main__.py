"""`python -m kimi_fx` or `kimi-fx`: the command line as a process. A signal ends it with a word and its code, a reader
that leaves with a code alone."""

import signal
import sys
from collections.abc import Sequence

from .signals import UNREAD, Stopped, handle, hush, listen


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code."""
    listen()
    try:
        from .cli import main

        code = main(argv)
        return UNREAD if hush() else code
    except BrokenPipeError:
        hush()
        return UNREAD
    except Stopped as stopped:
        handle(signal.SIG_IGN)
        print(f"kimi-fx: {stopped}", file=sys.stderr)
        return stopped.code


if __name__ == "__main__":
    raise SystemExit(main())
