"""Requests to a swarm's server, with their repetition, as generators that do no IO themselves.

An `Exchange` yields what to do next (send a request, wait, read a line of a stream) and receives
the outcome; its return value is the result. `Transport` runs one for sync callers, and
`AsyncTransport` for async callers, so that there is one body for both.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import httpx
from pydantic import ValidationError

from ajet_sdk.engines.http import is_loopback, without_certificates
from ajet_sdk.errors import (
    EpisodeOver,
    HeldOutTask,
    SwarmError,
    SwarmFinished,
    SwarmKeyRefused,
    SwarmOffline,
    SwarmUnavailable,
)
from ajet_sdk.swarm.messages import PREFIX, Fault, Refusal

log = logging.getLogger("ajet")
T = TypeVar("T")

CONNECT_SECONDS = 10.0
READ_SECONDS = 60.0
"""Time for a reply, beyond what a request asks the server to wait."""
SHORTEST_PAUSE = 0.05
FIRST_PAUSE = 0.2
LONGEST_PAUSE = 5.0
"""Bounds of the pause after a failed connection."""
LONGEST_RETRY_AFTER = 60.0
NOTICED_FAILURES = 3
"""Failed connections in a row after which a log line says so."""
NOTICE_AGAIN = 60.0
"""Seconds between two log lines about the same wait."""

WITHOUT_PLACE = frozenset(("booting", "updating", "closing", "full", "group_full", "kind_full"))
"""Codes of a server that is well and has no place for an episode now."""

_CLASSES: dict[str, type[SwarmError]] = {
    "unknown_key": SwarmKeyRefused,
    "forbidden": SwarmKeyRefused,
    "offline": SwarmOffline,
    "finished": SwarmFinished,
    "held_out": HeldOutTask,
    "episode_over": EpisodeOver,
    **dict.fromkeys(WITHOUT_PLACE, SwarmUnavailable),
}


@dataclass(frozen=True, slots=True)
class Send:
    """Send a request; the outcome is its response."""

    method: str
    path: str
    key: str | None
    body: bytes | None = None
    wait: float = 0.0
    """Seconds that the server may take besides the usual time."""
    content_type: str = "application/json"


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait some seconds."""

    seconds: float


class ReadLine:
    """Read a line of the connection's stream; the outcome is the line, or None at its end."""


Outcome = httpx.Response | str | None
Exchange = Generator[Send | Wait | ReadLine, Outcome, T]
"""Failed connections are raised into it as `httpx.TransportError`."""


# Requests that are repeated


class Notices:
    """Tells what a client waits for, once for all of its requests that wait for the same."""

    def __init__(self) -> None:
        self._said = ""
        self._when = -NOTICE_AGAIN

    def waiting(self, refused: SwarmError, failures: int) -> None:
        """Log why a request waits. A server without a place is well, and a lost connection is often
        back at once: nothing is said of them at first."""
        now = time.monotonic()
        is_news = refused.code != self._said or now - self._when >= NOTICE_AGAIN
        if not is_news or refused.code in WITHOUT_PLACE or 0 < failures < NOTICED_FAILURES:
            return
        self._said = refused.code
        self._when = now
        log.warning("Waiting for the swarm's server: %s", refused)


def exchange(
    server: str,
    send: Send,
    patience: float,
    place_wait: float | None = 0.0,
    notices: Notices | None = None,
    *,
    is_claim: bool = False,
) -> Exchange[httpx.Response]:
    """Send a request until it is answered, and return the response.

    It is repeated while the server cannot be reached, restarts, or is offline, for `patience`
    seconds since it last answered; a claim also while there is no place for an episode, for
    `place_wait` seconds (None: without a limit). Other refusals are raised at once.
    """
    started = answered = time.monotonic()
    failures = 0
    notices = notices or Notices()
    while True:
        retry_after: float | None = None
        try:
            response = yield send
        except httpx.TransportError as error:
            failures += 1
            if str(error):
                cause = f"{type(error).__name__}: {error}"
            else:
                cause = type(error).__name__
            refused: SwarmError = SwarmUnavailable(
                f"the swarm's server {server} could not be reached ({cause}); check the URL, and"
                " that `ajet swarm start` runs there"
            )
        else:
            assert isinstance(response, httpx.Response)
            if response.is_success:
                return response
            fault = fault_of(response)
            refused = error_of(fault, response.status_code, server)
            retry_after = fault.retry_after
            if response.status_code < 500 and not (response.status_code == 429 and retry_after):
                raise refused
            failures = failures + 1 if retry_after is None else 0
        now = time.monotonic()
        if is_claim and refused.code in WITHOUT_PLACE:
            answered = now
            limit = None if place_wait is None else started + place_wait
        else:
            limit = answered + patience
        pause = _pause(failures, retry_after)
        if limit is not None and now + pause > limit:
            raise refused
        notices.waiting(refused, failures)
        yield Wait(pause)


def _pause(failures: int, retry_after: float | None) -> float:
    if retry_after is not None:
        return min(max(retry_after, SHORTEST_PAUSE), LONGEST_RETRY_AFTER)
    longest = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(failures - 1, 10))
    # Clients that lost the same server must not come back all at once.
    return longest * random.uniform(0.5, 1.0)


def fault_of(response: httpx.Response) -> Fault:
    """The server's reason for a refusal; a proxy on the way may answer with anything."""
    try:
        return Refusal.model_validate_json(response.content).error
    except ValidationError:
        text = " ".join(response.text.split())[:200]
        code = f"http_{response.status_code}"
        return Fault(code=code, message=text or response.reason_phrase)


def error_of(fault: Fault, status: int, server: str) -> SwarmError:
    """The exception of a refusal."""
    kind = _CLASSES.get(fault.code)
    if kind is None:
        kind = SwarmUnavailable if status >= 500 else SwarmError
    advice = ""
    if status == 401:
        advice = "; set AJET_SWARM_KEY, or pass key=, to a key of this server"
    return kind(f"{server}: {fault.message}{advice}", code=fault.code, status=status)


# Running an exchange


def _headers(send: Send) -> dict[str, str]:
    if send.body is not None:
        headers = {"content-type": send.content_type}
    else:
        headers = {}
    if send.key:
        headers["authorization"] = f"Bearer {send.key}"
    return headers


def _timeout(send: Send) -> httpx.Timeout:
    read = READ_SECONDS + send.wait
    return httpx.Timeout(read, connect=CONNECT_SECONDS, pool=None)


def _connection(url: str) -> dict[str, Any]:
    """The settings of an HTTP client. This machine needs no proxy, plain HTTP no certificates."""
    settings: dict[str, Any] = {
        "base_url": url,
        "trust_env": not is_loopback(url),
        # Claims may wait at the server, many at once; requests of open episodes must not queue.
        "limits": httpx.Limits(max_connections=None, max_keepalive_connections=64),
    }
    if url.startswith("http://"):
        settings["verify"] = without_certificates()
    return settings


class Connection:
    """An open stream of lines."""

    def __init__(self) -> None:
        self.closing = ExitStack()
        self.lines: Iterator[str] = iter(())

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.close()


class Transport:
    """Runs exchanges for sync callers, from any thread."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._client: httpx.Client | None = None
        self._pid = 0

    def _http(self) -> httpx.Client:
        client = self._client
        # After a fork, two processes must not share connections.
        if client is None or self._pid != os.getpid():
            client = httpx.Client(**_connection(self._url))
            self._client = client
            self._pid = os.getpid()
        return client

    def run(self, steps: Exchange[T], connection: Connection | None = None) -> T:
        """Run an exchange to its result; `connection` keeps a stream open for the next one. Raises
        what it raises."""
        outcome: Outcome = None
        failure: httpx.TransportError | None = None
        while True:
            try:
                if failure is None:
                    step = steps.send(outcome)
                else:
                    step = steps.throw(failure)
            except StopIteration as ended:
                result: T = ended.value
                return result
            outcome = failure = None
            try:
                if isinstance(step, Wait):
                    time.sleep(step.seconds)
                elif isinstance(step, Send):
                    outcome = self._send(step, connection)
                elif connection is not None:
                    outcome = next(connection.lines, None)
            except httpx.TransportError as error:
                failure = error

    def _send(self, send: Send, connection: Connection | None) -> httpx.Response:
        client = self._http()
        request = client.build_request(
            send.method,
            send.path,
            content=send.body,
            headers=_headers(send),
            timeout=_timeout(send),
        )
        response = client.send(request, stream=connection is not None)
        if connection is not None:
            connection.closing.close()
            connection.closing.callback(response.close)
            if response.is_success:
                connection.lines = response.iter_lines()
            else:
                response.read()
        return response

    def close(self) -> None:
        """Close the connections; a later request opens new ones."""
        if self._client is not None and self._pid == os.getpid():
            self._client.close()
        self._client = None


class AsyncConnection:
    """As `Connection`, for async callers."""

    def __init__(self) -> None:
        self.closing = AsyncExitStack()
        self.lines: AsyncIterator[str] | None = None

    async def __aenter__(self) -> AsyncConnection:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.closing.aclose()


class AsyncTransport:
    """Runs exchanges for async callers, from any event loop."""

    def __init__(self, url: str) -> None:
        self._url = url
        # A connection belongs to the event loop that opened it.
        self._clients: WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient] = (
            WeakKeyDictionary()
        )

    def _http(self) -> httpx.AsyncClient:
        loop = asyncio.get_running_loop()
        client = self._clients.get(loop)
        if client is None:
            client = httpx.AsyncClient(**_connection(self._url))
            self._clients[loop] = client
        return client

    async def run(self, steps: Exchange[T], connection: AsyncConnection | None = None) -> T:
        """As `Transport.run`."""
        outcome: Outcome = None
        failure: httpx.TransportError | None = None
        while True:
            try:
                if failure is None:
                    step = steps.send(outcome)
                else:
                    step = steps.throw(failure)
            except StopIteration as ended:
                result: T = ended.value
                return result
            outcome = failure = None
            try:
                if isinstance(step, Wait):
                    await asyncio.sleep(step.seconds)
                elif isinstance(step, Send):
                    outcome = await self._send(step, connection)
                elif connection is not None and connection.lines is not None:
                    outcome = await anext(connection.lines, None)
            except httpx.TransportError as error:
                failure = error

    async def _send(self, send: Send, connection: AsyncConnection | None) -> httpx.Response:
        client = self._http()
        request = client.build_request(
            send.method,
            send.path,
            content=send.body,
            headers=_headers(send),
            timeout=_timeout(send),
        )
        response = await client.send(request, stream=connection is not None)
        if connection is not None:
            await connection.closing.aclose()
            connection.closing.push_async_callback(response.aclose)
            if response.is_success:
                connection.lines = response.aiter_lines()
            else:
                await response.aread()
        return response

    async def aclose(self) -> None:
        """Close the connections of the running event loop."""
        client = self._clients.pop(asyncio.get_running_loop(), None)
        if client is not None:
            await client.aclose()


def route(*parts: str) -> str:
    """The path of a route of the protocol."""
    return "/".join((PREFIX, *parts))
