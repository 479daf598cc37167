"""Processes for long jobs, none of which outlives the process that asked for them, however that ends.

Each leads a session of its own, in which the compilers it starts are too, so that all of them end together. Ctrl-C is
for the process that asked: it ends the others.
"""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from threading import Thread
from typing import Any, TypeVar, TypeVarTuple

from ..signals import WORDS

PATIENCE = 5.0  # seconds for a pool to see that its processes have ended
Given = TypeVarTuple("Given")
Result = TypeVar("Result")


@contextmanager
def crew(size: int) -> Iterator[ProcessPoolExecutor]:
    """A pool of fresh processes. What breaks the block off ends them at once, before anything else is cleaned up.
    RuntimeError where one of them was killed."""
    with ProcessPoolExecutor(size, multiprocessing.get_context("spawn"), initializer=begin) as pool:
        try:
            yield pool
        except BaseException as error:
            members = list((pool._processes or {}).values())
            manager: Any = pool._executor_manager_thread  # a thread, which its stub does not say
            pool.shutdown(wait=False, cancel_futures=True)
            for member in members:
                end(member)
            if manager is not None:  # else it closes its pipe while the interpreter's end writes to that
                manager.join(PATIENCE)
            if isinstance(error, BrokenProcessPool):
                raise RuntimeError(
                    "a process that compiles was killed, most likely as memory ran out: what was compiled before is "
                    "kept, so free some memory and run the same command again."
                ) from None
            raise


def submit(pool: ProcessPoolExecutor, job: Callable[[*Given], Result], *arguments: *Given) -> Future[Result]:
    """A signal to stop never comes to a process started for the job, and waits until that is done."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, WORDS)
    try:
        future = pool.submit(job, *arguments)
        with pool._shutdown_lock:  # else the pool would not see the newest process end before another job does
            pool._executor_manager_thread_wakeup.wakeup()
        return future
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def begin() -> None:
    """In a process of a crew."""
    os.setsid()
    Thread(target=end_with_parent, daemon=True).start()


def end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.killpg(0, signal.SIGKILL)


def end(member: BaseProcess) -> None:
    """Kill it and what it has started; before `begin` there is neither that nor the group."""
    assert member.pid is not None
    with suppress(ProcessLookupError):
        os.killpg(member.pid, signal.SIGKILL)
    member.kill()
    member.join()
