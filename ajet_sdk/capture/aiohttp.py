"""Hook of aiohttp."""

from __future__ import annotations

import functools
import weakref
from collections.abc import AsyncIterator, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ajet_sdk.capture.patches import Patches
from ajet_sdk.capture.routing import (
    Done,
    Fallback,
    Feed,
    PassThrough,
    Reroute,
    active_episode,
    decide,
    sending,
)
from ajet_sdk.dialects.json import json_bytes

if TYPE_CHECKING:
    import aiohttp
    from aiohttp.typedefs import StrOrURL


class _ContentTee:
    """An aiohttp stream reader that passes the bytes it reads to `feed`."""

    def __init__(self, inner: aiohttp.StreamReader, feed: Feed, done: Done) -> None:
        self._inner = inner
        self._feed = feed
        self._done = done

    def __getattr__(self, name: str) -> Any:
        attribute: Any = getattr(self._inner, name)
        if name not in ("read", "readany", "readline", "readuntil", "readexactly"):
            return attribute

        async def read(*args: object, **kwargs: object) -> bytes:
            return self._seen(await attribute(*args, **kwargs))

        return read

    def _seen(self, data: bytes) -> bytes:
        self._feed(data)
        if self._inner.at_eof():
            self._done(True)
        return data

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


def patch_aiohttp(module: ModuleType, patches: Patches, fallback: Fallback) -> None:
    original = module.ClientSession.__dict__["_request"]

    @functools.wraps(original)
    async def request(
        self: aiohttp.ClientSession, method: str, str_or_url: StrOrURL, **kwargs: Any
    ) -> aiohttp.ClientResponse:
        active = active_episode(fallback)
        if active is None:
            return await original(self, method, str_or_url, **kwargs)
        if kwargs.get("json") is not None:
            payload = kwargs.get("json")
        else:
            payload = kwargs.get("data")
        url = str(self._build_url(str_or_url))
        headers = self._prepare_headers(kwargs.get("headers"))
        plan = decide(active, method, url, headers, lambda: payload)
        if isinstance(plan, Reroute):
            rerouted = _arguments_to_gateway(self, plan, headers, payload, kwargs)
            with sending(active, plan):
                return await original(self, "POST", plan.url, **rerouted)
        with sending(active, plan):
            response = await original(self, method, str_or_url, **kwargs)
        if isinstance(plan, PassThrough):
            _observe_aiohttp(plan, response)
        return response

    patches.replace(module.ClientSession, "_request", request)


def _arguments_to_gateway(
    session: object,
    reroute: Reroute,
    headers: Mapping[str, str],
    body: object,
    kwargs: Mapping[str, object],
) -> dict[str, object]:
    """Arguments for the agent's session, which belongs to the loop; BasicAuth excludes an
    Authorization header."""
    ours = reroute.headers(
        {key: value for key, value in headers.items() if key.lower() != "content-type"}
    )
    if getattr(session, "_default_auth", None) is not None:
        ours["x-api-key"] = ours.pop("authorization").removeprefix("Bearer ")
    options = {
        key: kwargs[key] for key in ("timeout", "raise_for_status", "read_bufsize") if key in kwargs
    }
    if isinstance(body, (bytes, bytearray, str)):
        data = body
    else:
        data = json_bytes(body)
    return {
        **options,
        "data": data,
        "headers": {**ours, "content-type": "application/json"},
        "allow_redirects": False,
    }


def _observe_aiohttp(passing: PassThrough, response: aiohttp.ClientResponse) -> None:
    done = passing.ending(response.status, response.headers.get("content-type", ""))
    if response.content.at_eof():
        passing.feed(response._body or b"")
        done(True)
        return
    reading: Any = _ContentTee(response.content, passing.feed, done)
    response.content = reading
    weakref.finalize(response, done, False)  # if it is closed early
