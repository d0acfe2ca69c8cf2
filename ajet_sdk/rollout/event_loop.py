"""Runs a coroutine to its end, even if the caller's event loop is running, as in notebooks and
async programs.

Meanwhile the first SIGINT (Ctrl-C) or SIGTERM cancels the coroutine, which ends orderly; the second
ends the process.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from contextvars import ContextVar, copy_context
from functools import partial
from typing import Any, NoReturn, TypeVar

from ajet_sdk.engines.loop_calls import in_thread

log = logging.getLogger("ajet")

T = TypeVar("T")
_Begun = Future[tuple[asyncio.AbstractEventLoop, "asyncio.Task[Any]"]]

_begun: ContextVar[_Begun | None] = ContextVar("ajet_begun", default=None)
"""Receives the task to cancel from the first `run_to_end` of a thread."""
_START_SECONDS = 10.0
"""Time for a thread to start, in seconds."""
_LOOK = 1.0
"""Seconds between checks for Ctrl-C: a signal just before a thread starts to wait does not wake
it."""
TERMINATED = 128 + signal.SIGTERM
"""Exit code after SIGTERM, also of the `SystemExit` raised for it."""


def run_to_end(
    work: Coroutine[Any, Any, T], on_signal: Callable[[signal.Signals], None] | None = None
) -> T:
    """Run a coroutine as `asyncio.run` does, even if a loop is running, as in a notebook.

    In the latter case it gets its own loop in a thread, and the caller's loop waits. Ctrl-C (a
    notebook's interrupt) and SIGTERM cancel it; when it has ended, KeyboardInterrupt or
    SystemExit(143) is raised. `on_signal` is called in the coroutine's loop before the
    cancellation.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        stop = _Stop(on_signal)
        try:
            return asyncio.run(_cancellable(work, stop))
        except asyncio.CancelledError:
            if stop.signal == signal.SIGTERM:
                raise SystemExit(TERMINATED) from None
            if stop.signal is not None:
                raise KeyboardInterrupt from None
            raise
    outcome: Future[T] = Future()
    begun: _Begun = Future()
    try:
        _start(partial(run_to_end, work), outcome, begun)
        while not wait([outcome], _LOOK).done:
            pass
    except (KeyboardInterrupt, SystemExit):
        if _cancel(begun):
            wait([outcome])
        elif not wait([outcome], _START_SECONDS).done:  # the thread was not started
            work.close()
        raise
    return outcome.result()


async def call_to_end(function: Callable[[], T]) -> T:
    """Run a function that calls `run_to_end` in a thread. Cancelling this cancels its coroutine."""
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


async def _cancellable(work: Coroutine[Any, Any, T], stop: _Stop) -> T:
    begun = _begun.get()
    task = asyncio.current_task()
    if begun is not None and begun.cancelled():
        work.close()
        raise asyncio.CancelledError
    if (
        begun is not None
        and task is not None
        and not begun.done()
        and begun.set_running_or_notify_cancel()
    ):
        begun.set_result((asyncio.get_running_loop(), task))
    with stop.listening():
        return await work


class _Stop:
    """Handles the two signals while a coroutine runs in the main thread. Handlers of the caller
    stay in place.

    It replaces asyncio's handler of SIGINT, which even after a second signal waits for a training
    thread.
    """

    def __init__(self, on_signal: Callable[[signal.Signals], None] | None) -> None:
        self._on_signal, self._pid = on_signal, os.getpid()
        self.signal: signal.Signals | None = None
        """The signal that cancelled the task."""
        self._heard = []
        if threading.current_thread() is threading.main_thread():
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                self._heard.append(signal.SIGINT)
            if signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, _exit):
                self._heard.append(signal.SIGTERM)

    @contextmanager
    def listening(self) -> Iterator[None]:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        handler = self._handle
        before = [(number, signal.signal(number, handler)) for number in self._heard]
        try:
            yield
        finally:
            for number, old in before:
                if signal.getsignal(number) == handler:
                    signal.signal(number, old)

    def _handle(self, number: int, _: object) -> None:
        if (
            self.signal is not None or os.getpid() != self._pid
        ):  # or in a forked child, which doesn't run this loop
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.signal = signal.Signals(number)
        self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        assert self.signal is not None and self._task is not None
        if self._task.done():
            return
        log.info("%s: stopping; a second signal ends the process at once", self.signal.name)
        if self._on_signal is not None:
            self._on_signal(self.signal)
        self._task.cancel()


@contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Within the block, SIGTERM raises SystemExit(143) in the main thread, as Ctrl-C raises
    KeyboardInterrupt."""
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
    ):
        yield
        return
    signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is _exit:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _exit(*_: object) -> NoReturn:
    raise SystemExit(TERMINATED)


def _cancel(begun: _Begun) -> bool:
    """Cancel the task; False if none had started, and none will."""
    if begun.cancel():
        return False
    loop, task = begun.result()
    with suppress(RuntimeError):  # it has just ended, and its loop is closed
        loop.call_soon_threadsafe(task.cancel)
    return True
