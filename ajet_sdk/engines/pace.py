"""`Pace`: paces requests to an endpoint by its rate, and retries them after 429, 5xx and lost
connections."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Awaitable, Callable
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from http.client import responses
from typing import TypeVar

from ajet_sdk.addresses import public
from ajet_sdk.errors import AjetError, EngineUnavailable

FIRST_WAIT = 0.5
"""Seconds before the second attempt; doubled for each further attempt, up to 16 times as much."""

LONGEST_WAIT = 60.0
"""Seconds; longer Retry-After values are cut to it."""

_LOG_INTERVAL = 30.0
"""Seconds between two log lines about retries."""

T = TypeVar("T")
log = logging.getLogger("ajet")


class Pace:
    """Sends requests to an endpoint and retries them while it is busy or unreachable; several event
    loops may share it.

    A 429 delays all requests by its Retry-After. 5xx and lost connections delay their own request,
    with exponential backoff. Retries are logged at the first, then twice a minute.

    Args:
        base_url: the endpoint, for the log.
        remedy: a sentence on how to send fewer requests, for the log and errors.
        retries: maximum retries of a request.
        patience: seconds after which 429s count as failure; None: they count as other failures do.
        per_minute: maximum requests per minute; None: no limit.
    """

    def __init__(
        self,
        base_url: str,
        remedy: str = "",
        *,
        retries: int = 4,
        patience: float | None = None,
        per_minute: float | None = None,
    ) -> None:
        self.retries = retries
        self._base_url, self._remedy, self._patience = public(base_url), remedy, patience
        self._interval = 60.0 / per_minute if per_minute else 0.0
        self._halted: AjetError | None = None
        self._answered = False
        """Whether the endpoint has answered; one that never did gets fewer retries."""
        self._not_before = self._limited_until = 0.0
        """Earliest time of the next request; the second is set by 429s only."""
        self._waiting = 0
        """Requests that wait because of a 429 or the rate."""
        self._retried: dict[object, tuple[str, float]] = {}
        """Failed requests that wait for a retry: the reason and the time."""
        self._sent: dict[object, float] = {}
        """Requests in flight, with the time of sending."""
        self._refusals, self._next_line = 0, 0.0

    async def send(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `attempt`, with retries. Raises its errors, the last one for
        EngineUnavailable."""
        request, started, failed = object(), time.monotonic(), 0
        while True:
            if self._not_before or self._interval:
                await self._wait_turn()
            if self._halted is not None:
                raise self._halted
            self._sent[request] = time.monotonic()
            try:
                answer = await attempt()
            except EngineUnavailable as error:
                failed += 1
                self._answered |= error.status is not None
                del self._sent[request]
                await self._pause(error, failed, time.monotonic() - started, request)
            else:
                self._answered = True
                return answer
            finally:
                self._sent.pop(request, None)

    def halt(self, error: AjetError) -> None:
        """Send no further requests: waiting ones raise `error`; those in flight complete."""
        self._halted = self._halted or error

    def check_halted(self) -> None:
        """Raise the error of `halt`."""
        if self._halted is not None:
            raise self._halted

    def describe_wait(self, slow: float = 10.0) -> str:
        """Why requests wait: a rate limit, a retry, or replies that take more than `slow` seconds;
        else empty."""
        now, waits = time.monotonic(), list[str]()
        waiting, retried, sent = (
            self._waiting,
            list(self._retried.values()),
            list(self._sent.values()),
        )
        if waiting:
            limit = "the rate limit (429)" if self._limited_until > now else "--rpm"
            waits.append(
                f"{limit}: {_count(waiting, 'request')}, {max(0.0, self._not_before - now):.0f} s"
            )
        if retried:
            why, due = min(retried, key=lambda retry: retry[1])
            waits.append(
                f"a retry after {why}: {_count(len(retried), 'request')},"
                f" {max(0.0, due - now):.0f} s"
            )
        if sent and now - min(sent) > slow:
            waits.append(
                f"a slow endpoint: {_count(len(sent), 'request')}, for {now - min(sent):.0f} s"
            )
        return "; ".join(waits)

    async def _wait_turn(self) -> None:
        """Wait for the delay of a 429 and for the rate."""
        while (wait := self._not_before - time.monotonic()) > 0:
            self._waiting += 1
            try:
                await asyncio.sleep(wait)
            finally:
                self._waiting -= 1
        if self._interval:
            self._not_before = max(self._not_before, time.monotonic()) + self._interval

    async def _pause(
        self, error: EngineUnavailable, failed: int, elapsed: float, request: object
    ) -> None:
        """Wait until the retry. Raises the error, with the number of attempts, if there is none."""
        wait, limited = pause(failed - 1, error.retry_after), error.status == 429
        if limited and self._patience is not None:
            given_up = elapsed + wait > self._patience or "exceeded your current quota" in str(
                error
            )
        else:
            given_up = failed > self.retries or (
                error.refused and not self._answered and failed > 1
            )
        if given_up or not error.retryable:
            if failed == 1:
                raise error
            remedy = f"; {self._remedy}" if limited and self._patience is not None else ""
            raise EngineUnavailable(
                f"{error} ({failed} attempts){remedy}",
                status=error.status,
                retry_after=error.retry_after,
            ) from error
        if error.status is not None:
            self._record_refusal(error.status, wait)
        if limited:
            self._not_before = self._limited_until = max(self._not_before, time.monotonic() + wait)
            return
        why = "a lost connection" if error.status is None else str(error.status)
        self._retried[request] = why, time.monotonic() + wait
        try:
            await asyncio.sleep(wait)
        finally:
            del self._retried[request]

    def _record_refusal(self, status: int, wait: float) -> None:
        self._refusals += 1
        now = time.monotonic()
        if now < self._next_line:
            return
        self._next_line = now + _LOG_INTERVAL
        meaning = f", {responses[status].lower()}" if status in responses else ""
        log.warning(
            "%s answered %d%s (%d so far); next request in %.0f s%s",
            self._base_url,
            status,
            meaning,
            self._refusals,
            wait,
            f". {self._remedy}" if status == 429 else "",
        )


def pause(attempt: int, retry_after: str | None) -> float:
    """Seconds to wait: the server's Retry-After, else FIRST_WAIT · 2^attempt, with up to a quarter
    of jitter."""
    seconds = FIRST_WAIT * min(2.0**attempt, 16.0)
    if retry_after:
        with contextlib.suppress(TypeError, ValueError):
            seconds = (
                parsedate_to_datetime(retry_after) - datetime.now(timezone.utc)
            ).total_seconds()
        with contextlib.suppress(ValueError):
            seconds = float(retry_after)
    return min(max(seconds, 0.0), LONGEST_WAIT) * (1 + random.random() / 4)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
