"""`ajet trace view`: the application, and the way from one screen to another."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from textual.app import App

from ajet_sdk.protocols import TraceReader

__all__ = ["TraceApp"]

P = ParamSpec("P")
T = TypeVar("T")


class TraceApp(App[None]):
    """The viewer of one trace. Screens reach the trace through `ask`, and each other through `open_...`."""

    CSS_PATH = "app.tcss"
    TITLE = "ajet"

    def __init__(self, reader: TraceReader, where: Path, run_id: str | None = None) -> None:
        super().__init__()
        self.reader = reader
        self.where = where
        self.first_run = run_id

    async def ask(self, question: Callable[Concatenate[TraceReader, P], T], *arguments: P.args, **named: P.kwargs) -> T:
        """The answer of a function of the reader, worked out in a thread. Raises what the function raises."""
        return await asyncio.to_thread(question, self.reader, *arguments, **named)

    def on_mount(self) -> None:
        from ajet_tools.tui.screens.runs import RunsScreen

        self.push_screen(RunsScreen())

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

    def told(self, error: Exception) -> None:
        """An error of ours as a word at the screen's edge; the screen stays as it is."""
        self.notify(str(error), severity="error", markup=False)
