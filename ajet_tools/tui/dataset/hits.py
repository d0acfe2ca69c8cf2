"""The rows in which a searched text was found."""

from __future__ import annotations

from dataclasses import dataclass

from ajet_tools.trace.text import one_line
from ajet_tools.tui.widgets.listing import Rows

__all__ = ["Hits"]


@dataclass(frozen=True)
class Hits:
    """What was searched for, and the numbers of the rows that have it."""

    needle: str
    numbers: list[int]

    def step(self, rows: Rows, cursor: int, by: int) -> int | None:
        """The place of the next row shown that has it (0: or this one), or of the one before, round the end."""
        places = [at for number in self.numbers if (at := rows.position(str(number))) is not None]
        if not places:
            return None
        beyond = [at for at in places if (at >= cursor if by == 0 else at > cursor if by > 0 else at < cursor)]
        return (beyond or places)[-1 if by < 0 else 0]

    def __str__(self) -> str:
        return f"{len(self.numbers):,} have {one_line(self.needle, 30)!r}"
