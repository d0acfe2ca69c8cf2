"""lm15, the transports of DSPy from 3.4 on: sockets and asyncio's streams, no HTTP library."""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import AsyncIterator, Iterator
from typing import Any

from ajet_sdk.capture.patches import Patches
from ajet_sdk.capture.routing import Fallback, PassThrough, Reroute, active_episode, decide, in_client, never_raise

__all__ = ["patch_lm15"]


def patch_lm15(module: Any, patches: Patches, fallback: Fallback) -> None:
    transport, atransport = module.StdlibTransport, module.StdlibAsyncTransport
    original, aoriginal = transport.__dict__["stream"], atransport.__dict__["_do_stream"]
    own: dict[int, Any] = {}
    aown: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Any] = weakref.WeakKeyDictionary()

    def to_gateway(self: Any, plan: Reroute, request: Any) -> Any:
        return module.TransportRequest(
            "POST",
            plan.url,
            list(plan.headers(dict(request.headers)).items()),
            request.body,
            connect_timeout=request.connect_timeout or self._connect_timeout,
            read_timeout=request.read_timeout or self._read_timeout,
            write_timeout=request.write_timeout or self._write_timeout,
        )

    def planned(active: Any, request: Any) -> Reroute | PassThrough | None:
        given = {name.lower(): value for name, value in request.headers}
        return decide(active, request.method, request.url, given, lambda: request.body)

    def stream(self: Any, request: Any) -> Any:
        active = active_episode(fallback)
        if active is None:
            return original(self, request)
        plan = planned(active, request)
        with in_client(active):
            if isinstance(plan, Reroute):
                if os.getpid() not in own:
                    own[os.getpid()] = transport(trust_env=False, max_connections=256)
                return original(own[os.getpid()], to_gateway(self, plan, request))
            try:
                response = original(self, request)
            except BaseException as error:
                if plan is not None:
                    plan.failed(error)
                raise
        if plan is not None:
            response._chunks = _read_along(plan, response)
        return response

    async def do_stream(self: Any, request: Any) -> Any:
        active = active_episode(fallback)
        if active is None:
            return await aoriginal(self, request)
        plan = planned(active, request)
        with in_client(active):
            if isinstance(plan, Reroute):
                loop = asyncio.get_running_loop()
                if loop not in aown:
                    aown[loop] = atransport(trust_env=False, max_connections=256)
                return await aoriginal(aown[loop], to_gateway(self, plan, request))
            try:
                response = await aoriginal(self, request)
            except BaseException as error:
                if plan is not None:
                    plan.failed(error)
                raise
        if plan is not None:
            response._chunks = _aread_along(plan, response)
        return response

    patches.replace(transport, "stream", stream)
    patches.replace(atransport, "_do_stream", do_stream)

    def close() -> None:
        if os.getpid() in own:
            own.pop(os.getpid()).close()

    patches.at_end(close)


def _read_along(passing: PassThrough, response: Any) -> Iterator[bytes]:
    whole, chunks = False, response._chunks
    try:
        for chunk in chunks:
            passing.feed(chunk)
            yield chunk
        whole = True
    finally:
        _done(passing, response, whole)


async def _aread_along(passing: PassThrough, response: Any) -> AsyncIterator[bytes]:
    whole, chunks = False, response._chunks
    try:
        async for chunk in chunks:
            passing.feed(chunk)
            yield chunk
        whole = True
    finally:
        _done(passing, response, whole)


def _done(passing: PassThrough, response: Any, whole: bool) -> None:
    kind = response.header("content-type") or ""
    never_raise(lambda: passing.done(response.status, kind, whole=whole))
