"""Every setting and its default: frozen dataclasses, and nothing else holds a default.

`Config` and its groups are what a user sets; `TargetModel` and `DrafterModel` are the geometry read from a
checkpoint's `config.json` and closed over by the graphs. What a value may be stands at the end: the type of
its field and `LIMITS`. This file is also the only reader of the environment. It is long because every setting
is here. It does not compose YAML (see `compose.py`), does not look at devices, and imports no torch.
"""

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal

from .rules import Range, cast, type_name

PAGE = 64  # tokens a page of the pool holds
STOP_SLOTS = 8  # stop ids a request may have
TOP_LOGPROBS = 20  # alternatives reported for a token, at most
NODE_BUCKETS = (1, 8, 16, 32, 64, 128)  # nodes a round is built for, the root included
MAX_BUDGET = NODE_BUCKETS[-1] - 1  # nodes drafted a round, the root excluded
MAX_TOKENS = 256  # ids emitted at most where max_tokens is null

Mode = Literal["plain", "chain", "tree"]


@dataclass(frozen=True)
class Target:
    """The model that decides every token."""

    path: str | None = None
    """Checkpoint folder; `kimi_fx:…` is a folder inside the package."""
    lora_norm_eps: float | None = None
    """Epsilon of the two latent norms (q_a, kv_a); null: the checkpoint's `rms_norm_eps`."""
    bos: bool = True
    """Begin a text prompt with the checkpoint's [BOS], as its training documents do; ids and chats never."""


@dataclass(frozen=True)
class Drafter:
    """The DFlash model that proposes tokens; without a path only plain decoding is possible."""

    path: str | None = None
    """Checkpoint folder; `kimi_fx:…` is a folder inside the package."""
    window: int | None = None
    """Context tokens a slot sees at most, itself counted; null: what the checkpoint says of each layer."""
    rope_amplitude: float | None = None
    """Factor on the drafter's cos and sin; null: from the checkpoint's rope settings."""
    backend: Literal["inductor", "tensorrt"] = "inductor"
    """What its dense parts are in compiled rounds on CUDA: our kernels in Inductor's code, or TensorRT engines."""


@dataclass(frozen=True)
class Step:
    """How a round drafts."""

    mode: Mode = "tree"
    """plain: no draft; chain: the drafter's first choices; tree: the best-first tree."""
    budget: int | None = None
    """Nodes drafted a round, root excluded; null: 15 for a tree, block - 1 for a chain."""
    block: int | None = None
    """Slots of the drafter's block, the last accepted token included (1: no drafts); null: as trained, the most."""
    give_up: int | None = 128
    """After this many steps in a row without an accepted draft a request goes on plainly; null: never."""


@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled and when it ends. Every field is honoured in every mode, or refused here.

    Raises ValueError with the fields, their values and what is allowed, one problem a line. Code that reads a
    setting of several names takes it from the properties below.
    """

    max_tokens: int | None = None
    """Ids emitted at most; null: 256, or what context and pool still hold; 0: none."""
    max_new_tokens: int | None = None
    """Another name of max_tokens."""
    max_completion_tokens: int | None = None
    """Another name of max_tokens."""
    min_tokens: int | None = None
    """Ids emitted before a stop is allowed; null: 0."""
    min_new_tokens: int | None = None
    """Another name of min_tokens."""
    temperature: float | None = None
    """0 is greedy; null: the checkpoint's generation_config (0 where do_sample is false), else 1.0."""
    top_p: float | None = None
    """Smallest set of tokens with this mass; null: generation_config, else 1."""
    top_k: int | None = None
    """Best tokens kept; -1 or 0: all; null: generation_config, else all."""
    min_p: float = 0.0
    """Tokens under this share of the best one's probability are dropped, 0..1."""
    seed: int | None = None
    """Same seed, same ids, in every mode and batch (fp32; near ties apart in bf16); null: drawn afresh."""
    n: int = 1
    """Samples of one prompt."""
    stop: tuple[str, ...] = ()
    """Strings that end the text; a single string is taken too."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end the text, beside the model's own."""
    ignore_eos: bool = False
    """The model's own stop ids do not end the text."""
    include_stop_str_in_output: bool = False
    """Keep the matched stop string in the text."""
    no_stop_trim: bool = False
    """Another name of include_stop_str_in_output."""
    skip_special_tokens: bool = True
    """Leave control tokens out of the text."""
    logprobs: int | None = None
    """Alternatives reported for each emitted id, 0..20: log-probabilities of the raw logits,
    before temperature, penalties and filters."""
    presence_penalty: float = 0.0
    """Taken from the logit of every id already emitted, -2..2."""
    frequency_penalty: float = 0.0
    """Taken from an id's logit once for each time it was emitted, -2..2."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of ids in prompt or output."""
    logit_bias: dict[int, float] | None = None
    """Added to the logits of these ids; never clamped."""
    grammar: str | None = None
    """Refused: not supported."""
    prompt_logprobs: int | None = None
    """Refused: not supported."""
    tools: str | None = None
    """Refused: not supported."""

    def __post_init__(self) -> None:
        check_sampling(self)
        for name, value in vars(self).items():  # lists and dicts are the caller's, who may use them again
            object.__setattr__(self, name, cast(value, KEYS[f"sampling.{name}"]))

    @property
    def limit(self) -> int | None:
        """max_tokens by any of its names; None: not given, see `MAX_TOKENS`."""
        return next((getattr(self, name) for name in LIMIT_NAMES if getattr(self, name) is not None), None)

    @property
    def least(self) -> int:
        """min_tokens by either name."""
        return self.min_tokens if self.min_tokens is not None else self.min_new_tokens or 0

    @property
    def keep_stop(self) -> bool:
        """include_stop_str_in_output by either name."""
        return self.include_stop_str_in_output or self.no_stop_trim


@dataclass(frozen=True)
class Cache:
    """What is kept: rows of tokens in the paged pool, and weights on disk."""

    max_len: int | None = None
    """Longest request, prompt and output together, in tokens; null: the models' own limit."""
    tokens: int | None = None
    """Tokens the pool holds over all requests; null: run.batch requests of max_len."""
    weights: bool = False
    """Keep each rank's packed weights beside the compiled steps, written once, so that later loads are one read."""


@dataclass(frozen=True)
class Run:
    """How the engine runs."""

    batch: int = 4
    """Requests decoded together at most; the rest wait."""
    chunk: int = 512
    """Prompt tokens prefilled at once at most."""
    threads: int | None = None
    """CPU threads; null: as torch finds them, shared among the ranks."""
    compile: bool | None = None
    """Run every step as one function compiled ahead (`kimi-fx warmup`); null: in bf16 on CUDA, unless ops=reference."""
    nodes: tuple[int, ...] | None = None
    """Nodes a round is compiled for, of 1, 8, 16, 32, 64, 128; null: 1 and what step.budget needs."""
    require_warm: bool = False
    """Refuse to compile: all that run.compile needs must be in the artefact store."""
    trace: str | None = None
    """File that gets one JSON line a request and round: tree, accepted path, tokens; keys in `runtime/trace.py`."""


@dataclass(frozen=True)
class Mesh:
    """The processes that share one model, a device each."""

    tp: int = 1
    """Ranks that share heads, experts' columns and the vocabulary; started on this machine unless torchrun did."""
    timeout: float = 10.0
    """Seconds a step may take, compiling apart, before the ranks are ended, as one of them must hang."""
    near: bool | None = None
    """Sum small arrays by stores into each other's memory; null: if NVLink joins all devices of one machine."""
    check: bool = False
    """Compare tree, draws and accepted paths of all ranks after every round, and stop at the first difference."""


@dataclass(frozen=True)
class Chat:
    """The chat format, used with `messages`."""

    thinking: bool = True
    """Leave the answer's thinking block open (the model thinks first), or close it."""


@dataclass(frozen=True)
class Config:
    """Everything a user can set; `conf/<group>/<name>.yaml` presets hold differences only."""

    target: Target = field(default_factory=Target)
    drafter: Drafter = field(default_factory=Drafter)
    step: Step = field(default_factory=Step)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    cache: Cache = field(default_factory=Cache)
    run: Run = field(default_factory=Run)
    mesh: Mesh = field(default_factory=Mesh)
    chat: Chat = field(default_factory=Chat)
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute type; auto: bfloat16 on CUDA, float32 on a CPU."""
    device: str = "auto"
    """cpu, cuda, cuda:1…; auto: CUDA where there is one."""
    ops: Literal["auto", "reference"] = "auto"
    """reference: the plain PyTorch meaning of every operator, on any device."""
    prompt: str | None = None
    """generate, validate, doctor: one text."""
    prompts: str | None = None
    """generate, validate, doctor, bench: a file, one JSON object a line with prompt, ids or messages, or a
    safetensors file with a `prompts` matrix of ids."""
    ids: tuple[int, ...] | None = None
    """generate, validate, doctor: one prompt as token ids."""
    messages: str | None = None
    """generate, validate, doctor: a chat as a JSON list of {role, content}."""
    output: Literal["text", "json"] = "text"
    """generate: stream text, or one JSON object a prompt."""
    limit: int | None = None
    """Prompts taken from the file at most."""
    budgets: tuple[int, ...] = (7, 15, 31, 63)
    """bench: tree budgets to compare."""


@dataclass(frozen=True)
class Rope:
    """Rotary embedding with YaRN (factor 1: none). Formula: `graphs/layers.py`."""

    theta: float
    factor: float = 1.0
    original_max_position: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    amplitude: float = 1.0  # on cos and sin


@dataclass(frozen=True)
class TargetModel:
    """Geometry of a Kimi K2.x (DeepSeek-V3) text model. Letters: the table in `graphs/__init__.py`."""

    layers: int
    dense_layers: int  # the first ones, with a plain MLP
    D: int
    H: int
    V: int
    nope: int  # query and key width a head without rotation
    R: int  # query and key width with rotation
    value: int  # value width a head
    q_lora: int
    L: int  # latent width
    dense: int  # width of a dense layer's MLP
    E: int
    K: int  # experts a token
    I: int  # width of an expert  # noqa: E741
    shared: int  # shared experts, fused into one MLP of shared * I
    routed_scale: float
    norm_eps: float
    lora_norm_eps: float
    rope: Rope
    max_position: int
    group: int = 32  # inputs that share one INT4 scale

    @property
    def row(self) -> int:
        """Width of one pool row, latent then rope."""
        return self.L + self.R

    @property
    def softmax_scale(self) -> float:
        """(nope + rope)^-0.5 times YaRN's m(factor)^2; DeepSeek-V3 modelling code."""
        m = 0.1 * self.rope.mscale_all_dim * math.log(max(self.rope.factor, 1.0)) + 1.0
        return (self.nope + self.R) ** -0.5 * m * m


@dataclass(frozen=True)
class DrafterModel:
    """Geometry of a DFlash drafter (arXiv:2602.06036): a Qwen3-style stack over the target's features."""

    layers: int
    D: int
    H: int
    KV: int  # key/value heads
    head: int
    inner: int  # MLP width
    norm_eps: float
    rope: Rope
    block: int  # slots as trained, anchor included
    mask_id: int
    taps: tuple[int, ...]  # target layers whose outputs are the features
    windows: tuple[int, ...]  # of each layer; 0: no window
    causal: tuple[bool, ...]  # of each layer, inside the block
    max_position: int

    @property
    def scale(self) -> float:
        return self.head**-0.5

    def kv_heads(self, ranks: int) -> int:
        """Key/value heads that each rank has; where they are fewer than the ranks, several ranks have the same."""
        return max(self.KV // ranks, 1)


def package_path(path: str) -> Path:
    """A file or folder as the user wrote it, there or not, or inside the package for `kimi_fx:…`.

    ValueError for what cannot be one: a name too long, no such user's home, a folder that may not be entered.
    """
    root = Path(__file__).parent
    try:
        found = root / path.removeprefix("kimi_fx:") if path.startswith("kimi_fx:") else Path(path).expanduser()
        with suppress(FileNotFoundError, NotADirectoryError):
            found.stat()
    except (OSError, RuntimeError, ValueError) as error:
        raise ValueError(f"no usable path: {getattr(error, 'strerror', None) or error}") from None
    return found


def environment(name: str) -> str | None:
    """The value of a variable."""
    return os.environ.get(name)


def environment_of(prefix: str) -> dict[str, str]:
    """All variables whose names begin so."""
    return {name: value for name, value in os.environ.items() if name.startswith(prefix)}


def see_only(index: int) -> None:
    """Make one of the visible CUDA devices the only one, if this process has not used CUDA yet: to all ranks their
    device is then the first, and what is compiled for one fits all."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(index)] if visible is None else visible.split(",")[index : index + 1]
    os.environ["CUDA_VISIBLE_DEVICES"] = "".join(names)


@contextmanager
def with_environment(values: Mapping[str, str]) -> Iterator[None]:
    """These variables inside the block; afterwards as before."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


LIMITS = {  # for a list or map: each number in it
    "target.lora_norm_eps": Range(0, above=True),
    "drafter.window": Range(1),
    "drafter.rope_amplitude": Range(0, above=True),
    "step.budget": Range(0, MAX_BUDGET),
    "step.block": Range(1),
    "step.give_up": Range(1),
    "sampling.max_tokens": Range(0),
    "sampling.max_new_tokens": Range(0),
    "sampling.max_completion_tokens": Range(0),
    "sampling.min_tokens": Range(0),
    "sampling.min_new_tokens": Range(0),
    "sampling.temperature": Range(0),
    "sampling.top_p": Range(1e-6, 1),
    "sampling.top_k": Range(-1),
    "sampling.min_p": Range(0, 1),
    "sampling.seed": Range(-(2**63), 2**64 - 1),
    "sampling.n": Range(1, 1024),
    "sampling.stop_token_ids": Range(0),
    "sampling.logprobs": Range(0, TOP_LOGPROBS),
    "sampling.presence_penalty": Range(-2, 2),
    "sampling.frequency_penalty": Range(-2, 2),
    "sampling.repetition_penalty": Range(0.01, 100),
    "sampling.logit_bias": Range(-(10**9), 10**9),
    "cache.max_len": Range(1),
    "cache.tokens": Range(1, 10**12),
    "run.batch": Range(1, 64),
    "run.chunk": Range(1, 4096),
    "run.threads": Range(1, 1024),
    "run.nodes": Range(1, NODE_BUCKETS[-1]),
    "mesh.tp": Range(1, 1024),
    "mesh.timeout": Range(1),
    "ids": Range(0),
    "limit": Range(1),
    "budgets": Range(0, MAX_BUDGET),
}
PATHS = ("target.path", "drafter.path", "run.trace", "prompts")
REFUSED = ("sampling.grammar", "sampling.prompt_logprobs", "sampling.tools")
LIMIT_NAMES = ("max_tokens", "max_new_tokens", "max_completion_tokens")
SYNONYMS = (LIMIT_NAMES, ("min_tokens", "min_new_tokens"), ("include_stop_str_in_output", "no_stop_trim"))


def config_keys() -> Iterator[tuple[str, Any]]:
    """Every dotted key of `Config` with the type of its field."""
    for top in fields(Config):
        if is_dataclass(top.type):
            yield from ((f"{top.name}.{leaf.name}", leaf.type) for leaf in fields(top.type))
        else:
            yield top.name, top.type


KEYS = dict(config_keys())


def wanted(key: str) -> str:
    """Type and range of a key, in words."""
    return type_name(KEYS[key]) + (f", {LIMITS[key]}" if key in LIMITS else "")


def problem(key: str, value: Any, shown: str | None = None) -> str | None:
    """A line about a value its key cannot take, or None. `shown`: the two as the user wrote them."""
    shown = shown or f"{key}={value!r}"
    if key in REFUSED:
        return None if value is None else f"{shown}: not supported, leave it out"
    try:
        cast(value, KEYS[key], LIMITS.get(key))
    except ValueError:
        return f"{shown}: wanted {wanted(key)}"
    if key in PATHS and value:
        try:
            package_path(value)
        except ValueError as error:
            return f"{shown}: {error}"
    return None


def synonym_problems(given: Mapping[str, Any]) -> list[str]:
    """A line for each sampling parameter that has different values under its names."""
    problems = []
    for names in SYNONYMS:
        values = {name: given[name] for name in names if given.get(name) is not None}
        if len(set(values.values())) > 1:
            pairs = " and ".join(f"{name}={value}" for name, value in values.items())
            problems.append(f"{pairs}: names of one parameter with different values, give one")
    return problems


def check_sampling(p: SamplingParams) -> None:
    """Raise ValueError with a line for every field that cannot have its value, else for those in conflict."""
    lines = (problem(f"sampling.{name}", value, f"{name}={value!r}") for name, value in vars(p).items())
    problems = [line for line in lines if line]
    if not problems:
        limit = MAX_TOKENS if p.limit is None else p.limit
        lowest = min(p.logit_bias or {}, default=0)
        problems = synonym_problems({name: value for name, value in vars(p).items() if value is not False})
        if p.least > limit:
            problems.append(f"min_tokens={p.least}: more than max_tokens, which is {limit}")
        if "" in cast(p.stop, KEYS["sampling.stop"]):
            problems.append(f"stop={p.stop!r}: an empty string would end every text at once")
        if lowest < 0:
            problems.append(f"logit_bias: token ids are 0 or more, found {lowest}")
    if problems:
        raise ValueError("\n".join(problems))
