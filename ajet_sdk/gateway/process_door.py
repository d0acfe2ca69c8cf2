"""Answers clients in the gateway's own process without a socket: one hop to the gateway's event
loop and one back.

A connection pool checks each of its connections for each request, which takes half of an agent's
HTTP time with 128 concurrent episodes. Other processes, and libraries without transports, use HTTP.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from ajet_sdk.dialects.json import json_bytes
from ajet_sdk.engines.loop_calls import LoopCalls
from ajet_sdk.errors import TraceError
from ajet_sdk.gateway.access import (
    Access,
    ClientGone,
    HTTPError,
    RequestTarget,
    check_body,
    check_size,
    count,
    headers_of,
    parse_body,
)
from ajet_sdk.gateway.answer import answer, refuse_unread
from ajet_sdk.types import Json

log = logging.getLogger("ajet.gateway")


@dataclass(frozen=True, slots=True)
class ResponsePart:
    """Some bytes of a response, with its status and headers."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes
    last: bool


class ProcessDoor:
    """The entry for clients in other threads of this process. `close` it when the gateway's loop is
    closed."""

    def __init__(self, access: Access, loop: asyncio.AbstractEventLoop) -> None:
        self.access, self.loop, self.calls = access, loop, LoopCalls.for_loop(loop)
        self.open = set[ProcessClient]()
        """Clients that wait for the last part of their response."""

    def ask(
        self,
        place: RequestTarget,
        content: bytes,
        tell: Callable[[ResponsePart | None], None],
        body: dict[str, object] | None = None,
        in_parts: bool = False,
    ) -> ProcessClient:
        """POST a request; `tell` gets the response's parts in the loop's thread, or None if it
        breaks off.

        The caller calls `take` for each part that it passes on; with `in_parts` it may stop before
        the last. `body` is the content's JSON if it is already parsed. Raises RuntimeError if the
        loop is closed.
        """
        client = ProcessClient(self, place, content, tell, body, in_parts)
        self.open.add(client)
        self.calls.call(client.start)  # in an empty context, outside of any episode
        return client

    def close(self) -> None:
        """Break off requests that the loop, which may have stopped meanwhile, did not start."""
        for client in list(self.open):
            client.break_off()


class ProcessClient:
    """A request of a client of this process."""

    gone: asyncio.Future[None]

    def __init__(
        self,
        door: ProcessDoor,
        place: RequestTarget,
        content: bytes,
        tell: Callable[[ResponsePart | None], None],
        body: Json | None,
        in_parts: bool,
    ) -> None:
        self.in_parts = in_parts
        self._door = door
        self._place = place
        self._content = content
        self._body = body
        self._tell = tell
        self._over = False
        self._task: asyncio.Task[None] | None = None
        self._sent = self._taken = 0
        """Parts sent, and those that the caller has read."""
        self._waiting: asyncio.Future[None] | None = None
        self._confirm: Callable[[bool], None] | None = None
        """To be told whether the caller read the last part."""

    # Called by the client, from any thread

    def take(self) -> None:
        """Note that the caller has read the next part."""
        self._taken += 1
        if self._over and self._confirm is not None and not self.has_unread():
            self._confirm(True)
        if self._waiting is not None and not self.has_unread():
            self._call(self._wake)

    def leave(self) -> None:
        """Note that the caller leaves; no effect after the whole response."""
        if not self._over or self.has_unread():
            self._call(self._mark_gone)  # runs after `start`

    def _call(self, function: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the gateway's loop is closed
            self._door.calls.call(function)

    # In the gateway's loop

    def start(self) -> None:
        self.gone = self._door.loop.create_future()
        self._task = self._door.loop.create_task(self._run())

    async def drain(self) -> None:
        while self.has_unread() and not self.gone.done():
            self._waiting = self._door.loop.create_future()
            if self.has_unread():  # not read meanwhile
                await asyncio.wait((self._waiting, self.gone), return_when=asyncio.FIRST_COMPLETED)
            self._waiting = None

    def has_unread(self) -> bool:
        return self._taken < self._sent

    def break_off(self) -> None:
        """End an incomplete response; no effect after the whole response."""
        self._door.open.discard(self)
        if not self._over:
            self._over = True
            self._tell(None)

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    def _mark_gone(self) -> None:
        if not self.gone.done():
            self.gone.set_result(None)
        if self._confirm is not None:
            confirm = self._confirm
            self._confirm = None
            confirm(not self.has_unread())

    async def _run(self) -> None:
        place = self._place
        try:
            grant = self._door.access.grant(place)
            try:
                check_size(len(self._content))
                if self._body is None:
                    body = parse_body(self._content)
                else:
                    body = self._body
                    check_body(body, len(self._content))
            except HTTPError as error:
                raise refuse_unread(grant.episode, grant.request(place, {}, self), error) from error
            request = grant.request(place, body, self)
            if place.endpoint.counter is not None:
                counted = json_bytes(await count(grant.episode, request, place.endpoint.counter))
                self._send(200, headers_of(200, len(counted)), counted, True)
                return
            async with await answer(grant.episode, request) as reply:
                head = reply.headers
                async for chunk, last in reply.chunks:
                    if last:
                        self._confirm = reply.call.confirm
                    self._send(200, head, chunk, last)
        except HTTPError as error:
            content = json_bytes(error.body_in(place.speaks))
            self._send(error.status, headers_of(error.status, len(content)), content, True)
        except ClientGone:
            pass  # the call is recorded
        except TraceError as lost:  # the writer raises it again at its next record
            log.debug("Could not record a call: %s", lost)
        finally:
            self.break_off()

    def _send(
        self, status: int, headers: list[tuple[bytes, bytes]], body: bytes, last: bool
    ) -> None:
        if not self._over:
            self._over = last
            self._sent += 1
            self._tell(ResponsePart(status, headers, body, last))
