"""A progress bar for what takes long."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ajet_sdk import output

__all__ = ["progress_bar", "progress_told"]


@contextmanager
def progress_bar(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr, where that is a terminal; call what is given with how many more are done."""
    if not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.progress import Progress

    with Progress(console=output.console(stderr=True), transient=True) as progress:
        bar = progress.add_task(title, total=total)
        yield lambda done: progress.advance(bar, done)


@contextmanager
def progress_told(title: str) -> Iterator[Callable[[int, int], None]]:
    """The same where the total is not known before: call what is given with how many are done, and of how many."""
    if not sys.stderr.isatty():
        yield lambda done, of: None
        return
    from rich.progress import Progress

    with Progress(console=output.console(stderr=True), transient=True) as progress:
        bar = progress.add_task(title, total=None)
        yield lambda done, of: progress.update(bar, completed=done, total=of)
