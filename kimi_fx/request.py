"""One request on the host: what was asked, what has come, and the delta that each step adds."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from .config import Mode, SamplingParams
from .ops.sample_and_walk import LENGTH, NON_FINITE, RUNS, STOP
from .results import Completion, Delta, FinishReason, Result, Stats, TokenLogprob, Usage
from .text import TextStream

FINISH: dict[int, FinishReason | None] = {RUNS: None, STOP: "stop", LENGTH: "length", NON_FINITE: "error"}


@dataclass(frozen=True)
class Plan:
    """How a request drafts: `budget` nodes a round beside the root, `width` best tokens a depth."""

    mode: Mode
    budget: int
    width: int


@dataclass
class Request:
    """Mutable record of one sample of one prompt."""

    id: int
    prompt: tuple[int, ...]
    params: SamplingParams
    plan: Plan
    limit: int  # ids emitted at most
    seed: int
    backend: str
    place: int = 0  # of the prompt in its call
    sample: int = 0
    stream: TextStream | None = None  # None without a tokenizer
    pages: list[int] = field(default_factory=list)
    prefilled: int = 0
    ids: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    emitted: list[int] = field(default_factory=list)  # tokens that each verify step added
    nodes: int = 0  # verified in all steps, roots included
    eager: int = 0  # verify steps that ran operator by operator
    undrafted: int = 0  # verify steps that were the root alone though the plan has more
    fruitless: int = 0  # steps in a row whose drafts were all rejected, or that had none
    gave_up: int | None = None  # the step after which it stopped drafting
    born: float = field(default_factory=time.perf_counter)
    started: float = 0.0  # its prefill began
    first: float = 0.0  # its first token came
    ended: float = 0.0

    @property
    def prefilling(self) -> bool:
        return self.prefilled < len(self.prompt)

    def begin(self) -> None:
        """Its prefill starts now, unless it has."""
        self.started = self.started or time.perf_counter()

    def stop_drafting(self) -> None:
        """Go on plainly: its drafts have not been accepted for long."""
        self.gave_up, self.plan = len(self.emitted), replace(self.plan, budget=0)

    def absorb(
        self, tokens: Sequence[int], code: int, logprobs: Sequence[TokenLogprob], nodes: int, eager: bool
    ) -> Delta:
        """Take what the device emitted, after a step that verified `nodes` nodes (0: the prefill).

        A stop string may cut the tokens short and end the request here.
        """
        reason, text = FINISH[code], ""
        stop: int | str | None = None
        if reason == "stop" and tokens[-1] in self.params.stop_token_ids:
            stop = tokens[-1]
        if reason == "error":
            stop = "the logits were not finite"
        if self.stream is not None:
            text = self.stream.push(tokens[:-1] if reason == "stop" else tokens)
            if self.stream.ended:
                reason, stop = "stop", self.stream.stop_reason
                tokens = tokens[: self.stream.kept - len(self.ids)]
        self.ids.extend(tokens)
        if nodes:
            self.nodes += nodes
            self.eager += eager
            self.emitted.append(len(tokens))
            self.undrafted += nodes == 1 and self.plan.budget > 0
            self.fruitless = self.fruitless + 1 if self.plan.budget and len(tokens) == 1 else 0
        else:
            self.first = time.perf_counter()
        return self.delta(tokens, text, logprobs[: len(tokens)], reason, stop)

    def delta(
        self,
        tokens: Sequence[int] = (),
        text: str = "",
        logprobs: Sequence[TokenLogprob] = (),
        reason: FinishReason | None = None,
        stop: int | str | None = None,
    ) -> Delta:
        """The step's addition; with a reason it is the last one and ends the request."""
        if reason is None:
            return Delta(self.id, self.place, self.sample, text, tuple(tokens), tuple(logprobs))
        self.finish, self.ended = reason, time.perf_counter()
        text += self.stream.flush() if self.stream else ""
        return Delta(
            self.id, self.place, self.sample, text, tuple(tokens), tuple(logprobs), reason, stop,
            Usage(len(self.prompt), len(self.ids)), self.stats(),
        )  # fmt: skip

    def stats(self) -> Stats:
        """Definitions: `Stats`."""
        steps, now = len(self.emitted), self.ended or time.perf_counter()
        first, started = self.first or now, self.started or now
        later = max(len(self.ids) - 1, 0)
        read = self.prefilled if self.limit else 0  # for no token no prompt is read
        reached = Counter(depth for n in self.emitted for depth in range(n - 1))
        decode = max(now - first, 1e-9)
        return Stats(
            mode=self.plan.mode,
            budget=self.plan.budget,
            gave_up=self.gave_up,
            undrafted=self.undrafted,
            steps=steps,
            drafted=self.nodes - steps,
            accepted=sum(max(n - 1, 0) for n in self.emitted),
            acceptance_length=sum(self.emitted) / steps if steps else 0.0,
            acceptance_by_depth=tuple(reached[d] / steps for d in range(max(reached, default=-1) + 1)),
            nodes_per_step=self.nodes / steps if steps else 0.0,
            time_to_first_token=first - self.born,
            time_per_output_token=decode / later if later else 0.0,
            tokens_per_second=later / decode,
            prompt_tokens_per_second=read / max(first - started, 1e-9),
            total_time=now - self.born,
            kv_tokens=read + later,
            eager_steps=self.eager,
            backend=self.backend,
        )


def results_of(requests: Sequence[Request], deltas: Sequence[Delta]) -> list[Result]:
    """The requests' deltas joined, one result a prompt, samples in order."""
    outputs: dict[int, list[Completion]] = {}
    for request in requests:
        own = [d for d in deltas if d.request == request.id]
        outputs.setdefault(request.place, []).append(completion(request, own))
    prompts = {r.place: r.prompt for r in requests}
    return [
        Result(prompts[place], tuple(done), Usage(len(prompts[place]), sum(len(c.token_ids) for c in done)))
        for place, done in outputs.items()
    ]


def completion(request: Request, deltas: list[Delta]) -> Completion:
    """One sample's deltas joined."""
    logprobs = tuple(lp for d in deltas for lp in d.logprobs) if request.params.logprobs is not None else None
    last = deltas[-1]
    assert last.finish_reason is not None and last.stats is not None
    return Completion(
        index=request.sample,
        text="".join(d.text for d in deltas),
        token_ids=tuple(t for d in deltas for t in d.token_ids),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        logprobs=logprobs,
        cumulative_logprob=sum(lp.logprob for lp in logprobs) if logprobs is not None else None,
        stats=last.stats,
    )
