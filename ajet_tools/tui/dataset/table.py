"""The table of a review's rows: its columns, its pages, and the marks before each row."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, ClassVar

from textual.binding import Binding, BindingType

from ajet_tools.dataset.review import Review
from ajet_tools.tui.dataset.columns import columns_of
from ajet_tools.tui.dataset.hits import Hits
from ajet_tools.tui.dataset.numbers import Numbers
from ajet_tools.tui.widgets.listing import ListingTable

__all__ = ["RowsTable"]

_LOOKED_AT = 200
"""Rows that say which columns there are."""
_SIGNS = {"accepted": "✓", "rejected": "✗"}


class RowsTable(ListingTable):
    """The listing, in which `a` accepts."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("a", "screen.mark('accepted')", "Accept"),
        Binding("ctrl+a", "all", "Select all, or none", show=False),
    ]

    def __init__(self, review: Review) -> None:
        super().__init__((), self._page)
        self.review = review

    async def _page(self, rows: Numbers, offset: int, limit: int) -> Sequence[Any]:
        numbers = rows.numbers[offset : offset + limit]
        found = await asyncio.to_thread(self.review.rows, numbers)
        return [{"number": number, "values": row.values} for number, row in zip(numbers, found, strict=True)]

    def choose_columns(self) -> None:
        """Those that the rows have and the screen has room for."""
        rows = [row.values for row in self.review.spool.rows(0, _LOOKED_AT)]
        self.columns = tuple(columns_of(rows, self.review.mark_of, self.app.size.width))

    @property
    def numbers(self) -> list[int]:
        """The selected rows, or the one under the cursor."""
        ids = self.selected or ({self.cursor_id} if self.cursor_id else set())
        return sorted(int(id) for id in ids)

    @property
    def number(self) -> int | None:
        """The row under the cursor."""
        return int(self.cursor_id) if self.cursor_id is not None else None

    def show_marks(self, hits: Hits | None) -> None:
        """✓ or ✗, then ~ for a hit, else * where the row was edited."""
        signs = {}
        found = set(hits.numbers) if hits is not None else set()
        for number in {*found, *self.review.decisions}:
            decision = self.review.decisions.get(number)
            mark = _SIGNS.get(decision.mark or "", " ") if decision is not None else " "
            edited = "*" if decision is not None and decision.values is not None else " "
            signs[str(number)] = mark + ("~" if number in found else edited)
        self.mark(signs)
