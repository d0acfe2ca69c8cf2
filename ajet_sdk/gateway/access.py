"""Reads requests: the episode and agent by path and key, the route, the body; and makes the error
responses.

The episode is in the path (`/episodes/{episode_id}/{agent}/…`), else follows from the key (`/v1/…`
with an episode's key), else is in the header `x-ajet-episode` beside the gateway's own token;
without a path, the header `x-ajet-agent` names the agent. The route follows, with or without a
version (`ajet_sdk/dialects/table.py`).
"""

from __future__ import annotations

import logging
import secrets
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from urllib.parse import parse_qs, unquote

from ajet_sdk.agent.context import AgentIdentity, Recorder
from ajet_sdk.dialects.json import json_value
from ajet_sdk.dialects.openai_chat import CHAT
from ajet_sdk.dialects.table import (
    DIALECTS,
    ApiRoute,
    Counter,
    Dialect,
    Vendor,
    endpoint,
    instead_of,
    vendor,
)
from ajet_sdk.errors import (
    AjetError,
    ConfigError,
    ContextOverflow,
    EngineUnavailable,
    ModelAmbiguous,
    RequestRefused,
    place_of,
)
from ajet_sdk.gateway.episode import OpenEpisode
from ajet_sdk.gateway.pictures import checked
from ajet_sdk.pictures import is_data_url
from ajet_sdk.protocols import Client
from ajet_sdk.types import Json, JsonView, Phase

MOST_ITEMS = 50_000
"""Messages, tools and their parts of a request. Each takes some hundred bytes and several
conversions."""
REMEMBERED_KEYS = 200_000
"""Keys of finished episodes that are remembered, to distinguish them from unknown ones."""
LARGEST_BODY = 128 * 2**20
"""Bytes of a request: four pictures of the largest size."""
LARGEST_TEXT = 16 * 2**20
"""Bytes of a request beside its pictures: four million tokens. Parsing it takes about twenty times
as much memory."""
MOST_VALUES = 2_000_000
"""Values in the JSON of a request that is larger; pictures are few."""

log = logging.getLogger("ajet")


class HTTPError(Exception):
    """A response other than 200."""

    def __init__(
        self, status: int, message: str, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param

    def body_in(self, dialect: Dialect) -> dict[str, object]:
        """The body in the format of a dialect."""
        return dialect.error(self.status, str(self), self.code, self.param)


class ClientGone(Exception):
    """The client left before the last byte, or the episode ended before the client had read the
    response."""


@dataclass(frozen=True, slots=True)
class Request:
    """A request as read by a door."""

    route: str
    dialect: Dialect | None
    """The dialect of the route; None: the policy does not serve it."""
    body: dict[str, object]
    """The JSON as the client sent it."""
    identity: AgentIdentity
    phase: Phase
    client: Client
    captured: bool = False
    """It was addressed to another endpoint, so its model may not be the policy."""


@dataclass(frozen=True, slots=True)
class KeyGrant:
    """The access that a key grants."""

    episode: OpenEpisode
    phase: Phase
    captured: bool

    def request(self, place: RequestTarget, body: dict[str, object], client: Client) -> Request:
        """Make the request that came with the key."""
        target = place.endpoint
        return Request(
            target.route, target.dialect, body, place.agent, self.phase, client, self.captured
        )


@dataclass(frozen=True, slots=True)
class RequestTarget:
    """The target and the key of a request, from its path and headers."""

    episode: str | None
    """The episode that the path names."""
    key: str
    agent: AgentIdentity
    endpoint: ApiRoute
    speaks: Dialect
    """The dialect of its client, also for errors."""
    beside: str = ""
    """The episode named by a header, beside the gateway's own token."""


def locate(path: str, query: str, headers: Mapping[str, str]) -> RequestTarget:
    """Read the target of a request. The names of `headers` are in lower case."""
    parts = path.split("/", 4)
    if len(parts) > 4 and parts[1] == "episodes":
        named = unquote(parts[2])
        agent = AgentIdentity.parse(parts[3])
        path = parts[4]
    else:
        named = None
        agent = AgentIdentity(
            headers.get("x-ajet-agent") or "default", headers.get("x-ajet-target")
        )
    target = endpoint(path, query)
    speaks = target.dialect or vendor(path, headers)
    return RequestTarget(
        named, _key(headers, query), agent, target, speaks, headers.get("x-ajet-episode", "")
    )


def _key(headers: Mapping[str, str], query: str) -> str:
    """The key of a request, from any of the vendors' headers or the query; empty without one."""
    bearer = headers.get("authorization", "")
    if bearer[:7].lower() == "bearer " and bearer[7:].strip():
        return bearer[7:].strip()
    key = headers.get("x-api-key") or headers.get("x-goog-api-key") or headers.get("api-key") or ""
    return key or ("key=" in query and parse_qs(query).get("key", [""])[0]) or ""


class Access:
    """The open episodes and their keys."""

    def __init__(self) -> None:
        self.token = secrets.token_urlsafe(32)
        """Opens any episode named by header."""
        self.episodes: dict[str, OpenEpisode] = {}
        self.observed: Callable[[str], Recorder] | None = None
        """Finds an episode of `ajet.trace` by its id, for reports of child processes."""
        self.issued: Callable[[str], str | None] | None = None
        """Finds the episode of a key that was made before a restart."""
        self._grants: dict[str, KeyGrant] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()

    def add(self, episode: OpenEpisode) -> None:
        """Grant access by the keys of an episode."""
        self.episodes[episode.episode_id] = episode
        self._grants[episode.handle_key] = KeyGrant(episode, "rollout", False)
        self._grants[episode.captured_key] = KeyGrant(episode, "rollout", True)
        self._grants[episode.judge_key] = KeyGrant(episode, "judge", False)

    def end_keys(self, episode: OpenEpisode, final: bool) -> None:
        """Revoke the keys of an episode's rollout, and with `final` the judge's too."""
        keys = [episode.handle_key, episode.captured_key, *([episode.judge_key] if final else [])]
        for key in keys:
            if self._grants.pop(key, None) is not None:
                self._ended[key] = episode.episode_id
        while len(self._ended) > REMEMBERED_KEYS:
            self._ended.popitem(last=False)
        if final:
            self.episodes.pop(episode.episode_id, None)

    def recorder(self, place: RequestTarget) -> Recorder:
        """The episode that takes a report of another process. Raises HTTPError 401, 404, 410."""
        if self.observed is not None and secrets.compare_digest(
            place.key.encode(), self.token.encode()
        ):
            return self.observed(place.episode or "")
        grant = self.grant(place)
        if not grant.captured and grant.phase != "judge":
            raise unknown_route(place.endpoint.route)
        return grant.episode

    def grant(self, place: RequestTarget) -> KeyGrant:
        """The access that the request's key grants. Raises HTTPError 401, 410."""
        named = place.episode
        key = place.key
        grant = self._grants.get(key)
        if grant is not None and named in (None, grant.episode.episode_id):
            return grant
        if secrets.compare_digest(key.encode(), self.token.encode()):
            wanted = named or place.beside
            episode = self.episodes.get(wanted)
            if episode is None:
                raise HTTPError(410, f"no episode {wanted!r} is open", "episode_finished")
            return KeyGrant(episode, "judge" if episode.judged else "rollout", False)
        ended = self._ended.get(key)
        if ended is None and self.issued is not None:
            ended = self.issued(key)
        if ended is not None and named in (None, ended):
            raise HTTPError(
                410, f"episode {ended} is over; its key is no longer valid", "episode_finished"
            )
        raise HTTPError(
            401,
            "the API key belongs to another episode" if named else "unknown API key",
            "invalid_api_key",
        )


# Shared by both doors


def unknown_route(route: str) -> HTTPError:
    """The error 404 for a route."""
    known = ", ".join((*DIALECTS, "models/NAME:generateContent"))
    hint = instead_of(route.rpartition(" ")[2])
    message = f"the policy does not serve the route {route}" + (f": {hint}" if hint else "")
    return HTTPError(404, f"{message}; it serves {known}", "unknown_route")


def check_size(size: int) -> None:
    """Raise HTTPError 413 if a request is too large."""
    if size > LARGEST_BODY:
        raise _too_large(size, LARGEST_BODY, "in all")


def _too_large(size: int, limit: int, what: str) -> HTTPError:
    message = f"the request has at least {size:,} bytes {what}; the limit is {limit:,}"
    return HTTPError(413, f"{message}; shorten the conversation", "request_too_large")


def parse_body(data: bytes) -> dict[str, object]:
    """Parse the request's JSON object. Raises HTTPError 400, 413."""
    if len(data) > LARGEST_TEXT and sum(map(data.count, b",[{")) > MOST_VALUES:
        raise _too_large(len(data), LARGEST_TEXT, "beside pictures")
    try:
        body = json_value(data)
    except (ValueError, RecursionError) as error:
        raise HTTPError(400, f"the request is not JSON: {error}", "invalid_json") from error
    if not isinstance(body, dict):
        raise HTTPError(
            400, f"the request must be a JSON object (got {str(body)[:100]})", "invalid_json"
        )
    check_body(body, len(data))
    return body


def read_body(episode: OpenEpisode, target: RequestTarget, data: bytes) -> Json:
    """Parse the request's JSON object; one of chat completions, from where it no longer repeats the
    agent's latest. Raises HTTPError 400, 413."""
    if target.endpoint.dialect is not CHAT or len(data) > LARGEST_TEXT:
        return parse_body(data)
    agent = target.agent.agent
    body = episode.kept.read(data, agent)
    if body is None:
        return episode.kept.keep_read(data, parse_body(data), agent)
    check_items(body)
    return body


def check_body(body: dict[str, object], size: int) -> None:
    """Check a parsed request of `size` bytes. Raises HTTPError 413."""
    check_items(body)
    if size > LARGEST_TEXT:
        text = size - _size_of_data(body)
        if text > LARGEST_TEXT:
            raise _too_large(text, LARGEST_TEXT, "beside pictures")


def _size_of_data(value: object) -> int:
    """Characters of the pictures in a request of any dialect."""
    if isinstance(value, str):
        return len(value) if is_data_url(value) else 0
    if isinstance(value, dict):
        data = value.get("data")
        others = sum(_size_of_data(item) for name, item in value.items() if name != "data")
        return others + (len(data) if isinstance(data, str) else _size_of_data(data))
    return sum(map(_size_of_data, value)) if isinstance(value, list) else 0


def check_items(body: JsonView) -> None:
    """Raise HTTPError 413 if a request has too many messages, tools or parts of them."""
    count = 0
    for name in ("messages", "input", "contents", "tools"):
        items = body.get(name)
        if not isinstance(items, list):
            continue
        count += len(items)
        for item in items:
            if isinstance(item, dict):
                for value in item.values():
                    if isinstance(value, list):
                        count += len(value)
    if count > MOST_ITEMS:
        message = (
            f"the request has {count:,} messages, tools and parts of them; the limit is"
            f" {MOST_ITEMS:,}"
        )
        raise HTTPError(413, f"{message}; shorten the conversation", "request_too_large")


def headers_of(status: int, length: int | None, media_type: str = "") -> list[tuple[bytes, bytes]]:
    """Headers of a JSON response of `length` bytes, or if it is None, of a stream of
    `media_type`."""
    if length is None:
        return [(b"content-type", media_type.encode()), (b"cache-control", b"no-store")]
    retry = [(b"x-should-retry", b"false")] if status >= 400 else []
    return [(b"content-type", b"application/json"), (b"content-length", b"%d" % length), *retry]


# Responses without a call


def is_of_models(route: str) -> bool:
    """Whether a route is the list of models or one of them."""
    return route == "models" or route.startswith("models/")


def models(route: str, names: list[str], speaks: Dialect) -> Json:
    """The list of models, or the model named by the route. Raises HTTPError 404 if it is
    unknown."""
    speaker: Vendor = speaks  # type: ignore[assignment]  # these routes have a vendor's dialect
    wanted = unquote(route.removeprefix("models").strip("/"))
    if not wanted:
        return speaker.models(names)
    if wanted not in names:
        raise HTTPError(
            404,
            f"there is no model {wanted!r}; available: {', '.join(names)}",
            "model_not_found",
            "model",
        )
    return speaker.model(wanted)


async def count(episode: OpenEpisode, request: Request, counter: Counter) -> Json:
    """Count the tokens of a request by the engine, without a record. Raises HTTPError."""
    try:
        neutral = counter.neutral(request.body, episode.stored)
        ask = counter.form.ask(neutral, episode.episode_id, request.identity.agent)
        identity = request.identity
        ask = replace(ask, target=identity.target_tag or identity.agent)
        engine = episode.spec.engine
        if has_pictures(ask.messages) and engine.takes_pictures is not False:
            ask = await checked(ask, episode.spec.picture_hosts, episode.loaded)
        return counter.count(await engine.count(ask))
    except RequestRefused as error:
        raise HTTPError(400, str(error), "unsupported_parameter", error.parameter) from error
    except AjetError as error:
        raise HTTPError(
            503 if error.infrastructure else 400, str(error), "engine_failed"
        ) from error


def refusal(episode: OpenEpisode, error: Exception) -> HTTPError:
    """The error response to the client. An error other than the request's own also fails the
    episode."""
    if isinstance(error, HTTPError):
        return error
    if isinstance(error, RequestRefused):
        return HTTPError(400, str(error), error.code, error.parameter)
    if not isinstance(error, AjetError):  # the engine failed
        fault = EngineUnavailable(
            f"the engine failed: {type(error).__name__}: {error}{place_of(error)}"
        )
        log.error("In episode %s %s", episode.episode_id, fault, exc_info=error)
        episode.fail(fault)
        return HTTPError(500, str(fault), "engine_failed")
    episode.fail(error)
    if isinstance(error, ContextOverflow):
        return HTTPError(400, str(error), "context_length_exceeded", "messages")
    if isinstance(error, ModelAmbiguous):
        return HTTPError(400, str(error), "model_ambiguous", "model")
    if isinstance(error, ConfigError):
        return HTTPError(400, str(error), "not_configured")
    return HTTPError(503 if error.infrastructure else 502, str(error), "engine_failed")


def has_pictures(messages: object) -> bool:
    """Whether messages in the form of chat completions have a picture. One plain loop, since every
    request of text asks."""
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and part.get("type") == "image_url":
                return True
    return False
