"""Threads, tasks and processes that an episode starts besides its workflow, and which of them a
context belongs to."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial

FORKED = "pid"
"""Begins the id of a child process made by `os.fork`; its pid follows."""


@dataclass(frozen=True, slots=True, eq=False)
class Activity:
    """A thread, task, process or submitted function that an episode started besides its
    workflow."""

    name: str
    """As in messages: `thread 'batcher'`."""
    is_running: Callable[[], bool]
    parent: Activity | None = None
    """The activity that started it; None: the workflow itself."""


current_activity: ContextVar[Activity | None] = ContextVar("ajet_current_activity", default=None)
"""The activity that this context belongs to; None: the workflow itself."""


def activities() -> Iterator[Activity]:
    """The activity of this context, the one that started it, and so on up to the workflow."""
    activity = current_activity.get()
    while activity is not None:
        yield activity
        activity = activity.parent


def process_activity(pid: int, name: str) -> Activity:
    """A child process of this process, as an activity."""
    return Activity(name, partial(_runs, pid), current_activity.get())


def forked_process(child: str) -> Activity | None:
    """The process with an id that begins with `FORKED`; None for another id."""
    pid = child.removeprefix(FORKED)
    if pid == child or not pid.isdecimal():
        return None
    return process_activity(int(pid), f"process {pid}")


def _runs(pid: int) -> bool:
    """Whether a child process has not ended. Its exit status is left to whoever waits for it."""
    if not hasattr(os, "waitid"):  # macOS before Python 3.13
        return True
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:  # its exit status was taken
        return False
