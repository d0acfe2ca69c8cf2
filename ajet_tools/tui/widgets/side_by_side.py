"""Conversations in columns that scroll together, with a head over each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual.binding import Binding, BindingType
from textual.events import Click
from textual.geometry import Size
from textual.message import Message
from textual.strip import Strip
from textual.widgets import Static

from ajet_tools.trace.align import Attempt, Divergence
from ajet_tools.trace.compare_layout import Cell, Columns, Kind, columns_of
from ajet_tools.trace.render import number
from ajet_tools.tui.widgets.cells import fitted
from ajet_tools.tui.widgets.line_view import LineView

__all__ = ["LEAST_COLUMN", "ColumnHeads", "SideBySide", "room_for"]

LEAST_COLUMN = 34
"""Cells below which a column cannot be read."""
_RULE = " │ "
_STYLES: dict[Kind, str] = {
    "role": "bold cyan",
    "same": "dim",
    "differs": "bold reverse",
    "after": "",
    "left out": "italic dim",
}
_GOOD = {"succeeded": "green", "failed": "red", "timeout": "yellow", "aborted": "yellow", "running": "cyan"}


def room_for(width: int) -> tuple[int, int]:
    """How many columns fit, two or three, and how wide each is."""
    columns = 3 if width >= 3 * LEAST_COLUMN + 2 * len(_RULE) + 2 else 2
    return columns, max(1, (width - 2 - (columns - 1) * len(_RULE)) // columns)


class ColumnHeads(Static):
    """Of each column: which episode, how it ended, what it was worth, where it parts from the first."""

    DEFAULT_CSS = "ColumnHeads { height: 5; padding: 0 1; background: $panel; color: $foreground; }"

    def tell(
        self, shown: Sequence[Attempt], parted: Sequence[Divergence | None], width: int, chosen: int, runs: bool
    ) -> None:
        """Show the heads; the chosen column's is marked. With `runs`, each run is named."""
        heads = [_head(a, parted[i], i, width, runs) for i, a in enumerate(shown)]
        said = Text()
        for line in range(5):
            for i, head in enumerate(heads):
                text, style = head[line]
                mark = "bold reverse" if line == 0 and i == chosen else style
                said.append(fitted(text, width), style=mark).append(_RULE if i < len(heads) - 1 else "\n", "dim")
        self.update(said)


def _head(attempt: Attempt, parted: Divergence | None, column: int, width: int, runs: bool) -> list[tuple[str, str]]:
    run = f"run {attempt.run_id[:8]} " if runs else ""
    name = f"{attempt.episode_id[:12]}  {run}attempt {attempt.attempt}, step {attempt.step}"
    reward = "no reward" if attempt.reward is None else f"reward {number(attempt.reward)}"
    status = f"{attempt.status}, {reward}{f', {attempt.cause}' if attempt.cause else ''}"
    recomputed = " (recomputed)" if attempt.recomputed else ""
    advantage = "no advantage" if attempt.advantage is None else f"advantage {attempt.advantage:+.3g}{recomputed}"
    tokens = f"{attempt.sampled:,} tokens sampled, {attempt.trained:,} trained"
    return [
        (name, "bold"),
        (status, _GOOD.get(attempt.status, "")),
        (advantage, ""),
        (tokens, ""),
        (_parting(parted, column), "magenta"),
    ]


def _parting(parted: Divergence | None, column: int) -> str:
    if column == 0:
        return "the others are compared with this"
    if parted is None:
        return "says the same to the end"
    token = "" if parted.token is None else f", token {parted.token:,}"
    return f"parts: message {parted.message + 1}, char {parted.character:,}{token}"


class SideBySide(LineView, can_focus=True):
    """The columns. They scroll as one."""

    DEFAULT_CSS = """
    SideBySide {
        height: 1fr; padding: 0 1; background: $background; color: $foreground;
        overflow-x: hidden; overflow-y: scroll; scrollbar-size-vertical: 1;
    }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "scroll_up", "Line up", show=False),
        Binding("down,j", "scroll_down", "Line down", show=False),
        Binding("pageup", "page_up", "Page up", show=False),
        Binding("pagedown,space", "page_down", "Page down", show=False),
        Binding("home", "scroll_home", "Start", show=False),
        Binding("end", "scroll_end", "End", show=False),
    ]

    class Chosen(Message):
        """A column was clicked."""

        def __init__(self, column: int) -> None:
            super().__init__()
            self.column = column

    def __init__(self) -> None:
        super().__init__()
        self.columns: Columns | None = None
        self._width = 1
        self._styles = {kind: Style.parse(style) for kind, style in _STYLES.items()}

    def show(self, attempts: Sequence[Attempt], width: int) -> None:
        """Put up attempts in columns of a width; what is in sight stays where it was."""
        self._width = width
        self.columns = columns_of(attempts, width)
        self.virtual_size = Size(self.size.width, len(self.columns.lines))
        self.refresh()

    def go(self, line: int) -> None:
        """Bring a line into sight, with a little of what comes before it."""
        self.scroll_to(y=max(0, line - max(1, self.size.height // 4)), animate=False, force=True)

    def on_click(self, event: Click) -> None:
        self.post_message(self.Chosen(max(0, event.x - 1) // (self._width + len(_RULE))))

    def action_scroll_up(self) -> None:
        self.scroll_to(y=self.scroll_y - 1, animate=False, force=True)

    def action_scroll_down(self) -> None:
        self.scroll_to(y=self.scroll_y + 1, animate=False, force=True)

    def action_page_up(self) -> None:
        self.scroll_page_up(animate=False, force=True)

    def action_page_down(self) -> None:
        self.scroll_page_down(animate=False, force=True)

    def action_scroll_home(self) -> None:
        self.scroll_home(animate=False, force=True)

    def action_scroll_end(self) -> None:
        self.scroll_end(animate=False, force=True)

    def render_line(self, y: int) -> Strip:
        line = y + self.scroll_offset.y
        if self.columns is None or line >= len(self.columns.lines):
            return Strip.blank(self.size.width, self.ground)
        segments: list[Segment] = []
        for i, cell in enumerate(self.columns.lines[line]):
            if i:
                segments.append(Segment(_RULE, Style(dim=True)))
            segments += self._cell(cell)
        return Strip(segments).adjust_cell_length(self.size.width, self.ground).apply_style(self.ground)

    def _cell(self, cell: Cell) -> list[Segment]:
        used = sum(cell_len(text) for text, _ in cell)
        found = [Segment(text, self._styles[kind]) for text, kind in cell]
        return [*found, Segment(" " * max(0, self._width - used))]
