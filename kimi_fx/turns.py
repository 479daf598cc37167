"""One thread at a time: what changes an engine is its thread's turn, and another thread is refused, not made to wait.

Threads may follow one another. A turn may be taken inside a turn of the same thread, as a step does in `generate`.
"""

from collections.abc import Callable, Generator, Iterator
from functools import wraps
from threading import RLock
from typing import Any, Concatenate, ParamSpec, TypeVar

from .results import Delta

Given = ParamSpec("Given")
Result = TypeVar("Result")


class Taken(RuntimeError):
    """It is another thread's turn."""


class Turn:
    """A block that one thread runs at a time. Raises Taken in another one."""

    def __init__(self) -> None:
        self.lock = RLock()

    def __enter__(self) -> None:
        if not self.lock.acquire(blocking=False):
            raise Taken(
                "The engine is at work in another thread: call it from one thread at a time, or give `generate` a list."
            )

    def __exit__(self, *error: object) -> None:
        self.lock.release()


def alone(method: Callable[Concatenate[Any, Given], Result]) -> Callable[Concatenate[Any, Given], Result]:
    """A method that is one turn of its object."""

    @wraps(method)
    def call(owner: Any, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        with owner.turn:
            return method(owner, *args, **kwargs)

    return call


class Stream(Iterator[Delta]):
    """Deltas as they come, each `next` a turn: one that is refused may be asked again. Any thread may drop it."""

    def __init__(self, turn: Turn, deltas: Generator[Delta, None, None]) -> None:
        self.turn, self.deltas = turn, deltas

    @alone
    def __next__(self) -> Delta:
        return next(self.deltas)

    @alone
    def close(self) -> None:
        self.deltas.close()
