"""Chat messages become the ids of a prompt, in the format of Kimi K2.5 or by the checkpoint's own template.

What a user wrote (content, name, reasoning) is always text, also where it looks like a control string. Tools
and images are refused. Parsing the model's answer is not done here.
"""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2.sandbox import ImmutableSandboxedEnvironment

from . import strict_json
from .checkpoint.files import text_of
from .rules import nearest
from .tokenizer import Tokenizer, settings

ROLES = ("system", "user", "assistant")
KEYS = ("role", "content", "name", "reasoning_content", "reasoning")
TOOL_KEYS = ("tools", "tool_calls", "tool_call_id", "functions", "function_call")


def render_chat(
    messages: Sequence[Mapping[str, Any]],
    tokenizer: Tokenizer,
    thinking: bool = True,
    template: str | None = None,
) -> list[int]:
    """Ids of the prompt that asks for the assistant's next turn; no BOS.

    `messages` are {role, content} with an optional name and reasoning_content (or reasoning); null is absent.
    `thinking` leaves the answer's thinking block open. With a `template` (see `load_template`) the format is
    its own, and `thinking` is a variable it may read. ValueError for messages that are not as described.
    """
    checked = check_messages(messages)
    if template is None:
        return k2_prompt(checked, tokenizer, thinking)
    return template_prompt(checked, tokenizer, thinking, template)


def load_template(folder: Path) -> str | None:
    """The folder's `chat_template.jinja`, else `chat_template` in its tokenizer_config.json, else None. ValueError for
    a file that cannot be read as UTF-8."""
    path = folder / "chat_template.jinja"
    if os.path.lexists(path):
        return text_of(path)
    template = settings(folder / "tokenizer_config.json").get("chat_template")
    return template if isinstance(template, str) else None


def parse_messages(text: str) -> list[dict[str, str]]:
    """Messages from JSON text, checked."""
    try:
        messages = strict_json.loads(text)
    except ValueError as error:
        raise ValueError(f"messages: {error}") from None
    return check_messages(messages)


def k2_prompt(messages: list[dict[str, str]], tokenizer: Tokenizer, thinking: bool) -> list[int]:
    """The format of K2.5 and later: role, name, middle, body, end. Earlier answers keep no reasoning, and no
    system message is added."""
    control = tokenizer.control_id
    no_thinking = [control("<think>"), control("</think>")]
    ids = []
    for message in messages:
        role = message["role"]
        name = tokenizer.encode(message.get("name") or role)
        body = tokenizer.encode(message["content"])
        ids += [control(f"<|im_{role}|>"), *name, control("<|im_middle|>")]
        ids += [*(no_thinking if role == "assistant" else []), *body, control("<|im_end|>")]
    ids += [control("<|im_assistant|>"), *tokenizer.encode("assistant"), control("<|im_middle|>")]
    return ids + (no_thinking[:1] if thinking else no_thinking)


def template_prompt(messages: list[dict[str, str]], tokenizer: Tokenizer, thinking: bool, template: str) -> list[int]:
    """Render a Jinja template in a sandbox; control strings that it writes become control ids.

    The template sees messages, thinking, add_generation_prompt (true), bos_token and eos_token. While it is
    rendered, what users wrote carries a mark, an unused character, before its first visible character and
    after each that can begin a control string. So no control string is user text, wholly or in part, and a
    template that looks for strings in contents finds none. The marks are gone before encoding.
    """
    used = template + "".join(text for message in messages for text in message.values())
    mark = next(chr(code) for code in range(0xF0000, 0xFFFFE) if chr(code) not in used)
    ids = {name: id for id, name in tokenizer.special.items()}
    begins = re.compile(rf"\A\s*(?=\S)|[{re.escape(''.join({name[0] for name in ids}))}]")

    def guard(text: str) -> str:
        return begins.sub(lambda found: found[0] + mark, text)

    guarded = [{k: v if k == "role" else guard(v) for k, v in message.items()} for message in messages]
    try:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = refuse
        rendered = environment.from_string(template).render(
            messages=guarded,
            thinking=thinking,
            add_generation_prompt=True,
            bos_token=tokenizer.special[tokenizer.bos],
            eos_token=tokenizer.special[tokenizer.eos],
        )
    except Exception as error:  # whatever foreign code raises is its failure, not ours
        reason = str(error).replace(mark, "")
        raise ValueError(f"the checkpoint's chat template failed: {reason}") from error
    parts = re.split(f"({'|'.join(map(re.escape, ids))})", rendered)
    encoded = ([ids[part]] if part in ids else tokenizer.encode(part.replace(mark, "")) for part in parts)
    return [id for part in encoded for id in part]


def refuse(message: str) -> None:
    """`raise_exception` of chat templates."""
    raise ValueError(message)


def check_messages(messages: Any) -> list[dict[str, str]]:
    """The messages without their nulls. ValueError for the first mistake, with the message's index."""
    if not isinstance(messages, list | tuple):
        raise ValueError(f"messages must be a list of {{role, content}}, not {type(messages).__name__}")
    if not messages:
        raise ValueError("messages is empty: give at least one {role, content}")
    return [check_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def check_message(message: Any, where: str) -> dict[str, str]:
    """One message without its nulls; `where` names it in errors."""
    if not isinstance(message, Mapping):
        raise ValueError(f"{where} must be an object {{role, content}}, not {type(message).__name__}")
    message = {key: value for key, value in message.items() if value is not None}
    tools = [key for key in TOOL_KEYS if key in message] + ["role 'tool'"] * (message.get("role") == "tool")
    if tools:
        raise ValueError(f"{where} has {tools[0]}: tools are not supported")
    for key in message:
        if key not in KEYS:
            raise ValueError(f"{where} has an unknown key {key!r}; {suggestion(key, KEYS)}")
    for key in ("role", "content"):
        if key not in message:
            raise ValueError(f"{where} has no {key}")
    for key, value in message.items():
        if not isinstance(value, str):
            raise ValueError(f"{where}: {key} must be a string, not {type(value).__name__}{media(value)}")
    if message["role"] not in ROLES:
        role = message["role"]
        raise ValueError(f"{where} has an unknown role {role!r}; {suggestion(role, ROLES)}")
    return message


def media(value: Any) -> str:
    """What to add about content given as parts."""
    parts = value if isinstance(value, list) else []
    kinds = [str(part.get("type")) for part in parts if isinstance(part, Mapping)]
    found = [kind for kind in kinds if "image" in kind or "video" in kind]
    return f" with a part of type {found[0]!r}: images and video are not supported" if found else ""


def suggestion(word: Any, known: Sequence[str]) -> str:
    """What to say after an unknown word."""
    close = nearest(str(word), known)
    return f"did you mean {close!r}?" if close else f"known are {', '.join(known)}"
