"""Calls functions from other threads in an event loop, waking it once for many calls, and functions
in a new thread.

`call_soon_threadsafe` writes to the loop's socket for each call, and each write may switch threads;
with hundreds of episodes in a process most of these writes go to a loop that is already awake.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_thread(function: Callable[[], T], name: str, outcome: Future[T] | None = None) -> Future[T]:
    """Call a function in a new daemon thread and return its future (`outcome`), which cannot be
    cancelled.

    A call that hangs blocks no pool and does not keep the process alive.
    """
    future: Future[T] = Future() if outcome is None else outcome
    future.set_running_or_notify_cancel()

    def body() -> None:
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001  raised by the future
            future.set_exception(error)

    threading.Thread(target=body, name=name, daemon=True).start()
    return future


class LoopCalls:
    """Calls from other threads to a loop, in order. One per loop: `for_loop`."""

    _all: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopCalls] = (
        weakref.WeakKeyDictionary()
    )

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._calls: deque[tuple[Callable[..., None], tuple[object, ...]]] = deque()
        self._woken = False

    @classmethod
    def for_loop(cls, loop: asyncio.AbstractEventLoop) -> LoopCalls:
        return cls._all.get(loop) or cls._all.setdefault(loop, cls(loop))

    def call(self, function: Callable[..., None], *arguments: object) -> None:
        """Schedule a call in the loop, in an empty context. Raises RuntimeError if the loop is
        closed."""
        loop = self._loop()
        if loop is None or loop.is_closed():
            raise RuntimeError("the event loop is closed")
        self._calls.append((function, arguments))
        if not self._woken:
            self._woken = True
            loop.call_soon_threadsafe(self._run, context=contextvars.Context())

    def _run(self) -> None:
        self._woken = False  # first, so that later calls wake the loop again
        while self._calls:
            function, arguments = self._calls.popleft()
            try:
                function(*arguments)
            except Exception as error:  # noqa: BLE001  # reported, as for the loop's own calls
                if (loop := self._loop()) is not None:
                    loop.call_exception_handler(
                        {"message": f"a call of {function} failed", "exception": error}
                    )
