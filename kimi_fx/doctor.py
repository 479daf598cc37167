"""`kimi-fx doctor`: whether a configuration can run here, from headers and the machine alone, before any load.

A section each: devices and kernels, checkpoint, tokenizer, requests, memory of a rank, compiled steps, links between
the ranks. A section that finds something wrong says so in one message and the others go on as far as they can. With
`memory=139` the plan is for CUDA devices of that many GB, wherever the command runs, and the machine is left alone; a
preset without a folder then stands for the geometry it ships, so that nothing has to be there yet.
"""

import gc
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from pathlib import Path
from textwrap import fill, indent
from typing import Any

import torch

from .admit import longest, plan, token_limit
from .checkpoint.configs import read_target
from .checkpoint.report import inspect
from .checkpoint.shards import check_divides
from .compose import check_used, conf_folder, load_config, sampling_from
from .config import PAGE, Config
from .graphs.state import Model, Shape
from .inputs import KINDS, Prompt, check_each, check_shown, read_prompts
from .prompts import to_ids
from .runtime.buckets import buckets, name, tokens
from .runtime.build import compiler, library_for, own_arch
from .runtime.links import measure
from .runtime.load import (
    Loaded,
    Text,
    drafter_folder,
    far_apart,
    named_device,
    pick_dtype,
    rank_device,
    read_model,
    read_text,
    settled,
    target_folder,
)
from .runtime.memory import Ask, available, check_memory, gb, memory, table
from .runtime.ranks import Place, own_place
from .runtime.rounds import Rounds, check_steps, compiles

PLANNED = "memory="
PATIENCE = 10  # seconds for nvidia-smi


@dataclass(frozen=True)
class Case:
    """What is to be run, and on what: a device that is here, or with `planned` one of that many bytes."""

    config: Config
    place: Place
    device: torch.device
    planned: float | None
    shipped: Collection[str] = ()  # of target and drafter, whose geometry alone is known

    @property
    def dtype(self) -> torch.dtype:
        return pick_dtype(self.config.dtype, self.device)

    def ask(self) -> tuple[Ask, Model]:
        """Raises ValueError for sizes that the ranks cannot share, and for drafts that cannot be had."""
        model, _ = read_model(self.config, self.device)
        check_divides(model.target, model.drafter, self.place.size)
        how = plan(self.config, model, self.config.step.mode, self.config.step.budget)
        return Ask(self.config, how, longest(self.config, model)), model


def command(overrides: Sequence[str]) -> int:
    """Sections on stdout, on stderr which are not good: 0 if all are, 2 for what cannot be met, 1 for what failed."""
    case = case_of(overrides)
    said: set[str] = set()
    gc.disable()  # looking for cycles among the names of a large checkpoint takes longer than to read them
    try:
        codes = {title: run(title, section, case, said) for title, section in SECTIONS.items()}
    finally:
        gc.enable()
    if bad := [title for title, code in codes.items() if code]:
        print(f"kimi-fx: not good: {', '.join(bad)}", file=sys.stderr)
    return max(codes.values())


def case_of(overrides: Sequence[str]) -> Case:
    """Raises ValueError for settings that are wrong, and for a device or ranks that are not here."""
    check_used("doctor", overrides, {"budgets": "step.budget is that of a request"})
    words = [word for word in overrides if word.startswith(PLANNED)]
    overrides = [word for word in overrides if word not in words]
    shipped = geometries(overrides) if words else {}
    config = load_config([*overrides, *(f"{group}.path={folder}" for group, folder in shipped.items())])
    if words:
        try:
            planned = 1e9 * float(words[-1].removeprefix(PLANNED))
        except ValueError:
            planned = -1.0
        if not 0 < planned < float("inf"):
            raise ValueError(f"{words[-1]}: wanted the GB of a device's memory, such as memory=139.")
        if config.device != "auto" and named_device(config.device).type == "cpu":
            raise ValueError(f"{words[-1]} plans for CUDA devices and device=cpu asks for none: leave one of them out.")
        place = Place(0, config.mesh.tp, 0)
        config = settled(config, place, planned=True)
        return Case(config, place, torch.device("cuda"), planned, shipped)
    place = own_place(config)
    config = settled(config, place)
    return Case(config, place, rank_device(config.device, place), None)


def geometries(overrides: Sequence[str]) -> dict[str, Path]:
    """Folders of config files that ship with the chosen presets, where no checkpoint is named."""
    chosen = dict(word.split("=", 1) for word in overrides if "=" in word)
    presets = {file.parent for file in conf_folder().glob("*/*/config.json")}
    folders = {group: conf_folder() / group / chosen.get(group, "") for group in ("target", "drafter")}
    return {g: folder for g, folder in folders.items() if folder in presets and f"{g}.path" not in chosen}


def shares_links(overrides: Sequence[str]) -> bool:
    """Whether the other ranks that torchrun started have a part in it."""
    return not any(word.startswith(PLANNED) for word in overrides)


def run(title: str, section: Callable[[Case], str | None], case: Case, said: set[str]) -> int:
    """One section; its exit code. What another section said is not said again."""
    try:
        text = section(case)
    except (ValueError, RuntimeError, OSError) as error:
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        why = "not looked at, as above" if str(error) in said else f"NOT GOOD\n{indent(f'{kind}{error}', '  ')}"
        print(f"{title}: {why}\n", flush=True)
        said.add(str(error))
        return 2 if isinstance(error, ValueError) else 1
    if text:
        print(f"{title}: {text}\n", flush=True)
    return 0


def devices(case: Case) -> str:
    """What is here, which kernels it takes and whether they are compiled."""
    versions = f"torch {torch.__version__}, CUDA {torch.version.cuda or 'none'}, Python {platform.python_version()}"
    if case.planned:
        all_ranks = f"{case.place.size} CUDA device{'s' * (case.place.size > 1)}"
        return f"planned for {all_ranks} of {gb(case.planned)}, none is looked at\n  {versions}"
    if case.device.type == "cpu":
        count = torch.get_num_threads()
        return f"the CPU, {count} thread{'s' * (count > 1)}; operators run as their PyTorch references\n  {versions}"
    count = torch.cuda.device_count()
    lines = [f"{count} CUDA device{'s' * (count > 1)}", f"  {versions}"]
    for i in range(count):
        free, total = torch.cuda.mem_get_info(i)
        arch = "sm_{}{}".format(*torch.cuda.get_device_capability(i))
        lines.append(f"  cuda:{i}  {torch.cuda.get_device_name(i)}, {arch}, {gb(free)} of {gb(total)} free")
    if case.place.size > 1:
        lines += topology(case.place.size)
        why = far_apart(case.config, case.place, case.device) or "as mesh.near=false"
        near = "through the devices' own memory" if case.config.mesh.near else f"through NCCL, {why}"
        lines.append(f"  small sums: {near}")
    if case.config.ops == "reference":
        return "\n".join([*lines, "  ops=reference: no kernels"])
    arch = own_arch(case.device)
    return "\n".join([*lines, f"  kernels: {family(arch)}", f"  {compiled(arch)}"])


def family(arch: str) -> str:
    """Which attention kernel an architecture takes, and why."""
    if arch == "sm_90a":
        return "sm_90a: wgmma attention from 64 rows on (nodes x a rank's heads), as only 9.0 has it, else mma.sync"
    return f"{arch}: mma.sync attention, as warpgroup products (wgmma) are of 9.0 alone"


def compiled(arch: str) -> str:
    """Whether the library is there, or can be made. Raises ValueError without a compiler that can."""
    library, *_ = library_for(arch)
    if library.exists():
        return f"compiled: {library}"
    return f"not compiled yet: {compiler(arch)} does it at the first load, or ahead kimi-fx build"


def topology(size: int) -> list[str]:
    """Who reaches whose memory, and nvidia-smi's picture of the links."""
    far = [pair for pair in permutations(range(size), 2) if not torch.cuda.can_device_access_peer(*pair)]
    lines = [f"  peer access: {'not from ' + ', '.join(f'{i} to {j}' for i, j in far) if far else 'between all'}"]
    if smi := shutil.which("nvidia-smi"):
        try:
            found = subprocess.run([smi, "topo", "-m"], capture_output=True, text=True, timeout=PATIENCE).stdout
        except subprocess.TimeoutExpired:
            found = f"nvidia-smi topo -m has not answered in {PATIENCE} s"
        lines += [f"    {row}" for row in found.split("\n\n")[0].splitlines()]
    return lines


def checkpoint(case: Case) -> str:
    """Every file, name, shape and dtype of target and drafter, as `kimi-fx inspect` has it."""
    if "target" in case.shipped:
        return "none is named, the plan is of the geometry that ships with the preset"
    config, d = case.config, case.config.drafter
    folders = target_folder(config), None if "drafter" in case.shipped else drafter_folder(config)
    text = inspect(*folders, config.target.lora_norm_eps, d.window, d.rope_amplitude)
    return "good\n" + indent(text, "  ")


def words(case: Case) -> str | None:
    """Tokenizer, stop ids, and the control ids of its text."""
    if "target" in case.shipped:
        return None
    folder = target_folder(case.config)
    text = read_text(folder, read_target(folder, case.config.target.lora_norm_eps).V)
    lines = text.describe().removeprefix("tokenizer: ")
    if t := text.tokenizer:
        named = (f"{name} {id}" for id, name in t.special.items() if "reserved" not in name)
        lines += "\n" + fill(", ".join(named), 100, initial_indent="  control ids: ", subsequent_indent="    ")
    return lines


def requests(case: Case) -> str:
    """Sampling, and the prompts that are named, as `generate` checks them. Of a geometry that ships without a tokenizer
    texts and stop strings are left alone."""
    config, (ask, model), bare = case.config, case.ask(), "target" in case.shipped
    text = Text() if bare else read_text(target_folder(config), model.target.V)
    loaded = Loaded(None, model, case.device, case.dtype, text)
    named = any(getattr(config, source) is not None for source in (*KINDS, "prompts", "limit"))
    read = read_prompts(config) if named else [Prompt([0], {})]
    check_shown(config, read)

    def check(prompts: list[Any], fields: list[dict[str, Any]]) -> None:
        params, known = sampling_from(fields[0], config.sampling), prompts
        if bare:
            params = replace(params, stop=())
            known = [p if isinstance(p, list) and p and isinstance(p[0], int) else [0] for p in prompts]
        (ids,), _ = to_ids(known, None, loaded, config)
        token_limit(ids, params, loaded, ask.max_len, ask.pool // PAGE)

    check_each(read, check)
    return f"{len(read)} prompt{'s' * (len(read) > 1)}, good" if named else "no prompt is named, sampling is good"


def rank_memory(case: Case) -> str:
    """The plan of one rank. Raises ValueError, after the table, where it does not fit."""
    ask, model = case.ask()
    free, what = (case.planned, "planned") if case.planned else available(case.device, case.place.size)
    ranks = f"one of {case.place.size} ranks" if case.place.size > 1 else "one rank"
    shown = table(memory(ask, model, case.dtype, case.device), free, what)
    print(f"memory of {ranks}, {str(case.dtype).removeprefix('torch.')}, on {case.device.type}\n{shown}", flush=True)
    check_memory(ask, model, case.dtype, case.device, free)
    return "it fits"


def steps(case: Case) -> str | None:
    """Which compiled steps the artefact store has, and why it lacks others."""
    check_steps(case.config, case.device, case.dtype)
    if not compiles(case.config, case.device, case.dtype):
        return "not compiled, every operator is called (run.compile)"
    ask, model = case.ask()
    if case.planned:
        return f"{len(buckets(case.config, model, ask.plan))} to compile, the artefact store is not looked at"
    loaded = Loaded(None, model, case.device, case.dtype, Text())
    rounds = Rounds(case.config, loaded, ask.plan)
    cold = rounds.cold()
    if not cold:
        return f"all {len(rounds.buckets)} are in {rounds.store.folder}"
    rows = (f"  {'cold' if bucket in cold else 'warm'}  {name(bucket)}" for bucket in rounds.buckets)
    return "\n".join([f"{rounds.lack(cold)}: kimi-fx warmup compiles them", *rows])


def links(case: Case) -> str | None:
    """Sums over the ranks at the rounds' sizes, and blocks from rank to rank."""
    if case.planned or case.place.size == 1:
        return None
    ask, model = case.ask()
    sizes = sorted({tokens(bucket) for bucket in buckets(case.config, model, ask.plan) if isinstance(bucket, Shape)})
    found = measure(case.place, case.config, sizes, model.target.D)
    return "\n  ".join([f"{case.place.size} ranks, each call from the host", *found])


SECTIONS: dict[str, Callable[[Case], str | None]] = {
    "devices": devices,
    "checkpoint": checkpoint,
    "tokenizer": words,
    "requests": requests,
    "memory": rank_memory,
    "compiled steps": steps,
    "links": links,
}
