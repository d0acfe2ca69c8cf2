"""Threads that run users' code, apart from the training loop.

Async functions of a run share an event loop in its own thread, so that module-level clients stay on
the same loop for the whole run. A blocking call in async code delays the other episodes, with a
warning, but neither the gateway nor the run's loop. Each sync function gets a daemon thread.

Code that does not end within its time limit is abandoned and counted; more than `limit` of it stops
the run.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import Context, ContextVar, Token, copy_context
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from ajet_sdk.agent.activity import current_activity
from ajet_sdk.capture.programs import end_programs
from ajet_sdk.engines.loop_calls import in_thread
from ajet_sdk.errors import EpisodeTimeout, TrainingError

log = logging.getLogger("ajet")
T = TypeVar("T")
P = ParamSpec("P")
_BEAT = 0.1
_OURS = Path(__file__).parents[1]
_STANDARD_LIBRARY = Path(traceback.__file__).parent
_GRACE = 2.0
"""Time for cancelled code to clean up, in seconds."""


@dataclass(frozen=True)
class Outcome:
    """The result of a user's function. `error` may be any BaseException: it is data here."""

    value: Any = None
    error: BaseException | None = None


@dataclass
class _Work:
    """A running call. `cancel` requests it to stop, if possible."""

    future: Future[Outcome]
    cancel: Callable[[], None]
    thread: threading.Thread
    loop: _Loop | None = None
    """The loop of async code."""
    tasks: list[asyncio.Task[None]] = field(default_factory=list)


class _Daemons(ThreadPoolExecutor):
    """Default executor of the shared loop: hung calls neither exhaust a pool nor block the end of
    the process."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        return in_thread(partial(fn, *args, **kwargs), "ajet-to-thread")


class _Loop:
    """An event loop in a daemon thread that detects blocking calls."""

    def __init__(self, patience: float) -> None:
        self.patience = patience
        self.loop = asyncio.new_event_loop()
        self.loop.set_default_executor(_Daemons())
        self.beat = time.monotonic()
        self.suspect: tuple[asyncio.Task[object], float] | None = None
        self.thread = threading.Thread(target=self._run, name="ajet-workflows", daemon=True)
        Context().run(self.thread.start)  # without the first episode's context, which it outlives

    def _run(self) -> None:
        _unshare()
        asyncio.set_event_loop(self.loop)
        self.loop.call_soon(self._tick)
        self.loop.run_forever()
        self.loop.close()

    def _tick(self) -> None:
        self.beat = time.monotonic()
        self.loop.call_later(_BEAT, self._tick)

    def blocker(self) -> asyncio.Task[object] | None:
        """The task that has blocked the loop for longer than `patience`, seen in two checks.

        In a loop that is merely busy, each check sees another task.
        """
        now = time.monotonic()
        if now - self.beat > self.patience + _BEAT:
            task = asyncio.current_task(self.loop)
        else:
            task = None
        if task is None:
            self.suspect = None
        elif self.suspect is None or self.suspect[0] is not task:
            self.suspect = (task, now)
        elif now - self.suspect[1] >= self.patience / 2:
            return task
        return None

    def submit(
        self, make: Callable[[], Coroutine[object, object, object]], context: Context
    ) -> _Work:
        future: Future[Outcome] = Future()
        future.set_running_or_notify_cancel()
        work = _Work(future, lambda: None, self.thread, self)

        async def body() -> None:
            current_activity.set(None)  # this task is the workflow itself
            try:
                future.set_result(Outcome(await make()))
            except BaseException as error:  # noqa: BLE001  SystemExit too: it would end the shared loop
                future.set_result(Outcome(error=error))

        def start() -> None:
            work.tasks.append(context.run(self.loop.create_task, body()))

        work.cancel = lambda: self._call(lambda: [task.cancel() for task in work.tasks])
        self._call(start)
        return work

    def _call(self, callback: Callable[[], object]) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(callback)

    def stop(self) -> None:
        """Cancel remaining tasks and end the loop, unless it is blocked."""

        async def end() -> None:
            try:
                await _unwind()
            finally:  # a task that it cancels may cancel it, too
                self.loop.stop()

        self._call(lambda: self.loop.create_task(end()))
        if self.blocker() is None and self.thread is not threading.current_thread():
            self.thread.join(_GRACE)


async def _unwind() -> None:
    """Cancel the other tasks of this loop and close async generators, waiting a while for each."""
    pending = asyncio.all_tasks() - {asyncio.current_task()}
    for task in pending:
        task.cancel()
    if pending:  # they may need several iterations of the loop
        await asyncio.wait(pending, timeout=_GRACE / 2)
    closing = asyncio.create_task(
        asyncio.get_running_loop().shutdown_asyncgens()
    )  # and their connections
    await asyncio.wait([closing], timeout=_GRACE / 2)


def _current_place(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or -1)
    if frame is None:
        return "an unknown place"
    frames = traceback.extract_stack(frame)
    users = [f for f in frames if not is_library_code(f.filename)] or frames[-1:]
    return f"{users[-1].filename}:{users[-1].lineno} in {users[-1].name}"


def is_library_code(filename: str) -> bool:
    """Whether a file belongs to an installed package, Python or ajet, rather than to the user."""
    path = Path(filename)
    return (
        "site-packages" in path.parts
        or bool({_STANDARD_LIBRARY, _OURS} & {*path.parents})
        or filename[:1] == "<"
    )


class _ThreadLoop(asyncio.SelectorEventLoop):
    """An event loop that opens its selector and sockets at its first use: most sync code never uses
    it."""

    def __init__(self) -> None:
        self.used = False

    def __getattr__(self, name: str) -> Any:
        if self.used:
            raise AttributeError(name)
        self.used = True
        super().__init__()
        return getattr(self, name)

    def __del__(self) -> None:
        if self.used:
            super().__del__()


@contextmanager
def _event_loop() -> Iterator[None]:
    """Provides `asyncio.get_event_loop()` in this thread, as in a main thread; closed at the
    end."""
    loop = _ThreadLoop()
    asyncio.set_event_loop(loop)

    try:
        yield
    finally:
        if loop.used and not loop.is_closed():
            loop.run_until_complete(_unwind())
            loop.close()
        asyncio.set_event_loop(None)


_CLONE_FS = 0x200


def _unshare() -> None:
    """Give this thread and its children their own working directory and umask.

    This takes Linux and, in containers, the permission; otherwise `Workers` reverts changes after
    the call.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).unshare(_CLONE_FS)


def _start_thread(function: Callable[[], object], context: Context) -> _Work:
    future: Future[Outcome] = Future()
    future.set_running_or_notify_cancel()

    def body() -> None:
        try:
            _unshare()
            with _event_loop():
                value = context.run(function)
            future.set_result(Outcome(value))
        except BaseException as error:  # noqa: BLE001  the agent's own exception is data
            future.set_result(Outcome(error=error))

    thread = threading.Thread(target=body, name="ajet-sync-workflow", daemon=True)
    thread.start()
    return _Work(future, lambda: None, thread)


current_workers: ContextVar[Workers | None] = ContextVar("ajet_current_workers", default=None)
"""Workers of this context's run, set by `with Workers(...)`."""


class WorkerBlocked(EpisodeTimeout):
    """An episode ran out of time because of another episode's blocking call on the shared loop."""

    infrastructure = True


class Workers:
    """Runs users' functions with a time limit. A run has one, as a context manager."""

    def __init__(self, limit: int, *, patience: float = 1.0) -> None:
        self.limit = limit
        self.patience = patience
        """Seconds for which the shared loop may be blocked."""
        self.abandoned = 0
        """Number of calls that did not end within their time limit."""
        self._shared: _Loop | None = None
        self._retired: list[_Loop] = []
        self._warned = False
        self._directory: Path | None = None
        self._recursion = 0
        """Recursion limit of the process, which calls may change."""
        self._token: Token[Workers | None] | None = None

    def __enter__(self) -> Workers:
        self._token = current_workers.set(self)
        self._directory, self._recursion = Path.cwd(), sys.getrecursionlimit()
        return self

    def __exit__(self, *_: object) -> None:
        if self._token is not None:
            current_workers.reset(self._token)
        self.close()

    def close(self) -> None:
        """End the loops; a blocked one ends after its blocking call, or with the process."""
        for loop in [*self._retired, *([self._shared] if self._shared is not None else [])]:
            loop.stop()
        self._retired = []
        self._shared = None

    async def call(
        self,
        function: Callable[..., object],
        arguments: dict[str, object],
        *,
        timeout: float | None,
        label: str,
    ) -> Outcome:
        """Call a function, sync or async, in a copy of this context; `label` names it in messages.

        The outcome's error is EpisodeTimeout after `timeout` seconds. Raises TrainingError if more
        calls than `limit` were abandoned.
        """
        context = copy_context()
        deadline = None if timeout is None else time.monotonic() + timeout
        if inspect.iscoroutinefunction(function):
            return await self._wait(
                self._loop().submit(partial(function, **arguments), context), deadline, label
            )
        outcome = await self._wait(
            _start_thread(partial(function, **arguments), context), deadline, label
        )
        if inspect.isawaitable(outcome.value):  # a sync wrapper around an async function
            awaitable = outcome.value

            async def wait() -> object:
                return await awaitable

            outcome = await self._wait(self._loop().submit(wait, context), deadline, label)
        return outcome

    def _loop(self) -> _Loop:
        if self._shared is None:
            self._shared = _Loop(self.patience)
        return self._shared

    async def _wait(self, work: _Work, deadline: float | None, label: str) -> Outcome:
        waiting = asyncio.ensure_future(asyncio.wrap_future(work.future))
        started = time.monotonic()
        try:
            while True:
                if deadline is None:
                    remaining = self.patience
                else:
                    remaining = min(deadline - time.monotonic(), self.patience)
                done, _ = await asyncio.wait({waiting}, timeout=max(remaining, 0))
                if done:
                    return waiting.result()
                if deadline is not None and time.monotonic() >= deadline:
                    break
                self._warn_if_blocked(work)
            return await self._end_overdue(work, waiting, time.monotonic() - started, label)
        except asyncio.CancelledError:
            work.cancel()
            raise
        finally:
            end_programs()
            self._restore(label)

    def _restore(self, label: str) -> None:
        """Reverts changes of the process that would make the run fail."""
        if sys.getrecursionlimit() < self._recursion:
            sys.setrecursionlimit(self._recursion)
        try:
            changed = self._directory is not None and Path.cwd() != self._directory
        except OSError:  # it was removed
            changed = True
        if changed and self._directory is not None:
            log.warning(
                "%s changed the working directory; ajet changed it back to %s",
                label,
                self._directory,
            )
            os.chdir(self._directory)

    def _warn_if_blocked(self, work: _Work) -> None:
        if work.loop is None or work.loop.blocker() is None or self._warned:
            return
        self._warned = True
        log.warning(
            "A blocking call in async code delays all other episodes (%s). Use an async client, or"
            " make the workflow a plain function, which runs in its own thread.",
            _current_place(work.thread),
        )

    async def _end_overdue(
        self, work: _Work, waiting: asyncio.Future[Outcome], seconds: float, label: str
    ) -> Outcome:
        blocker = None if work.loop is None else work.loop.blocker()
        if work.loop is None or blocker is not None:
            place = _current_place(work.thread)
        else:
            place = ""
        work.cancel()
        end_programs()  # a call may be waiting for one
        done, _ = await asyncio.wait({waiting}, timeout=_GRACE)
        message = f"{label} did not finish within {seconds:.3g} s" + (
            f"; it was at {place}" if place else ""
        )
        held_up = blocker is not None and blocker not in work.tasks
        if blocker is not None and work.loop is self._shared and self._shared is not None:
            self._retired.append(self._shared)
            self._shared = None  # the next episodes get a new loop
            self._abandon(label, place)
        elif not done and blocker is None:
            self._abandon(label, place)
        if held_up:
            return Outcome(
                error=WorkerBlocked(
                    f"{message}, blocked by a call of another episode on the same event loop"
                )
            )
        return Outcome(error=EpisodeTimeout(message))

    def _abandon(self, label: str, place: str) -> None:
        self.abandoned += 1
        if self.abandoned > self.limit:
            raise TrainingError(
                f"{self.abandoned} calls of {label} did not finish in time and were abandoned, more"
                f" than rollout.max_env_worker ({self.limit}); the last was at"
                f" {place or 'an await'}. Set a time limit for blocking calls, or raise"
                " rollout.timeout"
            )
