"""An event loop for a coroutine of ours, also where the caller's is running: in a notebook, in an async program."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, wait
from contextlib import suppress
from contextvars import ContextVar, copy_context
from functools import partial
from typing import Any, TypeVar

from ajet_sdk.engines.loop_calls import in_thread

__all__ = ["call_to_end", "run_to_end"]

T = TypeVar("T")
_Begun = Future[tuple[asyncio.AbstractEventLoop, "asyncio.Task[Any]"]]

_begun: ContextVar[_Begun | None] = ContextVar("ajet_begun", default=None)
"""Where the first `run_to_end` of a thread puts the task that is to be cancelled."""

_START_SECONDS = 10.0
"""Seconds within which a thread that was started begins its work."""

_LOOK = 1.0
"""Seconds between looks for Ctrl-C: a signal that comes just before a thread begins to wait does not wake it."""


def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine; as `asyncio.run`, but also where a loop is running already, as in a notebook.

    There the coroutine has a loop in a thread of its own, and the caller's loop waits. Ctrl-C (a notebook's interrupt)
    cancels it and is raised when it has ended.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(_cancellable(work))
    outcome: Future[T] = Future()
    begun: _Begun = Future()
    try:
        _start(partial(run_to_end, work), outcome, begun)
        while not wait([outcome], _LOOK).done:
            pass
    except KeyboardInterrupt:
        if _cancel(begun):
            wait([outcome])
        elif not wait([outcome], _START_SECONDS).done:  # the thread was not started
            work.close()
        raise
    return outcome.result()


async def call_to_end(function: Callable[[], T]) -> T:
    """The result of a function that ends in `run_to_end`, in a thread of its own. Cancelling this cancels that."""
    outcome: Future[T] = Future()
    begun: _Begun = Future()
    _start(function, outcome, begun)
    waiting: asyncio.Future[T] = asyncio.wrap_future(outcome)
    try:
        result: T = await asyncio.shield(waiting)
        return result
    except asyncio.CancelledError:
        _cancel(begun)
        await asyncio.wait([waiting])
        raise


def _start(function: Callable[[], T], outcome: Future[T], begun: _Begun) -> None:
    context = copy_context()
    context.run(_begun.set, begun)
    in_thread(partial(context.run, function), "ajet-run", outcome)


async def _cancellable(work: Coroutine[Any, Any, T]) -> T:
    begun, task = _begun.get(), asyncio.current_task()
    if begun is not None and begun.cancelled():
        work.close()
        raise asyncio.CancelledError
    if begun is not None and task is not None and not begun.done() and begun.set_running_or_notify_cancel():
        begun.set_result((asyncio.get_running_loop(), task))
    return await work


def _cancel(begun: _Begun) -> bool:
    """Cancel the task; False where none had begun, and none will."""
    if begun.cancel():
        return False
    loop, task = begun.result()
    with suppress(RuntimeError):  # it ended just now, and its loop is closed
        loop.call_soon_threadsafe(task.cancel)
    return True
