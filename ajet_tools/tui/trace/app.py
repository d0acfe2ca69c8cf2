"""The application of `ajet trace view`."""

from __future__ import annotations

import io
import os
import sys
import tempfile
import webbrowser
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from textual.app import SystemCommand
from textual.binding import Binding, BindingType
from textual.screen import Screen

from ajet_sdk.errors import AjetError
from ajet_sdk.pictures import Picture
from ajet_sdk.protocols import TraceReader
from ajet_tools.trace import queries
from ajet_tools.trace.compare.runs import side_by_side
from ajet_tools.trace.export.html import pictures_page
from ajet_tools.tui.base import GoScreen
from ajet_tools.tui.trace.compare import CompareScreen
from ajet_tools.tui.trace.dialogs import ExplanationScreen, FeedbackScreen, TextScreen, text_width
from ajet_tools.tui.trace.episode import EpisodeScreen
from ajet_tools.tui.trace.episodes import EpisodesScreen
from ajet_tools.tui.trace.run import RunScreen
from ajet_tools.tui.trace.runs import RunsScreen
from ajet_tools.tui.trace.screen import TraceViewer
from ajet_tools.tui.trace.tokens import TokensScreen


def _has_screen() -> bool:
    """Whether a browser opens in its own window, not in this terminal."""
    return sys.platform == "darwin" or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY")))


class TraceApp(TraceViewer):
    """The trace viewer, which starts with the list of runs or a single run."""

    TITLE = "ajet"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "back", "Back", show=False),
    ]

    def __init__(self, reader: TraceReader, path: Path, run_id: str | None = None) -> None:
        super().__init__(reader, path)
        self.first_run = run_id

    def on_mount(self) -> None:
        self.push_screen(RunsScreen())
        if self.first_run is not None:
            self.open_run(self.first_run)
        self.set_interval(self.FOLLOW_SECONDS, self.follow)
        self.follow()

    def open_run(self, run_id: str) -> None:
        self.push_screen(RunScreen(run_id))

    def open_episodes(self, run_id: str | None = None, filter_text: str = "") -> None:
        self.push_screen(EpisodesScreen(run_id, filter_text))

    def open_episode(
        self, episode_id: str, call_id: str | None = None, *, needle: str = ""
    ) -> None:
        self.push_screen(EpisodeScreen(episode_id, call_id, needle=needle))

    def open_tokens(self, episode_id: str, timeline: int = 0, token: int = 0) -> None:
        self.push_screen(TokensScreen(episode_id, timeline, token))

    def open_compare(self, episode_ids: Sequence[str]) -> None:
        self.push_screen(CompareScreen(tuple(episode_ids)))

    def open_many_runs(self, run_ids: Sequence[str]) -> None:
        if len(run_ids) > 1:
            name = f"{len(run_ids)} runs"
        else:
            name = f"run {run_ids[0][:12]}"
        self.push_screen(TextScreen(name, partial(self._side_by_side, tuple(run_ids))))

    def _side_by_side(self, run_ids: Sequence[str]) -> str:
        """Called in a thread."""
        width = text_width(self)
        runs = [run for run in queries.overview(self.reader) if run["run_id"] in run_ids]
        options = self.console.options.update(width=width)
        lines: list[str] = []
        for part in side_by_side(self.reader, runs, width):
            for segments in self.console.render_lines(part, options):
                lines.append("".join(segment.text for segment in segments).rstrip())
        return "\n".join(lines)

    def open_explanation(self, run_id: str) -> None:
        self.push_screen(ExplanationScreen(run_id))

    def open_pictures(self, pictures: Sequence[Picture]) -> None:
        """Show pictures in a browser, and else save them and say where."""
        stored = [picture for picture in pictures if picture.data]
        if len(stored) < len(pictures):
            removed = next(picture for picture in pictures if not picture.data)
            self.notify(f"{removed.line}: it was removed from the trace", timeout=3)
        if not self.is_web:
            for picture in stored:
                self._open_picture(picture)
        elif stored:  # the browser is on another machine, and opens one page for a key
            page = pictures_page(stored).encode()
            self.deliver_binary(
                io.BytesIO(page),
                save_filename=f"{stored[0].digest[:12]}.html",
                open_method="browser",
                mime_type="text/html",
            )

    def _open_picture(self, picture: Picture) -> None:
        suffix = picture.media_type.replace("image/", ".")
        with tempfile.NamedTemporaryFile(
            prefix="ajet-picture-", suffix=suffix, delete=False
        ) as file:
            file.write(picture.data)
        path = Path(file.name)
        if not (_has_screen() and webbrowser.open(path.as_uri())):
            self.notify(f"saved as {path}", timeout=10)

    def open_feedback(self, episode_id: str, call_id: str | None = None) -> None:
        self.push_screen(FeedbackScreen(episode_id, call_id))

    def open_found(self, prefix: str) -> None:
        self.run_worker(self._open_found(prefix), group="goto", exclusive=True)

    async def _open_found(self, prefix: str) -> None:
        target = await self.ask(queries.find, prefix)
        if target.kind == "run":
            self.open_run(target.id)
        elif target.kind == "episode":
            self.open_episode(target.id)
        else:
            self.open_episode(await self.ask(queries.episode_of_call, target.id), target.id)

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        yield SystemCommand(
            "Go to an id",
            "Open a run, an episode or a call by the beginning of its id",
            self.action_go,
        )
        yield SystemCommand("Runs", "Back to the list of runs", self.action_runs)
        yield from super().get_system_commands(screen)

    async def action_back(self) -> None:
        """Go back one screen, up to the first."""
        if len(self.screen_stack) > 2:
            self.pop_screen()

    def action_runs(self) -> None:
        while len(self.screen_stack) > 2:
            self.pop_screen()

    def action_go(self) -> None:
        self.push_screen(GoScreen(), lambda prefix: self.open_found(prefix) if prefix else None)

    def _handle_exception(self, error: Exception) -> None:
        """Show expected errors of workers; any other exception ends the app."""
        cause = getattr(error, "error", None) or error
        if isinstance(cause, AjetError):
            self.show_error(cause)
        else:
            super()._handle_exception(error)
