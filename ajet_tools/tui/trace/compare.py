"""Screen that compares episodes with a first one, side by side, up to their first differences."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import ClassVar

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.strip import Strip
from textual.widgets import Static

from ajet_tools.text.clean import one_line
from ajet_tools.text.tables import number
from ajet_tools.trace.compare.attempts import (
    Cell,
    ComparedAttempt,
    Divergence,
    Kind,
    SideBySide,
    align,
    read_attempts,
    side_by_side,
)
from ajet_tools.trace.episode.overview import STATUS_STYLES
from ajet_tools.trace.queries.records import mark_of
from ajet_tools.tui.trace.screen import TraceScreen
from ajet_tools.tui.widgets.long_text import LineView, fit_text

_RULE = " │ "
_STYLES: dict[Kind, str] = {
    "role": "bold cyan",
    "same": "dim",
    "differs": "bold reverse",
    "after": "",
    "left out": "italic dim",
}


class CompareScreen(TraceScreen):
    """Shows one episode after the other beside the first one, which stays in the left column."""

    DEFAULT_CSS = """
    CompareScreen #head { height: 1; padding: 0 1; background: $surface; }
    CompareScreen.empty ColumnHeads, CompareScreen.empty Columns { display: none; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("n", "difference", "Next difference"),
        Binding("right", "beside(1)", "Next episode", show=False),
        Binding("left", "beside(-1)", "Previous episode", show=False),
        Binding("s", "swap", "Swap"),
        Binding("enter", "episode", "Open the episode", key_display="enter"),
        Binding("t", "tokens", "Tokens"),
    ]
    PALETTE: ClassVar[Sequence[tuple[str, str]]] = [("Copy the episode's id", "copy")]

    def __init__(self, episode_ids: Sequence[str]) -> None:
        super().__init__()
        self.episode_ids = tuple(dict.fromkeys(episode_ids))
        self.title = "compare"
        self.attempts: list[ComparedAttempt] = []
        self.beside = 1
        """Index of the attempt in the right column."""
        self._mark: tuple[int, ...] = ()

    def compose_body(self) -> ComposeResult:
        yield Static(Text("reading …"), id="head")
        yield ColumnHeads()
        yield Columns()
        yield Static(id="empty")

    @property
    def columns(self) -> Columns:
        return self.query_one(Columns)

    @property
    def attempt(self) -> ComparedAttempt:
        """The attempt in the right column, or a single one."""
        return self.attempts[min(self.beside, len(self.attempts) - 1)]

    @property
    def divergence(self) -> Divergence | None:
        return align(self.attempts[0], self.attempt)

    async def read(self) -> None:
        if not self.episode_ids:
            self.show_empty(
                "There are no episodes to compare; select some in the list of episodes."
            )
            return
        mark = await self.app.ask(mark_of, *self.episode_ids)
        if mark == self._mark:
            return
        attempts = await self.app.ask(read_attempts, self.episode_ids)
        is_first = not self.attempts
        self._mark = mark
        self.attempts = sorted(attempts, key=lambda a: self.episode_ids.index(a.episode_id))
        await self._show()
        if is_first:
            self.action_difference()

    async def _show(self) -> None:
        if not self.attempts:
            return
        self.remove_class("empty")
        width = max(1, (self.size.width - 2 - len(_RULE)) // 2)
        layout = await asyncio.to_thread(side_by_side, self.attempts[0], self.attempt, width)
        self.columns.show(layout, width)
        runs = {attempt.episode.run_id for attempt in self.attempts}
        self.query_one(ColumnHeads).show(
            [self.attempts[0], self.attempt], self.divergence, width, len(runs) > 1
        )
        head = Text(self._line(), no_wrap=True, overflow="ellipsis")
        self.query_one("#head", Static).update(head)

    def _line(self) -> str:
        """Describe the compared episodes, and the visible ones."""
        size = len(self.attempts)
        if size == 1:
            return "only 1 episode: nothing to compare it with"
        tasks = {attempt.episode.task.task_id for attempt in self.attempts}
        subject = one_line(self.attempts[0].episode.task.main_query, 200)
        if len(tasks) > 1:
            subject = f"{len(tasks)} different tasks"
        visible = ""
        if size > 2:
            visible = f", 1 beside {self.beside + 1} ← →"
        return f"{size} episodes{visible} · {subject}"

    async def on_resize(self) -> None:
        await self._show()

    # Keys

    def action_difference(self) -> None:
        """Go to the first difference."""
        layout = self.columns.layout_shown
        if layout is not None and layout.first_difference is not None:
            self.columns.go(layout.first_difference)
        elif len(self.attempts) > 1:
            self.app.notify("these say the same to the end", timeout=3)

    async def action_beside(self, step: int) -> None:
        if len(self.attempts) > 1:
            self.beside = max(1, min(self.beside + step, len(self.attempts) - 1))
            await self._show()

    async def action_swap(self) -> None:
        """Swap the two columns."""
        if len(self.attempts) > 1:
            order = self.attempts
            order[0], order[self.beside] = order[self.beside], order[0]
            self.episode_ids = tuple(attempt.episode_id for attempt in order)
            await self._show()

    def action_episode(self) -> None:
        """Open the right column's episode, at the first difference."""
        if not self.attempts:
            return
        call_id = None
        if self.divergence is not None and self.attempt.messages:
            at = min(self.divergence.message, len(self.attempt.messages) - 1)
            call_id = self.attempt.messages[at].call_id
        self.app.open_episode(self.attempt.episode_id, call_id)

    def action_tokens(self) -> None:
        """Open the right column's tokens, at the first difference."""
        if self.attempts:
            divergence = self.divergence or Divergence(0, 0)
            token = divergence.token or 0
            self.app.open_tokens(self.attempt.episode_id, divergence.timeline or 0, token)

    def action_copy(self) -> None:
        if self.attempts:
            self.app.copy(self.attempt.episode_id, "the episode's id")


class ColumnHeads(Static):
    """The heads of the columns: episode, status, reward, divergence from the first."""

    DEFAULT_CSS = "ColumnHeads { height: 5; padding: 0 1; background: $panel; color: $foreground; }"

    def show(
        self,
        attempts: Sequence[ComparedAttempt],
        divergence: Divergence | None,
        width: int,
        with_runs: bool,
    ) -> None:
        left = [*_head(attempts[0], with_runs), ("the others are compared with this", "magenta")]
        right = [*_head(attempts[1], with_runs), (_where(divergence), "magenta")]
        if attempts[0] is attempts[1]:  # a single one
            right = [("", "")] * len(left)
        lines = Text()
        for (left_text, left_style), (right_text, right_style) in zip(left, right, strict=True):
            lines.append(fit_text(left_text, width), style=left_style)
            lines.append(_RULE, "dim")
            lines.append(fit_text(right_text, width), style=right_style)
            lines.append("\n")
        self.update(lines)


def _where(divergence: Divergence | None) -> str:
    if divergence is None:
        return "says the same to the end"
    token = ""
    if divergence.token is not None:
        token = f", token {divergence.token:,}"
    return f"parts: message {divergence.message + 1}, char {divergence.character:,}{token}"


def _head(attempt: ComparedAttempt, with_runs: bool) -> list[tuple[str, str]]:
    """Return the lines that describe an attempt, with their styles."""
    episode = attempt.episode
    run = f"run {episode.run_id[:8]} " if with_runs else ""
    name = f"{attempt.episode_id[:12]}  {run}attempt {episode.attempt}, step {episode.step}"
    if episode.reward is None:
        reward = "no reward"
    else:
        reward = f"reward {number(episode.reward)}"
    status = f"{attempt.status}, {reward}{f', {episode.cause}' if episode.cause else ''}"
    advantage = "no advantage"
    if attempt.advantage is not None:
        recomputed = " (recomputed)" if attempt.recomputed else ""
        advantage = f"advantage {attempt.advantage:+.3g}{recomputed}"
    tokens = f"{attempt.sampled:,} tokens sampled, {attempt.trained:,} trained"
    return [
        (name, "bold"),
        (status, STATUS_STYLES.get(attempt.status, "")),
        (advantage, ""),
        (tokens, ""),
    ]


class Columns(LineView, can_focus=True):
    """Two columns that scroll together."""

    DEFAULT_CSS = """
    Columns {
        height: 1fr; padding: 0 1; background: $background; color: $foreground;
        overflow-x: hidden; overflow-y: scroll; scrollbar-size-vertical: 1;
    }
    """

    def __init__(self) -> None:
        super().__init__()
        self.layout_shown: SideBySide | None = None
        self._width = 1
        self._styles = {kind: Style.parse(style) for kind, style in _STYLES.items()}

    def show(self, layout: SideBySide, width: int) -> None:
        """Show a layout, keeping the scroll position."""
        self._width = width
        self.layout_shown = layout
        self.virtual_size = Size(self.size.width, len(layout.lines))
        self.refresh()

    def go(self, line: int) -> None:
        """Scroll to a line, with some lines before it."""
        self.scroll_to(y=max(0, line - max(1, self.size.height // 4)))

    def line(self, line: int) -> Strip | None:
        if self.layout_shown is None or line >= len(self.layout_shown.lines):
            return None
        left, right = self.layout_shown.lines[line]
        rule = Segment(_RULE, Style(dim=True))
        return Strip([*self._cell(left), rule, *self._cell(right)])

    def _cell(self, cell: Cell) -> list[Segment]:
        used = sum(cell_len(text) for text, _ in cell)
        segments = [Segment(text, self._styles[kind]) for text, kind in cell]
        return [*segments, Segment(" " * max(0, self._width - used))]
