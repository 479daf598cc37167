"""Text to ids and back with the Kimi K2 vocabulary: `tiktoken.model` and the control ids above its ranks.

User text never becomes a control id: `encode` takes control strings as plain text, and `chat.py` puts control
ids in by number. Decoding is exact on bytes; incremental decoding is in `text.py`. Also reads what the
checkpoint's JSON files say of stop ids and sampling defaults. Adds no BOS.
"""

import base64
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tiktoken

from .checkpoint.files import read_file, read_json
from .config import STOP_SLOTS

CONTROL_IDS = 256  # ids above the ranks

# K2's names, by distance from the first control id (163584 in K2 itself).
CONTROL_NAMES = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|im_end|>",
    3: "<|im_user|>",
    4: "<|im_assistant|>",
    6: "<|start_header_id|>",
    7: "<|end_header_id|>",
    9: "[EOT]",
    10: "<|im_system|>",
    11: "<|tool_calls_section_begin|>",
    12: "<|tool_calls_section_end|>",
    13: "<|tool_call_begin|>",
    14: "<|tool_call_argument_begin|>",
    15: "<|tool_call_end|>",
    17: "<|im_middle|>",
    18: "<|media_begin|>",
    19: "<|media_content|>",
    20: "<|media_end|>",
    21: "<|media_pad|>",
    22: "<think>",
    23: "</think>",
    254: "[UNK]",
    255: "[PAD]",
}
VISIBLE_NAMES = {name for name in CONTROL_NAMES.values() if "tool_call" in name or "think" in name}

CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
SPLIT = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)

LONGEST_TEXT = 400_000  # characters handed to tiktoken at once, as the family's own tokenizer does
LONGEST_RUN = 25_000  # characters of one run of spaces or of non-spaces: longer ones can overflow its stack


@dataclass(frozen=True)
class Tokenizer:
    """Ids 0..ranks-1 are byte strings, the 256 above them control ids. Build it with `load_tokenizer`."""

    encoding: tiktoken.Encoding
    special: dict[int, str]
    """Name of every control id."""
    hidden: frozenset[int]
    """Control ids flagged special: no text by default. K2 does not flag thinking and tool markers."""
    bos: int
    eos: int

    @property
    def size(self) -> int:
        """Ids in all, control ids included."""
        return self.encoding.n_vocab

    def encode(self, text: str) -> list[int]:
        """Ids of the text; control strings in it are text. A lone surrogate becomes U+FFFD."""
        return [id for piece in pieces(text) for id in self.encoding.encode_ordinary(piece)]

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of the ids; invalid UTF-8 becomes U+FFFD. ValueError for an id outside the vocabulary."""
        hidden = self.hidden if skip_special else ()
        return b"".join(self.token_bytes(id) for id in ids if id not in hidden).decode("utf-8", "replace")

    def token_bytes(self, id: int) -> bytes:
        """The id's bytes; of a control id, its name."""
        if not 0 <= id < self.size:
            raise ValueError(f"token id {id} is not in the vocabulary: ids are 0..{self.size - 1}")
        return self.encoding.decode_single_token_bytes(id)

    def token_text(self, id: int) -> str:
        """The id alone as text; incomplete UTF-8 becomes U+FFFD, a control id is its name."""
        return self.token_bytes(id).decode("utf-8", "replace")

    def control_id(self, name: str) -> int:
        """Id of a control string. ValueError where the tokenizer has none of that name."""
        for id, known in self.special.items():
            if known == name:
                return id
        raise ValueError(f"the tokenizer has no control id named {name}")


def load_tokenizer(folder: Path, vocab: int | None = None) -> Tokenizer:
    """Read `tiktoken.model` and `tokenizer_config.json` of a checkpoint folder.

    `vocab` is the model's vocabulary size: another size is refused. Without names in the configuration the
    control ids have K2's own. ValueError for a file that is absent, damaged, or at odds with the other.
    """
    ranks = read_ranks(folder / "tiktoken.model")
    path = folder / "tokenizer_config.json"
    config = settings(path)
    special, hidden = control_table(path, config, len(ranks))
    size = len(ranks) + CONTROL_IDS
    if vocab is not None and vocab != size:
        raise ValueError(
            f"{folder}: the tokenizer has {size} ids ({len(ranks)} ranks and {CONTROL_IDS} control ids), "
            f"but the model's vocabulary is {vocab}: their files belong to different models"
        )
    ids = {name: id for id, name in special.items()}
    encoding = tiktoken.Encoding("kimi_k2", pat_str=SPLIT, mergeable_ranks=ranks, special_tokens=ids)
    bos = named_id(path, config, ids, "bos_token", "[BOS]")
    eos = named_id(path, config, ids, "eos_token", "[EOS]")
    return Tokenizer(encoding, special, hidden, bos, eos)


def stop_ids(folder: Path, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Ids that end an answer, ascending: all that generation_config.json, config.json (outer and text_config)
    and the tokenizer name, and the end of a chat turn. ValueError if there is none, as nothing is assumed, or more
    than a request can have.
    """
    generation, model = folder / "generation_config.json", folder / "config.json"
    config = settings(model)
    named = {
        generation: eos_ids(generation, settings(generation)),
        model: eos_ids(model, config) | eos_ids(model, config.get("text_config") or {}),
    }
    found: set[int] = set().union(*named.values())
    if tokenizer is not None:
        found |= {tokenizer.eos} | {id for id, name in tokenizer.special.items() if name == "<|im_end|>"}
        if max(found) >= tokenizer.size:
            raise ValueError(f"{folder}: eos_token_id {max(found)} is not in the {tokenizer.size} ids")
    if not found:
        raise ValueError(f"{folder}: no stop id; set eos_token_id in generation_config.json or config.json")
    if len(found) > STOP_SLOTS:
        most = max(named, key=lambda path: len(named[path]))
        raise ValueError(
            f"{most}: eos_token_id makes {len(found)} stop ids with those that other files name, "
            f"a request has at most {STOP_SLOTS}: shorten it"
        )
    return tuple(sorted(found))


def generation_defaults(folder: Path) -> dict[str, float]:
    """temperature, top_p and top_k as far as generation_config.json sets them; temperature 0 for do_sample false."""
    path = folder / "generation_config.json"
    config = settings(path)
    found = {key: config[key] for key in ("temperature", "top_p", "top_k") if config.get(key) is not None}
    for key, value in found.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{path}: {key} must be a number, not {value!r}")
    if not isinstance(sample := config.get("do_sample"), bool | None):
        raise ValueError(f"{path}: do_sample must be true or false, not {sample!r}")
    return found | {"temperature": 0.0} if sample is False else found


def pieces(text: str) -> Iterator[str]:
    """The text in parts short enough for tiktoken. Ids differ from the uncut text's at the cuts only."""
    for begin in range(0, len(text), LONGEST_TEXT):
        part = text[begin : begin + LONGEST_TEXT]
        start = 0
        for run in re.finditer(r"\s+|\S+", part):
            for cut in range(run.start() + LONGEST_RUN, run.end(), LONGEST_RUN):
                yield part[start:cut]
                start = cut
        yield part[start:]


def read_ranks(path: Path) -> dict[bytes, int]:
    """Token bytes → rank from a `tiktoken.model`: base64 and rank a line, ranks 0..n-1, all 256 bytes."""
    if not os.path.lexists(path):
        raise ValueError(f"{path} is missing: without it prompts must be ids, and answers have no text")
    ranks = {}
    for number, line in enumerate(read_file(path).splitlines(), 1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError:
            raise ValueError(f"{path}, line {number}: {line[:60]!r} is not base64 and a rank") from None
    if absent := set(range(len(ranks))) - set(ranks.values()):
        raise ValueError(
            f"{path}: {len(ranks)} tokens, but none has rank {min(absent)}: the ranks must be "
            f"0..{len(ranks) - 1}, each once; the file is damaged or cut short"
        )
    if absent := {byte for byte in range(256) if bytes([byte]) not in ranks}:
        raise ValueError(f"{path}: {len(absent)} of the 256 single bytes are no tokens, first {min(absent)}")
    return ranks


def control_table(path: Path, config: dict[str, Any], first: int) -> tuple[dict[int, str], frozenset[int]]:
    """Names of the control ids `first`..`first`+255, and which of them text leaves out."""
    k2 = {name: first + offset for offset, name in CONTROL_NAMES.items()}
    names, visible = {}, set()
    entries = config.get("added_tokens_decoder") or {id: {"content": name} for name, id in k2.items()}
    if not isinstance(entries, dict):
        raise ValueError(f"{path}: added_tokens_decoder must be an object, not a {type(entries).__name__}")
    for key, entry in entries.items():
        try:
            id, name = int(key), str(entry["content"])
            special = entry.get("special", name not in VISIBLE_NAMES)
        except (ValueError, TypeError, KeyError, AttributeError):
            raise ValueError(f"{path}: added_tokens_decoder has {key!r}: {entry!r}, not id: object") from None
        if not first <= id < first + CONTROL_IDS:
            raise ValueError(
                f"{path}: {name} has id {id}, but the control ids beside {first} ranks are "
                f"{first}..{first + CONTROL_IDS - 1}: this file and tiktoken.model do not belong together"
            )
        if k2.get(name, id) != id:
            raise ValueError(f"{path}: {name} has id {id}; in Kimi K2 with {first} ranks it is {k2[name]}")
        names[id] = name
        if not special:
            visible.add(id)
    table = {id: names.get(id, f"<|reserved_token_{id}|>") for id in range(first, first + CONTROL_IDS)}
    if len(set(table.values())) < CONTROL_IDS:
        twice = next(name for name in table.values() if list(table.values()).count(name) > 1)
        raise ValueError(f"{path}: added_tokens_decoder gives the name {twice} to more than one id")
    return table, frozenset(table.keys() - visible)


def named_id(path: Path, config: dict[str, Any], ids: dict[str, int], key: str, default: str) -> int:
    """Id of the control string that a key such as `bos_token` holds, as a string or as {content}."""
    name = config.get(key) or default
    name = str(name.get("content") if isinstance(name, dict) else name)
    if name not in ids:
        raise ValueError(f"{path}: {key} is {name!r}, which is the name of no control id")
    return ids[name]


def eos_ids(path: Path, config: dict[str, Any]) -> set[int]:
    """The ids under `eos_token_id`, one or a list."""
    value = config.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for id in ids:
        if isinstance(id, bool) or not isinstance(id, int) or id < 0:
            raise ValueError(f"{path}: eos_token_id must be an id or a list of ids, not {value!r}")
    return set(ids)


def settings(path: Path) -> dict[str, Any]:
    """The object in a JSON file that a checkpoint may lack: then an empty one."""
    return read_json(path) if os.path.lexists(path) else {}
