"""Base classes of the trace viewer and its screens."""

from __future__ import annotations

import asyncio
import shlex
import time
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Concatenate, ParamSpec, TypeVar

from rich.text import Text
from textual import work
from textual.app import ComposeResult, SystemCommand
from textual.message import Message
from textual.screen import Screen
from textual.widgets import Footer, Static
from textual.worker import Worker

from ajet_sdk.errors import AjetError
from ajet_sdk.pictures import Picture
from ajet_sdk.protocols import TraceReader
from ajet_sdk.reporting.output import visible
from ajet_tools.text.clean import one_line
from ajet_tools.trace.locate import State, state_of
from ajet_tools.trace.queries.episodes import compared_with
from ajet_tools.tui.base import ViewerApp
from ajet_tools.tui.widgets.lines import TitleLine

MAX_COMPARED = 16
"""Maximum number of compared episodes."""
P = ParamSpec("P")
T = TypeVar("T")


class TraceChanged(Message):
    """Tells the current screen that the trace has changed."""


class TraceViewer(ViewerApp):
    """The viewer of a trace. Screens read the trace with `ask`, and open other screens with
    `open_...`."""

    FOLLOW_SECONDS: ClassVar[float] = 0.25
    PATIENCE: ClassVar[float] = 30.0
    """The pause between two refreshes, as a multiple of the processor time that the run spent on
    the last one, so that a live run is not slowed down."""
    LONGEST_WAIT: ClassVar[float] = 10.0
    """The longest pause, in seconds."""

    def __init__(self, reader: TraceReader, path: Path) -> None:
        super().__init__()
        self.reader = reader
        self.path = path
        self.sub_title = one_line(str(path))
        self.live = False
        """Whether a process is writing the trace."""
        self.filters: list[str] = []
        """History of filters, newest last."""
        self.tokenizer: Path | None = None
        """A tokenizer to use instead of the one in the run's config."""
        self._state: State = state_of(path, reader)
        self._last_error = ""
        self._refreshed = 0.0
        self._spent_before = 0.0
        """Processor time that the run had spent on answers before the last refresh."""
        self._followed: Screen[object] | None = None
        self._check: Worker[None] | None = None
        self._changes = 0
        self._seen: weakref.WeakKeyDictionary[Screen[object], int] = weakref.WeakKeyDictionary()
        """Value of `_changes` at the last notification of each screen."""

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        yield from super().get_system_commands(screen)
        if isinstance(screen, TraceScreen):
            for does, action in screen.PALETTE:
                act = partial(self.call_later, self.run_action, action, screen)
                yield SystemCommand(does, "has no key", act)

    async def ask(
        self,
        question: Callable[Concatenate[TraceReader, P], T],
        *arguments: P.args,
        **named: P.kwargs,
    ) -> T:
        """Call a function with the reader in a thread, and return its result."""
        return await asyncio.to_thread(question, self.reader, *arguments, **named)

    def follow(self) -> None:
        """Check for changes, one check at a time."""
        if self._check is None or self._check.is_finished:
            self._check = self.run_worker(self._check_for_changes(), group="follow")

    async def _check_for_changes(self) -> None:
        """Notify the current screen of changes. Reads only sizes and times of files."""
        state = await asyncio.to_thread(state_of, self.path, self.reader)
        before = self._changes
        self.live = state.live
        at = time.monotonic()
        if not self.screen_stack:  # the viewer was closed
            return
        screen = self.screen
        # a screen that comes to the front is not to wait for the pause of another one
        if screen is not self._followed:
            self._followed = screen
            self._refreshed = 0.0
        # at the end of a run nothing is left to slow down
        if state != self._state and (self._is_due(at) or not state.live):
            self._state = state
            self._changes += 1
        if self._seen.setdefault(screen, before) != self._changes:
            self._seen[screen] = self._changes
            self._refreshed = at
            self._spent_before = self.reader.spent
            screen.post_message(TraceChanged())

    def _is_due(self, now: float) -> bool:
        """Whether the pause since the last refresh is over. Times are monotonic, in seconds."""
        pause = self.PATIENCE * (self.reader.spent - self._spent_before)
        return now >= self._refreshed + min(pause, self.LONGEST_WAIT)

    def show_new_error(self, error: AjetError | None) -> None:
        """Show an error of the trace, unless it is the last one; None clears it."""
        before = self._last_error
        self._last_error = str(error or "")
        if error and self._last_error != before:
            self.show_error(error)

    def copy_branch(self, episode_id: str, call_id: str, keep: int = 0) -> None:
        """Copy the command that forks an episode from a call, keeping tokens of its reply."""
        token = f" --token {keep}" if keep > 0 else ""
        where = shlex.quote(str(self.path))
        command = f"ajet trace branch {episode_id[:12]} {where} --at {call_id[:12]}{token}"
        self.copy(command, command)

    @work(group="group", exclusive=True)
    async def compare_group(self, episode_id: str) -> None:
        """Compare an episode with its group, or without one, with its task at other steps."""
        ids = await self.ask(compared_with, episode_id)
        if len(ids) > 1:
            self.open_compare(ids[:MAX_COMPARED])
        else:
            self.notify("its run has no other attempt at this task to compare with", timeout=3)

    @abstractmethod
    def open_run(self, run_id: str) -> None:
        """Open a run: curves, ledger, metrics, config."""

    @abstractmethod
    def open_episodes(self, run_id: str | None = None, filter_text: str = "") -> None:
        """Open the list of episodes of a run, or of all runs."""

    @abstractmethod
    def open_episode(
        self, episode_id: str, call_id: str | None = None, *, needle: str = ""
    ) -> None:
        """Open the conversation of an episode, at a call or a text if given."""

    @abstractmethod
    def open_tokens(self, episode_id: str, timeline: int = 0, token: int = 0) -> None:
        """Open the tokens of a timeline."""

    @abstractmethod
    def open_compare(self, episode_ids: Sequence[str]) -> None:
        """Compare episodes in columns."""

    @abstractmethod
    def open_many_runs(self, run_ids: Sequence[str]) -> None:
        """Compare runs as `ajet trace compare` does, or the tasks of a single run by steps."""

    @abstractmethod
    def open_explanation(self, run_id: str) -> None:
        """Explain the step of a run with the largest change of reward."""

    @abstractmethod
    def open_pictures(self, pictures: Sequence[Picture]) -> None:
        """Show pictures in a browser."""

    @abstractmethod
    def open_feedback(self, episode_id: str, call_id: str | None = None) -> None:
        """Open the feedback form of an episode or a call."""

    @abstractmethod
    def open_found(self, prefix: str) -> None:
        """Open the run, episode or call whose id begins with a prefix."""


class TraceScreen(Screen[None]):
    """A screen with title, body and key line, which reads the trace again after changes.

    Changes during a reading cause a single further one.
    """

    app: TraceViewer
    EMPTY_HEAD: ClassVar[str] = ""
    """Text of `#head` without content, a format with the screen as argument."""
    PALETTE: ClassVar[Sequence[tuple[str, str]]] = ()
    """Actions without a key, which the command palette offers: what each does, and its name."""
    DEFAULT_CSS = """
    TraceScreen #empty { height: 1fr; padding: 1 2; display: none; }
    TraceScreen.empty #empty { display: block; }
    """

    def __init__(self) -> None:
        super().__init__()
        self._behind = self._reading = False

    def compose(self) -> ComposeResult:
        yield TitleLine()
        yield from self.compose_body()
        yield Footer(compact=True)

    def compose_body(self) -> ComposeResult:
        """Yield the widgets between title and key line."""
        raise NotImplementedError

    def on_mount(self) -> None:
        self.load()

    async def read(self) -> None:
        """Read the trace and show changes, keeping cursor and scroll position."""

    def load(self) -> None:
        """Read now, or again after the current reading."""
        self._behind = True
        if not self._reading:
            self._read_on()

    @work(group="load")
    async def _read_on(self) -> None:
        self._reading = True
        try:
            while self._behind:
                self._behind = False
                try:
                    await self.read()
                except AjetError as error:
                    self.app.show_new_error(error)
                    if self.query("#empty"):
                        self.show_empty(str(error))
                else:
                    self.app.show_new_error(None)
        finally:
            self._reading = False

    def show_empty(self, why: str) -> None:
        """Show a message in `#empty` instead of the content, and set the class `empty`."""
        self.add_class("empty")
        self.query_one("#empty", Static).update(Text(visible(why)))
        self.query_one("#head", Static).update(Text(self.EMPTY_HEAD.format(self)))

    def on_trace_changed(self) -> None:
        self.load()
