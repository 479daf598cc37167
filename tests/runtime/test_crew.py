"""Processes that end with the one that started them: interrupted, killed, or when one of them is killed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from oracles.processes import runs

TESTS = Path(__file__).parents[1]
PATIENCE = 60.0  # seconds for a slow machine; what is waited for takes less than one


def wait_for(what: Callable[[], object]) -> None:
    last = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < last
        time.sleep(0.02)


@pytest.fixture
def parent(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    """As a terminal starts it: Ctrl-C would reach the whole group."""
    path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
    process = subprocess.Popen(
        [sys.executable, "-m", "oracles.crew", str(tmp_path)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path},
        start_new_session=True, preexec_fn=partial(signal.signal, signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    with process:
        yield process
        process.kill()


def members(folder: Path) -> list[int]:
    """Processes of both jobs, once they run."""
    wait_for(lambda: (folder / "a").exists() and (folder / "b").exists())
    found = [int(pid) for name in "ab" for pid in (folder / name).read_text().split()]
    assert all(map(runs, found))
    return found


def test_a_killed_parent_takes_all_with_it(parent: "subprocess.Popen[str]", tmp_path: Path) -> None:
    found = members(tmp_path)
    parent.kill()
    wait_for(lambda: not any(map(runs, found)))


def test_an_interrupted_parent_ends_them_at_once(parent: "subprocess.Popen[str]", tmp_path: Path) -> None:
    found = members(tmp_path)
    parent.send_signal(signal.SIGINT)
    out, err = parent.communicate(timeout=PATIENCE)
    assert (out, err) == ("started\nKeyboardInterrupt \n", "")
    wait_for(lambda: not any(map(runs, found)))


def test_ctrl_c_while_they_start_is_quiet(parent: "subprocess.Popen[str]") -> None:
    assert parent.stdout is not None
    assert parent.stdout.readline() == "started\n"
    os.killpg(parent.pid, signal.SIGINT)
    out, err = parent.communicate(timeout=PATIENCE)
    assert (out, err) == ("KeyboardInterrupt \n", "")


@pytest.mark.parametrize("which", [min, max])
def test_a_killed_member_is_said(parent: "subprocess.Popen[str]", tmp_path: Path, which: Callable[..., int]) -> None:
    """The one started first, and the one started last."""
    found = members(tmp_path)
    os.kill(which(found[0], found[2]), signal.SIGKILL)
    out, err = parent.communicate(timeout=PATIENCE)
    assert "RuntimeError a process that compiles was killed, most likely as memory ran out" in out and not err
    wait_for(lambda: not any(map(runs, found)))
