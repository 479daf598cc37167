"""The compiled steps of one engine: found in the artefact store or built, loaded, on CUDA captured, and run.

A bucket is made ready when first needed, or all that the store has at once by `load_all`. What no bucket holds is the
engine's to run operator by operator. Several ranks make the same buckets ready in the same order, as a step tried is a
step of all; where they share a folder one of them builds and the others wait for it.
"""

import re
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..config import Config
from ..graphs.params import Params
from ..graphs.pytree import tree_map
from ..graphs.state import Emitted, KVPool, Shape, StepState, slots
from ..ops.linear import ROWS
from ..request import Plan
from .buckets import Bucket, Chunk, buckets, fit, name, tokens
from .build import cache_folder
from .capture import Graphs
from .compiled import Arguments, Step, compile_step, example, load_step, signature
from .flight import in_one_piece
from .ingredients import ingredients
from .load import Loaded
from .ranks import Ranks
from .store import Store
from .tensorrt import check_backend, operators

FIXED, PER_LAYER = 5.0, 1.0  # seconds that compiling takes on a server
MANY = 2  # times that of more rows than the kernels take, whose products the compiler sees
UNRECORDED = 4  # times that where steps are not recorded, which is mostly C++ for a CPU


def compiles(config: Config, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether steps run compiled."""
    on = config.run.compile
    return recorded(device, dtype) and config.ops == "auto" if on is None else on


def check_steps(config: Config, device: torch.device, dtype: torch.dtype) -> None:
    """Raises ValueError for settings of compiled steps that cannot be had."""
    if config.run.compile and config.ops == "reference":
        raise ValueError("run.compile=true compiles the operators' kernels and ops=reference avoids them: choose one.")
    on = compiles(config, device, dtype)
    if config.run.require_warm and not on:
        raise ValueError("run.require_warm=true asks for compiled steps, and none are in use: set run.compile=true.")
    if config.run.nodes is not None and not on:
        raise ValueError("run.nodes is of compiled steps, and none are in use: set run.compile=true, or leave it out.")
    check_backend(config, device, on)


def eager(config: Config) -> Config:
    """The same settings with every operator called."""
    run = replace(config.run, compile=False, nodes=None, require_warm=False)
    return replace(config, run=run, drafter=replace(config.drafter, backend="inductor"))


def recorded(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether compiled steps become CUDA graphs. In fp32 some operators have no kernel, and wait for the host."""
    return device.type == "cuda" and dtype == torch.bfloat16


@dataclass(frozen=True)
class Prompt:
    """What a prefill takes beside weights and pool."""

    row: StepState  # of one slot
    tokens: Tensor  # [1, C] i64
    count: Tensor  # [1] i64
    final: Tensor  # [1] bool


class Rounds:
    """Callables by bucket, over one pool and one state. ValueError if run.require_warm finds something cold."""

    def __init__(self, config: Config, loaded: Loaded, plan: Plan) -> None:
        self.backend = config.drafter.backend
        self.model = replace(loaded.model, ops=operators(self.backend))
        self.buckets = buckets(config, self.model, plan)
        self.store = Store(cache_folder(), ingredients(self.model, loaded.dtype, loaded.device))
        self.budget = plan.budget
        self.graphs = Graphs(loaded.device) if recorded(loaded.device, loaded.dtype) else None
        self.may_build = not config.run.require_warm
        self.steps: dict[Bucket, Step] = {}
        self.calls: dict[Bucket, Callable[[], Any]] = {}  # over buffers that stay where they are
        self.prompts: dict[Chunk, Prompt] = {}  # a prefill's own buffers, as any slot may have it
        self.ranks: Ranks | None = None  # once this process is one of several
        if not self.may_build and (cold := self.cold()):
            raise ValueError(f"run.require_warm=true, but {self.lack(cold)}: run kimi-fx warmup with these settings.")
        if loaded.device.type == "cpu" and re.search(r"[\s'\"]", str(self.store.root)) and self.cold():
            raise ValueError(
                f"{self.store.root} has a blank or a quote in it, with which Inductor's calls of a C++ compiler fail: "
                "set KIMI_FX_CACHE to another folder."
            )

    def decode(self, shape: Shape, params: Params, pool: KVPool, state: StepState) -> Any:
        """One round of the first slots, as `ddtree_step` gives it but of as many slots as the bucket has, those beyond
        the seated ones being padding. None where no bucket holds the shape."""
        bucket = fit(shape, self.buckets)
        return bucket and self.call(bucket, params, pool, state)()

    def call(self, bucket: Bucket, params: Params, pool: KVPool, state: StepState) -> Callable[[], Any]:
        """The bucket's step over these buffers, always the same ones; a prefill's row and tokens are its own."""
        if bucket not in self.calls:
            arguments = self.arguments(bucket, params, pool, state)
            call = partial(self.step(bucket, arguments), *arguments)
            self.calls[bucket] = self.graphs.capture(partial(for_host, call)) if self.graphs else call
        return self.calls[bucket]

    def arguments(self, bucket: Bucket, params: Params, pool: KVPool, state: StepState) -> Arguments:
        """What the bucket's step is called with from now on."""
        if isinstance(bucket, Shape):
            return params, pool, slots(state, bucket.batch), bucket, self.model
        tokens = torch.zeros(1, bucket.tokens, dtype=torch.int64, device=state.anchor.device)
        count = tokens.new_ones(1)
        prompt = Prompt(tree_map(torch.clone, slots(state, 1)), tokens, count, count == 0)
        self.prompts[bucket] = prompt
        return params, pool, *vars(prompt).values(), self.model

    def prefill(self, params: Params, pool: KVPool, row: StepState, tokens: Sequence[int], final: bool) -> Emitted:
        """One chunk of one slot's prompt."""
        bucket = fit(Chunk(len(tokens)), self.buckets)
        assert bucket is not None  # no chunk is longer than run.chunk
        call, prompt = self.call(bucket, params, pool, row), self.prompts[bucket]
        tree_map(Tensor.copy_, prompt.row, row)
        prompt.tokens[0, : len(tokens)] = torch.tensor(tokens, device=prompt.tokens.device)
        prompt.count.fill_(len(tokens))
        prompt.final.fill_(final)
        _, emitted = call()
        tree_map(Tensor.copy_, row, prompt.row)
        return emitted

    def load_all(self, params: Params, pool: KVPool, state: StepState) -> None:
        """Make ready what the store has, largest first, so that later captures find memory; say what it lacks."""
        cold = self.cold()
        if cold:
            takes = f"takes about {clock(self.pace(cold))}, or ahead by kimi-fx warmup"
            self.say(f"{self.lack(cold)}: each is compiled when first needed and {takes}.")
        if all(b.nodes <= self.budget for b in self.buckets if isinstance(b, Shape)):
            self.say(f"rounds of {self.budget + 1} nodes are in no bucket of run.nodes and run operator by operator")
        for bucket in self.buckets:
            if bucket not in cold:
                self.call(bucket, params, pool, state)

    def step(self, bucket: Bucket, arguments: Arguments) -> Step:
        """The bucket's function, which takes arguments like these."""
        if bucket not in self.steps:
            with self.unlimited():
                self.steps[bucket] = self.ready(bucket, arguments)
        return self.steps[bucket]

    def ready(self, bucket: Bucket, arguments: Arguments) -> Step:
        """A bucket's function loaded and tried, built if it has to be."""
        idle = example(bucket, arguments[0], self.model)
        entry = self.store.entry(name(bucket)) or self.build(bucket, idle)
        for compiled, found in zip_longest(entry["arguments"], signature(arguments)):
            if compiled != found:
                where = self.store.folder
                raise RuntimeError(f"{name(bucket)} takes {compiled} and was given {found}: delete {where}.")
        with self.store.kernel_folder() as kernels:
            step = load_step(self.store.code(name(bucket)), idle, kernels)
        if self.graphs:
            self.graphs.warm(partial(step, *idle))
        return step

    def build(self, bucket: Bucket, idle: Arguments) -> dict[str, Any]:
        """Compile a bucket into the store, unless another process has by now; its entry."""
        if not self.may_build:
            raise RuntimeError(f"run.require_warm=true, but {name(bucket)} is gone from {self.store.folder}.")
        self.say(f"compiling {name(bucket)}, which takes about {clock(self.pace([bucket]))}")
        with self.store.building(quiet=not self.speaks):
            if entry := self.store.entry(name(bucket)):
                return entry
            with self.store.workshop(stocked=True) as kernels:
                return self.keep(bucket, *compile_step(bucket, idle, kernels), kernels)

    def keep(self, bucket: Bucket, code: bytes, notes: dict[str, Any], kernels: Path) -> dict[str, Any]:
        """Put what was compiled into the store, which is locked; its entry."""
        self.store.add(name(bucket), code, kernels, **notes)
        entry = self.store.entry(name(bucket))
        assert entry is not None
        return entry

    def pace(self, cold: Sequence[Bucket]) -> float:
        """Seconds that compiling one takes: the mean of those built with these ingredients, else by the layers."""
        m = self.model
        layers = m.target.layers + (m.drafter.layers if m.drafter else 0)
        each = PER_LAYER * (MANY if self.graphs and any(tokens(bucket) > ROWS for bucket in cold) else 1)
        return self.store.pace() or (FIXED + each * layers) * (UNRECORDED if self.graphs is None else 1)

    def cold(self) -> list[Bucket]:
        """Buckets that the store lacks, be it that of one rank: whether one is loaded is the same on all."""
        lacking = [self.store.entry(name(bucket)) is None for bucket in self.buckets]
        lacking = self.ranks.anywhere(lacking) if self.ranks else lacking
        return [bucket for bucket, lacks in zip(self.buckets, lacking, strict=True) if lacks]

    def lack(self, cold: Sequence[Bucket]) -> str:
        """What is cold, and why."""
        count = f"{len(cold)} of {len(self.buckets)} compiled steps"
        which = name(cold[-1]) + (", …" if len(cold) > 1 else "")
        return f"{count} are not in {self.store.folder} ({which}; {self.store.why_cold([*map(name, cold)])})"

    def release(self) -> None:
        """Drop the graphs, once they have run: a group whose operations they hold could not end."""
        if self.graphs:
            torch.cuda.synchronize(self.graphs.stream.device)
        self.calls.clear()

    def unlimited(self) -> AbstractContextManager[None]:
        """No time in here counts as that of a step."""
        return self.ranks.watch.unlimited() if self.ranks else nullcontext()

    @property
    def speaks(self) -> bool:
        """One rank does for all."""
        return self.ranks is None or self.ranks.place.rank == 0

    def say(self, line: str, end: str = "\n") -> None:
        if self.speaks:
            print(line, file=sys.stderr, flush=True, end=end)


def for_host(call: Callable[[], Any]) -> Any:
    """What the call gives, with its last part, what is emitted, in one piece."""
    *rest, emitted = call()
    return *rest, in_one_piece(emitted)


def clock(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
