"""From a `Config` to what the engine runs on: geometry, weights on the device, tokenizer, stop ids."""

import os
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from ..chat import load_template
from ..checkpoint.configs import read_drafter, read_target
from ..checkpoint.files import read_entries
from ..checkpoint.load import load_drafter, load_target
from ..checkpoint.preflight import DRAFTER, TARGET, check
from ..checkpoint.shards import check_divides, local
from ..compose import sampling_from, show
from ..config import Config, Mesh, SamplingParams, environment, package_path
from ..graphs.axis import Axis
from ..graphs.params import Params, drafter_plan, target_plan
from ..graphs.state import Model
from ..ops import KERNELS, REFERENCE, Ops
from ..tokenizer import Tokenizer, generation_defaults, load_tokenizer, stop_ids
from .build import load_kernels
from .peers import first_gap
from .ranks import GROUP, Place, own_place
from .weights import loaded_once


@dataclass(frozen=True)
class Text:
    """What a checkpoint folder says about text."""

    tokenizer: Tokenizer | None = None  # None where there is no tiktoken.model: ids only
    template: str | None = None  # the checkpoint's own chat template
    stop_ids: tuple[int, ...] = ()
    defaults: dict[str, float] = field(default_factory=dict)  # temperature, top_p, top_k of generation_config.json

    def describe(self) -> str:
        t = self.tokenizer
        size = f"{t.size:,} ids, {len(t.special)} of them control ids" if t else "none, prompts must be ids"
        format = "chat_template of the checkpoint" if self.template else "built in"
        defaults = ", ".join(f"{k} {v}" for k, v in self.defaults.items()) or "none"
        return (
            f"tokenizer: {size}\n  stop ids: {', '.join(map(str, self.stop_ids))}\n  chat format: {format}\n"
            f"  sampling defaults of the checkpoint: {defaults}"
        )


@dataclass(frozen=True)
class Loaded:
    """What an engine runs on; without `params` it is prepared: enough to check any request, no weight read."""

    params: Any  # Params; None where only prepared
    model: Model
    device: torch.device
    dtype: torch.dtype
    text: Text


def prepare(config: Config, place: Place | None = None) -> Loaded:
    """Everything that can be checked or read before the weights. Raises ValueError, a sentence a problem."""
    place = place or own_place(config)
    device = rank_device(config.device, place)
    model, folder = read_model(config, device)
    check_divides(model.target, model.drafter, place.size)
    check(target_plan(model.target), read_entries(folder), TARGET, str(folder))
    if model.drafter and (drafter := drafter_folder(config)):
        check(drafter_plan(model.drafter), read_entries(drafter), DRAFTER, str(drafter))
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    elif place.size > 1:
        torch.set_num_threads(min(torch.get_num_threads(), max((os.cpu_count() or 1) // place.size, 1)))
    return Loaded(None, model, device, pick_dtype(config.dtype, device), read_text(folder, model.target.V))


def load(config: Config, ready: Loaded | None = None, progress: bool = True, mesh: DeviceMesh | None = None) -> Loaded:
    """`ready`, or what `prepare` gives, with the weights of target and drafter on the device; on a mesh this rank's."""
    ready = ready or prepare(config)
    model, device, dtype = ready.model, ready.device, ready.dtype
    if device.type == "cuda" and model.ops is KERNELS:
        load_kernels(device)

    def read() -> Params:
        target = load_target(target_folder(config), model.target, device, dtype, progress, mesh)
        drafter = None
        if model.drafter and (folder := drafter_folder(config)):
            drafter = load_drafter(folder, model.drafter, device, dtype, progress, mesh)
        return local(Params(target, drafter))

    rank = mesh.get_local_rank("tp") if mesh is not None else 0
    kept = config.cache.weights
    return replace(ready, params=loaded_once(config, model, rank, device, dtype, read, progress) if kept else read())


def read_text(folder: Path, vocab: int) -> Text:
    """Tokenizer, chat template, stop ids and sampling defaults of a checkpoint folder."""
    tokenizer = load_tokenizer(folder, vocab) if os.path.lexists(folder / "tiktoken.model") else None
    stops, defaults = stop_ids(folder, tokenizer), generation_defaults(folder)
    if max(stops) >= vocab:
        raise ValueError(f"{folder}: the stop id {max(stops)} is outside the vocabulary of {vocab} ids.")
    try:
        sampling_from(defaults, SamplingParams())
    except ValueError as error:
        raise ValueError(f"{folder / 'generation_config.json'}: {error}") from None
    return Text(tokenizer, load_template(folder), stops, defaults)


def read_model(config: Config, device: torch.device) -> tuple[Model, Path]:
    """Geometry of both models and the target's folder; reads config files only."""
    folder = target_folder(config)
    target = read_target(folder, config.target.lora_norm_eps)
    drafter = None
    if (found := drafter_folder(config)) is not None:
        drafter = read_drafter(found, target, config.drafter.window, config.drafter.rope_amplitude)
    axis = Axis(GROUP, config.mesh.tp, bool(config.mesh.near)) if config.mesh.tp > 1 else None
    return Model(target, drafter, pick_ops(config.ops, device), axis), folder


def target_folder(config: Config) -> Path:
    """Raises ValueError where the user has named none."""
    if config.target.path is None:
        raise ValueError("target.path is not set: give the checkpoint's folder, target=/path/to/Kimi-K2.6.")
    return folder_of("target", config.target.path)


def drafter_folder(config: Config) -> Path | None:
    return folder_of("drafter", config.drafter.path) if config.drafter.path else None


def folder_of(group: str, path: str) -> Path:
    folder = package_path(path)
    if not folder.is_dir():
        raise ValueError(f"{group}.path={path}: no such folder: give a checkpoint's, or a preset's name as {group}=.")
    return folder


def pick_device(name: str) -> torch.device:
    """`auto` is CUDA where there is one. Raises ValueError for a device that is not here."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = named_device(name)
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ValueError(f"device={name!r} was asked for, but {count} CUDA devices are visible: use cpu or auto.")
    return device


def named_device(name: str) -> torch.device:
    """Raises ValueError for what is none, such as an index of the CPU."""
    with suppress(RuntimeError):
        device = torch.device(name)
        if name == "cpu" or device.type == "cuda" and str(device) == name:  # it takes 256 for 0
            return device
    raise ValueError(f"device={name!r} is not a device: use auto, cpu, cuda or cuda:<index>.")


def rank_device(name: str, place: Place) -> torch.device:
    """The device of a rank. Raises ValueError where its machine has too few."""
    device = pick_device(name)
    if device.type == "cpu" or place.size == 1:
        return device
    count, needed = torch.cuda.device_count(), place.size if place.port == 0 else 1
    if needed > count:
        raise ValueError(f"mesh.tp={place.size} needs {needed} CUDA devices here and {count} are visible.")
    torch.cuda.set_device(0)
    return torch.device("cuda", 0)  # of a started rank the only one it sees


def settled(config: Config, place: Place, planned: bool = False) -> Config:
    """With what rank 0 decides for all: the kind of device, and whether small sums go through the devices' memory.
    Raises ValueError where what was asked for cannot be. `planned`: on CUDA devices elsewhere, joined by NVLink."""
    if place.size == 1:
        unused = [name for name, value in vars(config.mesh).items() if name != "tp" and value != getattr(Mesh(), name)]
        if unused:
            given = f"mesh.{unused[0]}={show(getattr(config.mesh, unused[0]))}"
            raise ValueError(f"{given}, but there is one rank: leave it out, or set mesh.tp to more.")
        return config
    if ":" in config.device:
        given = f"device={config.device} names one device"
        raise ValueError(f"{given} and mesh.tp={place.size} needs one a rank: use device=cuda.")
    device = torch.device("cuda") if planned else pick_device(config.device)
    why = far_apart(config, place, device, planned)
    if config.mesh.near and why:
        raise ValueError(f"mesh.near=true, but {why}: leave it out.")
    kind = device.type if config.device == "auto" else config.device
    return replace(config, device=kind, mesh=replace(config.mesh, near=config.mesh.near is not False and why is None))


def far_apart(config: Config, place: Place, device: torch.device, planned: bool = False) -> str | None:
    """Why small sums cannot go through the devices' memory."""
    if device.type != "cuda":
        return "the ranks are on a CPU"
    if config.ops != "auto":
        return "ops=reference avoids the kernel for it"
    if place.port and environment("LOCAL_WORLD_SIZE") != str(place.size):
        return "the ranks are on several machines"
    gap = None if planned else first_gap(place.size)
    return f"no NVLink joins devices {gap[0]} and {gap[1]}" if gap else None


def pick_ops(name: str, device: torch.device) -> Ops:
    """Kernels where the device has them. A CPU has none: there the references run, without the dispatcher."""
    return KERNELS if name == "auto" and device.type == "cuda" else REFERENCE


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 on CUDA and float32 on a CPU."""
    named = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    return named[name] if name in named else named["bfloat16" if device.type == "cuda" else "float32"]
