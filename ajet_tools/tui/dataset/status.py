"""One line of what a reader has to know of the table: where they are, what is decided, what is shown."""

from __future__ import annotations

from rich.text import Text
from textual.widgets import Static

from ajet_tools.dataset.review import Only, Review
from ajet_tools.trace.text import one_line
from ajet_tools.tui.dataset.hits import Hits
from ajet_tools.tui.widgets.listing import ListingTable

__all__ = ["ReviewStatus"]


class ReviewStatus(Static):
    """The parts in the order in which they matter: a narrow screen cuts the last ones."""

    DEFAULT_CSS = "ReviewStatus { height: 1; padding: 0 1; background: $panel; color: $foreground; }"

    def __init__(self, review: Review) -> None:
        super().__init__("", markup=False)
        self.review = review

    def tell(self, table: ListingTable, busy: str, filter_text: str, only: Only, hits: Hits | None) -> None:
        marks = self.review.marks
        parts = [
            self._place(table, narrowed=bool(filter_text) or only != "all"),
            "" if self.review.loaded else "reading",
            busy,
            f"{len(table.selected):,} selected" if table.selected else "",
            *(f"{marks[name]:,} {name}" for name in ("accepted", "rejected", "edited") if marks[name]),
            "not saved" if self.review.unsaved else "",
            f"only {only}" if only != "all" else "",
            one_line(filter_text, 60),
            str(hits) if hits is not None else "",
        ]
        line = Text(" · ").join(Text(part) for part in parts if part)
        line.no_wrap, line.overflow = True, "ellipsis"
        self.update(line)

    def _place(self, table: ListingTable, *, narrowed: bool) -> str:
        of = f" (of {len(self.review.spool):,})" if narrowed else ""
        if table.count:
            return f"{table.cursor + 1:,} of {table.count:,}{of}"
        if narrowed:
            return f"no row fits{of}"
        return "no rows" if self.review.loaded else ""
