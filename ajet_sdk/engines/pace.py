"""`Pace`: when requests to an endpoint are sent, and sent again: its rate, its 429s, 5xx and lost connections."""

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
"""Seconds before the second attempt; doubled for each further one, up to 16 times."""

LONGEST_WAIT = 60.0
"""Seconds; a longer Retry-After is cut to it."""

_LOG_INTERVAL = 30.0
"""Seconds between two lines about requests that are refused and sent again."""

T = TypeVar("T")
log = logging.getLogger("ajet")


class Pace:
    """Sends requests to one endpoint, again where it is busy or gone for a moment; several event loops may share it.

    A 429 holds back every request, for as long as Retry-After says. 5xx and a lost connection hold back their own, with
    exponential backoff. Where requests are sent again is logged at the first, then twice a minute.

    Args:
        base_url: the endpoint, for the log.
        remedy: the sentence that says how to ask for less.
        retries: how often a request is sent again.
        patience: seconds for which 429s are waited out; None: they count as other failures do.
        per_minute: requests; None: no limit.
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
        """An endpoint that never did is not waited for as long as one that is gone for a moment."""
        self._not_before = self._limited_until = 0.0
        """When the next request may be sent; the second by a 429."""
        self._waiting = 0
        """Requests that wait because of a 429, or for the rate."""
        self._retried: dict[object, tuple[str, float]] = {}
        """Requests that failed and are sent again: why, and when."""
        self._sent: dict[object, float] = {}
        """Requests under way, with the time at which each was sent."""
        self._refusals, self._next_line = 0, 0.0

    async def send(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """The result of `attempt`, retried as often as needed and allowed.

        Raises what it raises; of EngineUnavailable the last.
        """
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
        """Send nothing more: requests that wait for their turn raise `error`; those under way come back."""
        self._halted = self._halted or error

    def check_halted(self) -> None:
        """Raise what `halt` was given."""
        if self._halted is not None:
            raise self._halted

    def describe_wait(self, slow: float = 10.0) -> str:
        """The reason why requests wait: a rate limit, a retry, a reply of more than `slow` seconds; else empty."""
        now, waits = time.monotonic(), list[str]()
        waiting, retried, sent = self._waiting, list(self._retried.values()), list(self._sent.values())
        if waiting:
            limit = "the rate limit (429)" if self._limited_until > now else "--rpm"
            waits.append(f"{limit}: {_count(waiting, 'request')}, {max(0.0, self._not_before - now):.0f} s")
        if retried:
            why, due = min(retried, key=lambda retry: retry[1])
            waits.append(f"a retry after {why}: {_count(len(retried), 'request')}, {max(0.0, due - now):.0f} s")
        if sent and now - min(sent) > slow:
            waits.append(f"a slow endpoint: {_count(len(sent), 'request')}, for {now - min(sent):.0f} s")
        return "; ".join(waits)

    async def _wait_turn(self) -> None:
        """Wait for what a 429 said, and for the rate."""
        while (wait := self._not_before - time.monotonic()) > 0:
            self._waiting += 1
            try:
                await asyncio.sleep(wait)
            finally:
                self._waiting -= 1
        if self._interval:
            self._not_before = max(self._not_before, time.monotonic()) + self._interval

    async def _pause(self, error: EngineUnavailable, failed: int, elapsed: float, request: object) -> None:
        """Until the request may be sent again. Raises the error, with the number of attempts, where it may not."""
        wait, limited = pause(failed - 1, error.retry_after), error.status == 429
        if limited and self._patience is not None:
            given_up = elapsed + wait > self._patience or "exceeded your current quota" in str(error)
        else:
            given_up = failed > self.retries or (error.refused and not self._answered and failed > 1)
        if given_up or not error.retryable:
            if failed == 1:
                raise error
            remedy = f"; {self._remedy}" if limited and self._patience is not None else ""
            raise EngineUnavailable(
                f"{error} ({failed} attempts){remedy}", status=error.status, retry_after=error.retry_after
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
            self._base_url, status, meaning, self._refusals, wait, f". {self._remedy}" if status == 429 else "",
        )  # fmt: skip


def pause(attempt: int, retry_after: str | None) -> float:
    """Seconds to wait: what the server says, else FIRST_WAIT · 2^attempt, both with up to a quarter of jitter."""
    seconds = FIRST_WAIT * min(2.0**attempt, 16.0)
    if retry_after:
        with contextlib.suppress(TypeError, ValueError):
            seconds = (parsedate_to_datetime(retry_after) - datetime.now(timezone.utc)).total_seconds()
        with contextlib.suppress(ValueError):
            seconds = float(retry_after)
    return min(max(seconds, 0.0), LONGEST_WAIT) * (1 + random.random() / 4)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
