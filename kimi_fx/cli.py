"""The command line: `kimi-fx <command> key=value …`. Results on stdout, everything else on stderr.

Exit codes: 0 success, 1 something failed while running, 2 the request was wrong; 130 interrupted, 141 nobody reads
stdout any more, and 143 terminated are `__main__`'s.
"""

import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence

from . import __version__
from .bench import BENCHES, usage
from .config import environment
from .results import Delta
from .rules import nearest

USAGE = f"""usage: kimi-fx <command> [key=value …]

  generate   prompt="…" | prompts=FILE | ids=[…] | messages='[…]'   text as it comes, or output=json
  validate   the same prompts: speculation against plain decoding, reference against kernels
  inspect    target=FOLDER drafter=FOLDER   check a checkpoint without loading it
  doctor     the same keys as generate   check machine, checkpoint, requests, memory, links; memory=GB: plan only
  warmup     compile every step of a configuration into the artefact store, ahead of use
  config     print every key with its value, type and origin
  bench      {" | ".join(BENCHES)}
             kimi-fx bench NAME --help: what it measures, the keys it takes
  build      [arch=sm_80,sm_90a,sm_120]   compile the CUDA kernels

Keys are those `kimi-fx config` prints: groups are chosen by name or path (target=kimi_nano, step=chain), single
keys by dots (sampling.temperature=0, step.budget=15).
"""


def main(argv: Sequence[str] | None = None) -> int:
    args = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a text may have what a terminal's encoding has not
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115 (closed by the caller: nothing to say it to)
    if args[:1] == ["bench"] and "--help" in args[2:] and args[1] in BENCHES:
        print(usage(args[1]))
        return 0
    if not args or args[0] in ("-h", "--help", "help") or "--help" in args:
        print(USAGE, end="")
        return 0 if args else 2
    if args[0] == "--version":
        print(f"kimi_fx {__version__}")
        return 0
    name, overrides = args[0], args[1:]
    try:
        if name not in COMMANDS:
            near = nearest(name, COMMANDS)
            hint = f"did you mean {near}?" if near else f"there are {', '.join(COMMANDS)}."
            raise ValueError(f"no command {name!r}: {hint}")
        return follow(name, overrides) if environment("RANK") else COMMANDS[name](overrides)
    except ValueError as error:
        print(f"kimi-fx: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        raise  # the reader left: nothing more to say
    except (RuntimeError, OSError, MemoryError) as error:
        print(f"kimi-fx: {type(error).__name__}: {error}", file=sys.stderr)
        return 1


def follow(name: str, overrides: Sequence[str]) -> int:
    """A command in one of torchrun's processes: rank 0 runs it and speaks for all, the others follow."""
    from .doctor import shares_links
    from .follow import follow
    from .runtime import links
    from .runtime.ranks import launched_place

    place = launched_place()
    if place is None or place.rank == 0:
        return COMMANDS[name](overrides)
    if name == "doctor" and shares_links(overrides):
        return links.follow(place)
    return follow(place) if name in SHARED else 0


def generate(overrides: Sequence[str]) -> int:
    from .compose import check_used, load_config
    from .engine import Engine
    from .inputs import check_each, check_shown, read_prompts

    check_used("generate", overrides, {"budgets": "step.budget is that of a request"})
    config = load_config(overrides)
    read = read_prompts(config)
    prompts, fields = [p.value for p in read], [p.fields for p in read]
    check_shown(config, read)
    engine = Engine.open(config, check=lambda engine: check_each(read, engine.check))
    print(engine.settings(), file=sys.stderr)
    if config.output == "json":
        results = engine.generate(prompts, fields)
        for place, result in enumerate(results):
            print(json.dumps({"prompt": place} | result.to_dict()), flush=True)
        return int(any(c.finish_reason == "error" for r in results for c in r.outputs))
    lone = len(prompts) == 1 and fields[0].get("n", config.sampling.n) == 1
    return print_stream(engine.generate(prompts, fields, stream=True), lone)


def print_stream(deltas: Iterator[Delta], lone: bool) -> int:
    """A lone text as it comes; several ones whole, in the order they end, each under a heading."""
    failed = False
    texts: dict[tuple[int, int], str] = {}
    for delta in deltas:
        key = (delta.prompt, delta.index)
        if lone:
            print(delta.text, end="", flush=True)
        else:
            texts[key] = texts.get(key, "") + delta.text
        if delta.finished:
            failed |= delta.finish_reason == "error"
            heading = f"--- prompt {delta.prompt}, sample {delta.index}"
            print("" if lone else f"{heading}\n{texts.pop(key)}", flush=True)
            print(summary(delta) if lone else f"{heading} {summary(delta)}", file=sys.stderr)
    return int(failed)


def summary(delta: Delta) -> str:
    """One line about a finished sample."""
    s, usage = delta.stats, delta.usage
    assert s is not None and usage is not None
    why = f" ({delta.stop_reason})" if delta.finish_reason == "error" else ""
    pace = f"{usage.completion_tokens} tokens, {s.tokens_per_second:.1f} tokens/s"
    line = f"[{delta.finish_reason}{why}: {pace}, {s.mode}"
    if s.budget:
        line += f" of {s.budget}"
    if s.drafted:
        line += f", acceptance length {s.acceptance_length:.2f} (tokens a verify step, bonus included)"
    if s.undrafted:
        line += f", nothing drafted in {s.undrafted} of {s.steps} steps: the drafter's logits were not finite"
    if s.gave_up:
        line += f", no drafts after step {s.gave_up}: none was accepted"
    return line + "]"


def validate(overrides: Sequence[str]) -> int:
    from .validate import validate

    return validate(overrides)


def inspect(overrides: Sequence[str]) -> int:
    from .checkpoint.configs import read_target
    from .checkpoint.report import inspect
    from .compose import OF_REQUESTS, check_used, load_config
    from .runtime.load import drafter_folder, read_text, target_folder

    check_used("inspect", overrides, dict.fromkeys(OF_REQUESTS, "leave it out"))
    config = load_config(overrides)
    target, d = target_folder(config), config.drafter
    print(inspect(target, drafter_folder(config), config.target.lora_norm_eps, d.window, d.rope_amplitude))
    print(f"\n{read_text(target, read_target(target, None).V).describe()}")
    return 0


def doctor(overrides: Sequence[str]) -> int:
    from .doctor import command

    return command(overrides)


def warmup(overrides: Sequence[str]) -> int:
    from .warmup import command

    return command(overrides)


def config(overrides: Sequence[str]) -> int:
    from .compose import format_config

    print(format_config(overrides))
    return 0


def bench(overrides: Sequence[str]) -> int:
    from .bench import run

    return run(overrides)


def build(overrides: Sequence[str]) -> int:
    from .runtime.build import command

    return command(overrides)


COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "generate": generate,
    "validate": validate,
    "inspect": inspect,
    "doctor": doctor,
    "warmup": warmup,
    "config": config,
    "bench": bench,
    "build": build,
}
SHARED = ("generate", "validate", "warmup", "bench")  # commands that every rank takes part in
