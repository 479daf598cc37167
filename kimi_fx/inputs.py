"""Prompts as the command line names them: `prompt=`, `ids=`, `messages=`, or a file."""

from pathlib import Path
from typing import Any

from .chat import check_messages, parse_messages
from .checkpoint.files import parse_json
from .compose import sampling_from
from .config import Config, SamplingParams, package_path

KINDS = ("prompt", "ids", "messages")


def read_prompts(config: Config) -> list[tuple[Any, dict[str, Any]]]:
    """Each prompt (a text, ids, or a chat) with the sampling fields of its line.

    Raises ValueError if none or several sources are named, or a file cannot be read.
    """
    given = {name: getattr(config, name) for name in (*KINDS, "prompts") if getattr(config, name) is not None}
    if len(given) != 1:
        found = ", ".join(given) or "none"
        raise ValueError(f"Give one of prompt=, prompts=, ids= or messages=; found {found}.")
    ((name, value),) = given.items()
    if config.limit is not None and name != "prompts":
        raise ValueError(f"limit={config.limit} is of a file, and {name}= gives one prompt: leave it out.")
    if name == "prompts":
        return _read_file(package_path(value))[: config.limit]
    return [(_value(name, value), {})]


def _read_file(path: Path) -> list[tuple[Any, dict[str, Any]]]:
    try:
        if not path.is_file():
            raise ValueError(f"prompts={path}: {'not a file' if path.exists() else 'there is no such file'}.")
        if path.suffix == ".safetensors":
            return [(row, {}) for row in _matrix(path)]
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"prompts={path}: not a text in UTF-8.") from None
    except OSError as error:
        raise ValueError(f"prompts={path}: cannot be read ({error.strerror or error}).") from None
    lines = enumerate(text.split("\n"), 1)  # not splitlines: JSON may hold other line separators
    prompts = [_line(text, f"{path}, line {number}") for number, text in lines if text.strip()]
    if not prompts:
        raise ValueError(f"prompts={path}: the file holds no prompt.")
    return prompts


def _matrix(path: Path) -> list[list[int]]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise ValueError(f"prompts={path} is not a safetensors file: {error}.") from None
    if "prompts" not in tensors:
        raise ValueError(f"prompts={path} has no tensor `prompts`; it holds {', '.join(tensors) or 'none'}.")
    return tensors["prompts"].tolist()


def _line(text: str, where: str) -> tuple[Any, dict[str, Any]]:
    try:
        record = parse_json(text)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}.") from None
    if isinstance(record, str):
        return record, {}
    kinds = [kind for kind in KINDS if isinstance(record, dict) and kind in record]
    if len(kinds) != 1:
        raise ValueError(f"{where}: a line is an object with one of prompt, ids or messages, or a text.")
    fields = {key: value for key, value in record.items() if key not in KINDS and value is not None}
    if isinstance(bias := fields.get("logit_bias"), dict):  # JSON has no other keys than strings
        fields["logit_bias"] = {int(k) if k.isascii() and k.isdecimal() else k: v for k, v in bias.items()}
    try:
        sampling_from(fields, SamplingParams())
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return _value(kinds[0], record[kinds[0]], where), fields


def _value(kind: str, value: Any, where: str = "") -> Any:
    if kind == "prompt":
        if not isinstance(value, str):
            raise ValueError(f"{where}: prompt is {value!r}, wanted a text.")
        return value
    if kind == "messages":
        return parse_messages(value) if isinstance(value, str) else check_messages(value)
    return list(value) if isinstance(value, list | tuple) else [value]
