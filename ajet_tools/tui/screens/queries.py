"""The list of queries to choose from: the user's own, examples, and what was asked before."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from ajet_tools.trace.text import one_line, visible
from ajet_tools.tui.app import TraceApp
from ajet_tools.tui.saved_queries import EXAMPLES, SavedQueries, keep

__all__ = ["QueriesScreen"]


class QueriesScreen(ModalScreen[str]):
    """Returns the query that was chosen; None where none was."""

    app: TraceApp
    DEFAULT_CSS = """
    QueriesScreen { align: center middle; }
    QueriesScreen > Vertical {
        width: 90%; height: 85%; border: round $accent; background: $surface;
    }
    QueriesScreen OptionList { height: 1fr; border: none; }
    QueriesScreen Static { height: 6; padding: 0 1; border-top: solid $primary; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "dismiss", "Close"),
        Binding("delete,d", "remove", "Forget"),
    ]

    def __init__(self, queries: SavedQueries) -> None:
        super().__init__()
        self.queries = queries
        self.listed: list[tuple[str, str, str]] = []
        """Kind, name, SQL."""

    def compose(self) -> ComposeResult:
        with Vertical() as box:
            box.border_title = "queries"
            box.border_subtitle = "enter takes it · d forgets one that you saved · escape closes"
            yield OptionList()
            yield Static()

    def on_mount(self) -> None:
        self._fill()
        self.query_one(OptionList).focus()

    def _fill(self) -> None:
        self.listed = [("saved", name, sql) for name, sql in sorted(self.queries.saved.items())]
        self.listed += [("before", one_line(sql, 120), sql) for sql in reversed(self.queries.history)]
        self.listed += [("example", name, sql) for name, sql in EXAMPLES.items()]
        options = self.query_one(OptionList)
        options.clear_options()
        for kind, name, _ in self.listed:
            line = Text(f"{kind:8}", style="dim", no_wrap=True, overflow="ellipsis")
            options.add_option(Option(line.append(one_line(name), style="not dim")))
        if self.listed:
            options.highlighted = 0

    def on_option_list_option_highlighted(self, event: OptionList.OptionHighlighted) -> None:
        self.query_one(Static).update(Text(visible(self.listed[event.option_index][2])))

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(self.listed[event.option_index][2])

    def action_remove(self) -> None:
        at = self.query_one(OptionList).highlighted
        if at is not None and self.listed[at][0] == "saved":
            self.queries = self.queries.without(self.listed[at][1])
            keep(self.queries)
            self._fill()
