"""Hook of lm15, the HTTP transports of DSPy 3.4 and later, which use sockets and asyncio
streams."""

from __future__ import annotations

import asyncio
import weakref
from types import ModuleType
from typing import Any

from ajet_sdk.agent.context import ActiveEpisode
from ajet_sdk.capture.patches import OwnClient, Patches
from ajet_sdk.capture.routing import (
    Done,
    Fallback,
    PassThrough,
    Plan,
    Reroute,
    active_episode,
    atee,
    decide,
    sending,
    tee,
)


def patch_lm15(module: ModuleType, patches: Patches, fallback: Fallback) -> None:
    transport = module.StdlibTransport
    atransport = module.StdlibAsyncTransport
    original = transport.__dict__["stream"]
    aoriginal = atransport.__dict__["_do_stream"]
    client = OwnClient(lambda: transport(trust_env=False, max_connections=256))
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

    def planned(active: ActiveEpisode, request: Any) -> Plan:
        headers = {name.lower(): value for name, value in request.headers}
        return decide(active, request.method, request.url, headers, lambda: request.body)

    def ending(passing: PassThrough, response: Any) -> Done:
        return passing.ending(response.status, response.header("content-type") or "")

    def stream(self: object, request: object) -> Any:
        active = active_episode(fallback)
        if active is None:
            return original(self, request)
        plan = planned(active, request)
        with sending(active, plan):
            if isinstance(plan, Reroute):
                return original(client.get(), to_gateway(self, plan, request))
            response = original(self, request)
        if isinstance(plan, PassThrough):
            response._chunks = tee(response._chunks, plan.feed, ending(plan, response))
        return response

    async def do_stream(self: object, request: object) -> object:
        active = active_episode(fallback)
        if active is None:
            return await aoriginal(self, request)
        plan = planned(active, request)
        with sending(active, plan):
            if isinstance(plan, Reroute):
                loop = asyncio.get_running_loop()
                if loop not in aown:
                    aown[loop] = atransport(trust_env=False, max_connections=256)
                return await aoriginal(aown[loop], to_gateway(self, plan, request))
            response = await aoriginal(self, request)
        if isinstance(plan, PassThrough):
            response._chunks = atee(response._chunks, plan.feed, ending(plan, response))
        return response

    patches.replace(transport, "stream", stream)
    patches.replace(atransport, "_do_stream", do_stream)
    patches.at_end(client.close)
