"""Ctrl-C and SIGTERM end a command alike: what runs is broken off and cleaned up, once, and a word says so.

A reader that closes its end, as `head` does, is no signal here but BrokenPipeError: it ends a command as quietly.

Imports next to nothing, as it is the first that a command does.
"""

import os
import signal
import sys
import time
from types import FrameType

WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
UNREAD = 128 + signal.SIGPIPE  # what a process ends with that nobody reads any more
CALM = 5.0  # seconds after a signal in which the next ones leave the cleaning up alone


class Stopped(KeyboardInterrupt):
    """A signal came; `code` is what the process ends with."""

    def __init__(self, number: int) -> None:
        super().__init__(WORDS[signal.Signals(number)])
        self.code = 128 + number


class Stop:
    """A handler. After its time another signal counts again, as the exception of the first may have got lost."""

    def __init__(self) -> None:
        self.calm = 0.0  # until then

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if time.monotonic() > self.calm:
            self.calm = time.monotonic() + CALM
            raise Stopped(number)


def listen() -> None:
    """Raise Stopped where a signal comes that would have ended the process."""
    stop = Stop()
    for number in WORDS:
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, stop)


def handle(how: signal.Handlers) -> None:
    """From now on SIG_IGN: they change nothing; SIG_DFL: they end the process at once, be it inside a collective."""
    for number in WORDS:
        signal.signal(number, how)


def hush() -> bool:
    """Write what waits; whether a reader has left, to whom then nothing more is written, be it as the process ends."""
    left = False
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            left = True
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        except (OSError, ValueError, AttributeError):  # full, closed, or none
            pass
    return left
