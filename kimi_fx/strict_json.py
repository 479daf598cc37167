"""JSON as users write it, with nothing lost in silence: no key twice, no number that Python would not read."""

import json
from collections.abc import Iterable
from typing import Any

from .checkpoint.files import parse_json

DIGITS = 1000  # of a number; Python reads up to 4300


def loads(text: str) -> Any:
    """The value. ValueError with a sentence for what is no JSON, or says a key twice."""
    try:
        return parse_json(text, object_pairs_hook=unique, parse_int=whole)
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON: {error}") from None


def unique(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    """A map of these. ValueError for a key that comes twice."""
    found: dict[Any, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} is given twice")
        found[key] = value
    return found


def whole(digits: str) -> int:
    """The number. ValueError where it is far too long."""
    if len(digits) > DIGITS:
        raise ValueError(f"{digits[:9]}… is a number of {len(digits)} digits")
    return int(digits)
