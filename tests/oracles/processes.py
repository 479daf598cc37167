"""Which processes still run, as Linux says."""

import time
from contextlib import suppress
from pathlib import Path

ENDED = ("", "Z", "X")  # a zombie has ended: where nobody asks for its exit code, as in some containers, it stays


def state(pid: int) -> str:
    """One letter, or nothing where there is no such process."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def runs(pid: int) -> bool:
    return state(pid) not in ENDED


def wait_for_end(pid: int, last: float) -> None:
    """AssertionError if it runs at that time still."""
    while runs(pid) and time.time() < last:
        time.sleep(0.05)
    assert state(pid) in ENDED
