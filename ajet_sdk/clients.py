"""The four HTTP libraries: how a request is seen, sent elsewhere, or watched, in each.

A rerouted request goes through a client of ours, for the agent's own may have a proxy, a mock or a base URL; its
timeout is kept. A watched one goes through the agent's client, and its response is read along with the agent, never
ahead of it.
"""

from __future__ import annotations

import asyncio
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

from ajet_sdk.direct import EXTENSION, transports
from ajet_sdk.endpoint import json_bytes, without_certificates
from ajet_sdk.intercept import Reroute, Watch, active_episode, begin, quietly, route_of
from ajet_sdk.model import ActiveEpisode
from ajet_sdk.patches import Patches

__all__ = ["LIBRARIES", "Imports"]

Fallback = Callable[[], ActiveEpisode | None]


class Imports:
    """Patches each library when it is imported, be it already or later."""

    def __init__(self, patches: Patches, fallback: Fallback) -> None:
        self._patches = patches
        self._fallback = fallback

    def patch_if_imported(self, name: str) -> None:
        module = sys.modules.get(name)
        if module is not None and getattr(module.__spec__, "_initializing", False) is False:
            self._patch(module)

    def watch(self) -> None:
        """Patch what is imported from now on."""
        finder = _Finder(self._patch)
        sys.meta_path.insert(0, finder)
        self._patches.at_end(lambda: sys.meta_path.remove(finder))

    def _patch(self, module: ModuleType) -> None:
        LIBRARIES[module.__name__](module, self._patches, self._fallback)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, patch: Callable[[ModuleType], None]) -> None:
        self._patch = patch

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in LIBRARIES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._patch)
        return spec


class _Loader(importlib.abc.Loader):
    """The library's own loader, and the patch after it."""

    def __init__(self, loader: Any, patch: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._patch = patch

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._patch(module)


# httpx and httpx2: one API under two names


class _Httpx:
    def __init__(self, module: ModuleType, fallback: Fallback) -> None:
        self.module: Any = module
        self.fallback = fallback
        self.send = module.Client.__dict__["send"]
        self.asend = module.AsyncClient.__dict__["send"]
        self._sync: dict[int, Any] = {}
        self._async: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Any] = weakref.WeakKeyDictionary()
        self.tee, self.atee = _httpx_streams(self.module)
        self.transport, self.atransport = transports(self.module)

    def plan(self, request: Any, body: Callable[[], Any]) -> Reroute | Watch | None:
        active = active_episode(self.fallback)
        if active is None or request.method != "POST":
            return None
        return begin(active, request.method, str(request.url), request.headers, body)

    def rerouted(self, request: Any, reroute: Reroute) -> Any:
        kept = {key: value for key, value in request.extensions.items() if key == "timeout"}
        return self.module.Request(
            "POST",
            reroute.url,
            headers=reroute.headers(request.headers),
            content=request.content,
            extensions=kept if reroute.direct is None else {**kept, EXTENSION: reroute.direct},
        )

    def client(self) -> Any:
        # By process: a pool of connections must not be shared across a fork.
        if os.getpid() not in self._sync:
            self._sync[os.getpid()] = self.module.Client(transport=self.transport(**self._arguments()), timeout=None)
        return self._sync[os.getpid()]

    def aclient(self) -> Any:
        loop = asyncio.get_running_loop()
        if loop not in self._async:
            transport = self.atransport(**self._arguments())
            self._async[loop] = self.module.AsyncClient(transport=transport, timeout=None)
        return self._async[loop]

    def _arguments(self) -> dict[str, Any]:
        limits = self.module.Limits(max_connections=None, max_keepalive_connections=256)
        return {"trust_env": False, "verify": without_certificates(), "limits": limits}

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


def _httpx_streams(module: Any) -> tuple[Any, Any]:
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


def _patch_httpx(module: ModuleType, patches: Patches, fallback: Fallback) -> None:
    hook = _Httpx(module, fallback)

    def send(self: Any, request: Any, *, stream: bool = False, **kwargs: Any) -> Any:
        plan = hook.plan(request, request.read)
        if isinstance(plan, Reroute):
            return hook.send(hook.client(), hook.rerouted(request, plan), stream=stream)
        try:
            response = hook.send(self, request, stream=stream, **kwargs)
        except BaseException as error:
            if plan is not None:
                _failed(plan, error)
            raise
        return response if plan is None else hook.watched(plan, response, stream, hook.tee)

    async def asend(self: Any, request: Any, *, stream: bool = False, **kwargs: Any) -> Any:
        ours = active_episode(fallback) is not None and route_of(request.method, str(request.url)) is not None
        body = await request.aread() if ours else b""
        plan = hook.plan(request, lambda: body)
        if isinstance(plan, Reroute):
            return await hook.asend(hook.aclient(), hook.rerouted(request, plan), stream=stream)
        try:
            response = await hook.asend(self, request, stream=stream, **kwargs)
        except BaseException as error:
            if plan is not None:
                _failed(plan, error)
            raise
        return response if plan is None else hook.watched(plan, response, stream, hook.atee)

    patches.replace(module.Client, "send", send)
    patches.replace(module.AsyncClient, "send", asend)
    patches.at_end(hook.close)


def _failed(watch: Watch, error: BaseException) -> None:
    quietly(lambda: watch.failed(error))


# requests


class _RawTee:
    """A urllib3 response that is read along."""

    def __init__(self, inner: Any, feed: Callable[[bytes], None], done: Callable[[bool], None]) -> None:
        self._inner, self._feed, self._done = inner, feed, done

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __iter__(self) -> Iterator[bytes]:
        return self.stream()

    def stream(self, *args: Any, **kwargs: Any) -> Iterator[bytes]:
        for chunk in self._inner.stream(*args, **kwargs):
            self._feed(chunk)
            yield chunk
        self._done(True)

    def read(self, *args: Any, **kwargs: Any) -> bytes:
        data: bytes = self._inner.read(*args, **kwargs)
        self._feed(data)
        if not data:
            self._done(True)
        return data

    def close(self) -> None:
        self._done(False)
        self._inner.close()

    def release_conn(self) -> None:
        self._done(False)
        self._inner.release_conn()


def _patch_requests(module: Any, patches: Patches, fallback: Fallback) -> None:
    original = module.Session.__dict__["send"]
    own: dict[int, Any] = {}

    def session() -> Any:
        if os.getpid() not in own:
            made = own[os.getpid()] = module.Session()
            made.trust_env = False
            made.mount("http://", module.adapters.HTTPAdapter(pool_connections=4, pool_maxsize=256))
        return own[os.getpid()]

    def send(self: Any, request: Any, **kwargs: Any) -> Any:
        active = active_episode(fallback)
        plan = (
            None
            if active is None or request.method != "POST"
            else begin(active, request.method, str(request.url), request.headers, lambda: request.body)
        )
        if isinstance(plan, Reroute):
            copy = request.copy()
            copy.url = plan.url
            copy.headers = module.structures.CaseInsensitiveDict(plan.headers(request.headers))
            copy.headers["content-length"] = str(len(request.body))
            kept = {key: kwargs[key] for key in ("stream", "timeout") if key in kwargs}
            return original(session(), copy, **kept, allow_redirects=False, proxies={})
        try:
            response = original(self, request, **kwargs)
        except BaseException as error:
            if plan is not None:
                _failed(plan, error)
            raise
        return response if plan is None else _watched_requests(plan, response, bool(kwargs.get("stream", self.stream)))

    patches.replace(module.Session, "send", send)

    def close() -> None:
        if os.getpid() in own:
            own[os.getpid()].close()

    patches.at_end(close)


def _watched_requests(watch: Watch, response: Any, stream: bool) -> Any:
    kind = response.headers.get("content-type", "")

    def done(whole: bool) -> None:
        quietly(lambda: watch.done(response.status_code, kind, whole=whole))

    if stream:
        response.raw = _RawTee(response.raw, watch.feed, done)
    else:
        watch.feed(response.content)
        done(True)
    return response


# aiohttp


class _ContentTee:
    """An aiohttp stream reader that is read along."""

    def __init__(self, inner: Any, feed: Callable[[bytes], None], done: Callable[[bool], None]) -> None:
        self._inner, self._feed, self._done = inner, feed, done

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _seen(self, data: bytes) -> bytes:
        self._feed(data)
        if self._inner.at_eof():
            self._done(True)
        return data

    async def read(self, n: int = -1) -> bytes:
        return self._seen(await self._inner.read(n))

    async def readany(self) -> bytes:
        return self._seen(await self._inner.readany())

    async def readline(self, **kwargs: Any) -> bytes:
        return self._seen(await self._inner.readline(**kwargs))

    async def readuntil(self, *args: Any, **kwargs: Any) -> bytes:
        return self._seen(await self._inner.readuntil(*args, **kwargs))

    async def readexactly(self, n: int) -> bytes:
        return self._seen(await self._inner.readexactly(n))

    async def readchunk(self) -> tuple[bytes, bool]:
        data, end = await self._inner.readchunk()
        return self._seen(data), end

    def read_nowait(self, n: int = -1) -> bytes:
        return self._seen(self._inner.read_nowait(n))

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while line := await self.readline():
            yield line

    async def iter_chunked(self, n: int) -> AsyncIterator[bytes]:
        while data := await self.read(n):
            yield data

    async def iter_any(self) -> AsyncIterator[bytes]:
        while data := await self.readany():
            yield data

    async def iter_chunks(self) -> AsyncIterator[tuple[bytes, bool]]:
        while (chunk := await self.readchunk()) != (b"", False):
            yield chunk


def _patch_aiohttp(module: Any, patches: Patches, fallback: Fallback) -> None:
    original = module.ClientSession.__dict__["_request"]

    async def request(self: Any, method: str, str_or_url: Any, **kwargs: Any) -> Any:
        active = active_episode(fallback)
        given = kwargs.get("json") if kwargs.get("json") is not None else kwargs.get("data")
        url, headers = str(self._build_url(str_or_url)), {**self.headers, **(kwargs.get("headers") or {})}
        plan = None if active is None else begin(active, method, url, headers, lambda: given)
        if isinstance(plan, Reroute):
            return await original(self, "POST", plan.url, **_rerouted_aiohttp(self, plan, headers, given, kwargs))
        try:
            response = await original(self, method, str_or_url, **kwargs)
        except BaseException as error:
            if plan is not None:
                _failed(plan, error)
            raise
        if plan is not None:
            _watched_aiohttp(plan, response)
        return response

    patches.replace(module.ClientSession, "_request", request)


def _rerouted_aiohttp(
    session: Any, reroute: Reroute, headers: Mapping[str, str], body: Any, kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The agent's own session is used, for it belongs to the loop; its BasicAuth allows no Authorization beside it."""
    ours = reroute.headers({key: value for key, value in headers.items() if key.lower() != "content-type"})
    if getattr(session, "_default_auth", None) is not None:
        ours["x-api-key"] = ours.pop("authorization").removeprefix("Bearer ")
    kept = {key: kwargs[key] for key in ("timeout", "raise_for_status", "read_bufsize") if key in kwargs}
    data = body if isinstance(body, (bytes, bytearray, str)) else json_bytes(body)
    return {**kept, "data": data, "headers": {**ours, "content-type": "application/json"}, "allow_redirects": False}


def _watched_aiohttp(watch: Watch, response: Any) -> None:
    status, kind = response.status, response.headers.get("content-type", "")

    def done(whole: bool) -> None:
        quietly(lambda: watch.done(status, kind, whole=whole))

    if response.content.at_eof():
        watch.feed(response._body or b"")
        done(True)
        return
    response.content = _ContentTee(response.content, watch.feed, done)
    weakref.finalize(response, done, False)  # closed before its end


LIBRARIES: dict[str, Callable[[ModuleType, Patches, Fallback], None]] = {
    "httpx": _patch_httpx,
    "httpx2": _patch_httpx,
    "requests": _patch_requests,
    "aiohttp": _patch_aiohttp,
}
