"""A thread in every rank that ends it when another has failed or a step takes too long, and keeps the first cause.

What a rank waits for inside a collective or a CUDA graph, nothing else may notice to be gone. The cause lies in the
ranks' store, where the first to report wins; an error that only says that a connection was lost waits for a better one.
"""

import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from traceback import extract_tb

from torch.distributed import Store

EVERY = 0.2  # seconds between looks
GRACE = 3.0  # seconds: for a better cause to come, and for the main thread to leave a collective that lost its peer
LOST = re.compile(r"gloo|nccl|connection|socket|peer|store", re.IGNORECASE)  # an error that is another's consequence
PACKAGE = Path(__file__).parents[1]


class Watch(threading.Thread):
    """`begin` and `done` stand around each step."""

    def __init__(
        self, rank: int, size: int, store: Store, followers: "Sequence[subprocess.Popen[bytes]]", limit: float
    ) -> None:
        super().__init__(daemon=True)
        self.rank, self.size, self.store, self.followers, self.limit = rank, size, store, followers, limit
        self.over = threading.Event()
        self.cause: str | None = None  # why the ranks ended
        self.since: float | None = None  # when the step began
        self.advice = ""  # what to try where a step takes too long

    def begin(self) -> None:
        self.since = time.monotonic()

    def done(self) -> None:
        self.since = None

    @contextmanager
    def unlimited(self) -> Iterator[None]:
        """What is done in here may take any time; a step around it begins anew."""
        stepping, self.since = self.since is not None, math.inf
        try:
            yield
        finally:
            self.since = time.monotonic() if stepping else None

    def run(self) -> None:
        while not self.over.wait(EVERY):
            try:
                self.cause = self.look()
            except Exception:  # the store is gone, and rank 0 with it
                if self.rank:
                    os._exit(1)
                return
            if self.cause:
                return self.end()

    def look(self) -> str | None:
        """What has gone wrong on any rank."""
        if self.store.check(["cause"]):
            return self.store.get("cause").decode()
        for rank, follower in enumerate(self.followers, 1):
            if follower.poll() is not None:
                return self.publish(f"rank {rank} ended {how(follower.returncode)}")
        if self.store.check(["late"]):
            self.store.set(f"at{self.rank}", whereabouts())
        if self.since is not None and time.monotonic() - self.since > self.limit:
            return self.publish(self.late())
        return None

    def end(self) -> None:
        """End this process, unless its main thread does so in time or runs no step."""
        for follower in self.followers:
            follower.kill()
        last = time.monotonic() + GRACE
        while self.rank == 0 and time.monotonic() < last:
            if self.since is None or self.over.wait(EVERY):
                return
        if self.rank == 0:
            print(f"kimi-fx: {self.cause}", file=sys.stderr, flush=True)
            reap(self.followers)
        os._exit(1)

    def check(self) -> None:
        """Raise RuntimeError with the cause if there is one."""
        if self.cause:
            raise RuntimeError(self.cause)

    def report(self, error: BaseException) -> bool:
        """This rank's error becomes the cause, unless another was first; whether it did."""
        frames = extract_tb(error.__traceback__)
        place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
        last = time.monotonic() + (GRACE if LOST.search(str(error)) else 0.0)
        while not self.cause and time.monotonic() < last:
            time.sleep(EVERY / 4)
        own = f"rank {self.rank}: {type(error).__name__}: {error}{place}"
        self.cause = self.cause or self.publish(own)
        return self.cause == own

    def publish(self, cause: str) -> str:
        """The cause that stands: this one, or the one that was first."""
        return self.store.compare_set("cause", "", cause).decode()

    def late(self) -> str:
        """A step's time is over: where every rank is, or which have gone silent."""
        self.store.set("late", "")
        self.store.set(f"at{self.rank}", whereabouts())
        time.sleep(4 * EVERY)  # the others look meanwhile
        keys = [f"at{rank}" for rank in range(self.size)]
        at = [f"in {self.store.get(key).decode()}" if self.store.check([key]) else "silent (stopped?)" for key in keys]
        found = ", ".join(f"rank {rank} {where}" for rank, where in enumerate(at))
        return f"a step has taken more than mesh.timeout={self.limit:g} s: {found}{self.advice}"


def reap(followers: "Sequence[subprocess.Popen[bytes]]") -> None:
    """Wait for those that were killed: nobody else would ask for their exit codes, and a driver takes its time."""
    last = time.monotonic() + GRACE
    for follower in followers:
        with suppress(subprocess.TimeoutExpired):
            follower.wait(max(last - time.monotonic(), 0.0))


def whereabouts() -> str:
    """The main thread's innermost line of this package."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and PACKAGE not in Path(frame.f_code.co_filename).parents:
        frame = frame.f_back
    if frame is None:
        return "code outside kimi_fx"
    return f"{Path(frame.f_code.co_filename).relative_to(PACKAGE)}, line {frame.f_lineno} ({frame.f_code.co_name})"


def how(code: int) -> str:
    """A process's end in words."""
    return f"by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"with exit code {code}"
