"""The row under the cursor, below the table."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import Static

from ajet_tools.dataset.review import Review
from ajet_tools.trace.text import visible
from ajet_tools.tui.dataset.described import Section, sections
from ajet_tools.tui.widgets.cells import steady

__all__ = ["RowPane"]

_MOST = 3000
"""Characters of a section; the screen of the row shows all."""


class RowPane(VerticalScroll):
    """Shows a row in sections; long ones are cut, and enter in the table shows them whole."""

    DEFAULT_CSS = """
    RowPane { height: 45%; background: $surface; padding: 0 1; scrollbar-size-vertical: 1; }
    RowPane:focus { background: $surface-lighten-1; }
    RowPane > Static { height: auto; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "app.focus_previous", "Back to the table", show=False)]

    def __init__(self, review: Review) -> None:
        super().__init__()
        self.review = review
        self._shown: int | None = None

    def compose(self) -> ComposeResult:
        yield Static("", markup=False)

    def show(self, number: int | None) -> None:
        """Another row, from its beginning; or the same one as it is now."""
        if number != self._shown:
            self.scroll_home(animate=False)
        self._shown = number
        found = sections(self.review, number) if number is not None else []
        self.query_one(Static).update(_styled(found))


def _styled(found: list[Section]) -> Text:
    text = Text()
    for at, one in enumerate(found):
        text.append(("\n" if at else "") + visible(one.title), style="bold" if at else "bold reverse")
        if one.text:
            cut = one.text[:_MOST] + (" … enter shows all" if len(one.text) > _MOST else "")
            for line in steady(visible(cut)).split("\n"):
                text.append(f"\n  {line}")
    return text
