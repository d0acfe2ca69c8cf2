"""A progress bar."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from ajet_sdk.reporting import output

if TYPE_CHECKING:
    from rich.progress import Progress


class ProgressBar:
    """Within the block, a bar on stderr if that is a terminal."""

    def __init__(self, title: str, total: int | None = None, *, quiet: bool = False) -> None:
        self._bar: Progress | None = None
        if quiet or not sys.stderr.isatty():
            return
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=output.console(stderr=True), transient=True)
        self._task = self._bar.add_task(title, total=total)

    def __enter__(self) -> ProgressBar:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def advance(self, by: int = 1) -> None:
        if self._bar:
            self._bar.advance(self._task, by)

    def update(self, done: int, total: int) -> None:
        """Set the number done and the total; a total of 0 is unknown."""
        if self._bar:
            self._bar.update(self._task, completed=done, total=total or None)

    def show(self, stage: str, done: int, total: int) -> None:
        """`update` for a named stage."""
        if self._bar:
            self._bar.update(self._task, description=stage, completed=done, total=total or None)
