"""Which pages of the pool belong to whom. Pages are taken when a request is admitted and returned when it ends."""

from ..config import PAGE


class Pages:
    """A free list of page ids."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.free = list(range(count - 1, -1, -1))

    def take(self, tokens: int) -> list[int] | None:
        """Pages for that many tokens, or None while too few are free."""
        n = pages_for(tokens)
        return [self.free.pop() for _ in range(n)] if n <= len(self.free) else None

    def give(self, pages: list[int]) -> None:
        self.free.extend(reversed(pages))


def pages_for(tokens: int) -> int:
    return -(-tokens // PAGE)
