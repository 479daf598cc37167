"""The ranks of one engine: who they are, how they start, meet, get orders, and end together.

The process that calls the engine is rank 0. It starts the others on this machine, or torchrun has started all; each of
them runs an engine of the same class, one step for every step of rank 0, which tells them what was added and cancelled
in between. One process group carries both: tensors on CUDA through NCCL, tensors on the CPU through gloo.
"""

import atexit
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh

from ..checkpoint.shards import AXES
from ..config import Config, environment, see_only, with_environment
from ..graphs.axis import Axis, gather, psum, rows_of_columns
from ..signals import UNREAD, Stopped, handle
from .peers import part, share
from .watch import GRACE, Watch

GROUP = "0"  # torch's name of a process's first group; the same in all processes, so that graphs are, too
FOREVER = timedelta(days=365)  # a rank may wait that long for the next request; `Watch` finds one that hangs
PATIENCE = 20.0  # seconds for the others to end in
HEADER, LENGTH = 512, 8  # bytes of an order's first part, and of its length therein
GUARD = "import os, threading; threading.Thread(target=lambda: (os.read(0, 1), os._exit(1)), daemon=True).start(); "
FOLLOW = "import sys; sys.path[:] = {path!r}; from {module} import main; sys.exit(main({place!r}))"


@dataclass(frozen=True)
class Place:
    """Where a process stands among the ranks."""

    rank: int
    size: int
    device: int  # index among the devices of its machine; in its own process the only one
    host: str = "127.0.0.1"
    port: int = 0  # 0: rank 0 opens one and starts the others
    prefix: str = "kimi_fx"  # of keys in the store
    serves: bool = True  # rank 0 keeps the store; else the launcher does


def own_place(config: Config) -> Place:
    """Of a process that is not told: from torchrun's variables, else rank 0. Raises ValueError if numbers disagree."""
    size, launched = config.mesh.tp, launched_place()
    if launched and launched.size != size:
        raise ValueError(f"torchrun started {launched.size} processes and mesh.tp is {size}: give the same number.")
    if launched and launched.rank:
        raise ValueError(
            "under torchrun only `python -m kimi_fx` shares an engine: start a script once, it starts the other ranks."
        )
    return launched or Place(0, size, 0)


def launched_place() -> Place | None:
    """What torchrun says, if it started this process. Raises ValueError for numbers that cannot be."""
    host = environment("MASTER_ADDR")
    if host is None or any(environment(name) is None for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")):
        return None
    size, port = whole("WORLD_SIZE", 1), whole("MASTER_PORT", 1, 65_535)
    rank, device = whole("RANK", 0, size - 1), whole("LOCAL_RANK", 0, size - 1)
    served = environment("TORCHELASTIC_USE_AGENT_STORE") == "True"
    prefix = f"kimi_fx/{environment('TORCHELASTIC_RESTART_COUNT') or 0}"
    return Place(rank, size, device, host, port, prefix, not served)


def whole(name: str, least: int, most: int = 2**31 - 1) -> int:
    """A number in one of torchrun's variables; unset it is 0."""
    text = environment(name) or "0"
    if not re.fullmatch("[0-9]{1,10}", text) or not least <= int(text) <= most:
        range_ = f"from {least} to {most}" if most < 2**31 - 1 else f"of {least} or more"
        raise ValueError(f"{name}={text} is no number {range_}: start the ranks with torchrun, or unset RANK.")
    return int(text)


def open_store(place: Place, serves: bool) -> TCPStore:
    """The ranks' store. Raises ValueError where another process has its port."""
    try:
        return TCPStore(place.host, place.port, is_master=serves, wait_for_workers=False)
    except dist.DistNetworkError as error:
        if not serves or "EADDRINUSE" not in str(error):
            raise
        raise ValueError(f"MASTER_PORT={place.port} is taken by another process: give one that is free.") from error


class Ranks:
    """This process among the ranks. `config` and `kind`, the engine's class, are rank 0's and go to all; what it starts
    runs `main` of `module`."""

    def __init__(
        self, place: Place, config: Config | None = None, kind: Any = None, module: str = "kimi_fx.follow"
    ) -> None:
        if dist.is_initialized():
            raise RuntimeError(
                "this process is in a process group already: one engine with mesh.tp above 1 at a time, and a new "
                "process after ranks have failed."
            )
        if place.rank:
            see_only(place.device)
        serves = place.rank == 0 and place.serves
        self.server = open_store(place, serves)
        self.place = Place(**vars(place) | {"port": self.server.port})
        self.store = PrefixStore(place.prefix, self.server)
        self.followers = [start(self.place, rank, module) for rank in range(1, place.size)] if place.port == 0 else []
        if config is not None:
            self.store.set("engine", pickle.dumps((config, kind)).hex())
        self.config: Config
        self.config, self.kind = pickle.loads(bytes.fromhex(wait_for(self.store, "engine")))
        watching = PrefixStore(place.prefix, TCPStore(place.host, self.place.port, wait_for_workers=False))
        self.watch = Watch(place.rank, place.size, watching, self.followers, self.config.mesh.timeout)
        self.watch.start()
        self.ended = False
        self.release: Callable[[], object] = int  # drops what holds the group's operations, such as graphs

    def join(self, device: torch.device) -> DeviceMesh:
        """Wait for the other processes and make the mesh."""
        self.meet("started")
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        store = PrefixStore("group", self.store)
        rank, size = self.place.rank, self.place.size
        dist.init_process_group(backend, timeout=FOREVER, rank=rank, world_size=size, store=store)
        everybody = dist.distributed_c10d._get_default_group()
        assert everybody.group_name == GROUP
        mesh = DeviceMesh.from_group(everybody, device.type, mesh_dim_names=AXES)
        if self.config.mesh.near and device.type == "cuda":
            share(GROUP, self.store, rank, size, device)
        x, axis = torch.zeros(size, 1, device=device), Axis(GROUP, size)
        for connect in (psum, gather, rows_of_columns):  # so that the first round finds connections
            connect(x, axis)
        return mesh

    def meet(self, where: str) -> None:
        """Wait until all ranks are here. Raises RuntimeError where one has failed."""
        self.store.add(where, 1)
        while self.store.add(where, 0) < self.place.size:
            self.watch.check()
            time.sleep(0.02)

    def anywhere(self, flags: list[bool]) -> list[bool]:
        """Where the flag is set on any rank; all ranks ask together."""
        counts = torch.tensor(flags).int()
        dist.all_reduce(counts)
        return counts.bool().tolist()

    def lead(self, orders: list[Any]) -> None:
        """Rank 0 begins a step; the others get what happened before it."""
        if self.ended:
            raise RuntimeError(f"the ranks have ended ({self.watch.cause or 'interrupted'}): start a new process.")
        self.watch.begin()
        self.send(orders)

    def send(self, orders: list[Any] | None) -> None:
        """Orders to all others, in one part if they are short."""
        data = pickle.dumps(orders)
        whole = torch.frombuffer(bytearray(len(data).to_bytes(LENGTH, "little") + data), dtype=torch.uint8)
        first = torch.zeros(HEADER, dtype=torch.uint8)
        first[: len(whole)] = whole[:HEADER]
        dist.broadcast(first, 0)
        if len(whole) > HEADER:
            dist.broadcast(whole[HEADER:].clone(), 0)

    def follow(self) -> list[Any] | None:
        """What rank 0 sends, once it does; None: there are no more steps."""
        first = torch.zeros(HEADER, dtype=torch.uint8)
        dist.broadcast(first, 0)
        self.watch.begin()
        length = LENGTH + int.from_bytes(first[:LENGTH].numpy().tobytes(), "little")
        if length > HEADER:
            rest = torch.zeros(length - HEADER, dtype=torch.uint8)
            dist.broadcast(rest, 0)
            first = torch.cat((first, rest))
        return pickle.loads(first[LENGTH:length].numpy().tobytes())

    def fail(self, error: BaseException) -> None:
        """End all ranks for this rank's error. Raises RuntimeError with the first cause where another rank had it."""
        own = self.ended or not isinstance(error, Exception) or self.watch.report(error)
        code = 2 if own and isinstance(error, ValueError) else 1
        if isinstance(error, BrokenPipeError):
            code = UNREAD
        if isinstance(error, KeyboardInterrupt):
            code = error.code if isinstance(error, Stopped) else 130
        self.close(broken=True, code=code)
        if not own:
            raise RuntimeError(self.watch.cause) from error

    def close(self, broken: bool = False, code: int = 1) -> None:
        """End the followers: after their last step, or at once where a step was broken off. `code`: with which this
        process ends then, be it later, if it has a device."""
        if self.ended:
            return
        self.ended = True
        broken = broken or self.watch.cause is not None
        if dist.is_initialized() and not broken:
            broken = not self.leave()
        if broken and torch.cuda.is_initialized():
            atexit.register(end_at_once, code, self)
        self.watch.over.set()
        for follower in self.followers:
            end(follower, 0.0 if broken else PATIENCE)
        self.watch.join(GRACE)  # the interpreter's end aborts a process with a thread inside the store

    def leave(self) -> bool:
        """Leave the group with all others, as NCCL ends together; whether they came in time."""
        if self.place.rank == 0:
            self.send(None)
        self.store.add("left", 1)
        last = time.monotonic() + PATIENCE
        while self.place.rank == 0 and self.store.add("left", 0) < self.place.size:
            if self.watch.cause or time.monotonic() > last:
                return False
            time.sleep(0.02)
        self.watch.over.set()
        self.release()
        part(GROUP)
        dist.destroy_process_group()
        return True


def start(place: Place, rank: int, module: str) -> "subprocess.Popen[bytes]":
    """A follower on this machine, out of reach of the terminal's Ctrl-C: rank 0 ends it, and says why. Its standard
    input ends with rank 0, however that ends and however far the follower has come by then."""
    own = vars(place) | {"rank": rank, "device": rank, "serves": False}
    code = GUARD + FOLLOW.format(path=sys.path, module=module, place=own)
    level = {"TORCH_CPP_LOG_LEVEL": environment("TORCH_CPP_LOG_LEVEL") or "ERROR"}  # else a lost store is a long tale
    with with_environment(level):
        return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, start_new_session=True)


def follow_with(place: Place, part: Callable[[Ranks], object]) -> int:
    """A follower's life: its part, then 0, or 1 where any rank has failed, which rank 0 says."""
    handle(signal.SIG_DFL)
    ranks = Ranks(place)
    try:
        part(ranks)
    except Exception as error:
        with suppress(RuntimeError):
            ranks.fail(error)
        return 1
    ranks.close()
    return 0


def follow_once(place: Place, steps: Callable[[Ranks], Iterable[object]]) -> int:
    """A follower that takes all these steps with the others, then waits for the end."""

    def part(ranks: Ranks) -> None:
        for _ in steps(ranks):
            pass
        ranks.watch.done()
        while ranks.follow() is not None:
            pass

    return follow_with(place, part)


def end(follower: "subprocess.Popen[bytes]", patience: float) -> None:
    try:
        follower.wait(patience)
    except subprocess.TimeoutExpired:
        follower.kill()
        follower.wait()
    if follower.stdin:
        follower.stdin.close()


def end_at_once(code: int, ranks: Ranks) -> None:
    """The end of a process whose device waits for ranks that are no more: freeing anything would wait for the device.
    Until then `ranks` holds what is on it."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed, or none
            stream.flush()
    os._exit(code)


def wait_for(store: Store, key: str) -> str:
    """A key's value, once rank 0 has set it."""
    store.wait([key], FOREVER)
    return store.get(key).decode()
