"""Several ranks give what one gives, each holds its share and no more, and all end when one fails."""

import gc
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore
from torch.distributed.tensor import Replicate, Shard

import kimi_fx
from kimi_fx.checkpoint.configs import read_drafter, read_target
from kimi_fx.checkpoint.load import _fill
from kimi_fx.checkpoint.shards import check_divides, local_leaf
from kimi_fx.cli import main
from kimi_fx.compose import load_config
from kimi_fx.engine import Engine
from kimi_fx.graphs import target
from kimi_fx.graphs.params import Leaf, Params, drafter_plan, target_plan
from kimi_fx.graphs.pytree import tree_leaves
from kimi_fx.runtime.load import Loaded, prepare
from kimi_fx.runtime.ranks import Place, open_store
from kimi_fx.runtime.watch import Watch
from oracles import ranks
from oracles.processes import state, wait_for_end

pytestmark = pytest.mark.xdist_group("ranks")  # one process sets up for all

ORACLES = Path(ranks.__file__).parent
FP32 = ["dtype=float32", "device=cpu"]
LOGITS = 1e-4
SOON = 15  # seconds in which all ranks must have ended


def environment(**more: Any) -> dict[str, str]:
    paths = [str(Path(kimi_fx.__file__).parents[1]), str(ORACLES)]
    return (
        os.environ
        | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths), "TORCH_CPP_LOG_LEVEL": "ERROR"}
        | {name: str(value) for name, value in more.items()}
    )


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@pytest.fixture(scope="module")
def alone(loaded: Loaded) -> dict[str, Any]:
    """What one rank gives."""
    drawn: list[torch.Tensor] = []
    logits = target.logits

    def seen(*args: Any, **more: Any) -> torch.Tensor:
        drawn.append(logits(*args, **more))
        return drawn[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, "logits", seen)
        texts = ranks.texts(Engine(load_config(FP32), loaded))
    return {"texts": texts, "logits": [rows.flatten(0, 1) for rows in drawn]}


@pytest.fixture(scope="module", params=[2, 4])
def together(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of several ranks saw."""
    size, folder = request.param, tmp_path_factory.mktemp("ranks")
    port = free_port()
    places = [{"RANK": r, "LOCAL_RANK": r, "WORLD_SIZE": size} for r in range(size)]
    call = [sys.executable, str(ORACLES / "ranks.py"), str(folder), *FP32, f"mesh.tp={size}", "mesh.check=true"]
    call.append("mesh.timeout=60")
    running = [
        subprocess.Popen(call, env=environment(**place, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)) for place in places
    ]
    assert [process.wait(100) for process in running] == [0] * size
    return [torch.load(folder / f"{r}.pt", weights_only=False) for r in range(size)]


def test_same_texts(alone: dict[str, Any], together: list[dict[str, Any]]) -> None:
    found = together[0]["texts"]
    for mode, samples in alone["texts"].items():
        for one, several in zip(samples, found[mode], strict=True):
            for key in ("ids", "alternatives", "finish", "steps", "drafted"):
                assert one[key] == several[key], (mode, key)
            torch.testing.assert_close(
                torch.tensor(one["logprobs"]), torch.tensor(several["logprobs"]), rtol=0, atol=LOGITS
            )


def test_same_logits(alone: dict[str, Any], together: list[dict[str, Any]]) -> None:
    """Row by row, of every node of every round, each on the rank that drew from it."""
    steps = list(zip(*(rank["logits"] for rank in together), strict=True))
    assert len(steps) == len(alone["logits"])
    for expected, parts in zip(alone["logits"], steps, strict=True):
        rows = torch.cat(parts)
        assert not rows[len(expected) :].any()
        torch.testing.assert_close(rows[: len(expected)], expected, rtol=0, atol=LOGITS)


def test_placements_and_shares(together: list[dict[str, Any]]) -> None:
    """Leaf by leaf as the plan declares: what is sharded is divided evenly, what is not is whole."""
    size = len(together)
    model = prepare(load_config(FP32)).model
    assert model.drafter is not None
    plan = Params(target_plan(model.target, size), drafter_plan(model.drafter, size))
    leaves: list[Leaf] = tree_leaves(plan)
    expected = [(Shard(leaf.axes.index("tp")) if "tp" in leaf.axes else Replicate(),) for leaf in leaves]
    pairs = zip(leaves, expected, strict=True)  # on a CPU experts are unpacked, their scales are gone
    expected = ["packed" if leaf.init == "words" else e for leaf, e in pairs if leaf.init != "scales"]
    own = _fill(plan, lambda leaf: torch.empty(own_shape(leaf, size), dtype=leaf.stored), "cpu", torch.float32)
    shapes = [(tuple(leaf.shape), leaf.nbytes) for leaf in tree_leaves(own) if leaf is not None]
    shapes = [((1,), 8) if shape == (size,) else (shape, count) for shape, count in shapes]  # a rank's own number
    for rank in together:
        assert tree_leaves(rank["placements"], is_leaf=is_placement) == expected
        assert rank["shapes"] == shapes


def own_shape(leaf: Leaf, size: int) -> tuple[int, ...]:
    assert all(n % size == 0 for n, axis in zip(leaf.shape, leaf.axes, strict=True) if axis)
    return tuple(n // size if axis else n for n, axis in zip(leaf.shape, leaf.axes, strict=True))


def is_placement(part: Any) -> bool:
    return isinstance(part, tuple) and all(isinstance(p, Shard | Replicate) for p in part)


def test_sizes_that_do_not_divide() -> None:
    with pytest.raises(ValueError, match=r"mesh.tp=8 .*heads \(4\).*128: 16 columns a rank.* 32 .*mesh.tp=1 or 2 or 4"):
        prepare(load_config([*FP32, "mesh.tp=8"]))


CAUSES = {
    "killed": "rank 1 ended by signal 9 (SIGKILL)",
    "raises": "rank 1: MemoryError: no room for an egg",
    "hangs": "a step has taken more than mesh.timeout=4 s: rank 0 in ",
    "stopped": ", rank 1 silent (stopped?)",
    "differs": "ranks 1 have another value of the tree's score than rank 0",
    "interrupted": "kimi-fx: interrupted",
    "terminated": "kimi-fx: terminated",
}
SENT = {"interrupted": (signal.SIGINT, 130), "terminated": (signal.SIGTERM, 143)}  # to the first; its code


@pytest.mark.parametrize("how", CAUSES)
def test_one_fails_and_all_end(how: str, tmp_path: Path) -> None:
    file, (sent, code) = tmp_path / "second", SENT.get(how, (None, 1))
    call = [sys.executable, str(ORACLES / "failing.py"), how, str(file), *FP32, "mesh.tp=2", "mesh.check=true"]
    asked = ["ids=[3840,100,200]", "sampling.max_tokens=2000", "sampling.ignore_eos=true", "mesh.timeout=4"]
    first = subprocess.Popen([*call, *asked], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert first.stdout is not None
    first.stdout.read(8)  # it runs
    if sent:
        first.send_signal(sent)
    _, said = first.communicate(timeout=60)
    ended = time.time()
    pid, *failed = file.read_text().split()
    *loading, last = said.decode().splitlines()
    assert CAUSES[how] in last and len(loading) == 3, said.decode()  # two models and the settings
    assert first.returncode == code
    assert all(ended - float(at) < SOON for at in failed) and len(failed) == (sent is None)
    assert state(int(pid)) == ""  # its parent has asked for its exit code


def test_building_is_not_a_steps_time() -> None:
    watch = Watch(0, 1, HashStore(), [], 0.05)
    with watch.unlimited():
        pass
    assert watch.since is None  # there was no step
    watch.begin()
    with watch.unlimited():
        time.sleep(0.1)
        assert watch.look() is None
    assert watch.look() is None
    time.sleep(0.1)
    assert "a step has taken more than mesh.timeout=0.05 s" in (watch.look() or "")


def test_the_first_is_killed(tmp_path: Path) -> None:
    """The others have nobody to follow."""
    file = tmp_path / "second"
    call = [sys.executable, str(ORACLES / "failing.py"), "interrupted", str(file), *FP32, "mesh.tp=2"]
    asked = ["ids=[3840,100,200]", "sampling.max_tokens=2000", "sampling.ignore_eos=true"]
    first = subprocess.Popen([*call, *asked], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert first.stdout is not None and first.stderr is not None
    first.stdout.read(8)
    first.kill()
    first.wait()
    wait_for_end(int(file.read_text()), time.time() + SOON)
    first.stdout.close()
    assert len(first.stderr.read().splitlines()) == 3  # as it loaded
    first.stderr.close()


def test_nobody_reads_the_first(tmp_path: Path) -> None:
    file = tmp_path / "second"
    call = [sys.executable, str(ORACLES / "failing.py"), "interrupted", str(file), *FP32, "mesh.tp=2"]
    asked = ["ids=[3840,100,200]", "output=json", "sampling.max_tokens=5"]
    reader, writer = os.pipe()
    os.close(reader)
    first = subprocess.run([*call, *asked], env=environment(), stdout=writer, stderr=subprocess.PIPE, timeout=60)
    os.close(writer)
    assert first.returncode == 141 and len(first.stderr.splitlines()) == 3  # as it loaded
    assert state(int(file.read_text())) == ""


def test_the_first_is_killed_while_the_others_start() -> None:
    call = [sys.executable, "-m", "kimi_fx", "generate", "ids=[3840]", *FP32, "mesh.tp=2"]
    with subprocess.Popen(call, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as first:
        children = Path(f"/proc/{first.pid}/task/{first.pid}/children")
        last = time.time() + 60
        while not (found := children.read_text().split()) and time.time() < last:
            time.sleep(0.01)
        first.kill()
        wait_for_end(int(found[0]), time.time() + SOON)
        assert first.stderr is not None and not first.stderr.read()


STUCK = """
import atexit, time
from kimi_fx.runtime.ranks import end_at_once

class Device:
    def __del__(self, wait=time.sleep):
        wait(100)

device = Device()
atexit.register(end_at_once, 3, None)
print("said", end="")
"""


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("RANK", "5", "RANK=5 is no number from 0 to 1: start the ranks with torchrun"),
        ("RANK", "x", "RANK=x is no number from 0 to 1"),
        ("LOCAL_RANK", "2", "LOCAL_RANK=2 is no number from 0 to 1"),
        ("WORLD_SIZE", "0", "WORLD_SIZE=0 is no number of 1 or more"),
        ("MASTER_PORT", "none", "MASTER_PORT=none is no number from 1 to 65535"),
    ],
)
def test_a_launchers_numbers_that_cannot_be(
    name: str, value: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"} | {name: value}
    for key, text in given.items():
        monkeypatch.setenv(key, text)
    assert main(["generate", "ids=[1]"]) == 2
    assert said in capsys.readouterr().err


def test_a_port_that_is_taken() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ValueError, match=f"MASTER_PORT={port} is taken by another process: give one that is free"):
            open_store(Place(0, 2, 0, port=port), serves=True)


def test_an_end_that_waits_for_no_device() -> None:
    done = subprocess.run([sys.executable, "-c", STUCK], env=environment(), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (3, "said", "")


def test_engine_in_the_calling_process(alone: dict[str, Any]) -> None:
    """Requests that are added, cancelled and left unread reach all ranks, and the ranks end with the engine."""
    engine = Engine.load([*FP32, "mesh.tp=2", "mesh.check=true", "mesh.timeout=60"], progress=False)
    assert engine.ranks is not None
    (follower,), watch = engine.ranks.followers, engine.ranks.watch
    engine.add([3840, 5, 6, 7], {"max_tokens": 30})
    unwanted = engine.add([3840, *range(100, 300)], {"max_tokens": 30})  # its order takes two parts
    for _ in range(3):
        engine.step()
    engine.cancel(unwanted)
    stream = engine.generate([3840, 9], stream=True, max_tokens=50)
    next(stream)
    stream.close()
    results = engine.generate(ranks.PROMPTS, ranks.ASKED, mode="tree")
    assert [r.outputs[0].token_ids for r in results] == [one["ids"] for one in alone["texts"]["tree"]]
    check_slots_move_alike(engine)
    with pytest.raises(RuntimeError, match="one engine with mesh.tp above 1 at a time"):
        Engine.load([*FP32, "mesh.tp=2"], progress=False)
    del engine, stream
    gc.collect()
    assert follower.poll() == 0 and not watch.is_alive()


def check_slots_move_alike(engine: Engine) -> None:
    """Also where another thread drops a stream in the very step in which an earlier request ends."""
    how = {"mode": "plain", "temperature": 0, "ignore_eos": True}
    lengths, round_ = (6, 20, 20, 20), engine._round
    alone = [engine.generate([3840, 9 + i], max_tokens=n, **how).outputs[0].token_ids for i, n in enumerate(lengths)]
    streams = [engine.generate([3840, 9 + i], max_tokens=n, stream=True, **how) for i, n in enumerate(lengths)]
    ids = [next(stream).token_ids for stream in streams]

    def last_round() -> Any:
        if engine.seated[0].limit == 6 and len(engine.seated[0].ids) == 5 and streams[1] is not None:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(streams.__setitem__, 1, None).result(10)
        return round_()

    engine._round = last_round  # type: ignore[method-assign]
    for i in (0, 2, 3):
        ids[i] += tuple(t for delta in streams[i] for t in delta.token_ids)
    del engine._round
    assert streams[1] is None and [ids[i] for i in (0, 2, 3)] == [alone[i] for i in (0, 2, 3)]


def test_a_ranks_share_of_kimi_k2_6() -> None:
    """The byte count that other engines' layouts give for eight ranks; the drafter shares as well."""
    conf = Path(kimi_fx.__file__).parents[1] / "conf"
    model = read_target(conf / "target" / "kimi_k2_6", None)
    drafter = read_drafter(conf / "drafter" / "kimi_k2_6_dflash", model, None, None)
    check_divides(model, drafter, 8)
    leaves = [local_leaf(leaf, 8) for leaf in tree_leaves(target_plan(model, 8)) if leaf.sources]
    assert sum(prod(leaf.shape) * leaf.stored.itemsize for leaf in leaves) == 76_182_593_536
    with pytest.raises(ValueError, match="use mesh.tp=1 or 2 or 4 or 8 or 16 or 32 or 64"):
        check_divides(model, drafter, 6)


@pytest.mark.parametrize(
    ("inner", "ranks", "said"),
    [(96, 2, r"the expert width \(96: 48 columns a rank, in groups of 32"), (64, 4, r"\(64: 16 columns a rank")],
)
def test_a_width_that_would_cut_a_group_is_refused(loaded: Loaded, inner: int, ranks: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_divides(replace(loaded.model.target, I=inner), None, ranks)
