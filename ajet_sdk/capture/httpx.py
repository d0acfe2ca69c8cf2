"""Hooks of httpx and httpx2, which have the same API.

A request to the gateway of this process needs no socket and skips the client's authentication,
redirects, cookies and connection pool.
"""

from __future__ import annotations

import asyncio
import functools
import queue
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ajet_sdk.capture.patches import OwnClient, Patches
from ajet_sdk.capture.routing import (
    Discarded,
    Done,
    Fallback,
    Feed,
    PassThrough,
    Reroute,
    active_episode,
    atee,
    decide,
    reads_body,
    sending,
    tee,
)
from ajet_sdk.engines.http import is_loopback, without_certificates
from ajet_sdk.engines.loop_calls import LoopCalls
from ajet_sdk.gateway.process_door import ProcessClient, ResponsePart

if TYPE_CHECKING:
    import httpx


class _Inbox:
    """A queue from another thread to a task of this loop; waiting for a part creates no task."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._parts: deque[ResponsePart | None] = deque()
        self._waited: asyncio.Future[None] | None = None

    def put(self, part: ResponsePart | None) -> None:
        with suppress(RuntimeError):  # the agent's loop is closed
            LoopCalls.for_loop(self._loop).call(self._arrive, part)

    def _arrive(self, part: ResponsePart | None) -> None:
        self._parts.append(part)
        self._wake()

    def _wake(self) -> None:
        if self._waited is not None and not self._waited.done():
            self._waited.set_result(None)

    async def get(self, patience: float | None) -> ResponsePart | None:
        """The next part. Raises TimeoutError after `patience` seconds."""
        if not self._parts:
            waited = self._waited = self._loop.create_future()
            if patience is None:
                timer = None
            else:
                timer = self._loop.call_later(patience, self._wake)
            try:
                await waited
            finally:
                if timer is not None:
                    timer.cancel()
        if not self._parts:
            raise TimeoutError
        return self._parts.popleft()


class _Httpx:
    """The original `send` methods, requests to the gateway of this process, and clients for those
    over a socket."""

    def __init__(self, module: ModuleType) -> None:
        self.module = module
        self.request: type[httpx.Request] = module.Request
        self.response: type[httpx.Response] = module.Response
        self.send: Callable[..., httpx.Response] = module.Client.__dict__["send"]
        self.asend: Callable[..., Awaitable[httpx.Response]] = module.AsyncClient.__dict__["send"]
        self._own: dict[bool, OwnClient[httpx.Client]] = {
            is_here: OwnClient(partial(self._client, is_here)) for is_here in (True, False)
        }
        """Clients for gateways of this machine, and of others."""
        self._async: weakref.WeakKeyDictionary[
            asyncio.AbstractEventLoop, dict[bool, httpx.AsyncClient]
        ] = weakref.WeakKeyDictionary()

        class Stream(module.SyncByteStream):  # type: ignore[misc,name-defined]
            def __init__(self, chunks: Iterator[bytes], close: Callable[[], None]) -> None:
                self.chunks = chunks
                self.close = close

            def __iter__(self) -> Iterator[bytes]:
                return self.chunks

        class AsyncStream(module.AsyncByteStream):  # type: ignore[misc,name-defined]
            def __init__(
                self, chunks: AsyncIterator[bytes], close: Callable[[], Awaitable[None]]
            ) -> None:
                self.chunks = chunks
                self.aclose = close

            def __aiter__(self) -> AsyncIterator[bytes]:
                return self.chunks

        self.stream: Callable[..., httpx.SyncByteStream] = Stream
        self.astream: Callable[..., httpx.AsyncByteStream] = AsyncStream

    def to_gateway(self, request: httpx.Request, plan: Reroute) -> httpx.Request:
        extensions = {key: value for key, value in request.extensions.items() if key == "timeout"}
        headers = plan.headers(request.headers)
        return self.request(
            "POST", plan.url, headers=headers, content=request.content, extensions=extensions
        )

    def ask(self, plan: Reroute, request: httpx.Request, stream: bool) -> httpx.Response:
        """Send a request to the gateway of this process; its body and time limit count.

        The response is read unless `stream`. Raises the module's ReadTimeout, ConnectError (the
        gateway has stopped) and RemoteProtocolError (it closed the connection early).
        """
        began = time.perf_counter()
        parts = queue.SimpleQueue[ResponsePart | None]()
        request.read()
        client = self._send_to_door(plan, request, parts.put, stream)
        patience = request.extensions.get("timeout", {}).get("read")

        def next_part() -> ResponsePart:
            try:
                part = parts.get(timeout=patience)
            except queue.Empty:
                raise self.module.ReadTimeout(
                    f"no answer within {patience:g} s", request=request
                ) from None
            return self._accept(request, part, client)

        def bodies(part: ResponsePart) -> Iterator[bytes]:
            yield part.body
            while not part.last:
                part = next_part()
                yield part.body

        try:
            first = next_part()
            if first.last and not stream:
                return self._response(request, first, began, content=first.body)
            response = self._response(
                request, first, began, stream=self.stream(bodies(first), client.leave)
            )
            if not stream:
                response.read()
        except BaseException:
            client.leave()
            raise
        return response

    async def aask(self, plan: Reroute, request: httpx.Request, stream: bool) -> httpx.Response:
        """As `ask`."""
        began = time.perf_counter()
        parts = _Inbox()
        client = self._send_to_door(plan, request, parts.put, stream)
        patience = request.extensions.get("timeout", {}).get("read")

        async def next_part() -> ResponsePart:
            try:
                part = await parts.get(patience)
            except TimeoutError:
                raise self.module.ReadTimeout(
                    f"no answer within {patience:g} s", request=request
                ) from None
            return self._accept(request, part, client)

        async def bodies(part: ResponsePart) -> AsyncIterator[bytes]:
            yield part.body
            while not part.last:
                part = await next_part()
                yield part.body

        async def leave() -> None:
            client.leave()

        try:
            first = await next_part()
            if first.last and not stream:
                return self._response(request, first, began, content=first.body)
            response = self._response(
                request, first, began, stream=self.astream(bodies(first), leave)
            )
            if not stream:
                await response.aread()
        except BaseException:
            client.leave()
            raise
        return response

    def _send_to_door(
        self,
        plan: Reroute,
        request: httpx.Request,
        put: Callable[[ResponsePart | None], None],
        in_parts: bool,
    ) -> ProcessClient:
        assert plan.door is not None
        try:
            return plan.door.ask(plan.place, request.content, put, plan.body, in_parts)
        except RuntimeError as error:
            raise self.module.ConnectError("the gateway has stopped", request=request) from error

    def _accept(
        self, request: httpx.Request, part: ResponsePart | None, client: ProcessClient
    ) -> ResponsePart:
        if part is None:
            raise self.module.RemoteProtocolError(
                "the gateway closed the connection early", request=request
            )
        client.take()
        return part

    def _response(
        self, request: httpx.Request, first: ResponsePart, began: float, **body: object
    ) -> httpx.Response:
        response: httpx.Response = self.module.Response(
            first.status, headers=first.headers, request=request, **body
        )
        response.elapsed = timedelta(seconds=time.perf_counter() - began)
        return response

    def own(self, plan: Reroute) -> httpx.Client:
        return self._own[_is_here(plan)].get()

    def own_async(self, plan: Reroute) -> httpx.AsyncClient:
        of_loop = self._async.setdefault(asyncio.get_running_loop(), {})
        is_here = _is_here(plan)
        if is_here not in of_loop:
            of_loop[is_here] = self.module.AsyncClient(**self._arguments(is_here))
        return of_loop[is_here]

    def _client(self, is_here: bool) -> httpx.Client:
        client: httpx.Client = self.module.Client(**self._arguments(is_here))
        return client

    def _arguments(self, is_here: bool) -> dict[str, object]:
        limits = self.module.Limits(max_connections=None, max_keepalive_connections=256)
        direct: dict[str, object] = {"trust_env": False, "verify": without_certificates()}
        return {**(direct if is_here else {}), "limits": limits, "timeout": None}

    def decoder(self, response: httpx.Response) -> Callable[[bytes], bytes]:
        encoding = response.headers.get("content-encoding")

        def decode(raw: bytes) -> bytes:
            headers = {"content-encoding": encoding} if encoding else {}
            return self.response(200, headers=headers, content=raw).content

        return decode

    def tee(self, inner: Any, feed: Feed, done: Done) -> httpx.SyncByteStream:
        def close() -> None:
            done(False)
            inner.close()

        return self.stream(tee(inner, feed, done), close)

    def atee(self, inner: Any, feed: Feed, done: Done) -> httpx.AsyncByteStream:
        async def aclose() -> None:
            done(False)
            await inner.aclose()

        return self.astream(atee(inner, feed, done), aclose)

    def observe(
        self, passing: PassThrough, response: httpx.Response, stream: bool, tee: Callable[..., Any]
    ) -> httpx.Response:
        kind = response.headers.get("content-type", "")
        if stream:
            done = passing.ending(response.status_code, kind, self.decoder(response))
            response.stream = tee(response.stream, passing.feed, done)
        else:
            passing.feed(response.content)
            passing.ending(response.status_code, kind)(True)
        return response

    def close(self) -> None:
        for own in self._own.values():
            own.close()
        for loop, clients in list(self._async.items()):
            for client in clients.values():
                if loop.is_running():
                    asyncio.run_coroutine_threadsafe(client.aclose(), loop)
        self._async.clear()


def _is_here(plan: Reroute) -> bool:
    """Whether a gateway is on this machine, so that it needs no proxy and no certificates."""
    return plan.gateway_url.startswith("http://") and is_loopback(plan.gateway_url)


def patch_httpx(module: ModuleType, patches: Patches, fallback: Fallback) -> None:
    hook = _Httpx(module)

    @functools.wraps(hook.send)
    def send(
        self: httpx.Client, request: httpx.Request, *, stream: bool = False, **kwargs: object
    ) -> httpx.Response:
        active = active_episode(fallback)
        if active is None:
            return hook.send(self, request, stream=stream, **kwargs)
        try:
            plan = decide(
                active,
                request.method,
                str(request.url),
                request.headers,
                request.read,
                in_process=True,
            )
        except Discarded:
            return hook.response(204, request=request)
        if isinstance(plan, Reroute):
            if plan.door is not None:
                return hook.ask(plan, request, stream)
            with sending(active, plan):
                return hook.send(hook.own(plan), hook.to_gateway(request, plan), stream=stream)
        with sending(active, plan):
            response = hook.send(self, request, stream=stream, **kwargs)
        if not isinstance(plan, PassThrough):
            return response
        return hook.observe(plan, response, stream, hook.tee)

    @functools.wraps(hook.asend)
    async def asend(
        self: httpx.AsyncClient, request: httpx.Request, *, stream: bool = False, **kwargs: object
    ) -> httpx.Response:
        active = active_episode(fallback)
        if active is None:
            return await hook.asend(self, request, stream=stream, **kwargs)
        url = str(request.url)
        if reads_body(request.method, url):
            body = await request.aread()
        else:
            body = b""
        try:
            plan = decide(
                active, request.method, url, request.headers, lambda: body, in_process=True
            )
        except Discarded:
            return hook.response(204, request=request)
        if isinstance(plan, Reroute):
            if plan.door is not None:
                return await hook.aask(plan, request, stream)
            rerouted = hook.to_gateway(request, plan)
            with sending(active, plan):
                return await hook.asend(hook.own_async(plan), rerouted, stream=stream)
        with sending(active, plan):
            response = await hook.asend(self, request, stream=stream, **kwargs)
        if not isinstance(plan, PassThrough):
            return response
        return hook.observe(plan, response, stream, hook.atee)

    patches.replace(module.Client, "send", send)
    patches.replace(module.AsyncClient, "send", asend)
    patches.at_end(hook.close)
