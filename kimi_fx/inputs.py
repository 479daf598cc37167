"""Prompts as the command line names them: `prompt=`, `ids=`, `messages=`, or a file."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from . import strict_json
from .chat import check_messages, parse_messages
from .compose import sampling_from
from .config import Config, SamplingParams, package_path, problem

KINDS = ("prompt", "ids", "messages")
SHOWN = 20  # wrong lines of a file, at most


class Prompt(NamedTuple):
    """One prompt, with the sampling fields of its line."""

    value: Any  # a text, ids, or a chat
    fields: dict[str, Any]
    where: str = ""  # file and line, if it stands in one


def read_prompts(config: Config) -> list[Prompt]:
    """All prompts asked for.

    Raises ValueError if none or several sources are named, or a file cannot be read; of that the first wrong lines.
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
    return [Prompt(_value(name, value), {})]


def read_plain(config: Config) -> list[Prompt]:
    """The same for a command that samples all alike: raises ValueError as well for a line with fields."""
    read = read_prompts(config)
    for prompt in read:
        with standing(prompt.where):
            if prompt.fields:
                raise ValueError(f"all prompts are sampled alike: leave out {', '.join(prompt.fields)}.")
    return read


def check_shown(config: Config, prompts: Sequence[Prompt]) -> None:
    """Raises ValueError for what `generate` would not print."""
    if config.output == "text" and any(p.fields.get("logprobs", config.sampling.logprobs) is not None for p in prompts):
        raise ValueError("sampling.logprobs is printed with output=json only: add it, or leave logprobs out.")


def check_each(prompts: Sequence[Prompt], check: Callable[[Any, Any], object]) -> None:
    """Call `check` with each prompt and its fields; a ValueError then says where the prompt stands."""
    for prompt in prompts:
        with standing(prompt.where):
            check([prompt.value], [prompt.fields])


@contextmanager
def standing(where: str) -> Iterator[None]:
    """A ValueError in here begins with the place it is about."""
    try:
        yield
    except ValueError as error:
        lines = str(error).split("\n")
        raise ValueError("\n".join(f"{where}: {line}" if where else line for line in lines)) from None


def _read_file(path: Path) -> list[Prompt]:
    try:
        if not path.is_file():
            raise ValueError(f"prompts={path}: {'not a file' if path.exists() else 'there is no such file'}.")
        if path.suffix == ".safetensors":
            return [Prompt(row, {}, f"{path}, prompts[{i}]") for i, row in enumerate(_matrix(path))]
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"prompts={path}: not a text in UTF-8.") from None
    except OSError as error:
        raise ValueError(f"prompts={path}: cannot be read ({error.strerror or error}).") from None
    lines = enumerate(text.split("\n"), 1)  # not splitlines: JSON may hold other line separators
    prompts, wrong = [], []
    for number, text in lines:
        if text.strip():
            try:
                prompts.append(_line(text, f"{path}, line {number}"))
            except ValueError as error:
                wrong.append(str(error))
    if wrong:
        more = [f"and {len(wrong) - SHOWN} more."] if len(wrong) > SHOWN else []
        raise ValueError("\n".join([*wrong[:SHOWN], *more]))
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
    matrix = tensors["prompts"]
    if matrix.dim() != 2 or not len(matrix) or "int" not in str(matrix.dtype):
        raise ValueError(
            f"prompts={path}: `prompts` is {list(matrix.shape)} in {matrix.dtype}, wanted a matrix of ids: "
            "a prompt a row, one row or more, in a type of integers."
        )
    return matrix.tolist()


def _line(text: str, where: str) -> Prompt:
    with standing(where):
        record = strict_json.loads(text)
        if isinstance(record, str):
            return Prompt(record, {}, where)
        given = {k: v for k, v in record.items() if v is not None} if isinstance(record, dict) else {}
        kinds = [kind for kind in KINDS if kind in given]
        if len(kinds) != 1:
            raise ValueError("a line is an object with one of prompt, ids or messages, or a text.")
        value = _value(kinds[0], given.pop(kinds[0]))
        if isinstance(bias := given.get("logit_bias"), dict):  # JSON has no other keys than strings
            numbers = ((strict_json.whole(k) if k.isascii() and k.isdecimal() else k, v) for k, v in bias.items())
            with standing("logit_bias"):
                given["logit_bias"] = strict_json.unique(numbers)
        sampling_from(given, SamplingParams())
        return Prompt(value, given, where)


def _value(kind: str, value: Any) -> Any:
    if kind == "messages":
        return parse_messages(value) if isinstance(value, str) else check_messages(value)
    if line := problem(kind, value, f"{kind}={value!r:.60}"):
        raise ValueError(line)
    return list(value) if kind == "ids" else value
