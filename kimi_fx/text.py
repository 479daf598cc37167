"""Ids become text as they arrive: exact on UTF-8 across tokens, and ended by stop strings.

One `TextStream` an output. How the ids are grouped into calls never changes the text. Stop ids and lengths
are not its business: they end a request on the device.
"""

import codecs
from collections.abc import Iterable, Sequence

from .tokenizer import Tokenizer


class TextStream:
    """The text of one output.

    A stop string is looked for in the bytes of the text, so it may begin and end inside tokens. The first one
    to be complete ends the text before it (`keep_stop`: after it); of several complete at the same byte, the
    longest. One that an id with index < `min_tokens` completes does not count. Control ids have their names
    as text, those flagged special none (`skip_special`). A stop id that ended the request is not to be
    pushed: it has no text either way.
    """

    text: str
    """All the text released so far."""
    kept: int
    """Ids taken so far; once ended, those up to and with the one that completed the stop string."""
    stop_reason: str | None
    """The stop string that ended the text."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        keep_stop: bool = False,
        skip_special: bool = True,
        min_tokens: int = 0,
    ) -> None:
        self.text, self.kept, self.stop_reason = "", 0, None
        self._tokenizer = tokenizer
        self._stops = {stop.encode("utf-8", "surrogatepass"): stop for stop in stops}
        self._keep_stop = keep_stop
        self._hidden = tokenizer.hidden if skip_special else frozenset()
        self._min_tokens = min_tokens
        self._held = b""  # may be the start of a stop string
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")  # holds an incomplete character

    @property
    def ended(self) -> bool:
        """A stop string is complete; further ids are ignored."""
        return self.stop_reason is not None

    def push(self, ids: Iterable[int]) -> str:
        """Take ids; the text that can be released now, possibly none."""
        released = ""
        for id in ids:
            if self.ended:
                break
            released += self._take(b"" if id in self._hidden else self._tokenizer.token_bytes(id))
        self.text += released
        return released

    def flush(self) -> str:
        """No more ids come: the rest of the text; an incomplete character becomes one U+FFFD."""
        rest = self._decoder.decode(self._held, final=True)
        self._held = b""
        self.text += rest
        return rest

    def _take(self, token: bytes) -> str:
        data = self._held + token
        match = self._match(data, len(self._held)) if self.kept >= self._min_tokens else None
        self.kept += 1
        if match is not None:
            end, start, stop = match
            self.stop_reason, self._held = self._stops[stop], b""
            return self._decoder.decode(data[: end if self._keep_stop else start], final=True)
        cut = len(data) - self._undecided(data)
        self._held = data[cut:]
        return self._decoder.decode(data[:cut])

    def _match(self, data: bytes, known: int) -> tuple[int, int, bytes] | None:
        """(end, start, stop) of the stop complete first among those that end after byte `known`."""
        found = ((data.find(stop, max(0, known + 1 - len(stop))), stop) for stop in self._stops)
        return min(((start + len(stop), start, stop) for start, stop in found if start >= 0), default=None)

    def _undecided(self, data: bytes) -> int:
        """Length of the longest end of `data` that begins a stop string."""
        lengths = ((n, stop) for stop in self._stops for n in range(min(len(stop) - 1, len(data)), 0, -1))
        return max((n for n, stop in lengths if data.endswith(stop[:n])), default=0)
