"""Answers clients over HTTP: the ASGI application of the gateway's server."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError
from starlette.types import Receive, Scope, Send

from ajet_sdk.agent.context import AgentIdentity, Fault, ObservedExchange, Recorder
from ajet_sdk.dialects.json import json_bytes
from ajet_sdk.dialects.openai_responses import RESPONSES
from ajet_sdk.errors import TraceError
from ajet_sdk.gateway.access import (
    Access,
    ClientGone,
    HTTPError,
    KeyGrant,
    RequestTarget,
    check_size,
    count,
    headers_of,
    is_of_models,
    locate,
    models,
    parse_body,
    read_body,
    unknown_route,
)
from ajet_sdk.gateway.answer import Reply, answer, refuse_unread
from ajet_sdk.types import Event

if TYPE_CHECKING:
    from starlette.applications import Starlette

CONNECTION = "ajet.connection"
"""Key in the `state` of a scope for the connection, an `http_server.TimedProtocol`."""

_REPORTS: dict[str, tuple[TypeAdapter[Any], Callable[[Recorder, Any], None]]] = {
    "observed": (
        TypeAdapter(ObservedExchange),
        lambda episode, exchange: episode.observed(exchange),
    ),
    "events": (TypeAdapter(Event), lambda episode, event: episode.happened(event)),
    "handles": (
        TypeAdapter(AgentIdentity),
        lambda episode, identity: episode.takes_handle(identity.agent),
    ),
    "faults": (TypeAdapter(Fault), lambda episode, fault: episode.fail(fault.error())),
}
"""Reports of other processes of the agent by route: their type, and the method of an episode that
records them."""

log = logging.getLogger("ajet.gateway")


class HttpDoor:
    """The ASGI application: calls, the state of an episode for its handles, and with `live` the
    trace."""

    def __init__(self, access: Access, live: Starlette | None = None) -> None:
        self.access = access
        self.live = live

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path = scope.get("raw_path", scope["path"].encode()).decode("latin-1").partition("?")[0]
        query = scope.get("query_string", b"").decode("latin-1")
        headers = {
            name.decode("latin-1").lower(): value.decode("latin-1")
            for name, value in scope["headers"]
        }
        place = locate(path, query, headers)
        foreign = not place.endpoint.dialect and not path.startswith(("/episodes/", "/v1"))
        if foreign and self.live is not None:
            await self.live(scope, receive, send)
            return
        try:
            if foreign:
                raise unknown_route(path)
            if place.endpoint.route in _REPORTS and scope["method"] == "POST":
                await self._take_report(scope, place, receive, send)
                return
            await self._answer(scope, place, self.access.grant(place), receive, send)
        except HTTPError as error:
            await respond(send, error.status, error.body_in(place.speaks))
        except ClientGone:
            pass  # the call is recorded
        except TraceError as lost:  # the writer raises it again at its next record
            log.debug("Could not record a call: %s", lost)

    async def _take_report(
        self, scope: Scope, place: RequestTarget, receive: Receive, send: Send
    ) -> None:
        route = place.endpoint.route
        recorder = self.access.recorder(place)
        kind, record = _REPORTS[route]
        try:
            record(recorder, kind.validate_python(await read_json(receive, scope)))
        except ValidationError as error:
            raise HTTPError(
                400, f"this is no report of {route}: {error}", "invalid_report"
            ) from error
        await respond(send, 200, {})

    async def _answer(
        self, scope: Scope, place: RequestTarget, grant: KeyGrant, receive: Receive, send: Send
    ) -> None:
        route = place.endpoint.route
        method = scope["method"]
        episode = grant.episode
        if method == "GET" and route == "episode":
            return await respond(send, 200, {"context_overflow": episode.context_overflow})
        if method == "GET" and is_of_models(route):
            names = [
                episode.spec.engine.model,
                *sorted(episode.spec.policy_models - {episode.spec.engine.model}),
            ]
            return await respond(send, 200, models(route, names, place.speaks))
        if method in ("GET", "DELETE") and route.startswith("responses/resp_"):
            named = route.partition("/")[2]
            response = RESPONSES.look_up(method, named, episode.stored)
            if response is None:
                raise HTTPError(404, f"Response with id {named!r} not found.", "response_not_found")
            return await respond(send, 200, response)
        if method != "POST":
            if place.endpoint.dialect is None:
                raise unknown_route(f"{method} {route}")
            raise HTTPError(
                405, f"{method} {route} is not supported; send calls with POST", "method"
            )
        connection = scope["state"][CONNECTION]
        try:
            body = read_body(episode, place, await read_bytes(receive, scope))
        except HTTPError as error:
            raise refuse_unread(episode, grant.request(place, {}, connection), error) from error
        request = grant.request(place, body, connection)
        if place.endpoint.counter is not None:
            return await respond(send, 200, await count(episode, request, place.endpoint.counter))
        return await send_reply(await answer(episode, request), scope, send)


async def send_reply(reply: Reply, scope: Scope, send: Send) -> None:
    """Send a call's reply. Raises ClientGone."""
    connection = scope["state"][CONNECTION]
    async with reply:
        if not reply.is_stream:
            connection.join_next()  # head and body
        await send({"type": "http.response.start", "status": 200, "headers": reply.headers})
        async for chunk, last in reply.chunks:
            if last:
                connection.join_next()  # the last chunk and the end of the response
                connection.on_end_of_reply = reply.call.confirm
            await send({"type": "http.response.body", "body": chunk, "more_body": not last})


async def respond(send: Send, status: int, value: dict[str, object]) -> None:
    """Send a whole JSON response."""
    body = json_bytes(value)
    await send(
        {"type": "http.response.start", "status": status, "headers": headers_of(status, len(body))}
    )
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def read_json(receive: Receive, scope: Scope) -> dict[str, object]:
    """Read the request's JSON object. Raises ClientGone, HTTPError 400, and 413 before the body is
    read."""
    return parse_body(await read_bytes(receive, scope))


async def read_bytes(receive: Receive, scope: Scope) -> bytes:
    """Read the request's body. Raises ClientGone, and HTTPError 413 before it is read."""
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            check_size(int(value))
    parts = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        check_size(size)
        if not message.get("more_body"):
            return b"".join(parts)
