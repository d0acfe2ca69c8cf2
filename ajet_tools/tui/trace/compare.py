"""Screen that compares episodes in columns, aligned up to their first differences."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from rich.cells import cell_len
from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.events import Click
from textual.geometry import Size
from textual.message import Message
from textual.strip import Strip
from textual.widgets import Static

from ajet_tools.text.clean import one_line
from ajet_tools.text.tables import number
from ajet_tools.trace.compare.attempts import (
    Cell,
    Columns,
    ComparedAttempt,
    Divergence,
    Kind,
    align,
    columns_of,
    read_attempts,
)
from ajet_tools.trace.queries.records import mark_of
from ajet_tools.tui.trace.screen import TraceScreen
from ajet_tools.tui.widgets.long_text import LineView, fit_text


class CompareScreen(TraceScreen):
    """Compares episodes with the first one, which stays in the left column."""

    DEFAULT_CSS = """
    CompareScreen #head { height: 1; padding: 0 1; background: $surface; }
    CompareScreen.empty ColumnHeads, CompareScreen.empty SideBySide { display: none; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("n", "divergence(1)", "Next divergence"),
        Binding("N", "divergence(-1)", "Previous divergence", show=False),
        Binding("right", "choose(1)", "Column right", show=False),
        Binding("left", "choose(-1)", "Column left", show=False),
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
        self.first = 1
        """Index of the first visible attempt after the reference."""
        self.chosen = 0
        """Selected column."""
        self._mark: tuple[int, ...] = ()
        self._place = 0
        """Index in `_places` of the last visited divergence."""
        self._places: Sequence[int] = ()
        self._divergences: list[Divergence | None] = []

    def compose_body(self) -> ComposeResult:
        yield Static(Text("reading …"), id="head")
        yield ColumnHeads()
        yield SideBySide()
        yield Static(id="empty")

    @property
    def side(self) -> SideBySide:
        return self.query_one(SideBySide)

    @property
    def shown(self) -> list[ComparedAttempt]:
        """Visible attempts, the reference first."""
        return [*self.attempts[:1], *self.attempts[self.first : self.first + self._beside]]

    @property
    def _beside(self) -> int:
        """Number of columns after the reference."""
        return fit_columns(self.size.width)[0] - 1

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
        reloaded, self._mark = bool(self.attempts), mark
        order = {episode_id: i for i, episode_id in enumerate(self.episode_ids)}
        self.attempts = sorted(attempts, key=lambda a: order[a.episode_id])
        await self._show()
        if not reloaded:
            self.action_divergence(1)

    async def _show(self) -> None:
        if not self.attempts:
            return
        self.remove_class("empty")
        self._divergences = await asyncio.to_thread(
            lambda: [align(self.attempts[0], attempt) for attempt in self.attempts]
        )
        self.side.show(self.shown, fit_columns(self.size.width)[1])
        self._describe()

    def _describe(self) -> None:
        shown = self.shown
        self.chosen = max(0, min(self.chosen, len(shown) - 1))
        divergences = [self._divergences[self.attempts.index(attempt)] for attempt in shown]
        runs = len({attempt.episode.run_id for attempt in self.attempts}) > 1
        self.query_one(ColumnHeads).show(
            shown, divergences, fit_columns(self.size.width)[1], self.chosen, runs
        )
        self.query_one("#head", Static).update(
            Text(self._line(), no_wrap=True, overflow="ellipsis")
        )

    def _line(self) -> str:
        """Describe the compared episodes, and the visible ones."""
        tasks = {attempt.episode.task.task_id for attempt in self.attempts}
        last, size = self.first + len(self.shown) - 2, len(self.attempts)
        count = f"{size} episodes" if size > 1 else "only 1 episode: nothing to compare it with"
        beside = f"{self.first + 1}" if last == self.first else f"{self.first + 1} to {last + 1}"
        seen = f", 1 beside {beside}" if len(self.shown) < size else ""
        query = one_line(self.attempts[0].episode.task.main_query, 200)
        return f"{count}{seen} · {f'{len(tasks)} different tasks' if len(tasks) > 1 else query}"

    async def on_resize(self) -> None:
        await self._show()

    # Keys

    def action_divergence(self, step: int) -> None:
        """Go to the next divergence from the reference, wrapping around."""
        columns = self.side.columns
        if columns is None or not columns.places:
            if len(self.attempts) > 1:
                self.app.notify("these say the same to the end", timeout=3)
            return
        self._place = (
            (self._place + step) % len(columns.places) if self._places == columns.places else 0
        )
        self._places = columns.places
        self.side.go(columns.places[self._place])

    def action_choose(self, step: int) -> None:
        if not self.attempts:
            return
        column = self.chosen + step
        if column >= len(self.shown) and self.first + len(self.shown) - 1 < len(self.attempts):
            self._page_to(self.first + 1)
        elif column < 0 and self.first > 1:
            self._page_to(self.first - 1)
        else:
            self.chosen = column
        self._describe()

    def _page_to(self, first: int) -> None:
        self.first = max(1, min(first, len(self.attempts) - self._beside))
        self.side.show(self.shown, fit_columns(self.size.width)[1])
        self._describe()

    async def action_swap(self) -> None:
        """Swap the selected column with the reference."""
        if self.chosen == 0 or len(self.attempts) < 2:
            self.app.notify(
                "choose another column with the right arrow, then s makes it the first", timeout=3
            )
            return
        index = self.attempts.index(self.shown[self.chosen])
        self.attempts[0], self.attempts[index] = self.attempts[index], self.attempts[0]
        self.episode_ids = tuple(attempt.episode_id for attempt in self.attempts)
        await self._show()

    def on_side_by_side_chosen(self, event: SideBySide.Chosen) -> None:
        self.chosen = event.column
        self._describe()

    def action_episode(self) -> None:
        if self.attempts:
            attempt, divergence = self._current_column()
            at = (
                min(divergence.message, len(attempt.messages) - 1)
                if divergence and attempt.messages
                else None
            )
            self.app.open_episode(
                attempt.episode_id, None if at is None else attempt.messages[at].call_id
            )

    def action_tokens(self) -> None:
        """Open the tokens of the selected column, at the first difference."""
        if self.attempts:
            attempt, divergence = self._current_column()
            timeline = divergence.timeline if divergence and divergence.timeline is not None else 0
            self.app.open_tokens(
                attempt.episode_id, timeline, divergence.token or 0 if divergence else 0
            )

    def _current_column(self) -> tuple[ComparedAttempt, Divergence | None]:
        """Return the selected attempt with its divergence from the reference; a reference is
        compared with the next."""
        shown = self.shown
        attempt = shown[self.chosen]
        if self.chosen == 0 and len(shown) > 1:
            return attempt, align(shown[1], attempt)
        return attempt, self._divergences[self.attempts.index(attempt)]

    def action_copy(self) -> None:
        if self.attempts:
            self.app.copy(self.shown[self.chosen].episode_id, "the episode's id")


MIN_COLUMN_WIDTH = 34
"""Minimum width of a readable column."""
_RULE = " │ "
_STYLES: dict[Kind, str] = {
    "role": "bold cyan",
    "same": "dim",
    "differs": "bold reverse",
    "after": "",
    "left out": "italic dim",
}
_STATUS_STYLES = {"failed": "red", "timeout": "yellow", "aborted": "yellow", "running": "cyan"}


def fit_columns(width: int) -> tuple[int, int]:
    """Return the number of columns that fit, two or three, and their width."""
    columns = 3 if width >= 3 * MIN_COLUMN_WIDTH + 2 * len(_RULE) + 2 else 2
    return columns, max(1, (width - 2 - (columns - 1) * len(_RULE)) // columns)


class ColumnHeads(Static):
    """The heads of the columns: episode, status, reward, divergence from the first."""

    DEFAULT_CSS = "ColumnHeads { height: 5; padding: 0 1; background: $panel; color: $foreground; }"

    def show(
        self,
        shown: Sequence[ComparedAttempt],
        divergences: Sequence[Divergence | None],
        width: int,
        chosen: int,
        runs: bool,
    ) -> None:
        """Show the heads and mark the selected one; `runs` includes the ids of runs."""
        heads = [_head(a, divergences[i], i, width, runs) for i, a in enumerate(shown)]
        lines = Text()
        for line in range(5):
            for i, head in enumerate(heads):
                text, style = head[line]
                mark = "bold reverse" if line == 0 and i == chosen else style
                lines.append(fit_text(text, width), style=mark).append(
                    _RULE if i < len(heads) - 1 else "\n", "dim"
                )
        self.update(lines)


def _head(
    attempt: ComparedAttempt, divergence: Divergence | None, column: int, width: int, runs: bool
) -> list[tuple[str, str]]:
    run = f"run {attempt.episode.run_id[:8]} " if runs else ""
    name = (
        f"{attempt.episode_id[:12]}  {run}attempt {attempt.episode.attempt}, step"
        f" {attempt.episode.step}"
    )
    episode = attempt.episode
    reward = "no reward" if episode.reward is None else f"reward {number(episode.reward)}"
    status = f"{attempt.status}, {reward}{f', {episode.cause}' if episode.cause else ''}"
    recomputed = " (recomputed)" if attempt.recomputed else ""
    advantage = (
        "no advantage"
        if attempt.advantage is None
        else f"advantage {attempt.advantage:+.3g}{recomputed}"
    )
    tokens = f"{attempt.sampled:,} tokens sampled, {attempt.trained:,} trained"
    where = "the others are compared with this" if column == 0 else "says the same to the end"
    if column and divergence is not None:
        token = "" if divergence.token is None else f", token {divergence.token:,}"
        where = f"parts: message {divergence.message + 1}, char {divergence.character:,}{token}"
    style = _STATUS_STYLES.get(attempt.status, "")
    return [(name, "bold"), (status, style), (advantage, ""), (tokens, ""), (where, "magenta")]


class SideBySide(LineView, can_focus=True):
    """Columns that scroll together."""

    DEFAULT_CSS = """
    SideBySide {
        height: 1fr; padding: 0 1; background: $background; color: $foreground;
        overflow-x: hidden; overflow-y: scroll; scrollbar-size-vertical: 1;
    }
    """

    @dataclass
    class Chosen(Message):
        """A column was clicked."""

        column: int

    def __init__(self) -> None:
        super().__init__()
        self.columns: Columns | None = None
        self._width = 1
        self._styles = {kind: Style.parse(style) for kind, style in _STYLES.items()}

    def show(self, attempts: Sequence[ComparedAttempt], width: int) -> None:
        """Show attempts in columns, keeping the scroll position."""
        self._width = width
        self.columns = columns_of(attempts, width)
        self.virtual_size = Size(self.size.width, len(self.columns.lines))
        self.refresh()

    def go(self, line: int) -> None:
        """Scroll to a line, with some lines before it."""
        self.scroll_to(y=max(0, line - max(1, self.size.height // 4)))

    def on_click(self, event: Click) -> None:
        self.post_message(self.Chosen(max(0, event.x - 1) // (self._width + len(_RULE))))

    def line(self, line: int) -> Strip | None:
        if self.columns is None or line >= len(self.columns.lines):
            return None
        segments: list[Segment] = []
        for i, cell in enumerate(self.columns.lines[line]):
            if i:
                segments.append(Segment(_RULE, Style(dim=True)))
            segments += self._cell(cell)
        return Strip(segments)

    def _cell(self, cell: Cell) -> list[Segment]:
        used = sum(cell_len(text) for text, _ in cell)
        segments = [Segment(text, self._styles[kind]) for text, kind in cell]
        return [*segments, Segment(" " * max(0, self._width - used))]
