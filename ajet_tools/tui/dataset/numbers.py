"""Which rows a table shows: numbers of a review's rows, in their order."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

__all__ = ["Numbers"]


class Numbers:
    """What a `ListingTable` shows rows of; a row's id is its number, as text."""

    def __init__(self, numbers: Sequence[int]) -> None:
        """`numbers` rise: a range, where all are shown."""
        self.numbers = numbers

    @property
    def count(self) -> int:
        return len(self.numbers)

    def ids(self, start: int = 0, stop: int | None = None) -> list[str]:
        return [str(number) for number in self.numbers[start:stop]]

    def position(self, id: str, /) -> int | None:
        """Where a row stands; None where it is not among them."""
        at = bisect_left(self.numbers, int(id))
        return at if at < len(self.numbers) and self.numbers[at] == int(id) else None
