"""Running a coroutine to its end from code that is not async, in a program and in a notebook alike."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import Future, wait
from contextlib import suppress
from contextvars import copy_context
from threading import Thread
from typing import Any, TypeVar

__all__ = ["run_to_end"]

T = TypeVar("T")
_BEGINS = 10.0
"""Seconds within which a thread that was started begins its work."""


def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine; as `asyncio.run`, but also where a loop is running already, as in a notebook.

    There the coroutine has a loop in a thread of its own, and the caller's loop waits. Ctrl-C (a notebook's interrupt)
    cancels it and is raised when it has ended.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    outcome: Future[T] = Future()
    begun: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any] | None]] = Future()
    context = copy_context()

    async def cancellable() -> T:
        begun.set_result((asyncio.get_running_loop(), asyncio.current_task()))
        return await work

    def thread() -> None:
        try:
            outcome.set_result(context.run(asyncio.run, cancellable()))  # type: ignore[arg-type]
        except BaseException as error:  # noqa: BLE001  raised where the caller waits
            outcome.set_exception(error)

    try:
        Thread(target=thread, name="ajet-run", daemon=True).start()
        wait([outcome])
    except KeyboardInterrupt:
        if not wait([begun], _BEGINS).done:  # the thread was not started
            work.close()
            raise
        loop, task = begun.result()
        with suppress(RuntimeError):  # it ended just now, and its loop is closed
            if task is not None:
                loop.call_soon_threadsafe(task.cancel)
        wait([outcome])
        raise
    return outcome.result()
