"""Is speculation lossless here? Every prompt in plain, chain and tree, and with the reference operators.

The first difference against plain decoding is judged by the gap between the two best logits there: under the
tolerance (four times the RMS difference of the shared tokens' log-probabilities) it is rounding, above it a fault.
In fp32 any difference is a fault. Compares greedy text, whatever sampling.temperature is. Every run has one seed, which
is printed, so that a verdict can be repeated.
"""

import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from .compose import check_used, load_config
from .config import Mode
from .engine import Engine
from .inputs import Prompt, check_each, read_prompts
from .ops import REFERENCE
from .results import Completion, Result
from .runtime.rounds import eager

TOLERANCE = 4.0  # in RMS differences


@dataclass(frozen=True)
class Verdict:
    """How one prompt's ids compare with plain decoding's."""

    prompt: int
    what: str
    same: int  # leading tokens that agree
    tokens: int
    gap: float | None  # between plain's two best logits at the first difference; None: there is none
    tolerance: float
    acceptance: float
    error: str | None  # why a run could not be finished

    @property
    def good(self) -> bool:
        return not self.error and (self.gap is None or self.gap <= self.tolerance)

    def __str__(self) -> str:
        line = f"prompt {self.prompt}  {self.what:<12}"
        if self.error:
            return f"{line} ERROR: {self.error}"
        if self.gap is None:
            steps = f", acceptance length {self.acceptance:.2f}" if self.acceptance else ""
            return f"{line} equal, {self.tokens} tokens{steps}"
        word = "near tie" if self.good else "DIFFERENT"
        return f"{line} {word} after {self.same} tokens: gap {self.gap:.2e}, tolerance {self.tolerance:.2e}"


def validate(overrides: Sequence[str]) -> int:
    """Print a verdict per prompt and comparison; 0 if all are good, else 1."""
    check_used("validate", overrides, {"budgets": "give step.budget", "output": "leave it out"})
    config = load_config(overrides)
    seed = secrets.randbits(32) if config.sampling.seed is None else config.sampling.seed
    own = {"temperature": 0, "logprobs": 2, "n": 1}
    read = [p._replace(fields={"seed": seed} | p.fields | own) for p in read_prompts(config)]
    prompts, params = [p.value for p in read], [p.fields for p in read]
    engine = Engine.open(config, check=lambda engine: comparable(engine, read))
    print(f"temperature 0, whatever sampling.temperature is; sampling.seed={seed}", file=sys.stderr)
    loaded = engine.loaded
    modes: list[Mode] = ["plain", "chain", "tree"] if loaded.params.drafter else ["plain"]
    budgets = {config.step.mode: config.step.budget}
    runs: dict[str, list[Result]] = {
        mode: engine.generate(prompts, params, mode=mode, budget=budgets.get(mode)) for mode in modes
    }
    if config.mesh.tp > 1:
        print("with mesh.tp above 1 the kernels are not compared with the reference", file=sys.stderr)
    elif not engine.rounds and loaded.model.ops is REFERENCE:
        why = "ops=reference asks for none" if config.ops == "reference" else "there are none for this device"
        print(f"the kernels are not compared with the reference: {why}", file=sys.stderr)
    else:
        plain = Engine(eager(config), replace(loaded, model=replace(loaded.model, ops=REFERENCE)))
        runs["reference"] = plain.generate(prompts, params, mode="plain")
    exact = loaded.dtype == torch.float32
    verdicts = [v for what in list(runs)[1:] for v in judge(what, runs["plain"], runs[what], exact)]
    for verdict in sorted(verdicts, key=lambda v: v.prompt):
        print(verdict)
    bad = sum(not v.good for v in verdicts)
    print(f"{len(verdicts) - bad} of {len(verdicts)} comparisons good", file=sys.stderr)
    return int(bad > 0)


def comparable(engine: Engine, prompts: list[Prompt]) -> None:
    """Raises ValueError where there is nothing to compare, or a prompt that cannot run."""
    if engine.model.drafter is None and engine.model.ops is REFERENCE and not engine.rounds:
        raise ValueError("There is nothing to compare plain decoding with: validate needs a drafter, or a CUDA device.")
    check_each(prompts, engine.check)


def judge(what: str, plain: Sequence[Result], other: Sequence[Result], exact: bool) -> list[Verdict]:
    """Verdicts of one run against plain decoding; `exact`: no difference is forgiven."""
    pairs = [(p.outputs[0], o.outputs[0]) for p, o in zip(plain, other, strict=True)]
    tolerance = 0.0 if exact else TOLERANCE * rms(pairs)
    return [verdict(i, what, p, o, tolerance) for i, (p, o) in enumerate(pairs)]


def verdict(prompt: int, what: str, plain: Completion, other: Completion, tolerance: float) -> Verdict:
    same, gap = agreement(plain, other), None
    if plain.token_ids != other.token_ids:
        gap = float("inf")  # one text is the other's beginning
        if same < min(len(plain.token_ids), len(other.token_ids)) and plain.logprobs:
            (_, best), (_, second) = plain.logprobs[same].top[:2]
            gap = best - second
    error = next((str(c.stop_reason) for c in (plain, other) if c.finish_reason == "error"), None)
    return Verdict(prompt, what, same, len(plain.token_ids), gap, tolerance, other.stats.acceptance_length, error)


def agreement(a: Completion, b: Completion) -> int:
    """Leading ids in common."""
    return next((i for i, (x, y) in enumerate(zip(a.token_ids, b.token_ids, strict=False)) if x != y),
                min(len(a.token_ids), len(b.token_ids)))  # fmt: skip


def rms(pairs: Sequence[tuple[Completion, Completion]]) -> float:
    """RMS difference of log-probabilities over the tokens that both runs share."""
    differences = [
        x.logprob - y.logprob
        for a, b in pairs
        for x, y, _ in zip(a.logprobs or (), b.logprobs or (), range(agreement(a, b)), strict=False)
    ]
    return (sum(d * d for d in differences) / max(len(differences), 1)) ** 0.5
