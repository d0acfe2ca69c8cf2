"""Maps routes to dialects."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol
from urllib.parse import parse_qs, unquote

from ajet_sdk.dialects.anthropic_messages import COUNT, MESSAGES
from ajet_sdk.dialects.anthropic_requests import MESSAGE_FIELDS
from ajet_sdk.dialects.fields import COMPLETIONS, Fields
from ajet_sdk.dialects.gemini import Gemini
from ajet_sdk.dialects.gemini_requests import CONFIG_FIELDS, GEMINI_FIELDS
from ajet_sdk.dialects.json import Stored
from ajet_sdk.dialects.openai_chat import CHAT, TEXT, Completions
from ajet_sdk.dialects.openai_responses import RESPONSE_FIELDS, RESPONSES
from ajet_sdk.types import Json


class Dialect(Protocol):
    """The format of requests and responses of one API.

    `body` is the JSON from the client, `request` the same in the format of OpenAI's completions.
    Engines, merging and the trace use the format of completions only.
    """

    @property
    def form(self) -> Completions:
        """Chat completions or text completions."""

    @property
    def fields(self) -> Fields:
        """The treatment of each field; empty for completions."""

    def neutral(self, body: Json, stored: Mapping[str, Json]) -> Json:
        """Convert a request to the format of completions. Raises RequestRefused.

        `stored` has the data that `response` stored for earlier calls of the open episode.
        """

    def streams(self, body: Mapping[str, object]) -> bool: ...

    def response(self, completion: Json, request: Json, body: Json, stored: Stored) -> Json: ...

    def events(self, response: Json, body: Mapping[str, object]) -> list[bytes]:
        """Return the response as server-sent events; the last one completes the reply."""

    @property
    def media_type(self) -> str:
        """The content type of a stream."""

    def opening(self, request_id: str, model: str, body: Mapping[str, object]) -> bytes:
        """Return the first event, to be sent before the answer is there; empty if a stream needs
        none."""

    def keep_alive(self, request_id: str, model: str, body: Mapping[str, object]) -> bytes:
        """Return bytes to send again and again, after `opening`, until the answer is there."""

    def error(self, status: int, message: str, code: str | None, param: str | None) -> Json: ...

    def error_event(self, error: Json) -> bytes: ...


class Vendor(Dialect, Protocol):
    """A dialect with routes that list models."""

    def model(self, name: str) -> Json: ...

    def models(self, names: list[str]) -> Json: ...


class Counter(Dialect, Protocol):
    """A dialect with a route that counts the tokens of a request."""

    def count(self, tokens: int) -> Json: ...


DIALECTS: dict[str, Dialect] = {
    "chat/completions": CHAT,
    "completions": TEXT,
    "responses": RESPONSES,
    "messages": MESSAGES,
}
"""Routes that the policy serves, except for Gemini's, which contain the model's name."""

COUNTERS: dict[str, Counter] = {"messages/count_tokens": COUNT, "responses/input_tokens": RESPONSES}
"""The routes that count the tokens of a request."""

UNSERVED = {
    "responses/compact": "no conversation is compacted; shorten the input yourself",
    "conversations": (
        "no conversation has an id; set previous_response_id, or send the items as input"
    ),
    "threads": (
        "there are no assistants; send the whole conversation to chat/completions or responses"
    ),
    "assistants": (
        "there are no assistants; send the whole conversation to chat/completions or responses"
    ),
}
"""Vendor routes that the policy does not serve, and what to use instead."""


def instead_of(route: str) -> str:
    """Advice on what to use instead of a route that the policy does not serve; empty if there is
    none."""
    if re.fullmatch(r"responses/[^/]+/cancel", route):
        return "no response is made in the background"
    return next((hint for name, hint in UNSERVED.items() if f"{route}/".startswith(f"{name}/")), "")


_GEMINI = re.compile(
    r"(?:^|/)models/([^:/]+(?:/[^:/]+)*):(generateContent|streamGenerateContent|countTokens)$"
)
_VERSION = re.compile(r"(?:v\d\w*/)+")


@dataclass(frozen=True, slots=True)
class ApiRoute:
    """The route of a request, and its dialect."""

    route: str
    """The path without a prefix such as a version or a deployment."""
    dialect: Dialect | None
    """None for a route that the policy does not serve."""
    counter: Counter | None = None
    """The dialect, for a route that counts tokens."""


@lru_cache(maxsize=4096)
def endpoint(path: str, query: str = "") -> ApiRoute:
    """The route of a path with any version or prefix: `v1/chat/completions`, `v1/v1/messages`, …"""
    path = path.strip("/")
    match = _GEMINI.search(path)
    if match is not None:
        name = unquote(match[1])
        method = match[2]
        sse = "sse" in parse_qs(query).get("alt", ())
        dialect = Gemini(name, method, sse)
        route = f"models/{match[1]}:{method}" + ("?alt=sse" if sse else "")
        return ApiRoute(route, dialect, dialect if method == "countTokens" else None)
    for route, counter in COUNTERS.items():
        if path == route or path.endswith("/" + route):
            return ApiRoute(route, counter, counter)
    for route, known in DIALECTS.items():
        if path == route or path.endswith("/" + route):
            return ApiRoute(route, known)
    return ApiRoute(_VERSION.sub("", path, count=1) if _VERSION.match(path) else path, None)


GEMINI = Gemini("", "")


def vendor(path: str, headers: Mapping[str, str]) -> Vendor:
    """The dialect of a route that several vendors share, from the headers and the version in the
    path."""
    if "anthropic-version" in headers:
        return MESSAGES
    if "x-goog-api-key" in headers or "/v1beta" in path or "/v1alpha" in path:
        return GEMINI
    return CHAT


FIELDS: dict[str, Fields] = {
    "OpenAI chat completions and completions": COMPLETIONS,
    "OpenAI Responses": RESPONSE_FIELDS,
    "Anthropic Messages": MESSAGE_FIELDS,
    "Gemini": GEMINI_FIELDS,
    "Gemini's generationConfig": CONFIG_FIELDS,
}
"""The treatment of each field of a request, by dialect."""
