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
import fcntl
import itertools
import logging
import socket
import struct
import termios
from collections import Counter
from collections.abc import Callable
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
from ajet_sdk.gateway.peer_socket import PeerSocket, PeerSockets

HEADER_SECONDS = 20.0
"""Limit for the headers, from the connection, or on a kept-alive one from the first byte of a
request."""

BODY_SECONDS = 120.0
"""Limit for the body, from the end of the headers."""

BUFFERED = 64 * 2**10
"""Unacknowledged bytes up to which a client counts as reading."""

LONGEST_PAUSE = 0.05
"""Seconds between two checks of a connection whose client does not read."""

AHEAD = 0.005
"""Seconds for a client on another machine to read the rest of a stream before its last chunk is
sent."""

_TURNS = 6
"""Turns of the event loop to wait for a client before timers are used, which take a millisecond."""

_TCP_CLOSE = 7

_UNACKNOWLEDGED, _UNSENT = termios.TIOCOUTQ, 0x894B
"""`ioctl` requests: SIOCOUTQ and, on Linux only, SIOCOUTQNSD (`tcp(7)`)."""


def server_config(
    app: Any, *, own_name: str = "", keyed: bool = False, **settings: Any
) -> uvicorn.Config:
    """Return uvicorn's configuration of a server; `settings` are passed to uvicorn.

    Requests of foreign web pages are refused (`foreign`), except with `keyed`: the application then
    requires a key, which no page has, and the server may be reached under any name.
    """
    ours = {
        "http": partial(TimedProtocol, SparseLog(), PeerSockets()),
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
        self.hold = False
        """Join the next write with the one after it."""
        self.before_close: Callable[[], bool] = lambda: True
        """Whether to close at once."""

    def write(self, data: bytes) -> None:
        data, self._held = self._held + data, b""
        if self.hold:
            self.hold, self._held = False, data
        else:
            self._transport.write(data)

    def close(self) -> None:
        if self.before_close():
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

    def __init__(self, log: SparseLog, peers: PeerSockets, **uvicorns: Any) -> None:
        super().__init__(**uvicorns)
        self.logger = log  # type: ignore[assignment]
        self._peers = peers
        self._confirm: Callable[[bool], None] | None = None
        self._half_closed = self._to_close = False
        self._following: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.transport = self._joining = _Transport(transport)  # type: ignore[assignment]
        self._joining.before_close = self._closes_at_once
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
        self.gone.set_result(None)
        if self._confirm is not None:  # a TLS transport reports nothing after this
            self._settle(exc is None and not self.unread())
        if self._following is not None:
            self._following.cancel()

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Handle the end of the client's data; if it closed only its sending side, it still gets
        its response."""
        peer = self._peer()
        waits = self._confirm is not None or (
            self.cycle is not None and not self.cycle.response_complete
        )
        if waits and peer is not None and not peer.closed:
            self._half_closed = True
            self._follow()
            return True  # ends reading, so that no further event tells the state of the connection
        self._settle(not self.unread())
        return None

    def timeout_keep_alive_handler(self) -> None:
        if self._confirm is None or not self.unread():
            super().timeout_keep_alive_handler()
        else:  # a slow client still reads the last response
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

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
        self._stage, self._limit = stage, None
        if stage is not None:
            seconds = HEADER_SECONDS if stage == "headers" else BODY_SECONDS
            self._limit = self.loop.call_later(seconds, self._too_slow, stage, seconds)

    def _too_slow(self, stage: str, seconds: float) -> None:
        if self.transport.is_closing():
            return
        # No error if the response has begun, or for headers if the request has not.
        awaited = (
            not self.cycle.response_started if stage == "body" else bool(self.conn.trailing_data[0])
        )
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

    # How much of the response the client has read

    async def taken(self, whole: bool = False) -> bool:
        """Wait until the client has read the bytes sent so far: all with `whole`, else all but
        `BUFFERED` bytes.

        False if the client leaves before. A client on another machine gets `AHEAD` seconds to read.
        """
        for turn in itertools.count():
            await asyncio.sleep(
                0 if turn < _TURNS else min(0.001 * 2 ** min(turn - _TURNS, 10), LONGEST_PAUSE)
            )
            if self.transport.is_closing():
                return False
            if not whole:
                if self._waiting(_UNACKNOWLEDGED) <= BUFFERED:
                    return True
                continue
            peer, waiting = self._behind()
            if peer is not None and peer.closed:
                return False
            if waiting:
                continue
            if peer is None:
                await asyncio.sleep(AHEAD)
            return not self.transport.is_closing()
        raise AssertionError("unreachable")

    def unread(self) -> int:
        """Bytes that the client has not read; on another machine, that its system has not
        acknowledged.

        On this machine sent bytes are in the client's receive queue at once, while their
        acknowledgement may take 40 ms. A client that closes its end with unread bytes resets the
        connection; their number is unknown and counts as 1.
        """
        return self._behind()[1] or int(self._reset())

    def confirm_by(self, confirm: Callable[[bool], None]) -> None:
        """Call `confirm` with whether the client has read the whole response, once that is
        known."""
        if self.transport.is_closing():  # the client has left, and the last chunk is not sent
            confirm(False)
        else:
            self._confirm = confirm

    def _settle(self, read: bool) -> None:
        confirm, self._confirm = self._confirm, None
        if confirm is not None:
            confirm(read)

    def _closes_at_once(self) -> bool:
        """Whether to close the connection now; a client that still reads could not be observed
        after it."""
        if self._confirm is None or self._half_closed or not self.unread():
            return True
        self._to_close = True
        self._follow()
        return False

    def _follow(self) -> None:
        """Poll a connection without events: the client closed its sending side, or the server waits
        to close."""
        peer = self._peer()
        if self._reset() or peer is None or peer.closed:
            self._settle(not self.unread())
            self._joining.abort()
            return
        if self._confirm is not None and not self.unread():
            self._settle(True)
        complete = self.cycle is None or self.cycle.response_complete
        if self._confirm is None and (self._to_close or (self._half_closed and complete)):
            self.transport.close()
        else:
            self._following = self.loop.call_later(LONGEST_PAUSE, self._follow)

    def _behind(self) -> tuple[PeerSocket | None, int]:
        """The client's socket, and the bytes not read; for a client on another machine, those not
        acknowledged.

        Our queue is read before the client's, so that bytes moving between them are counted at
        least once.
        """
        unsent = self._waiting(_UNSENT)
        peer = self._peer()
        return peer, self._waiting(_UNACKNOWLEDGED) if peer is None else unsent + peer.unread

    def _peer(self) -> PeerSocket | None:
        connection = self.transport.get_extra_info("socket")
        return (
            None if connection is None or connection.fileno() < 0 else self._peers.look(connection)
        )

    def _reset(self) -> bool:
        connection, option = (
            self.transport.get_extra_info("socket"),
            getattr(socket, "TCP_INFO", None),
        )
        if connection is None or connection.fileno() < 0 or option is None:
            return False
        return bool(connection.getsockopt(socket.IPPROTO_TCP, option, 1)[0] == _TCP_CLOSE)

    def _waiting(self, queue: int) -> int:
        """Bytes in the transport's buffer and in one of the system's queues."""
        waiting: int = self.transport.get_write_buffer_size()
        connection = self.transport.get_extra_info("socket")
        if connection is None or connection.fileno() < 0:
            return waiting
        try:
            sent: int = struct.unpack("i", fcntl.ioctl(connection.fileno(), queue, b"\0" * 4))[0]
        except OSError:  # not supported by the system
            sent = 0
        return waiting + sent


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
