"""The gateway, asked from its own process without a socket: the same application, one hop to its loop and one back.

A connection pool looks at each of its connections for each request; at 128 episodes at once that is half of all the
time that an agent's HTTP takes. Other processes, and libraries without transports, come over HTTP as before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urlsplit

from ajet_sdk.letterbox import Letterbox

__all__ = ["GONE", "READ", "Direct", "Exchange", "Part"]

GONE = "ajet.gone"
"""In a scope: a future that is done when the caller goes away, so that nobody need wait for `http.disconnect`."""
READ = "ajet.read"
"""In the message with the body: its JSON, where that is known."""

_Message = MutableMapping[str, Any]
_App = Callable[[_Message, Callable[[], Awaitable[_Message]], Callable[[_Message], Awaitable[None]]], Awaitable[None]]


class Direct:
    """An ASGI application and the event loop, of another thread, that it runs in. `close` it when the loop is."""

    def __init__(self, app: _App, loop: asyncio.AbstractEventLoop) -> None:
        self.app, self.loop = app, loop
        self.asked = set[Exchange]()
        """Those that are not over."""

    def ask(
        self,
        url: str,
        headers: Mapping[str, str],
        body: bytes,
        tell: Callable[[Part | None], None],
        read: dict[str, Any] | None = None,
    ) -> Exchange:
        """POST a request; `tell` gets the response's parts in the loop's thread, and None where it broke off.

        `read` is the body's JSON where it is known already; it becomes the application's. Raises RuntimeError where
        the loop is closed.
        """
        path = urlsplit(url).path
        scope = {
            "type": "http",
            "method": "POST",
            "path": unquote(path),
            "raw_path": path.encode("ascii"),
            "query_string": b"",
            "headers": [(name.lower().encode("latin-1"), _header(value)) for name, value in headers.items()],
        }
        exchange = Exchange(self, scope, body, tell, read)
        self.asked.add(exchange)
        Letterbox.of(self.loop).post(exchange.start)  # in an empty context: what it does belongs to no episode
        return exchange

    def close(self) -> None:
        """Break off what the loop never came to; it may have stopped between the asking and the start."""
        for exchange in list(self.asked):
            exchange.break_off()


@dataclass(frozen=True, slots=True)
class Part:
    """Some bytes of a response; the first part has its status and headers too."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes
    last: bool


class Exchange:
    """One request on its way through the application."""

    def __init__(
        self,
        direct: Direct,
        scope: _Message,
        body: bytes,
        tell: Callable[[Part | None], None],
        read: dict[str, Any] | None,
    ) -> None:
        self._direct = direct
        self._scope = scope
        self._body: bytes | None = body
        self._read = read
        self._tell = tell
        self._status, self._headers = 0, list[tuple[bytes, bytes]]()
        self._over = False
        self._gone: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._gone = self._scope[GONE] = self._direct.loop.create_future()
        self._task = self._direct.loop.create_task(self._run())

    def leave(self) -> None:
        """The caller goes away; nothing happens where the response was whole. From any thread."""
        if not self._over:
            with suppress(RuntimeError):  # the gateway's loop is closed
                Letterbox.of(self._direct.loop).post(self._left)  # behind `start`

    def _left(self) -> None:
        if self._gone is not None and not self._gone.done():
            self._gone.set_result(None)

    def break_off(self) -> None:
        """There will be nothing more of it; nothing happens where the response was whole."""
        self._direct.asked.discard(self)
        if not self._over:
            self._over = True
            self._tell(None)

    async def _run(self) -> None:
        try:
            await self._direct.app(self._scope, self._receive, self._send)
        finally:
            self._left()
            self.break_off()

    async def _receive(self) -> _Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False, READ: self._read}
        if self._gone is not None:
            await asyncio.shield(self._gone)
        return {"type": "http.disconnect"}

    async def _send(self, message: _Message) -> None:
        if message["type"] == "http.response.start":
            self._status, self._headers = message["status"], list(message.get("headers", ()))
            return
        last = not message.get("more_body", False)
        body = bytes(message.get("body", b""))
        if self._over or not (body or last):
            return
        self._over = last
        self._tell(Part(self._status, self._headers, body, last))


def _header(value: str) -> bytes:
    try:
        return value.encode("latin-1")
    except UnicodeEncodeError:
        return value.encode()
