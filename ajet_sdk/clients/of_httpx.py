"""httpx and httpx2: one API under two names."""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from types import ModuleType
from typing import Any

from ajet_sdk.clients.direct_httpx import asking
from ajet_sdk.endpoint import without_certificates
from ajet_sdk.intercept import Fallback, Reroute, Watch, active_episode, begin, quietly, route_of
from ajet_sdk.patches import Patches

__all__ = ["patch_httpx"]


class _Httpx:
    """The module's own `send`s, what stands in for them, and our clients for what goes over a socket."""

    def __init__(self, module: ModuleType) -> None:
        self.module: Any = module
        self.send = module.Client.__dict__["send"]
        self.asend = module.AsyncClient.__dict__["send"]
        self._sync: dict[int, Any] = {}
        self._async: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Any] = weakref.WeakKeyDictionary()
        self.tee, self.atee = _streams(self.module)
        self.ask, self.aask = asking(self.module)

    def reroute(self, request: Any, plan: Reroute, stream: bool) -> Any:
        if plan.direct is None:
            return self.send(self._client(), self._elsewhere(request, plan), stream=stream)
        return self.ask(plan, request, stream)

    async def areroute(self, request: Any, plan: Reroute, stream: bool) -> Any:
        if plan.direct is None:
            return await self.asend(self._aclient(), self._elsewhere(request, plan), stream=stream)
        return await self.aask(plan, request, stream)

    def _elsewhere(self, request: Any, plan: Reroute) -> Any:
        kept = {key: value for key, value in request.extensions.items() if key == "timeout"}
        headers = plan.headers(request.headers)
        return self.module.Request("POST", plan.url, headers=headers, content=request.content, extensions=kept)

    def _client(self) -> Any:
        # By process: a pool of connections must not be shared across a fork.
        if os.getpid() not in self._sync:
            self._sync[os.getpid()] = self.module.Client(**self._arguments())
        return self._sync[os.getpid()]

    def _aclient(self) -> Any:
        loop = asyncio.get_running_loop()
        if loop not in self._async:
            self._async[loop] = self.module.AsyncClient(**self._arguments())
        return self._async[loop]

    def _arguments(self) -> dict[str, Any]:
        limits = self.module.Limits(max_connections=None, max_keepalive_connections=256)
        return {"trust_env": False, "verify": without_certificates(), "limits": limits, "timeout": None}

    def decoder(self, response: Any) -> Callable[[bytes], bytes]:
        encoding = response.headers.get("content-encoding")

        def decode(raw: bytes) -> bytes:
            headers = {"content-encoding": encoding} if encoding else {}
            decoded: bytes = self.module.Response(200, headers=headers, content=raw).content
            return decoded

        return decode

    def watched(self, watch: Watch, response: Any, stream: bool, tee: Any) -> Any:
        kind = response.headers.get("content-type", "")
        if not stream:
            watch.feed(response.content)
            quietly(lambda: watch.done(response.status_code, kind, whole=True))
            return response
        decode = self.decoder(response)
        response.stream = tee(
            response.stream,
            watch.feed,
            lambda whole: quietly(lambda: watch.done(response.status_code, kind, whole=whole, decode=decode)),
        )
        return response

    def close(self) -> None:
        for pid, client in self._sync.items():
            if pid == os.getpid():
                client.close()
        for loop, client in list(self._async.items()):
            if loop.is_running():
                asyncio.run_coroutine_threadsafe(client.aclose(), loop)


def _streams(module: Any) -> tuple[Any, Any]:
    class Tee(module.SyncByteStream):  # type: ignore[misc]
        def __init__(self, inner: Any, feed: Callable[[bytes], None], done: Callable[[bool], None]) -> None:
            self.inner, self.feed, self.done = inner, feed, done

        def __iter__(self) -> Iterator[bytes]:
            for chunk in self.inner:
                self.feed(chunk)
                yield chunk
            self.done(True)

        def close(self) -> None:
            self.done(False)
            self.inner.close()

    class AsyncTee(module.AsyncByteStream):  # type: ignore[misc]
        def __init__(self, inner: Any, feed: Callable[[bytes], None], done: Callable[[bool], None]) -> None:
            self.inner, self.feed, self.done = inner, feed, done

        async def __aiter__(self) -> AsyncIterator[bytes]:
            async for chunk in self.inner:
                self.feed(chunk)
                yield chunk
            self.done(True)

        async def aclose(self) -> None:
            self.done(False)
            await self.inner.aclose()

    return Tee, AsyncTee


def patch_httpx(module: ModuleType, patches: Patches, fallback: Fallback) -> None:
    hook = _Httpx(module)

    def send(self: Any, request: Any, *, stream: bool = False, **kwargs: Any) -> Any:
        active = active_episode(fallback)
        plan = None
        if active is not None and request.method == "POST":
            url = str(request.url)
            body = request.read() if route_of("POST", url) is not None else b""
            plan = begin(active, "POST", url, request.headers, lambda: body, direct=True)
        if isinstance(plan, Reroute):
            return hook.reroute(request, plan, stream)
        try:
            response = hook.send(self, request, stream=stream, **kwargs)
        except BaseException as error:
            if plan is not None:
                plan.failed(error)
            raise
        return response if plan is None else hook.watched(plan, response, stream, hook.tee)

    async def asend(self: Any, request: Any, *, stream: bool = False, **kwargs: Any) -> Any:
        active = active_episode(fallback)
        plan = None
        if active is not None and request.method == "POST":
            url = str(request.url)
            body = await request.aread() if route_of("POST", url) is not None else b""
            plan = begin(active, "POST", url, request.headers, lambda: body, direct=True)
        if isinstance(plan, Reroute):
            return await hook.areroute(request, plan, stream)
        try:
            response = await hook.asend(self, request, stream=stream, **kwargs)
        except BaseException as error:
            if plan is not None:
                plan.failed(error)
            raise
        return response if plan is None else hook.watched(plan, response, stream, hook.atee)

    patches.replace(module.Client, "send", send)
    patches.replace(module.AsyncClient, "send", asend)
    patches.at_end(hook.close)
