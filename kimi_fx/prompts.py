"""Whatever a caller calls a prompt (text, ids, a chat, or a list of them) as lists of ids."""

from typing import Any

from .chat import render_chat
from .config import Config
from .runtime.load import Loaded
from .tokenizer import Tokenizer

Prompts = Any  # a text, a sequence or array of ids, a chat, or a list of those


def to_ids(prompts: Prompts, messages: Prompts, loaded: Loaded, config: Config) -> tuple[list[list[int]], bool]:
    """Ids of each prompt, and whether a single one was given. Raises ValueError naming what cannot be read."""
    if (prompts is None) == (messages is None):
        raise ValueError("Give either prompts (texts or ids) or messages (a chat), one of the two.")
    if prompts is None:
        several = isinstance(messages, list | tuple) and all(isinstance(item, list | tuple) for item in messages)
        chats = messages if several and messages else [messages]
        return [_chat(chat, loaded, config) for chat in chats], chats is not messages
    given = _plain(prompts)
    if not isinstance(given, str | list | tuple) or isinstance(given, list | tuple) and not given:
        raise ValueError(f"The prompt is {given!r}: give a text, a list of ids, a chat, or a list of those.")
    given = given if isinstance(given, str) else [_plain(item) for item in given]
    if len({isinstance(item, str | list | tuple) for item in given}) > 1:
        raise ValueError("The list mixes prompts with bare ids: give one list of ids, or a list of prompts.")
    single = isinstance(given, str) or not isinstance(given[0], str | list | tuple)
    return [_ids(one, loaded, config) for one in ([given] if single else given)], single


def _ids(prompt: Any, loaded: Loaded, config: Config) -> list[int]:
    if isinstance(prompt, str):
        tokenizer = _tokenizer(loaded)
        return ([tokenizer.bos] if config.target.bos else []) + tokenizer.encode(prompt)
    if isinstance(prompt, list | tuple) and any(isinstance(item, dict) for item in prompt):
        return _chat(prompt, loaded, config)
    return list(prompt) if isinstance(prompt, list | tuple) else [prompt]


def _chat(messages: Any, loaded: Loaded, config: Config) -> list[int]:
    return render_chat(messages, _tokenizer(loaded), config.chat.thinking, loaded.text.template)


def _tokenizer(loaded: Loaded) -> Tokenizer:
    if loaded.text.tokenizer is None:
        raise ValueError("The checkpoint has no tiktoken.model, so a text cannot be read: give token ids.")
    return loaded.text.tokenizer


def _plain(value: Any) -> Any:
    """An array or tensor as lists and numbers."""
    return value.tolist() if hasattr(value, "tolist") else value
