"""The rows of a listing: their order and their columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from ajet_tools.tui.widgets.long_text import fit_text

RowT = TypeVar("RowT", bound=Mapping[str, object])
PAGE = 100
"""Rows fetched at once."""
PAGES = 64
"""Pages that are kept."""


class Rows(Protocol):
    """Rows in an order, known by id; what they hold is fetched by page."""

    @property
    def count(self) -> int: ...

    def ids(self, start: int = 0, stop: int | None = None) -> list[str]: ...

    def position(self, episode_id: str, /) -> int | None: ...


@dataclass(frozen=True, slots=True)
class Column(Generic[RowT]):
    """One column: `text` of a row is shown in `width` cells, or up to `most` where the screen has room."""

    name: str
    title: str
    width: int
    text: Callable[[RowT], str]
    right: bool = False
    most: int = 0
    tone: Callable[[RowT], str] | None = None
    """The row's tone: good, bad, warn, faint or nothing."""

    def heading(self, width: int, by: str, descending: bool) -> str:
        """The title, with an arrow where the rows are sorted `by` this column."""
        title = (self.title + ("" if self.name != by else "↓" if descending else "↑"))[: width + 1]
        return (title.rjust(width) if self.right else title).ljust(width + 1)

    def cell(self, row: RowT | None, width: int) -> list[tuple[str, str]]:
        """The text of a cell, with its tone, and the space after it."""
        if row is None:
            return [(fit_text("·" * min(3, width), width, right=self.right), "faint"), (" ", "")]
        return [(fit_text(self.text(row), width, right=self.right), self.tone(row) if self.tone else ""), (" ", "")]


def fit_widths(columns: Sequence[Column[Any]], room: int) -> tuple[int, ...]:
    """Cells for each column, with one between them: room is given to those that want more, from left to right."""
    spare = room - sum(column.width for column in columns) - len(columns) + 1
    widths = []
    for column in columns:
        more = max(0, min(spare, column.most - column.width))
        widths.append(column.width + more)
        spare -= more
    return tuple(widths)


def find_column(columns: Sequence[Column[Any]], widths: Sequence[int], cell: int, scrolled: int) -> str | None:
    """The column at a cell of the window, from the first column on."""
    if cell < 0:
        return None
    start = -scrolled
    for column, width in zip(columns, widths, strict=True):
        if start <= cell < start + width + 1:
            return column.name
        start += width + 1
    return None


def step_to(places: Sequence[int], cursor: int, by: int) -> int | None:
    """The next of the places, which rise (0: or the cursor's own), or with -1 the one before, round the end."""
    beyond = [at for at in places if (at >= cursor if by == 0 else at > cursor if by > 0 else at < cursor)]
    return (beyond or places)[-1 if by < 0 else 0] if places else None
