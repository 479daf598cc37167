"""From overrides to a `Config`: the defaults, then the chosen presets, then `key=value` in the order given.

Presets are `conf/<group>/<name>.yaml`, chosen by the defaults list of `conf/config.yaml` or by `group=name`.
A value is YAML as OmegaConf reads it; a key of type str takes its text as it stands. Nothing is interpolated,
no key is added, and all that is wrong is raised at once. Looks into no checkpoint and at no device; of a path it asks
whether there can be one.
"""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from .config import KEYS, LIMITS, SYNONYMS, Config, SamplingParams, problem, synonym_problems, wanted
from .rules import cast, nearest

COMMAND_LINE = "command line"
OF_REQUESTS = ("prompt", "prompts", "ids", "messages", "limit", "budgets", "output")  # keys of what runs requests


class ConfigError(ValueError):
    """All that is wrong with a set of overrides, one problem a line."""


class Setting(NamedTuple):
    """One key as resolved."""

    key: str
    value: Any
    type: str  # and range, in words
    origin: str  # `default`, a preset's file, or `command line`


class Entry(NamedTuple):
    """One key as a preset or the command line sets it."""

    key: str
    value: Any
    origin: str
    shown: str  # key and value as written, for messages


def load_config(overrides: Sequence[str]) -> Config:
    """The configuration that overrides such as `["target=kimi_nano", "step.budget=15"]` ask for.

    Raises ConfigError, a ValueError that lists every problem.
    """
    settings = resolve(overrides)
    values = {setting.key: setting.value for setting in settings if "." not in setting.key}
    for group in {setting.key.partition(".")[0]: None for setting in settings if "." in setting.key}:
        values[group] = type(getattr(Config(), group))(**members(group, settings))
    return Config(**values)


def check_used(command: str, overrides: Sequence[str], unused: Mapping[str, str]) -> None:
    """Raise ConfigError for each key that a command has no use for; `unused` has what to do instead."""
    given = [(word.partition("=")[0], word) for word in overrides]
    lines = [f"{clip(word)}: {command} makes no use of it, {unused[key]}" for key, word in given if key in unused]
    if lines:
        raise ConfigError("\n".join(lines))


def resolve(overrides: Sequence[str]) -> list[Setting]:
    """Every key with its value, type and origin, in the order of the dataclasses. Raises ConfigError."""
    if isinstance(overrides, str) or not isinstance(overrides, Sequence):
        raise ConfigError(f"{clip(overrides)}: wanted a list of overrides, not one string")
    problems: list[str] = []
    settings = {key: Setting(key, attrgetter(key)(Config()), wanted(key), "default") for key in KEYS}
    choices, dotted = sort_overrides(overrides, problems)
    chosen = [entry for group, name in choices.items() for entry in preset(group, name, problems)]
    for key, value, origin, shown in [*chosen, *dotted]:
        if key not in KEYS:
            problems.append(unknown_key(key, value, shown))
        elif line := problem(key, value, shown):
            problems.append(line)
        else:
            value = cast(value, KEYS[key], LIMITS.get(key))
            settings[key] = Setting(key, value, wanted(key), origin)
    problems += conflicts(settings)
    if problems:
        raise ConfigError("\n".join(problems))
    return list(settings.values())


def format_config(overrides: Sequence[str]) -> str:
    """The resolved configuration in columns: key, value, type and range, origin and the default it hides."""
    rows = [("key", "value", "type", "origin")]
    for key, value, kind, origin in resolve(overrides):
        replaced = "" if origin == "default" else f" (default: {show(attrgetter(key)(Config()))})"
        rows.append((key, show(value), kind, origin + replaced))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def sampling_from(kwargs: Mapping[str, Any], base: SamplingParams) -> SamplingParams:
    """`base` with the keyword arguments of a Python call; a name given replaces its synonyms in `base` too.

    Raises ValueError with a line for each unknown name, wrong type, value out of range and conflict.
    """
    names = [field.name for field in fields(SamplingParams)]
    problems, good = [], {}
    for name, value in kwargs.items():
        if name not in names:
            problems.append(f"{name}: no such sampling parameter{suggestion(str(name), names)}")
        elif line := problem(f"sampling.{name}", value, f"{name}={value!r}"):
            problems.append(line)
        else:
            good[name] = value
    problems += synonym_problems(good)
    if problems:
        raise ValueError("\n".join(problems))
    unset = SamplingParams()
    for synonyms in SYNONYMS:
        if any(name in good for name in synonyms):
            good = {name: getattr(unset, name) for name in synonyms} | good
    return replace(base, **good)


def conf_folder() -> Path:
    """Where the presets are: inside an installed package, beside it in a repository."""
    inside = Path(__file__).parent / "conf"
    return inside if inside.is_dir() else Path(__file__).parents[1] / "conf"


def sort_overrides(overrides: Sequence[str], problems: list[str]) -> tuple[dict[str, str], list[Entry]]:
    """The preset of each group, and all other overrides."""
    defaults = read_yaml(conf_folder() / "config.yaml")["defaults"]
    usual = {group: name for choice in defaults for group, name in choice.items()}
    choices: dict[str, str] = {}
    dotted = []
    for override in overrides:
        key, equals, text = str(override).partition("=")
        if not equals or not key:
            problems.append(f"{clip(str(override))}: wanted key=value")
        elif key in usual:
            choices[key] = text
        else:
            shown = f"{clip(key)}={clip(text)}"
            dotted.append(Entry(key, parse(text, KEYS.get(key)), COMMAND_LINE, shown))
    named = {entry.key for entry in dotted}
    if choices.get("target", usual["target"]) != usual["target"] or "target.path" in named:
        usual["drafter"] = "none"  # the usual one was trained for the usual target
    if choices.get("drafter", usual["drafter"]) == "none" and "drafter.path" not in named:
        usual["step"] = "plain"
    return usual | choices, dotted


def preset(group: str, name: str, problems: list[str]) -> Iterator[Entry]:
    """What `group=name` sets. A folder in place of a name sets the path, and no preset applies."""
    file = conf_folder() / group / f"{name}.yaml"
    options = sorted(option.stem for option in file.parent.glob("*.yaml"))
    takes_folder = f"{group}.path" in KEYS
    if name in options:
        origin = f"conf/{group}/{name}.yaml"
        for key, value in read_yaml(file).items():
            yield Entry(f"{group}.{key}", value, origin, f"{origin}: {group}.{key}={value}")
    elif takes_folder and name and (name[0] in "~." or "/" in name or os.path.isdir(name)):
        yield Entry(f"{group}.path", name, COMMAND_LINE, f"{group}={clip(name)}")
    else:
        choice = ", ".join(options) + (" or a checkpoint folder" if takes_folder else "")
        problems.append(f"{group}={clip(name)}: no such preset; choose {choice}{suggestion(name, options)}")


def parse(text: str, hint: Any) -> Any:
    """The text of an override as a value for a field's type: strings as they stand, all else as YAML."""
    if text == "null":
        return None
    literal = hint in (None, str) or get_origin(hint) is Literal or str in get_args(hint)
    if literal and not (get_origin(hint) is tuple and text.startswith("[")):
        return text
    try:
        parsed: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))
    except (YAMLError, OmegaConfBaseException, ValueError, RecursionError):  # as it stands, for its type to be judged
        return text
    return parsed["value"]


def read_yaml(file: Path) -> dict[str, Any]:
    """A file of presets as plain containers."""
    read: Any = OmegaConf.to_container(OmegaConf.load(file))
    return read


def conflicts(settings: Mapping[str, Setting]) -> list[str]:
    """A line for each pair of settings that cannot hold together."""
    problems = []
    budget = settings["step.budget"].value
    if settings["step.mode"].value == "plain" and budget:
        problems.append(f"step.budget={budget}: step.mode=plain drafts nothing; choose step=tree or chain")
    given = [setting for setting in settings.values() if setting.origin != "default"]
    try:
        sampling_from(members("sampling", given), SamplingParams())
    except ValueError as error:
        problems += [f"sampling.{line}" for line in str(error).splitlines()]
    return problems


def members(group: str, settings: Iterable[Setting]) -> dict[str, Any]:
    """Field names and values of one group."""
    prefix = f"{group}."
    return {s.key.removeprefix(prefix): s.value for s in settings if s.key.startswith(prefix)}


def unknown_key(key: str, value: Any, shown: str) -> str:
    """A line about a key that does not exist; a bare field name suggests its full key."""
    inside = [known for known in KEYS if known.startswith(f"{key}.")]
    if inside:
        one = f"{inside[0]}={show(attrgetter(inside[0])(Config()))}"
        return f"{key} is a group of keys and takes no value such as {clip(repr(value))}: set its keys, such as {one}"
    by_name = {known.rpartition(".")[2]: known for known in KEYS} | {known: known for known in KEYS}
    near = nearest(key, by_name)
    return f"{shown}: no such key" + (f"; did you mean {by_name[near]}?" if near else "")


def suggestion(name: str, names: Iterable[str]) -> str:
    """`; did you mean …?` where a known name is close, else nothing."""
    near = nearest(name, names)
    return f"; did you mean {near}?" if near else ""


def show(value: Any) -> str:
    """A value as one would write it in an override, on one line."""
    return clip(value) if isinstance(value, str) else clip(json.dumps(value, ensure_ascii=False))


def clip(text: str) -> str:
    """A user's text fit for one line of a message."""
    short = text if len(text) <= 60 else text[:59] + "…"
    return short if short and short.isprintable() and short.strip() == short else repr(short)
