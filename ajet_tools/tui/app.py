"""`ajet trace view`: the application, and the way from one screen to another."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Concatenate, ParamSpec, TypeVar

from textual import events
from textual.app import App, SystemCommand
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.screen import Screen
from textual.worker import Worker

from ajet_sdk.errors import AjetError
from ajet_sdk.protocols import TraceReader
from ajet_tools.trace import queries
from ajet_tools.trace.locate import State, state_of
from ajet_tools.trace.text import one_line, visible

__all__ = ["DARK", "LEAST_SIZE", "LIGHT", "TraceApp", "is_basic"]

P = ParamSpec("P")
T = TypeVar("T")

LEAST_SIZE = (60, 15)
"""Columns and rows below which the screens do not fit."""
DARK, LIGHT = "textual-dark", "textual-light"


class TraceApp(App[None]):
    """The viewer of one trace. Screens reach the trace through `ask`, and each other through `open_...`."""

    CSS_PATH = "app.tcss"
    TITLE = "ajet"
    ENABLE_COMMAND_PALETTE = True
    FOLLOW_SECONDS: ClassVar[float] = 0.25
    PATIENCE: ClassVar[float] = 30.0
    """A live run is asked what is new after this many times as long as its last answers took: it is not to notice."""
    LONGEST_WAIT: ClassVar[float] = 10.0
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "back", "Back", show=False),
        Binding("question_mark", "keys", "Keys", key_display="?"),
        Binding("f1", "keys", "Keys", show=False, priority=True),
        Binding("f2", "change_theme_shade", "Light or dark", show=False, priority=True),
        Binding("q", "quit", "Quit", show=False),
    ]

    class Changed(Message):
        """The trace has new rows, or a run's status changed. Sent to the screen in front."""

    def __init__(self, reader: TraceReader, where: Path, run_id: str | None = None) -> None:
        super().__init__()
        self.reader = reader
        self.where = where
        self.first_run = run_id
        self.sub_title = one_line(str(where))
        self.live = False
        """Whether a process writes the trace."""
        self.last_sql = ""
        """What stood in the SQL console when it was left."""
        self.tokenizer: Path | None = None
        """A tokenizer to read tokens with, in place of the one that a run's config names."""
        self._state: State = state_of(where)
        self._trouble = ""
        self._asked = 0.0
        """Seconds for which the trace has been asked since a screen was last told of a change."""
        self._quiet_until = 0.0
        self._looking: Worker[None] | None = None
        self._changes = 0
        self._told: weakref.WeakKeyDictionary[Screen[Any], int] = weakref.WeakKeyDictionary()

    async def ask(self, question: Callable[Concatenate[TraceReader, P], T], *arguments: P.args, **named: P.kwargs) -> T:
        """The answer of a function of the reader, worked out in a thread. Raises what the function raises."""
        began = time.monotonic()
        try:
            return await asyncio.to_thread(question, self.reader, *arguments, **named)
        finally:
            self._asked += time.monotonic() - began

    def on_mount(self) -> None:
        from ajet_tools.tui.screens.runs import RunsScreen

        self.push_screen(RunsScreen())
        if self.first_run is not None:
            self.open_run(self.first_run)
        self.set_interval(self.FOLLOW_SECONDS, self._follow)
        self._follow()

    def _follow(self) -> None:
        """Look for changes, one look at a time."""
        if self._looking is None or self._looking.is_finished:
            self._looking = self.run_worker(self._look_for_changes(), group="follow")

    async def _look_for_changes(self) -> None:
        """Tell the screen in front, once, of what came since it was last told. Only the files' sizes are looked at."""
        state = await asyncio.to_thread(state_of, self.where)
        before, self.live = self._changes, state.live
        if self._asked:
            wait = min(self.PATIENCE * self._asked, self.LONGEST_WAIT) if self.live else 0.0
            self._asked, self._quiet_until = 0.0, time.monotonic() + wait
        if state != self._state and time.monotonic() >= self._quiet_until:
            self._state = state
            self._changes += 1
        if not self.screen_stack:  # the viewer has been left meanwhile
            return
        screen = self.screen
        if self._told.setdefault(screen, before) != self._changes:
            self._told[screen] = self._changes
            screen.post_message(self.Changed())

    def say_once(self, error: AjetError | None) -> None:
        """What is wrong with the trace, when it is not what was wrong before; None: nothing is."""
        before, self._trouble = self._trouble, str(error or "")
        if error and self._trouble != before:
            self.told(error)

    def open_run(self, run_id: str) -> None:
        from ajet_tools.tui.screens.run import RunScreen

        self.push_screen(RunScreen(run_id))

    def open_episodes(self, run_id: str | None = None, filter_text: str = "") -> None:
        from ajet_tools.tui.screens.episodes import EpisodesScreen

        self.push_screen(EpisodesScreen(run_id, filter_text))

    def open_episode(self, episode_id: str, call_id: str | None = None) -> None:
        from ajet_tools.tui.screens.episode import EpisodeScreen

        self.push_screen(EpisodeScreen(episode_id, call_id))

    def open_tokens(self, episode_id: str, timeline: int = 0, token: int = 0) -> None:
        from ajet_tools.tui.screens.tokens import TokensScreen

        self.push_screen(TokensScreen(episode_id, timeline, token))

    def open_compare(self, episode_ids: Sequence[str]) -> None:
        """Several episodes side by side: the attempts of one task, or any two."""
        from ajet_tools.tui.screens.compare import CompareScreen

        self.push_screen(CompareScreen(tuple(episode_ids)))

    def open_sql(self, text: str = "") -> None:
        from ajet_tools.tui.screens.sql import SqlScreen

        self.push_screen(SqlScreen(text))

    def give_feedback(self, episode_id: str, call_id: str | None = None) -> None:
        from ajet_tools.tui.screens.feedback import FeedbackScreen

        self.push_screen(FeedbackScreen(episode_id, call_id))

    def open_found(self, prefix: str) -> None:
        """Open the run, episode or call whose id begins so."""
        self.run_worker(self._open_found(prefix), group="goto", exclusive=True)

    async def _open_found(self, prefix: str) -> None:
        found = await self.ask(queries.find, prefix)
        if found.kind == "run":
            self.open_run(found.id)
        elif found.kind == "episode":
            self.open_episode(found.id)
        else:
            self.open_episode(await self.ask(queries.episode_of_call, found.id), found.id)

    def told(self, error: Exception) -> None:
        """An error of ours as a word at the screen's edge; the screen stays as it is."""
        self.notify(visible(str(error)), severity="error", markup=False, timeout=8)

    def copy(self, text: str, what: str) -> None:
        """Put a text on the clipboard (OSC 52, which reaches through SSH) and say what it is."""
        self.copy_to_clipboard(text)
        self.notify(f"copied {what}", markup=False, timeout=2)

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        yield SystemCommand(
            "Go to an id", "Open a run, an episode or a call by the beginning of its id", self.action_go
        )
        yield SystemCommand("Runs", "Back to the list of runs", self.action_runs)
        yield SystemCommand("SQL", "Ask the trace a question in SQL", self.open_sql)
        yield SystemCommand("Keys", "Every key of this screen", self.action_keys)
        yield SystemCommand(
            "Light or dark", "Change between the light and the dark theme", self.action_change_theme_shade
        )
        yield SystemCommand("Theme", "Choose among all themes", self.action_change_theme)
        yield SystemCommand("Save a picture", "This screen as an SVG file", self.deliver_screenshot)
        yield SystemCommand("Quit", "Leave the viewer", self.exit)
        for active in screen.active_bindings.values():
            binding = active.binding
            own = binding.show or active.node is screen
            if active.enabled and own and binding.description and active.node is not self and not is_basic(binding):
                yield SystemCommand(
                    binding.description,
                    f"key {self.get_key_display(binding)}",
                    _acting(self, binding.action, active.node),
                )

    async def action_back(self) -> None:
        """One screen back; the first stays."""
        if len(self.screen_stack) > 2:
            self.pop_screen()

    def action_runs(self) -> None:
        while len(self.screen_stack) > 2:
            self.pop_screen()

    def action_keys(self) -> None:
        from ajet_tools.tui.screens.help import HelpScreen

        if not isinstance(self.screen, HelpScreen):
            self.push_screen(HelpScreen.of(self.screen))

    def action_go(self) -> None:
        from ajet_tools.tui.screens.help import GoScreen

        self.push_screen(GoScreen(), lambda prefix: self.open_found(prefix) if prefix else None)

    def action_change_theme_shade(self) -> None:
        self.theme = DARK if self.current_theme.dark is False else LIGHT

    def on_resize(self, event: events.Resize) -> None:
        """A terminal that is too small says what it needs, until it is large enough."""
        from ajet_tools.tui.screens.help import TooSmallScreen

        fits = event.size.width >= LEAST_SIZE[0] and event.size.height >= LEAST_SIZE[1]
        shown = isinstance(self.screen, TooSmallScreen)
        if shown and fits:
            self.pop_screen()
        elif not shown and not fits:
            self.push_screen(TooSmallScreen(*LEAST_SIZE))

    def _handle_exception(self, error: Exception) -> None:
        """An error of ours that a worker raised is a word, not the end of the app; any other is a fault and ends it."""
        cause = getattr(error, "error", None) or error
        if isinstance(cause, AjetError):
            self.told(cause)
        else:
            super()._handle_exception(error)


def is_basic(binding: Binding) -> bool:
    """Whether a key is Textual's own on every screen: to go on, to copy what the mouse has selected."""
    return binding.action.startswith(("app.focus", "screen.copy_text"))


def _acting(app: TraceApp, action: str, node: Any) -> Callable[[], None]:
    def act() -> None:
        app.call_later(app.run_action, action, node)

    return act
