"""What a request may ask of the loaded models: its draft plan, its length, its defaults. Pure checks, in sentences."""

from collections.abc import Sequence
from dataclasses import replace

from .config import MAX_TOKENS, PAGE, STOP_SLOTS, Config, Mode, SamplingParams
from .graphs.state import Model
from .request import Plan
from .runtime.load import Loaded

TREE_BUDGET = 15


def plan(config: Config, model: Model, mode: Mode, budget: int | None) -> Plan:
    """How a request in `mode` drafts. Raises ValueError for a budget or a mode that cannot be had."""
    if mode not in ("plain", "chain", "tree"):
        raise ValueError(f"mode={mode!r} is unknown: use plain, chain or tree.")
    if isinstance(budget, bool) or not (budget is None or isinstance(budget, int) and 0 <= budget < 128):
        raise ValueError(f"budget={budget!r} is out of range: give 0 to 127 drafted nodes a round.")
    if mode != "plain" and model.drafter is None:
        raise ValueError(f"mode={mode} needs a drafter and none is loaded: set drafter=<name or path>, or mode=plain.")
    trained = model.drafter.block if model.drafter else 1
    block = config.step.block or trained
    if block > trained:
        raise ValueError(
            f"step.block={block} is more than the {trained} slots the drafter was trained for: give 1 to {trained}."
            if model.drafter
            else f"step.block={block} needs a drafter and none is loaded: set drafter=<name or path>."
        )
    if mode == "plain":
        if budget:
            raise ValueError(f"budget={budget} was asked for with mode=plain, which drafts nothing: use chain or tree.")
        return Plan(mode, 0, 1)
    if mode == "chain":
        if budget is not None and budget > block - 1:
            raise ValueError(
                f"budget={budget} is more than a chain can hold: a block of {block} slots drafts {block - 1} tokens."
            )
        return Plan(mode, block - 1 if budget is None else budget, 1)
    nodes = TREE_BUDGET if budget is None else budget
    return Plan(mode, nodes if block > 1 else 0, max(nodes, 1))


def longest(config: Config, model: Model) -> int:
    """Tokens a request may have, prompt and output together. Raises ValueError above a model's own limit."""
    own = {"target": model.target.max_position}
    if model.drafter:
        own["drafter"] = model.drafter.max_position
    asked = config.cache.max_len or min(own.values())
    for name, limit in own.items():
        if asked > limit:
            raise ValueError(f"cache.max_len={asked} is more than the {limit} positions the {name} was made for.")
    return asked


def complete(p: SamplingParams, loaded: Loaded) -> SamplingParams:
    """Fill what was left open from the checkpoint's generation_config, then from our defaults."""
    d = loaded.text.defaults
    return replace(
        p,
        temperature=d.get("temperature", 1.0) if p.temperature is None else p.temperature,
        top_p=d.get("top_p", 1.0) if p.top_p is None else p.top_p,
        top_k=int(d.get("top_k", 0)) if p.top_k is None else p.top_k,
    )


def stops(p: SamplingParams, loaded: Loaded) -> tuple[int, ...]:
    """Ids that end the request."""
    own = () if p.ignore_eos else loaded.text.stop_ids
    return tuple(dict.fromkeys((*own, *p.stop_token_ids)))


def token_limit(prompt: Sequence[int], p: SamplingParams, loaded: Loaded, max_len: int, pages: int) -> int:
    """Ids the request may emit. Raises ValueError if it can never run as asked."""
    V, ends = loaded.model.target.V, stops(p, loaded)
    held, holder = min((max_len, "the context"), (pages * PAGE, "the pool (cache.tokens)"))
    room = held - len(prompt)
    if not len(prompt):
        raise ValueError("The prompt is empty: give at least one token.")
    outside = [t for t in prompt if isinstance(t, bool) or not isinstance(t, int) or not 0 <= t < V]
    if outside:
        raise ValueError(f"The prompt holds {outside[0]!r}, which is no token id: ids are 0 to {V - 1}.")
    if room < 1:
        raise ValueError(f"The prompt has {len(prompt)} tokens and {holder} holds {held}: shorten the prompt.")
    if p.limit is not None and p.limit > room:
        raise ValueError(
            f"max_tokens={p.limit} after a prompt of {len(prompt)} tokens is more than {holder} of {held}: "
            f"at most {room} fit."
        )
    limit = min(MAX_TOKENS, room) if p.limit is None else p.limit
    if p.least > limit:
        raise ValueError(f"min_tokens={p.least} is more than the {limit} tokens that fit or are asked for.")
    if len(ends) > STOP_SLOTS:
        raise ValueError(f"{len(ends)} stop ids were asked for, the model's own included: at most {STOP_SLOTS}.")
    if p.stop and loaded.text.tokenizer is None:
        raise ValueError("The checkpoint has no tiktoken.model, so a stop string cannot be found in ids.")
    for field, ids in (("stop_token_ids", p.stop_token_ids), ("logit_bias", p.logit_bias or {})):
        if strange := [t for t in ids if not 0 <= t < V]:
            raise ValueError(f"{field} names id {strange[0]}: ids are 0 to {V - 1}.")
    return limit
