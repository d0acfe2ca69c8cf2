"""Tree of an episode's timelines, forks and calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from rich.text import Text
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.message import Message
from textual.reactive import reactive
from textual.strip import Strip

from ajet_tools.text.clean import drop_zero_width, one_line
from ajet_tools.text.tables import number
from ajet_tools.trace.episode.blocks import branch_title, format_tokens
from ajet_tools.trace.episode.messages import gist
from ajet_tools.trace.episode.overview import EpisodeOverview
from ajet_tools.trace.episode.tree import Branch, TreeRow
from ajet_tools.tui.widgets.long_text import CursorView

_DEEPEST = 6

_OUTCOMES = {"trained": "green", "failed": "red"}
_OUTCOMES |= dict.fromkeys(
    ("cancelled", "undelivered", "abandoned", "stale", "overlong", "truncated"), "yellow"
)


class CallTree(CursorView, can_focus=True):
    """A line for the episode, for each timeline and for each call."""

    DEFAULT_CSS = """
    CallTree { overflow-x: hidden; }
    CallTree:focus { background-tint: $foreground 4%; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "choose", "Open", show=False),
    ]
    cursor: reactive[int] = reactive(0)

    @dataclass
    class Chosen(Message):
        """The cursor moved to the episode (no branch), a branch (no call) or a call."""

        branch: int | None
        call_id: str | None
        read: bool = False

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._overview: EpisodeOverview | None = None
        self._rows: Sequence[TreeRow | None] = (None,)
        self._row_of: dict[str, int] = {}
        self._first_words: dict[str, str] = {}
        """Cache of the beginnings of replies."""

    def show(self, overview: EpisodeOverview) -> None:
        """Show an episode, keeping the cursor on its line."""
        at = None
        if self.cursor < len(self._rows):
            at = self._rows[self.cursor]
        self._overview = overview
        self._rows = (None, *overview.tree.rows())
        self._row_of = {row.call_id: n for n, row in enumerate(self._rows) if row and row.call_id}
        self.virtual_size = Size(self.size.width, len(self._rows))
        if at is not None:
            heads = (
                n
                for n, row in enumerate(self._rows)
                if row and (row.branch, row.call_id) == (at.branch, None)
            )
            if at.call_id:
                line = self._row_of.get(at.call_id)
            else:
                line = next(heads, None)
            self.set_reactive(
                CallTree.cursor, min(self.cursor, len(self._rows) - 1) if line is None else line
            )
        self.refresh(layout=True)

    def point_at(self, call_id: str | None) -> None:
        """Move the cursor to a call, or to the episode, without posting a message."""
        row = self._row_of.get(call_id, 0) if call_id else 0
        if row != self.cursor:
            self.set_reactive(CallTree.cursor, row)
            self._reveal()
            self.refresh()

    def _choose(self, row: int, read: bool = False) -> None:
        row = max(0, min(row, len(self._rows) - 1))
        self.cursor = row
        at = self._rows[row]
        self.post_message(self.Chosen(at.branch if at else None, at.call_id if at else None, read))

    def watch_cursor(self) -> None:
        self._reveal()
        self.refresh()

    def _reveal(self) -> None:
        self.scroll_to_region(Region(0, self.cursor, 1, 1), animate=False, force=True)

    def move_by_lines(self, lines: int) -> None:
        self._choose(self.cursor + lines)

    def move_by_pages(self, pages: int) -> None:
        self._choose(self.cursor + pages * max(1, self.size.height - 1))

    def move_to_edge(self, *, end: bool) -> None:
        self._choose(len(self._rows) - 1 if end else 0)

    def action_choose(self) -> None:
        self._choose(self.cursor, read=True)

    def on_click(self, event: events.Click) -> None:
        row = event.y + self.scroll_offset.y
        if row < len(self._rows):
            self._choose(row)

    def line(self, line: int) -> Strip | None:
        if self._overview is None or line >= len(self._rows):
            return None
        text = self._line(self._rows[line], self._overview)
        if line == self.cursor:
            text = Text("▌", style="bold").append_text(text)
            text.stylize("reverse" if self.has_focus else "bold")
        else:
            text = Text(" ").append_text(text)
        text.truncate(self.size.width, overflow="ellipsis", pad=True)
        return Strip(text.render(self.app.console), self.size.width)

    def _line(self, row: TreeRow | None, overview: EpisodeOverview) -> Text:
        if row is None:
            reward = ""
            if overview.episode.reward is not None:
                reward = f"  reward {number(overview.episode.reward)}"
            return Text(f"episode  {overview.status}{reward}")
        indent = "  " * min(row.depth, _DEEPEST)
        branch = overview.tree.branches[row.branch]
        if row.call_id is None:
            return Text(indent).append_text(_head(branch))
        call = overview.calls[row.call_id]
        outcome = overview.outcome(row.call_id)
        line = Text(f"{indent} {call.index:>3} ")
        line.append(
            f"{format_tokens(call).replace(' tokens', '').replace(' token', ''):<10} ", style="dim"
        )
        if call.error:
            return line.append(drop_zero_width(one_line(call.error, 40)), style="red")
        line.append(outcome or call.finish_reason or "", style=_OUTCOMES.get(outcome, ""))
        if row.call_id not in self._first_words:
            self._first_words[row.call_id] = drop_zero_width(one_line(gist(call), 40))
        line.append(f" {self._first_words[row.call_id]}", style="dim")
        return line


def _head(branch: Branch) -> Text:
    if branch.fork is None:
        line = Text.assemble((drop_zero_width(one_line(branch_title(branch), 80)), "bold"))
        if branch.tokens is not None:
            line.append(f"  {branch.tokens:,} tok", style="dim")
        return line
    fork = branch.fork
    name = ""
    if branch.timeline is not None:
        name = f"timeline {branch.timeline} "
    line = Text.assemble(
        (f"↳ {name}", "bold"), (fork.cause, "bold yellow"), (f" at {fork.at:,}", "yellow")
    )
    if fork.extra_tokens:
        line.append(f" +{fork.extra_tokens:,} tok", style="dim")
    return line
