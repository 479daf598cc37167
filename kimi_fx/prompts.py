"""Whatever a caller calls a prompt (text, ids, a chat, or a list of them) as lists of ids."""

from typing import Any

from .chat import render_chat
from .config import Config
from .runtime.load import Loaded

Prompts = Any  # a text, a sequence or array of ids, a chat, or a list of those


def to_ids(prompts: Prompts, messages: Prompts, loaded: Loaded, config: Config) -> tuple[list[list[int]], bool]:
    """Ids of each prompt, and whether a single one was given. Raises ValueError naming what cannot be read."""
    if (prompts is None) == (messages is None):
        raise ValueError("Give either prompts (texts or ids) or messages (a chat), one of the two.")
    given = messages if prompts is None else prompts
    given = _plain(given)
    if not isinstance(given, str | list | tuple) or isinstance(given, list | tuple) and not given:
        raise ValueError(f"The prompt is {given!r}: give a text, a list of ids, a chat, or a list of those.")
    given = given if isinstance(given, str) else [_plain(item) for item in given]
    single = isinstance(given, str) or not isinstance(given[0], str | list | tuple)
    return [_ids(one, loaded, config) for one in ([given] if single else given)], single


def _ids(prompt: Any, loaded: Loaded, config: Config) -> list[int]:
    chat = isinstance(prompt, list | tuple) and any(isinstance(item, dict) for item in prompt)
    if not isinstance(prompt, str) and not chat:
        return list(prompt) if isinstance(prompt, list | tuple) else [prompt]
    tokenizer = loaded.text.tokenizer
    if tokenizer is None:
        raise ValueError("The checkpoint has no tiktoken.model, so a text cannot be read: give token ids.")
    if chat:
        return render_chat(prompt, tokenizer, config.chat.thinking, loaded.text.template)
    bos = [tokenizer.bos] if config.target.bos else []
    return bos + tokenizer.encode(prompt)


def _plain(value: Any) -> Any:
    """An array or tensor as lists and numbers."""
    return value.tolist() if hasattr(value, "tolist") else value
