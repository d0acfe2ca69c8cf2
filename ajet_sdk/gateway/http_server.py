"""The HTTP server of every endpoint of ours: uvicorn's, with time limits for what a client sends.

A client that sends half a request would hold a connection, a task and memory for ever; ten thousand of them are an
outage. The server also tells an application how much of a response the client has taken (`protocols.Client`).

Whether a request to a server of ours may come from a web page that has no business with it.

A page in a browser on this machine can reach every server that listens here. It can't hide its `Origin`, and where it
had its own name point to 127.0.0.1 (DNS rebinding), the name stands in `Host`.
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
"""From the connection, or on one that is kept open from the first byte of a request, to the end of its headers."""

BODY_SECONDS = 120.0
"""From the end of the headers to the end of the body."""

BUFFERED = 64 * 2**10
"""Bytes that may be on their way when a client is said to have taken what was sent."""

LONGEST_PAUSE = 0.05
"""Seconds between two looks at a connection whose client does not read."""

AHEAD = 0.005
"""Seconds before the end of a stream in which a client on another machine reads what has arrived there."""

_TURNS = 6
"""Turns of the loop in which a client that waits for the bytes has read them: a timer takes a millisecond."""

_TCP_CLOSE = 7

_UNACKNOWLEDGED, _UNSENT = termios.TIOCOUTQ, 0x894B
"""What `ioctl` is asked for: SIOCOUTQ and, of Linux alone, SIOCOUTQNSD (`tcp(7)`)."""


def server_config(app: Any, *, own_name: str = "", keyed: bool = False, **settings: Any) -> uvicorn.Config:
    """uvicorn's configuration of a server of ours; `settings` are uvicorn's.

    What a foreign web page may have sent is refused (`origins.foreign`); with `keyed` the application itself asks for
    a key, which no page has, so that a server may be reached under any name.
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
            sent = {name: value.decode("latin-1") for name, value in scope["headers"] if name in _READ}
            refused = foreign(sent.get(b"host", ""), sent.get(b"origin"), sent.get(b"content-type"), own_name)
            if refused is not None:
                status, reason = refused
                await respond(send, status, error_body(reason, "invalid_request_error", "foreign_request"))
                return
        await app(scope, receive, send)

    return guarded


class _Transport:
    """A transport that can send two writes as one, and that can keep open what is to be closed."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._held = b""
        self.hold = False
        """Send what is written next together with what follows it."""
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
    """One server's log, with the 1st, the 10th, the 100th and so on of equal warnings and their number.

    Who sends it rubbish can't fill the log.
    """

    level = logging.INFO  # uvicorn looks whether it is to log each connection

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
    """One connection, and the `protocols.Client` at its other end."""

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
        self._settle(True)  # who asks again has read the last response
        super().data_received(data)
        self._watch(self._awaited())

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch(self._awaited() if self.conn.trailing_data[0] else self._stage)

    def connection_lost(self, exc: Exception | None) -> None:
        self._watch(None)
        super().connection_lost(exc)
        self.gone.set_result(None)
        if self._confirm is not None:  # a transport of TLS says nothing any more
            self._settle(exc is None and not self.unread())
        if self._following is not None:
            self._following.cancel()

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """The client sends no more. Where it only closed its sending side, it gets its response."""
        peer = self._peer()
        waits = self._confirm is not None or (self.cycle is not None and not self.cycle.response_complete)
        if waits and peer is not None and not peer.closed:
            self._half_closed = True
            self._follow()
            return True  # which ends the reading: no event says any more what becomes of the connection
        self._settle(not self.unread())
        return None

    def timeout_keep_alive_handler(self) -> None:
        if self._confirm is None or not self.unread():
            super().timeout_keep_alive_handler()
        else:  # a slow client, still at the last response
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    # What is no request

    def _unsupported_upgrade_warning(self) -> None:
        self.logger.warning("Answered a request to upgrade to another protocol as if it asked for none.")

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, and nothing else any more."""
        if self.cycle is not None and not self.cycle.response_complete:  # what is wrong is the body of its request
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()

    # Time limits

    def _awaited(self) -> str | None:
        """What the client has begun and not ended."""
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
        # An answer may be on its way or given before the body was whole; nothing is said of what was never begun.
        awaited = not self.cycle.response_started if stage == "body" else bool(self.conn.trailing_data[0])
        if awaited:
            message = f"the request's {stage} did not arrive within {seconds:g} s"
            body = json_bytes(error_body(message, "invalid_request_error", "request_timeout"))
            head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close"
            self.transport.write(f"HTTP/1.1 408 Request Timeout\r\n{head}\r\n\r\n".encode() + body)
        self.transport.close()

    def join_next(self) -> None:
        """Send what is written next as one with what follows it: a client reads both or neither."""
        self._joining.hold = True

    # How far the client has taken the response

    async def taken(self, whole: bool = False) -> bool:
        """Wait until the client has taken what was sent, all of it with `whole`, else up to `BUFFERED` bytes.

        False where the client went away before. A client on another machine is given `AHEAD` seconds to read.
        """
        for turn in itertools.count():
            await asyncio.sleep(0 if turn < _TURNS else min(0.001 * 2 ** min(turn - _TURNS, 10), LONGEST_PAUSE))
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
        """Bytes that the client has not read; of one on another machine, that its system has not acknowledged.

        On this machine what is sent is in the client's receive queue at once, while its acknowledgement may wait for 40
        ms. A client that closes its end with bytes unread resets the connection; how many they were is not known: 1.
        """
        return self._behind()[1] or int(self._reset())

    def confirm_by(self, confirm: Callable[[bool], None]) -> None:
        """Call `confirm` with whether the client has read what is sent now to its end, once that is known."""
        if self.transport.is_closing():  # the client left a moment ago, having read all before: this is not sent
            confirm(False)
        else:
            self._confirm = confirm

    def _settle(self, read: bool) -> None:
        confirm, self._confirm = self._confirm, None
        if confirm is not None:
            confirm(read)

    def _closes_at_once(self) -> bool:
        """Whether the connection may be closed: the client may still be reading, and is not seen to do so then."""
        if self._confirm is None or self._half_closed or not self.unread():
            return True
        self._to_close = True
        self._follow()
        return False

    def _follow(self) -> None:
        """Look now and then at a client of which no event tells: it closed its sending side, or is to be closed."""
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
        """The client's end, and the bytes that it has not read; of a client elsewhere, those not acknowledged.

        Our queue is looked at before the client's: bytes that move from one to the other are seen in one at least.
        """
        unsent = self._waiting(_UNSENT)
        peer = self._peer()
        return peer, self._waiting(_UNACKNOWLEDGED) if peer is None else unsent + peer.unread

    def _peer(self) -> PeerSocket | None:
        connection = self.transport.get_extra_info("socket")
        return None if connection is None or connection.fileno() < 0 else self._peers.look(connection)

    def _reset(self) -> bool:
        connection, option = self.transport.get_extra_info("socket"), getattr(socket, "TCP_INFO", None)
        if connection is None or connection.fileno() < 0 or option is None:
            return False
        return bool(connection.getsockopt(socket.IPPROTO_TCP, option, 1)[0] == _TCP_CLOSE)

    def _waiting(self, queue: int) -> int:
        """Bytes of our own buffer and of one of the system's queues."""
        waiting: int = self.transport.get_write_buffer_size()
        connection = self.transport.get_extra_info("socket")
        if connection is None or connection.fileno() < 0:
            return waiting
        try:
            sent: int = struct.unpack("i", fcntl.ioctl(connection.fileno(), queue, b"\0" * 4))[0]
        except OSError:  # a system that does not say
            sent = 0
        return waiting + sent


_UNASKED = ("text/plain", "application/x-www-form-urlencoded")
"""Types of content that a page may send elsewhere without asking first; none of our servers wants them."""


def foreign(host: str, origin: str | None, content_type: str | None, own_name: str = "") -> tuple[int, str] | None:
    """The status and the reason with which a request is refused, from its headers; None where it is let through.

    It is let through where it names the server by an address, `localhost`, this machine's name or `own_name`.
    """
    if not _ours(host, own_name):
        return 403, f"this server does not accept the host name {host[:100]!r}; use its address or localhost"
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
    if name in ("localhost", own_name.lower(), socket.gethostname().lower(), socket.getfqdn().lower()):
        return True
    try:
        ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True


def is_loopback(listener: socket.socket) -> bool:
    """Whether only this machine can reach a bound socket, however its address was spelt."""
    address = ip_address(listener.getsockname()[0].partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
