"""The gateway of this process, asked directly, with requests and responses of httpx's API.

None of a client's own work is done for such a request (authentication, redirects, cookies, a pool of connections).
"""

from __future__ import annotations

import asyncio
import queue
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

from ajet_sdk.direct import Exchange, Part
from ajet_sdk.intercept import Reroute
from ajet_sdk.letterbox import Letterbox

__all__ = ["asking"]

Ask = Callable[[Reroute, Any, bool], Any]


def asking(module: Any) -> tuple[Ask, Ask]:
    """`ask(plan, request, stream)` for the API of httpx in `module`, and the same as a coroutine.

    The response is to the agent's own `request`, whose body and time limit count; it is read unless `stream`. They
    raise the module's ReadTimeout, ConnectError (the gateway has stopped) and RemoteProtocolError (it broke off).
    """
    stream_of, astream_of = _streams(module)

    def ask(plan: Reroute, request: Any, stream: bool) -> Any:
        began, told = time.perf_counter(), queue.SimpleQueue[Part | None]()
        exchange = _begin(module, plan, request, told.put, stream)

        def following() -> Part:
            try:
                part = told.get(timeout=_patience(request))
            except queue.Empty:
                raise _too_late(module, request) from None
            return _taken(module, request, part, exchange)

        try:
            first = following()
            if first.last and not stream:
                return _response(module, request, first, began, content=first.body)
            response = _response(module, request, first, began, stream=stream_of(first, following, exchange))
            if not stream:
                response.read()
        except BaseException:
            exchange.leave()
            raise
        return response

    async def aask(plan: Reroute, request: Any, stream: bool) -> Any:
        began, told = time.perf_counter(), _Inbox()
        exchange = _begin(module, plan, request, told.put, stream)

        async def following() -> Part:
            try:
                part = await told.get(_patience(request))
            except TimeoutError:
                raise _too_late(module, request) from None
            return _taken(module, request, part, exchange)

        try:
            first = await following()
            if first.last and not stream:
                return _response(module, request, first, began, content=first.body)
            response = _response(module, request, first, began, stream=astream_of(first, following, exchange))
            if not stream:
                await response.aread()
        except BaseException:
            exchange.leave()
            raise
        return response

    return ask, aask


class _Inbox:
    """Parts put by another thread, for a task of this loop to await: a queue without a task for each wait."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._parts: deque[Part | None] = deque()
        self._waited: asyncio.Future[None] | None = None

    def put(self, part: Part | None) -> None:
        with suppress(RuntimeError):  # the agent's loop is closed: nobody waits
            Letterbox.of(self._loop).post(self._arrive, part)

    def _arrive(self, part: Part | None) -> None:
        self._parts.append(part)
        self._wake()

    def _wake(self) -> None:
        if self._waited is not None and not self._waited.done():
            self._waited.set_result(None)

    async def get(self, patience: float | None) -> Part | None:
        """The next part. Raises TimeoutError after so many seconds without one."""
        if not self._parts:
            waited = self._waited = self._loop.create_future()
            timer = None if patience is None else self._loop.call_later(patience, self._wake)
            try:
                await waited
            finally:
                if timer is not None:
                    timer.cancel()
        if not self._parts:
            raise TimeoutError
        return self._parts.popleft()


def _streams(module: Any) -> tuple[Any, Any]:
    class Stream(module.SyncByteStream):  # type: ignore[misc]
        def __init__(self, first: Part, following: Callable[[], Part], exchange: Exchange) -> None:
            self.first, self.following, self.exchange = first, following, exchange

        def __iter__(self) -> Iterator[bytes]:
            part = self.first
            yield part.body
            while not part.last:
                part = self.following()
                yield part.body

        def close(self) -> None:
            self.exchange.leave()

    class AsyncStream(module.AsyncByteStream):  # type: ignore[misc]
        def __init__(self, first: Part, following: Callable[[], Awaitable[Part]], exchange: Exchange) -> None:
            self.first, self.following, self.exchange = first, following, exchange

        async def __aiter__(self) -> AsyncIterator[bytes]:
            part = self.first
            yield part.body
            while not part.last:
                part = await self.following()
                yield part.body

        async def aclose(self) -> None:
            self.exchange.leave()

    return Stream, AsyncStream


def _begin(module: Any, plan: Reroute, request: Any, tell: Callable[[Part | None], None], in_parts: bool) -> Exchange:
    assert plan.direct is not None
    try:
        return plan.direct.ask(plan.url, plan.headers(request.headers), request.content, tell, plan.read, in_parts)
    except RuntimeError as error:
        raise module.ConnectError("the gateway has stopped", request=request) from error


def _patience(request: Any) -> float | None:
    patience: float | None = request.extensions.get("timeout", {}).get("read")
    return patience


def _too_late(module: Any, request: Any) -> Exception:
    late: Exception = module.ReadTimeout(f"no answer within {_patience(request):g} s", request=request)
    return late


def _taken(module: Any, request: Any, part: Part | None, exchange: Exchange) -> Part:
    if part is None:
        raise module.RemoteProtocolError("the gateway broke off", request=request)
    exchange.take()
    return part


def _response(module: Any, request: Any, first: Part, began: float, **body: Any) -> Any:
    response = module.Response(first.status, headers=first.headers, request=request, **body)
    response.elapsed = timedelta(seconds=time.perf_counter() - began)
    return response
