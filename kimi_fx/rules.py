"""What a single setting's value may be: the type of its field and, for numbers, a range.

`cast` decides it and `type_name` says it to the user. Knows no particular setting (see `config.py`), nor how
one setting limits another.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from types import NoneType
from typing import Any, Literal, get_args, get_origin

FLOAT_MAX = 3.4028234663852886e38  # largest float32: a larger number would be inf on the device


@dataclass(frozen=True)
class Range:
    """Numbers from low to high, both included unless `above` leaves low out."""

    low: float = -math.inf
    high: float = math.inf
    above: bool = False

    def __contains__(self, number: float) -> bool:
        return self.low <= number <= self.high and not (self.above and number == self.low)

    def __str__(self) -> str:
        if not self.above and self.high < math.inf:
            return f"{self.low}..{self.high}"
        end = f", <= {self.high}" if self.high < math.inf else ""
        return f"{'>' if self.above else '>='} {self.low}{end}"


def type_name(hint: Any) -> str:
    """A field's type as users read it: `int or null`, `plain, chain or tree`, `list of int`."""
    args, origin = get_args(hint), get_origin(hint)
    if NoneType in args:
        return f"{type_name(args[0])} or null"
    if origin is Literal:
        return f"{', '.join(args[:-1])} or {args[-1]}"
    if origin is tuple:
        return f"list of {type_name(args[0])}"
    if origin is dict:
        return f"map of {type_name(args[0])} to {type_name(args[1])}"
    return "finite float" if hint is float else hint.__name__


def cast(value: Any, hint: Any, limit: Range | None = None) -> Any:
    """`value` in a field's type: an int as a float, a list as a tuple, one string as a tuple of one.

    `limit` holds for a number, each item of a list, each value of a map. Raises ValueError for what does not
    fit: True is no number, NaN and inf are no floats, "1" is no int.
    """
    args, origin = get_args(hint), get_origin(hint)
    if NoneType in args:
        return None if value is None else cast(value, args[0], limit)
    if origin is tuple and isinstance(value, str | list | tuple):
        return tuple(cast(item, args[0], limit) for item in ([value] if isinstance(value, str) else value))
    if origin is dict and isinstance(value, dict):
        return {cast(k, args[0]): cast(v, args[1], limit) for k, v in value.items()}
    if origin is Literal and isinstance(value, str) and value in args:
        return value
    if hint in (bool, str) and isinstance(value, hint):
        return value
    kinds = {int: int, float: int | float}
    if hint in kinds and isinstance(value, kinds[hint]) and not isinstance(value, bool):
        finite = hint is int or abs(value) <= FLOAT_MAX
        if finite and (limit is None or value in limit):
            return hint(value)
    raise ValueError(f"{value!r} does not fit {type_name(hint)}")


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The known name that a mistyped one is closest to, if any is close."""
    return next(iter(get_close_matches(name, list(names), n=1)), None)
