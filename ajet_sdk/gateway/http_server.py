"""The HTTP server of all endpoints of ajet: uvicorn with time limits for requests and checks
against foreign web pages.

A client that sends half a request would otherwise hold a connection, a task and memory forever. The
server also reports how much of a response the client has read (`protocols.Client`).

A web page in a browser on this machine can reach every server that listens here. Its requests are
recognized by their `Origin`, or after DNS rebinding by the `Host` header, which has the page's own
name.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache, partial
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ajet_sdk.dialects.json import json_bytes
from ajet_sdk.dialects.openai_chat import error_body
from ajet_sdk.gateway.http_door import CONNECTION, respond
from ajet_sdk.gateway.peer_socket import bytes_read_by_peer, lost_bytes

HEADER_SECONDS = 20.0
"""Limit for the headers, from the connection, or on a kept-alive one from the first byte of a
request."""

BODY_SECONDS = 120.0
"""Limit for the body, from the end of the headers."""

LONGEST_PAUSE = 0.05
"""Seconds between two checks of a connection whose client does not read."""

AHEAD = 0.005
"""Seconds for a client on another machine to read the rest of a stream before its last chunk is
sent."""

LINGER_SECONDS = 10.0
"""Limit for a client to read the last response of a connection before the server closes it."""

_TURNS = 6
"""Turns of the event loop to wait for a client before timers are used, which take a millisecond."""


def server_config(
    app: Any, *, own_name: str = "", keyed: bool = False, **settings: Any
) -> uvicorn.Config:
    """Return uvicorn's configuration of a server; `settings` are passed to uvicorn.

    Requests of foreign web pages are refused (`foreign`), except with `keyed`: the application then
    requires a key, which no page has, and the server may be reached under any name.
    """
    ours = {
        "http": partial(TimedProtocol, SparseLog()),
        "ws": "none",
        "lifespan": "off",
        "log_config": None,
        "access_log": False,
    }
    guarded = app if keyed else _guarded(app, own_name)
    return uvicorn.Config(guarded, **{**ours, "interface": "asgi3", **settings})


_READ = frozenset((b"host", b"origin", b"content-type"))


def _guarded(app: Any, own_name: str) -> Any:
    async def guarded(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            sent = {
                name: value.decode("latin-1") for name, value in scope["headers"] if name in _READ
            }
            refused = foreign(
                sent.get(b"host", ""), sent.get(b"origin"), sent.get(b"content-type"), own_name
            )
            if refused is not None:
                status, reason = refused
                await respond(
                    send, status, error_body(reason, "invalid_request_error", "foreign_request")
                )
                return
        await app(scope, receive, send)

    return guarded


class _Transport:
    """A transport that can join two writes and delay its closing."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._held = b""
        self.written = 0
        """Bytes of all responses."""
        self.hold = False
        """Join the next write with the one after it."""
        self.lingers: Callable[[], bool] = lambda: False
        """Whether `close` ends the sending side only, as the client still reads. Its end of the
        connection then tells whether it read everything; a closed socket is told nothing."""

    def write(self, data: bytes) -> None:
        self.written += len(data)
        data = self._held + data
        self._held = b""
        if self.hold:
            self.hold = False
            self._held = data
        else:
            self._transport.write(data)

    def close(self) -> None:
        if self._transport.can_write_eof() and self.lingers():
            with suppress(OSError):  # reset by the client: `connection_lost` is about to be called
                self._transport.write_eof()
            loop = asyncio.get_running_loop()
            loop.call_later(LINGER_SECONDS, self._transport.close)
        else:
            self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:
    _Adapter = logging.LoggerAdapter  # generic from Python 3.11 on


class SparseLog(_Adapter):
    """The log of a server, with the 1st, 10th, 100th, ... of equal warnings, so that bad clients
    can't fill it."""

    level = logging.INFO  # uvicorn reads it for its log of connections

    def __init__(self) -> None:
        super().__init__(logging.getLogger("ajet.http"), {})
        self._counts: Counter[str] = Counter()

    def warning(self, msg: object, *args: object, **_: object) -> None:
        text = str(msg) % args if args else str(msg)
        self._counts[text] += 1
        count = self._counts[text]
        if str(count).strip("0") == "1":
            self.logger.warning("%s%s", text, f" ({count:,} so far)" if count > 1 else "")


class TimedProtocol(H11Protocol):
    """A connection, which is also the `protocols.Client` at its other end."""

    gone: asyncio.Future[None]
    in_parts = False

    def __init__(self, log: SparseLog, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self.logger = log  # type: ignore[assignment]
        self.on_end_of_reply: Callable[[bool], None] | None = None
        """To be told whether the client read the last reply, once that is known."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.transport = self._joining = _Transport(transport)  # type: ignore[assignment]
        self._joining.lingers = self._lingers
        self.gone = self.loop.create_future()
        self.app_state = {**self.app_state, CONNECTION: self}
        self._stage: str | None = None
        self._limit: asyncio.TimerHandle | None = None
        self._watch("headers")

    def data_received(self, data: bytes) -> None:
        self._settle(True)  # a client that sends the next request has read the last response
        super().data_received(data)
        self._watch(self._awaited())

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch(self._awaited() if self.conn.trailing_data[0] else self._stage)

    def connection_lost(self, exc: Exception | None) -> None:
        self._watch(None)
        super().connection_lost(exc)
        self._leave(exc is None)  # an error: the client closed it with unread bytes

    def eof_received(self) -> None:
        self._leave(not self._is_cut_off())
        super().eof_received()

    # Invalid requests

    def _unsupported_upgrade_warning(self) -> None:
        self.logger.warning(
            "Answered a request to upgrade to another protocol as if it asked for none."
        )

    def send_400_response(self, msg: str) -> None:
        """Answer invalid HTTP and end the connection."""
        if (
            self.cycle is not None and not self.cycle.response_complete
        ):  # the request's body is invalid
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()

    # Time limits

    def _awaited(self) -> str | None:
        """The unfinished part of the client's request: `headers`, `body` or None."""
        state = self.conn.their_state
        return "headers" if state is h11.IDLE else "body" if state is h11.SEND_BODY else None

    def _watch(self, stage: str | None) -> None:
        if stage == self._stage:
            return
        if self._limit is not None:
            self._limit.cancel()
        self._stage = stage
        self._limit = None
        if stage is not None:
            seconds = HEADER_SECONDS if stage == "headers" else BODY_SECONDS
            self._limit = self.loop.call_later(seconds, self._too_slow, stage, seconds)

    def _too_slow(self, stage: str, seconds: float) -> None:
        if self.transport.is_closing():
            return
        # No error if the response has begun, or for headers if the request has not.
        if stage == "body":
            awaited = not self.cycle.response_started
        else:
            awaited = bool(self.conn.trailing_data[0])
        if awaited:
            message = f"the request's {stage} did not arrive within {seconds:g} s"
            body = json_bytes(error_body(message, "invalid_request_error", "request_timeout"))
            head = (
                f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection:"
                " close"
            )
            self.transport.write(f"HTTP/1.1 408 Request Timeout\r\n{head}\r\n\r\n".encode() + body)
        self.transport.close()

    def join_next(self) -> None:
        """Join the next write with the one after it, so that a client reads both or neither."""
        self._joining.hold = True

    # Whether the client has read the response

    async def drain(self) -> None:
        for turn in itertools.count():
            if self.gone.done() or not self.has_unread():
                break
            if turn < _TURNS:
                wait = 0.0
            else:
                wait = min(0.001 * 2 ** min(turn - _TURNS, 10), LONGEST_PAUSE)
            await asyncio.sleep(wait)
        if self._bytes_read() is None:
            await asyncio.sleep(AHEAD)

    def has_unread(self) -> bool:
        read = self._bytes_read()
        if read is None:
            return self.transport.get_write_buffer_size() > 0
        return read < self._joining.written

    def _bytes_read(self) -> int | None:
        connection = self.transport.get_extra_info("socket")
        return None if connection is None else bytes_read_by_peer(connection)

    def _settle(self, is_read: bool) -> None:
        confirm = self.on_end_of_reply
        self.on_end_of_reply = None
        if confirm is not None:
            confirm(is_read)

    def _leave(self, is_read: bool) -> None:
        self._settle(is_read)
        if not self.gone.done():
            self.gone.set_result(None)

    def _is_cut_off(self) -> bool:
        """Whether the client, which has closed its end, did not get or read all bytes."""
        connection = self.transport.get_extra_info("socket")
        return self.has_unread() or (connection is not None and lost_bytes(connection))

    def _lingers(self) -> bool:
        """Whether to leave it to the client to close a connection that the server would close."""
        if self.on_end_of_reply is None:
            return False
        read = self._bytes_read()
        return read is None or read < self._joining.written


_UNASKED = ("text/plain", "application/x-www-form-urlencoded")
"""Content types that a page may send to another origin without a preflight request; no server of
ajet accepts them."""


def foreign(
    host: str, origin: str | None, content_type: str | None, own_name: str = ""
) -> tuple[int, str] | None:
    """Status and message for refusing a request, by its headers; None if it is accepted.

    Accepted hosts are addresses, `localhost`, this machine's name and `own_name`.
    """
    if not _ours(host, own_name):
        return (
            403,
            (
                f"this server does not accept the host name {host[:100]!r}; use its address or"
                " localhost"
            ),
        )
    if origin is not None and urlsplit(origin).netloc != host:
        return 403, f"pages of {origin[:100]!r} may not send requests to this server"
    kind = (content_type or "").partition(";")[0].strip().lower()
    if kind in _UNASKED:
        return 415, f"the content must be application/json, not {kind}"
    return None


@lru_cache(maxsize=256)
def _ours(host: str, own_name: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    if name in (
        "localhost",
        own_name.lower(),
        socket.gethostname().lower(),
        socket.getfqdn().lower(),
    ):
        return True
    try:
        ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True


def is_loopback(listener: socket.socket) -> bool:
    """Whether only this machine can reach a bound socket."""
    address = ip_address(listener.getsockname()[0].partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
