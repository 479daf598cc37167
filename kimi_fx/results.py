"""What a caller gets back: results, streamed deltas, usage, statistics. Plain data; `to_dict` makes JSON of any."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of one emitted id under the raw logits, before temperature, penalties and filters."""

    token_id: int
    logprob: float
    text: str
    top: tuple[tuple[int, float], ...]  # (id, logprob) of the best alternatives, best first


@dataclass(frozen=True)
class Usage:
    """Token counts; completion counts emitted ids only."""

    prompt_tokens: int
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True)
class Stats:
    """How the tokens came about. Times in seconds.

    `acceptance_length` is the mean over verify steps of the tokens they emitted: the bonus token counts, the
    prefill's token and tokens cut by a stop or a length do not. `acceptance_by_depth[d]` is the share of steps
    whose drafts were accepted d + 1 levels deep. The time to the first token counts from the request's arrival,
    waiting included; the prompt's rate from the start of its prefill; a mean or rate of nothing is 0. `kv_tokens` are
    those in the pool at the end: the last token never enters it. `eager_steps` ran operator by operator.
    """

    mode: str
    budget: int
    gave_up: int | None  # verify steps after which drafting stopped, as nothing had been accepted for long
    undrafted: int  # verify steps for which the drafter's logits were not finite, so that nothing could be drafted
    steps: int
    drafted: int
    accepted: int
    acceptance_length: float
    acceptance_by_depth: tuple[float, ...]
    nodes_per_step: float
    time_to_first_token: float
    time_per_output_token: float
    tokens_per_second: float  # after the first token
    prompt_tokens_per_second: float
    total_time: float
    kv_tokens: int
    eager_steps: int
    backend: str


@dataclass(frozen=True)
class Completion:
    """One sample of one prompt."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: int | str | None  # the stop id or string asked for that ended it, or the error; else None
    logprobs: tuple[TokenLogprob, ...] | None
    cumulative_logprob: float | None
    stats: Stats


@dataclass(frozen=True)
class Result:
    """All samples of one prompt. `stats` are the first sample's."""

    prompt_token_ids: tuple[int, ...]
    outputs: tuple[Completion, ...]
    usage: Usage

    @property
    def stats(self) -> Stats:
        return self.outputs[0].stats

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"stats": asdict(self.stats), "usage": usage_dict(self.usage)}


@dataclass(frozen=True)
class Delta:
    """What one step added to one sample. Joined texts and ids of a sample equal its completion's."""

    request: int  # id that `Engine.add` returned
    prompt: int  # place of the prompt in the call, 0 for `add`
    index: int  # sample of that prompt
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    usage: Usage | None = None  # in the last delta only, as is stats
    stats: Stats | None = field(default=None)

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"finished": self.finished, "usage": self.usage and usage_dict(self.usage)}


def usage_dict(usage: Usage) -> dict[str, int]:
    return asdict(usage) | {"total_tokens": usage.total_tokens}
