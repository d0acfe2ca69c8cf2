"""Episodes side by side: the attempts of one task, or any others, up to where they part and beyond."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import Screen
from textual.widgets import Static

from ajet_sdk.errors import AjetError
from ajet_tools.trace.align import Attempt, Divergence, align
from ajet_tools.trace.attempts import read_attempts
from ajet_tools.trace.queries.tokens import mark_of
from ajet_tools.trace.text import one_line, visible
from ajet_tools.tui.app import TraceApp
from ajet_tools.tui.widgets.key_line import KeyLine
from ajet_tools.tui.widgets.side_by_side import ColumnHeads, SideBySide, room_for
from ajet_tools.tui.widgets.title_line import TitleLine

__all__ = ["CompareScreen"]


class CompareScreen(Screen[None]):
    """The first episode is the reference: it stays on the left, and each other is aligned to it."""

    app: TraceApp
    DEFAULT_CSS = """
    CompareScreen #head { height: 1; padding: 0 1; background: $surface; }
    CompareScreen #empty { height: 1fr; padding: 1 2; display: none; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("n", "divergence(1)", "Divergence"),
        Binding("N", "divergence(-1)", "Divergence before", show=False),
        Binding("right", "choose(1)", "Column right", show=False),
        Binding("left", "choose(-1)", "Column left", show=False),
        Binding("right_square_bracket", "page(1)", "Columns", key_display="]"),
        Binding("left_square_bracket", "page(-1)", "Columns before", show=False, key_display="["),
        Binding("s", "swap", "Swap"),
        Binding("enter,o", "episode", "Episode", key_display="enter"),
        Binding("t", "tokens", "Tokens"),
        Binding("y", "copy", "Copy the episode's id", show=False),
    ]

    def __init__(self, episode_ids: Sequence[str]) -> None:
        super().__init__()
        self.episode_ids = tuple(dict.fromkeys(episode_ids))
        self.title = "compare"
        self.attempts: list[Attempt] = []
        self.first = 1
        """The first of the attempts beside the reference that is in sight."""
        self.chosen = 0
        """The column that keys act on."""
        self._mark: tuple[int, ...] = ()
        self._place = 0
        self._places: Sequence[int] = ()
        """The divergences that `_place` counts."""
        self._parted: list[Divergence | None] = []

    def compose(self) -> ComposeResult:
        yield TitleLine()
        yield Static(Text("reading …"), id="head")
        yield ColumnHeads()
        yield SideBySide()
        yield Static(id="empty")
        yield KeyLine()

    @property
    def side(self) -> SideBySide:
        return self.query_one(SideBySide)

    @property
    def shown(self) -> list[Attempt]:
        """The attempts in sight, the reference first."""
        count = room_for(self.size.width)[0] - 1
        return [*self.attempts[:1], *self.attempts[self.first : self.first + count]]

    def on_mount(self) -> None:
        self.side.focus()
        self._load()

    @work(exclusive=True, group="load")
    async def _load(self) -> None:
        if not self.episode_ids:
            self._say_nothing("There is no episode to compare: choose some in the list of episodes.")
            return
        try:
            mark = await self.app.ask(mark_of, *self.episode_ids)
            attempts = await self.app.ask(read_attempts, self.episode_ids)
        except AjetError as error:
            self._say_nothing(str(error))
            self.app.told(error)
            return
        again, self._mark = bool(self.attempts), mark
        order = {episode_id: i for i, episode_id in enumerate(self.episode_ids)}
        self.attempts = sorted(attempts, key=lambda a: order[a.episode_id])
        await self._show()
        if not again:
            self.action_divergence(1)

    @work(exclusive=True, group="follow")
    async def on_trace_app_changed(self) -> None:
        if self._mark and await self.app.ask(mark_of, *self.episode_ids) != self._mark:
            self._load()

    async def _show(self) -> None:
        if not self.attempts:
            return
        self._parted = await asyncio.to_thread(lambda: [align(self.attempts[0], other) for other in self.attempts])
        self.side.show(self.shown, room_for(self.size.width)[1])
        self._describe()

    def _say_nothing(self, why: str) -> None:
        self.side.display = self.query_one(ColumnHeads).display = False
        empty = self.query_one("#empty", Static)
        empty.display = True
        empty.update(Text(visible(why)))
        self.query_one("#head", Static).update(Text(""))

    def _describe(self) -> None:
        shown = self.shown
        self.chosen = max(0, min(self.chosen, len(shown) - 1))
        parted = [self._parted[self.attempts.index(attempt)] for attempt in shown]
        runs = len({attempt.run_id for attempt in self.attempts}) > 1
        self.query_one(ColumnHeads).tell(shown, parted, room_for(self.size.width)[1], self.chosen, runs)
        self.query_one("#head", Static).update(Text(self._line(), no_wrap=True, overflow="ellipsis"))

    def _line(self) -> str:
        """What is compared, and which of it is in sight."""
        tasks = {attempt.task_id for attempt in self.attempts}
        last = self.first + len(self.shown) - 2
        count = f"{len(self.attempts)} episodes" if len(self.attempts) > 1 else "1 episode: nothing to compare it with"
        beside = f"{self.first + 1}" if last == self.first else f"{self.first + 1} to {last + 1}"
        seen = f", 1 beside {beside}" if len(self.shown) < len(self.attempts) else ""
        what = f"{len(tasks)} different tasks" if len(tasks) > 1 else one_line(self.attempts[0].question, 200)
        return f"{count}{seen} · {what}"

    async def on_resize(self) -> None:
        await self._show()

    # Keys

    def action_divergence(self, step: int) -> None:
        """To the next place at which a column parts from the reference, around the end."""
        columns = self.side.columns
        if columns is None or not columns.places:
            if len(self.attempts) > 1:
                self.app.notify("these say the same to the end", timeout=3)
            return
        self._place = (self._place + step) % len(columns.places) if self._places == columns.places else 0
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

    def action_page(self, step: int) -> None:
        """Other attempts beside the reference."""
        count = max(1, room_for(self.size.width)[0] - 1)
        if len(self.attempts) <= count + 1:
            self.app.notify("all are in sight", timeout=2)
            return
        self._page_to(self.first + step * count)

    def _page_to(self, first: int) -> None:
        count = max(1, room_for(self.size.width)[0] - 1)
        self.first = max(1, min(first, len(self.attempts) - count))
        self.side.show(self.shown, room_for(self.size.width)[1])
        self._describe()

    async def action_swap(self) -> None:
        """The chosen column becomes the reference, and the reference takes its place."""
        if self.chosen == 0 or len(self.attempts) < 2:
            self.app.notify("choose another column with the right arrow, then s makes it the first", timeout=3)
            return
        other = self.attempts.index(self.shown[self.chosen])
        self.attempts[0], self.attempts[other] = self.attempts[other], self.attempts[0]
        self.episode_ids = tuple(attempt.episode_id for attempt in self.attempts)
        await self._show()

    def on_side_by_side_chosen(self, event: SideBySide.Chosen) -> None:
        self.chosen = event.column
        self._describe()

    def action_episode(self) -> None:
        if self.attempts:
            attempt, parted = self._acted_on()
            at = min(parted.message, len(attempt.messages) - 1) if parted and attempt.messages else None
            self.app.open_episode(attempt.episode_id, None if at is None else attempt.messages[at].call_id)

    def action_tokens(self) -> None:
        """The tokens of the chosen column, at the first that differs."""
        if self.attempts:
            attempt, parted = self._acted_on()
            timeline = parted.timeline if parted and parted.timeline is not None else 0
            self.app.open_tokens(attempt.episode_id, timeline, parted.token or 0 if parted else 0)

    def _acted_on(self) -> tuple[Attempt, Divergence | None]:
        """The chosen column's attempt, and where it parts from the reference (the reference from the next column)."""
        shown = self.shown
        attempt = shown[self.chosen]
        if self.chosen == 0 and len(shown) > 1:
            return attempt, align(shown[1], attempt)
        return attempt, self._parted[self.attempts.index(attempt)]

    def action_copy(self) -> None:
        if self.attempts:
            self.app.copy(self.shown[self.chosen].episode_id, "the episode's id")
