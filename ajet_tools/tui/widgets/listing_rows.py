"""Rows and columns of a listing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from ajet_tools.tui.widgets.long_text import fit_text

RowT = TypeVar("RowT", bound=Mapping[str, object])
PAGE = 100
"""Rows of a page."""
PAGES = 64
"""Pages in the cache."""


class Rows(Protocol):
    """Ordered ids of rows; their contents are fetched by page."""

    @property
    def count(self) -> int: ...

    def ids(self, start: int = 0, stop: int | None = None) -> list[str]: ...


@dataclass(frozen=True, slots=True)
class Column(Generic[RowT]):
    """A column that shows `text` of a row in `width` cells, or up to `most` if they fit."""

    name: str
    title: str
    width: int
    text: Callable[[RowT], str]
    right: bool = False
    most: int = 0
    tone: Callable[[RowT], str] | None = None
    """Tone of a cell: good, bad, warn, faint or empty."""

    def heading(self, width: int, by: str, descending: bool) -> str:
        """Format the title, with an arrow if the rows are sorted `by` this column."""
        title = (self.title + ("" if self.name != by else "↓" if descending else "↑"))[: width + 1]
        return (title.rjust(width) if self.right else title).ljust(width + 1)

    def cell(self, row: RowT | None, width: int) -> list[tuple[str, str]]:
        """Return the text of a cell with its tone, and the space after it."""
        if row is None:
            return [(fit_text("·" * min(3, width), width, right=self.right), "faint"), (" ", "")]
        return [
            (
                fit_text(self.text(row), width, right=self.right),
                self.tone(row) if self.tone else "",
            ),
            (" ", ""),
        ]


def fit_widths(columns: Sequence[Column[Any]], width: int) -> tuple[int, ...]:
    """Return the width of each column; spare cells go to columns with a larger `most`, from left to
    right."""
    spare = width - sum(column.width for column in columns) - len(columns) + 1
    widths = []
    for column in columns:
        more = max(0, min(spare, column.most - column.width))
        widths.append(column.width + more)
        spare -= more
    return tuple(widths)


def find_column(
    columns: Sequence[Column[Any]], widths: Sequence[int], cell: int, scrolled: int
) -> str | None:
    """Return the name of the column at a cell of the window."""
    if cell < 0:
        return None
    start = -scrolled
    for column, width in zip(columns, widths, strict=True):
        if start <= cell < start + width + 1:
            return column.name
        start += width + 1
    return None
