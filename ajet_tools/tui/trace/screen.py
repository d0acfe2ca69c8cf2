"""The interface of the application that screens use, and the screens' base class.

How often a viewer asks a live run what is new: so seldom that the run does not notice.
"""

from __future__ import annotations

import asyncio
import shlex
import time
import weakref
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import ClassVar, Concatenate, ParamSpec, TypeVar

from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.message import Message
from textual.screen import Screen
from textual.widgets import DataTable, Static
from textual.widgets.data_table import RowKey
from textual.worker import Worker

from ajet_sdk.errors import AjetError, ConfigError
from ajet_sdk.protocols import TraceReader
from ajet_sdk.reporting.output import visible
from ajet_tools.text.clean import one_line
from ajet_tools.trace.locate import State, state_of
from ajet_tools.trace.queries.episodes import compared_with
from ajet_tools.tui.base import ViewerApp
from ajet_tools.tui.widgets.lines import KeyLine, TitleLine

READ_ONLY = ConfigError("this viewer only reads: it takes no feedback and writes no file")
MAX_COMPARED = 16
"""Episodes side by side."""
P = ParamSpec("P")
T = TypeVar("T")


class RefreshRate:
    """A screen gets a change at the earliest `patience` times as long after the last as its answers cost the run.

    `spent` says how many processor seconds the run has spent on answers in all: an answer that waits for a busy run
    costs it nothing, and asking less often would not make it quicker. Of the last few rounds of answers the cheapest
    counts. What a screen reads at first is no round, for it is read but once. Times are in seconds, on any clock that
    only goes on.
    """

    def __init__(self, spent: Callable[[], float], patience: float, longest: float) -> None:
        self._spent = spent
        self.patience, self.longest = patience, longest
        self._rounds: deque[float] = deque(maxlen=4)
        self._before = 0.0
        self._under_way = 0
        self._refreshed: float | None = None

    def reset(self, patience: float) -> None:
        """Another screen is in front."""
        self.patience = patience
        self._rounds.clear()
        self._refreshed = None

    def begin_query(self) -> None:
        """A question is put; `end_query` follows. A round is not over before."""
        self._under_way += 1

    def end_query(self) -> None:
        self._under_way -= 1

    def is_due(self, now: float) -> bool:
        """Whether a screen may be notified of a change."""
        if self._refreshed is None or now >= self._refreshed + self.longest:
            return True
        if self._under_way:
            return False
        costs = [*self._rounds, *([self._cost] if self._cost else [])]
        return now >= self._refreshed + self.patience * min(costs, default=0.0)

    @property
    def _cost(self) -> float:
        """Of the round that goes on."""
        return self._spent() - self._before

    def record_refresh(self, now: float) -> None:
        """A screen is notified now: what it asks from here on is a round."""
        if self._refreshed is not None and self._cost:
            self._rounds.append(self._cost)
        self._before, self._refreshed = self._spent(), now


class TraceChanged(Message):
    """The trace has new rows, or a run's status changed. Sent to the screen in front."""


class TraceViewer(ViewerApp):
    """The viewer of one trace. Screens reach the trace through `ask`, and each other through `open_...`."""

    FOLLOW_SECONDS: ClassVar[float] = 0.25
    PATIENCE: ClassVar[float] = 30.0
    """See `RefreshRate`."""
    LONGEST_WAIT: ClassVar[float] = 10.0

    def __init__(self, reader: TraceReader, path: Path) -> None:
        super().__init__()
        self.reader = reader
        self.path = path
        self.sub_title = one_line(str(path))
        self.read_only = False
        """Whether feedback and files on this machine are refused: to a person of `--tokens`."""
        self.live = False
        """Whether a process writes the trace."""
        self.last_sql = ""
        """What stood in the SQL console when it was left."""
        self.queries: list[str] = []
        self.filters: list[str] = []
        self.searches: list[str] = []
        """What was asked before, the newest last."""
        self.tokenizer: Path | None = None
        """A tokenizer to read tokens with, in place of the one that a run's config names."""
        self._state: State = state_of(path, reader)
        self._last_error = ""
        self._rate = RefreshRate(lambda: reader.spent, self.PATIENCE, self.LONGEST_WAIT)
        self._followed: Screen[object] | None = None
        self._check: Worker[None] | None = None
        self._changes = 0
        self._seen: weakref.WeakKeyDictionary[Screen[object], int] = weakref.WeakKeyDictionary()
        """Of `_changes`, how many each screen was notified of."""

    async def ask(self, question: Callable[Concatenate[TraceReader, P], T], *arguments: P.args, **named: P.kwargs) -> T:
        """The answer of a function of the reader, worked out in a thread. Raises what the function raises."""
        self._rate.begin_query()
        try:
            return await asyncio.to_thread(question, self.reader, *arguments, **named)
        finally:
            self._rate.end_query()

    def follow(self) -> None:
        """Check for changes, one check at a time."""
        if self._check is None or self._check.is_finished:
            self._check = self.run_worker(self._check_for_changes(), group="follow")

    async def _check_for_changes(self) -> None:
        """Notify the screen in front, once, of what came since the last time. Only the files' sizes are read."""
        state = await asyncio.to_thread(state_of, self.path, self.reader)
        before, self.live = self._changes, state.live
        at = time.monotonic()
        if not self.screen_stack:  # the viewer has been left meanwhile
            return
        screen = self.screen
        if screen is not self._followed:
            self._followed = screen
            self._rate.reset(self.PATIENCE * getattr(screen, "PATIENCE_FACTOR", 1.0))
        if state != self._state and (self._rate.is_due(at) or not state.live):
            self._state = state
            self._changes += 1
        if self._seen.setdefault(screen, before) != self._changes:
            self._seen[screen] = self._changes
            self._rate.record_refresh(at)
            screen.post_message(TraceChanged())

    def show_new_error(self, error: AjetError | None) -> None:
        """What is wrong with the trace, when it is not what was wrong before; None: nothing is."""
        before, self._last_error = self._last_error, str(error or "")
        if error and self._last_error != before:
            self.show_error(error)

    def copy_branch(self, episode_id: str, call_id: str, keep: int = 0) -> None:
        """Copy, and show, the command that samples an episode again from a call on, keeping tokens of its reply."""
        token = f" --token {keep}" if keep > 0 else ""
        where = shlex.quote(str(self.path))
        command = f"ajet trace branch {episode_id[:12]} {where} --at {call_id[:12]}{token}"
        self.copy(command, command)

    @work(group="group", exclusive=True)
    async def compare_group(self, episode_id: str) -> None:
        """Compare an episode with its group; where it has none, with its task at other steps."""
        ids = await self.ask(compared_with, episode_id)
        if len(ids) > 1:
            self.open_compare(ids[:MAX_COMPARED])
        else:
            self.notify("its run has no other attempt at this task to compare with", timeout=3)

    @abstractmethod
    def open_run(self, run_id: str) -> None:
        """Its curves, ledger, metrics and config."""

    @abstractmethod
    def open_episodes(self, run_id: str | None = None, filter_text: str = "") -> None:
        """A list of episodes; of all runs where no run is given."""

    @abstractmethod
    def open_episode(self, episode_id: str, call_id: str | None = None) -> None:
        """Its conversation, at a call where one is given."""

    @abstractmethod
    def open_tokens(self, episode_id: str, timeline: int = 0, token: int = 0) -> None:
        """The tokens of one of its timelines."""

    @abstractmethod
    def open_compare(self, episode_ids: Sequence[str]) -> None:
        """Several episodes side by side: the attempts of one task, or any two."""

    @abstractmethod
    def open_many_runs(self, run_ids: Sequence[str]) -> None:
        """Their curves over each other, and tasks by runs; of one run tasks by steps."""

    @abstractmethod
    def open_explanation(self, run_id: str) -> None:
        """What changed at the step of a run with the largest change of reward."""

    @abstractmethod
    def open_sql(self, text: str = "") -> None:
        """The SQL console, with a query."""

    @abstractmethod
    def open_feedback(self, episode_id: str, call_id: str | None = None) -> None:
        """The form for feedback on an episode or a call."""

    @abstractmethod
    def open_found(self, prefix: str) -> None:
        """The run, episode or call whose id begins so."""


class TraceScreen(Screen[None]):
    """A title, a body and a line of keys; it reads again when the trace has changed.

    There is one reading at a time, and one more for any number of changes that came meanwhile.
    """

    app: TraceViewer
    PATIENCE_FACTOR: ClassVar[float] = 1.0
    """Above 1, changes may be shown so many times later."""
    EMPTY_HEAD: ClassVar[str] = ""
    """What stands in `#head` while there is nothing to show, a format of the screen."""
    DEFAULT_CSS = """
    TraceScreen #empty { height: 1fr; padding: 1 2; display: none; }
    TraceScreen.empty #empty { display: block; }
    """

    def __init__(self) -> None:
        super().__init__()
        self._behind = self._reading = False

    @property
    def address(self) -> str:
        """What `TraceApp.open_address` opens it by; empty for a screen that has none."""
        return ""

    def compose(self) -> ComposeResult:
        yield TitleLine()
        yield from self.compose_body()
        yield KeyLine()

    def compose_body(self) -> ComposeResult:
        """What stands between the title and the keys."""
        raise NotImplementedError

    def on_mount(self) -> None:
        self.load()

    async def read(self) -> None:
        """Ask the trace what is new and show it; what the reader looks at stays where it is."""

    def load(self) -> None:
        """Read, or read once more when the reading that goes on is done."""
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
                    self.show_failure(error)
                else:
                    self.app.show_new_error(None)
        finally:
            self._reading = False

    def show_failure(self, error: AjetError) -> None:
        """Why it could not be read: found at each change, and shown where it is another one, or in `#empty`."""
        self.app.show_new_error(error)
        if self.query("#empty"):
            self.show_empty(str(error))

    def show_empty(self, why: str) -> None:
        """Say in `#empty` why there is nothing to show; the screen has the class `empty` from now on."""
        self.add_class("empty")
        self.query_one("#empty", Static).update(Text(visible(why)))
        self.query_one("#head", Static).update(Text(self.EMPTY_HEAD.format(self)))

    def on_trace_changed(self) -> None:
        self.load()


class FittedTable(DataTable[object]):
    """A DataTable that draws its rows anew once their columns have got their widths.

    Textual measures new cells when the table is idle. Rows drawn before that, cut to the old widths, stay in its caches
    (https://github.com/Textualize/textual/issues/3533).
    """

    def _update_dimensions(self, new_rows: Iterable[RowKey]) -> None:
        super()._update_dimensions(new_rows)
        self.notify_style_update()
