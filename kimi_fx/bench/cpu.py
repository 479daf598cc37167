"""`kimi-fx bench cpu`: Hugging Face, plain, and trees on the same threads, as ratios of one run.

Needs the `test` extra. Greedy, batch 1, ignore_eos. Every prompt goes through all of them before the next one, so that
a busy machine slows all alike; times are whole calls, prefill included.
"""

import time
from collections.abc import Callable, Sequence

import torch

from ..compose import check_used, load_config
from ..config import KEYS, Mode
from ..engine import Engine
from ..inputs import check_each, read_plain
from ..runtime.load import target_folder
from . import acceptance
from .huggingface import check_installed, huggingface
from .record import record, say, table

USUAL = [
    "device=cpu",
    "dtype=float32",
    "budgets=[7,15]",
    "prompts=kimi_fx:nano/acceptance-prompts.safetensors",
    "limit=12",
    "sampling.max_tokens=128",
]
SAMPLING = {key: "its texts are greedy" for key in KEYS if key.startswith("sampling.") and key != "sampling.max_tokens"}
UNUSED = SAMPLING | acceptance.UNUSED
Way = Callable[[list[int]], list[int]]


def run(overrides: Sequence[str]) -> int:
    check_used("bench cpu", overrides, UNUSED)
    check_installed()
    config = load_config([*USUAL, *overrides])
    read = read_plain(config)
    prompts = [prompt.value for prompt in read]
    tokens = config.sampling.limit or 1
    engine = Engine.open(config, check=lambda engine: check_each(read, engine.check))
    peer = huggingface(target_folder(config), engine.model.target.lora_norm_eps)

    def ours(mode: Mode, budget: int | None) -> Way:
        how = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        return lambda ids: list(engine.generate(ids, how, mode=mode, budget=budget).outputs[0].token_ids)

    def theirs(ids: list[int]) -> list[int]:
        how = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
        return peer.generate(torch.tensor([ids]), **how)[0, len(ids) :].tolist()

    ways = {"Hugging Face": theirs, "plain": ours("plain", None)}
    ways |= {f"tree of {n}": ours("tree", n) for n in config.budgets}
    seconds = compare(ways, prompts)
    rows = [["", "seconds", "tokens/s", "over Hugging Face", "over plain"]]
    for name, s in seconds.items():
        ratios = [f"{seconds[base] / s:.2f}x" for base in ("Hugging Face", "plain")]
        rows.append([name, f"{s:.2f}", f"{len(prompts) * tokens / s:.1f}", *ratios])
    print(table(rows))
    print(f"\n{len(prompts)} prompts, {tokens} tokens each, batch 1. {record(config, engine.loaded)}")
    return 0


def compare(ways: dict[str, Way], prompts: list[list[int]]) -> dict[str, float]:
    """Seconds each way takes over all prompts; RuntimeError if one gives other ids than the first."""
    seconds = dict.fromkeys(ways, 0.0)
    for way in ways.values():
        way(prompts[0])  # first calls are slow
    for i, ids in enumerate(prompts):
        texts = {}
        for name, way in ways.items():
            begun = time.perf_counter()
            texts[name] = way(ids)
            seconds[name] += time.perf_counter() - begun
        say(f"prompt {i + 1} of {len(prompts)}")
        other = [name for name, text in texts.items() if text != texts[next(iter(ways))]]
        if other:
            raise RuntimeError(f"prompt {i}: {', '.join(other)} gave other ids than {next(iter(ways))}.")
    return seconds
