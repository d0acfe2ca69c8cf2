"""AgentJet's thread pools, by which its programs run many episodes at once.

`auto_retry` repeats a function that fails, with growing pauses and a few times only: an agent that
never works ends in an error, and not in an endless loop.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

log = logging.getLogger("ajet")

RETRIES = 5
FIRST_PAUSE = 1.0
"""Seconds before the first repetition; each later pause is twice as long."""


def retrying(function: Callable[..., Any]) -> Callable[..., Any]:
    """Repeat a function that raises, at most `RETRIES` times; the last error is raised."""

    def call(*arguments: Any, **named: Any) -> Any:
        for number in range(RETRIES + 1):
            try:
                return function(*arguments, **named)
            except Exception as error:
                if number == RETRIES:
                    raise
                log.warning("An episode failed, and is tried again: %s", error)
                time.sleep(FIRST_PAUSE * 2**number)
        return None

    return call


def retry_with_backoff(
    max_retry: int = 3,
    backoff_fn: Callable[[int], float] | None = None,
    **_: Any,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """AgentJet's decorator: call a function at most `max_retry` times."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            for number in range(max(1, max_retry)):
                try:
                    return function(*arguments, **named)
                except Exception as error:
                    if number + 1 >= max_retry:
                        raise
                    log.warning("%s failed, and is called again: %s", function.__name__, error)
                    time.sleep(backoff_fn(number) if backoff_fn else FIRST_PAUSE * 2**number)
            return None

        return call

    return decorate


class BoundedThreadPoolExecutor:
    """A thread pool whose `submit` waits while `max_queue_size` tasks wait for a thread."""

    def __init__(self, max_workers: int, max_queue_size: int = 100) -> None:
        self.executor = ThreadPoolExecutor(max_workers, "ajet-episode")
        self._places = threading.BoundedSemaphore(max_workers + max_queue_size)

    def submit(self, fn: Callable[..., Any], *arguments: Any, **named: Any) -> Future[Any]:
        """Run a function in a thread."""
        self._places.acquire()
        future = self.executor.submit(fn, *arguments, **named)
        future.add_done_callback(lambda _: self._places.release())
        return future

    def shutdown(self, wait: bool = True) -> None:
        """Wait for what was submitted."""
        self.executor.shutdown(wait=wait)


class PeriodicDrainThreadPoolExecutor:
    """A thread pool that waits for all its work each time `workers` functions were submitted."""

    def __init__(
        self,
        workers: int = 100,
        max_parallel: int | None = None,
        auto_retry: bool = True,
        block_first_run: bool = False,
    ) -> None:
        self._workers = workers
        self._executor = ThreadPoolExecutor(max_parallel or workers, "ajet-episode")
        self._auto_retry = auto_retry
        self._waits_for_first = block_first_run
        self._submitted = 0
        self._futures: list[Future[Any]] = []

    def submit(self, fn: Callable[..., Any], *arguments: Any, **named: Any) -> Future[Any]:
        """Run a function in a thread."""
        function = retrying(fn) if self._auto_retry else fn
        future = self._executor.submit(function, *arguments, **named)
        if self._waits_for_first:
            self._waits_for_first = False
            future.result()
        return future

    def submit_with_periodic_drain(
        self, fn: Callable[..., Any], *arguments: Any, **named: Any
    ) -> tuple[Future[Any], list[Any]]:
        """Run a function in a thread. After each `workers` submissions the next one first waits for
        all of them, and returns their results too."""
        results: list[Any] = []
        if self._submitted and self._submitted % self._workers == 0:
            results = _results(self._futures)
            self._futures = []
        self._submitted += 1
        future = self.submit(fn, *arguments, **named)
        self._futures.append(future)
        return future, results

    def shutdown(self, wait: bool = True) -> None:
        """Wait for what was submitted."""
        self._executor.shutdown(wait=wait)


class TaskCountLimitedThreadPoolExecutor:
    """A thread pool that works at no more than `max_parallel_groups` groups of attempts at once."""

    def __init__(
        self, max_parallel_groups: int, max_workers: int = 64, auto_retry: bool = True
    ) -> None:
        self._executor = ThreadPoolExecutor(max_workers, "ajet-episode")
        self._groups = threading.BoundedSemaphore(max_parallel_groups)
        self._auto_retry = auto_retry

    def submit_group(
        self,
        task_id: str,
        fn: Callable[..., Any],
        args_list: Sequence[Mapping[str, Any]],
    ) -> list[Future[Any]]:
        """Run the attempts at a task, once there is room for its group."""
        self._groups.acquire()
        left = [len(args_list)]
        lock = threading.Lock()

        def finished(_: Future[Any]) -> None:
            with lock:
                left[0] -= 1
                if left[0] == 0:
                    self._groups.release()

        function = retrying(fn) if self._auto_retry else fn
        futures = [self._executor.submit(function, **named) for named in args_list]
        for future in futures:
            future.add_done_callback(finished)
        if not futures:
            self._groups.release()
        return futures

    def on_entering_weight_sync(self) -> None:
        """Nothing: the server tells its clients what becomes of open episodes."""

    def shutdown(self, wait: bool = True) -> None:
        """Wait for what was submitted."""
        self._executor.shutdown(wait=wait)


def run_all(
    tasks: Sequence[Any], function: Callable[[Any], Any], threads: int, *, auto_retry: bool
) -> list[Any]:
    """Call a function with each task; returns the results, None for those that failed."""
    with ThreadPoolExecutor(max(1, threads), "ajet-episode") as executor:
        called = retrying(function) if auto_retry else function
        return _results([executor.submit(called, task) for task in tasks])


def _results(futures: Sequence[Future[Any]]) -> list[Any]:
    results: list[Any] = []
    for future in futures:
        try:
            results.append(future.result())
        except Exception:
            log.exception("An episode failed")
            results.append(None)
    return results
