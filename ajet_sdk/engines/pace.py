"""`Pace`: paces requests to an endpoint by its rate, and retries them after 429, 5xx and lost
connections."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections import defaultdict
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

_REPLY = "a slow endpoint"

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
        self._base_url = public(base_url)
        self._remedy = remedy
        self._patience = patience
        self._interval = 60.0 / per_minute if per_minute else 0.0
        self._halted: AjetError | None = None
        self._answered = False
        """Whether the endpoint has answered; one that never did gets fewer retries."""
        self._not_before = self._limited_until = 0.0
        """Earliest time of the next request; the second is set by 429s only."""
        self._waits: dict[object, tuple[str, float]] = {}
        """For what each request waits, and until when; for its reply, since when."""
        self._refusals = 0
        self._next_line = 0.0

    async def send(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Return the result of `attempt`, with retries. Raises its errors, the last one for
        EngineUnavailable."""
        request = object()
        started = time.monotonic()
        failed = 0
        try:
            while True:
                if self._not_before or self._interval:
                    await self._wait_turn(request)
                if self._halted is not None:
                    raise self._halted
                self._waits[request] = _REPLY, time.monotonic()
                try:
                    answer = await attempt()
                except EngineUnavailable as error:
                    failed += 1
                    await self._back_off(error, failed, time.monotonic() - started, request)
                else:
                    self._answered = True
                    return answer
        finally:
            self._waits.pop(request, None)

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
        now = time.monotonic()
        times = defaultdict[str, list[float]](list)
        for reason, moment in list(self._waits.values()):
            times[reason].append(moment)
        if _REPLY in times and now - min(times[_REPLY]) <= slow:
            del times[_REPLY]
        return "; ".join(
            f"{reason}: {len(moments):,} request{'s'[: len(moments) > 1]},"
            f" {abs(min(moments) - now):.0f} s"
            for reason, moments in sorted(times.items(), reverse=True)
        )

    async def _wait_turn(self, request: object) -> None:
        """Wait for the delay of a 429 and for the rate."""
        while (wait := self._not_before - (now := time.monotonic())) > 0:
            if self._limited_until > now:
                limit = "the rate limit (429)"
            else:
                limit = "--rpm"
            self._waits[request] = limit, self._not_before
            await asyncio.sleep(wait)
        if self._interval:
            self._not_before = max(self._not_before, now) + self._interval

    async def _back_off(
        self, error: EngineUnavailable, failed: int, elapsed: float, request: object
    ) -> None:
        """Wait until the retry. Raises the error, with the number of attempts, if there is none."""
        self._answered |= error.status is not None
        wait = pause(failed - 1, error.retry_after)
        patience = self._patience if error.status == 429 else None
        if patience is not None:
            given_up = elapsed + wait > patience or "exceeded your current quota" in str(error)
        elif error.refused and not self._answered:
            given_up = failed > min(self.retries, 1)
        else:
            given_up = failed > self.retries
        if given_up or not error.retryable:
            if failed == 1:
                raise error
            remedy = "" if patience is None else f"; {self._remedy}"
            raise EngineUnavailable(
                f"{error} ({failed} attempts){remedy}",
                status=error.status,
                retry_after=error.retry_after,
            ) from error
        if error.status is not None:
            self._log_refusal(error.status, wait)
        until = time.monotonic() + wait
        if error.status == 429:
            self._not_before = self._limited_until = max(self._not_before, until)
            return
        if error.status is None:
            why = "a lost connection"
        else:
            why = str(error.status)
        self._waits[request] = f"a retry after {why}", until
        await asyncio.sleep(wait)

    def _log_refusal(self, status: int, wait: float) -> None:
        self._refusals += 1
        now = time.monotonic()
        if now < self._next_line:
            return
        self._next_line = now + _LOG_INTERVAL
        if status in responses:
            meaning = f", {responses[status].lower()}"
        else:
            meaning = ""
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
