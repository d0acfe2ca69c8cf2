"""The HTTP routes of a swarm server, under `/swarm/v1`, and their description (`/docs`)."""

from __future__ import annotations

import hmac
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Literal, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from ajet_sdk.errors import AjetError, ConfigError, TraceError
from ajet_sdk.swarm.attempts import OpenAttempt
from ajet_sdk.swarm.description import Described, description_routes
from ajet_sdk.swarm.host import SwarmHost
from ajet_sdk.swarm.messages import (
    PREFIX,
    Abort,
    Agree,
    Agreed,
    CallFault,
    Claim,
    Claimed,
    Code,
    ConfigText,
    End,
    EpisodeCalls,
    Fault,
    Judging,
    Receipt,
    Refusal,
    State,
    SwarmStatus,
)
from ajet_sdk.swarm.refusals import Refused

M = TypeVar("M", bound=BaseModel)
Holder = Literal["owner", "worker", "episode", "anyone"]

LARGEST_BODY = 32 * 2**20
"""Bytes of a request: a task or an output may have a picture of the largest size."""
KEEP_ALIVE = 15.0
"""Seconds after which a silent stream of events sends a comment."""


@dataclass(frozen=True)
class Keys:
    """The keys of a server's owner and its workers; both None: this machine alone, without keys."""

    owner: str | None = None
    worker: str | None = None

    def holder(self, key: str) -> Literal["owner", "worker"] | None:
        """Whose key it is."""
        if self.owner is None and self.worker is None:
            return "owner"
        given = key.encode("utf-8", "replace")
        for name, known in (("owner", self.owner), ("worker", self.worker)):
            if known is not None and hmac.compare_digest(known.encode(), given):
                return name  # type: ignore[return-value]
        return None


class Owner:
    """What the owner's routes do (`ajet_sdk/swarm_server.py`)."""

    async def configure(self, text: str) -> None:
        """Take a config. Raises Refused unless the server is offline, ConfigError."""
        raise NotImplementedError

    async def start(self) -> None:
        """Start the training. Raises Refused."""
        raise NotImplementedError

    async def stop(self) -> None:
        """Stop the training, with a checkpoint."""
        raise NotImplementedError


class SwarmRoutes:
    """The handlers of a server's requests."""

    def __init__(self, keys: Keys, owner: Owner) -> None:
        self.keys = keys
        self.owner = owner
        self.last_request = time.monotonic()
        self.host: SwarmHost

    def routes(self) -> list[BaseRoute]:
        """All routes, and the pages that describe them."""
        described = self._described()
        made: list[BaseRoute] = [
            Route(f"{PREFIX}{d.path}", self._handler(d.holder, d.handler), methods=[d.method])
            for d in described
        ]
        return [*made, *description_routes(described)]

    def _described(self) -> list[Described]:
        one = "/episodes/{id}"
        return [
            Described("POST", "/episodes", "worker", self.claim, Claim, Claimed),
            Described("POST", f"{one}/end", "episode", self.end, End, Receipt),
            Described("POST", f"{one}/abort", "episode", self.abort, Abort, Receipt),
            Described("POST", f"{one}/judging", "episode", self.judging, None, Judging),
            Described("GET", f"{one}/calls", "episode", self.calls, None, EpisodeCalls),
            Described("GET", one, "episode", self.receipt, None, Receipt),
            Described("GET", "/status", "worker", self.status, None, SwarmStatus),
            Described("GET", "/events", "worker", self.events, None, None),
            Described("POST", "/agree", "worker", self.agree, Agree, Agreed),
            Described("PUT", "/config", "owner", self.configure, ConfigText, State),
            Described("POST", "/start", "owner", self.start, None, State),
            Described("POST", "/stop", "owner", self.stop, None, State),
        ]

    # Access

    def _handler(
        self, holder: Holder, handler: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def handle(request: Request) -> Response:
            self.last_request = time.monotonic()
            try:
                self.check_access(request, holder)
                return await handler(request)
            except Refused as error:
                return refusal(error.status, error.code, str(error), error.retry_after)
            except ConfigError as error:
                return refusal(422, "config", str(error))
            except TraceError as error:
                return refusal(500, "trace", str(error), 5.0)
            except AjetError as error:
                return refusal(503, "full", str(error), 5.0)
            except ClientDisconnect:
                return Response(status_code=499)

        return handle

    def check_access(self, request: Request, holder: Holder) -> None:
        """Raise Refused if the request's key does not open the route."""
        key = key_of(request)
        if holder == "episode":
            episode_id = str(request.path_params["id"])
            attempts = self.host.running().attempts
            if attempts.may_end(key, episode_id):
                attempts.asked_for(episode_id)  # its client is there, even if it only looks
                return
            is_receipt = request.method == "GET" and not request.url.path.endswith("/calls")
            opens = attempts.episode_of(key)
            if is_receipt and opens is None and self.keys.holder(key) is not None:
                return
            raise Refused(401, "unknown_key", "this needs the episode's end_key")
        whose = self.keys.holder(key)
        if whose is None:
            raise Refused(
                401,
                "unknown_key",
                "the key is missing or wrong; set AJET_SWARM_KEY to the server's",
            )
        if holder == "owner" and whose != "owner":
            raise Refused(403, "forbidden", "this needs the owner's key; a worker's is not enough")

    # Episodes

    async def claim(self, request: Request) -> Response:
        claim = await read(request, Claim)
        address = request.client.host if request.client is not None else ""
        claimed, is_new = await self.host.claim(claim, address, request.is_disconnected)
        reached = reached_at(request, self.host.gateway.url)
        base_url = claimed.base_url.replace(self.host.gateway.url, reached, 1)
        claimed = claimed.model_copy(update={"base_url": base_url})
        return reply(claimed, 201 if is_new else 200)

    async def end(self, request: Request) -> Response:
        end = await read(request, End)
        attempts = self.host.running().attempts
        return reply(await attempts.end(request.path_params["id"], end))

    async def abort(self, request: Request) -> Response:
        abort = await read(request, Abort)
        attempts = self.host.running().attempts
        return reply(await attempts.abort(request.path_params["id"], abort))

    def _open(self, request: Request) -> OpenAttempt:
        episode_id = request.path_params["id"]
        attempt = self.host.running().attempts.asked_for(episode_id)
        if attempt is None:
            raise Refused(410, "episode_over", f"episode {episode_id} is over; see its receipt")
        return attempt

    async def judging(self, request: Request) -> Response:
        attempt = self._open(request)
        async with attempt.opened.judging():
            return reply(Judging(judge_key=attempt.opened.judge_key))

    async def calls(self, request: Request) -> Response:
        opened = self._open(request).opened
        faults = tuple(
            CallFault(
                kind=type(error).__name__, message=str(error), infrastructure=error.infrastructure
            )
            for error in opened.errors
        )
        return reply(
            EpisodeCalls(
                calls=opened.calls,
                errors=faults,
                context_overflow=opened.context_overflow,
                stopped=opened.stopped,
            )
        )

    async def receipt(self, request: Request) -> Response:
        attempts = self.host.running().attempts
        return reply(await attempts.receipt(request.path_params["id"]))

    # The server

    async def status(self, request: Request) -> Response:
        return reply(self.host.status())

    async def events(self, request: Request) -> Response:
        given = request.query_params.get("after") or request.headers.get("last-event-id") or "0"
        if not given.isdecimal():
            raise Refused(422, "bad_request", "after must be the id of an event, a whole number")

        async def stream() -> AsyncIterator[str]:
            last = int(given)
            while True:
                events = await self.host.board.events_after(last, KEEP_ALIVE)
                if not events:
                    yield ": nothing new\n\n"
                for event in events:
                    last = event.id
                    yield f"id: {event.id}\nevent: {event.kind}\ndata: {json.dumps(event.data)}\n\n"

        return StreamingResponse(
            stream(), media_type="text/event-stream", headers={"cache-control": "no-store"}
        )

    async def agree(self, request: Request) -> Response:
        agree = await read(request, Agree)
        self.host.clients.seen(agree.client_id)
        accepted, reason = self.host.running().agree(agree.client_id)
        return reply(Agreed(accepted=accepted, reason=reason))

    async def configure(self, request: Request) -> Response:
        if request.headers.get("content-type", "").startswith("application/json"):
            text = (await read(request, ConfigText)).yaml
        else:
            text = (await read_body(request)).decode("utf-8", "replace")
        await self.owner.configure(text)
        return self._state()

    async def start(self, request: Request) -> Response:
        await self.owner.start()
        return self._state()

    async def stop(self, request: Request) -> Response:
        await self.owner.stop()
        return self._state()

    def _state(self) -> Response:
        return reply(State(state=self.host.state))


def key_of(request: Request) -> str:
    """The key of a request, as the vendors' clients send it."""
    bearer = request.headers.get("authorization", "")
    if bearer[:7].lower() == "bearer ":
        return bearer[7:].strip()
    return request.headers.get("x-api-key", "")


def reached_at(request: Request, default: str) -> str:
    """The address at which the client reached the server: scheme and host, without a slash."""
    host = request.headers.get("host", "")
    if not host:
        return default
    forwarded = request.headers.get("x-forwarded-proto", "")
    if forwarded in ("http", "https"):
        scheme = forwarded
    else:
        scheme = request.url.scheme
    return f"{scheme}://{host}"


async def read_body(request: Request) -> bytes:
    """The body of a request. Raises Refused 413."""
    parts = []
    size = 0
    async for part in request.stream():
        parts.append(part)
        size += len(part)
        if size > LARGEST_BODY:
            raise Refused(413, "too_large", f"the request has more than {LARGEST_BODY:,} bytes")
    return b"".join(parts)


async def read(request: Request, model: type[M]) -> M:
    """The message of a request. Raises Refused 413, 422."""
    body = await read_body(request)
    try:
        values = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refused(422, "bad_request", f"the request is not JSON: {error}") from error
    try:
        return model.model_validate(values)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_input=False)
        code: Code = "bad_request"
        if any(fault["loc"][:1] == ("reward",) for fault in faults):
            code = "bad_reward"
        listed = "; ".join(
            f"{'.'.join(map(str, fault['loc'])) or 'the request'}: {fault['msg']}"
            for fault in faults[:5]
        )
        raise Refused(422, code, listed) from error


def reply(message: BaseModel, status: int = 200) -> Response:
    """A message as the response."""
    return Response(message.model_dump_json(), status, media_type="application/json")


def refusal(status: int, code: str, message: str, retry_after: float | None = None) -> Response:
    """The response to a request that is refused."""
    body = Refusal(error=Fault(code=code, message=message, retry_after=retry_after))
    if retry_after is None:
        headers = {}
    else:
        headers = {"retry-after": f"{max(1, round(retry_after))}"}
    return JSONResponse(body.model_dump(), status, headers)
