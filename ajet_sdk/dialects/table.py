"""Which dialect the clients of a route speak."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol
from urllib.parse import parse_qs, unquote

from ajet_sdk.dialects.anthropic_messages import COUNT, MESSAGES
from ajet_sdk.dialects.anthropic_requests import MESSAGE_FIELDS
from ajet_sdk.dialects.fields import COMPLETIONS, Fields
from ajet_sdk.dialects.gemini import Gemini
from ajet_sdk.dialects.gemini_requests import CONFIG_FIELDS, GEMINI_FIELDS
from ajet_sdk.dialects.json import Json, Stored
from ajet_sdk.dialects.openai_chat import CHAT, TEXT, Completions
from ajet_sdk.dialects.openai_responses import RESPONSE_FIELDS, RESPONSES

__all__ = [
    "CHAT",
    "DIALECTS",
    "FIELDS",
    "TEXT",
    "ApiRoute",
    "Counter",
    "Dialect",
    "Vendor",
    "endpoint",
    "instead_of",
    "vendor",
]


class Dialect(Protocol):
    """How clients spell requests, and what they read.

    `body` is a request's JSON as it was sent, `asked` the same as JSON of OpenAI's completions: everything behind a
    dialect (engines, the record, merging, the trace) reads and writes completions only.
    """

    @property
    def form(self) -> Completions:
        """Whether `asked` is of chat completions or of text completions."""
        ...

    @property
    def fields(self) -> Fields:
        """What becomes of each field, where they are not those of completions."""
        ...

    def neutral(self, body: dict[str, Any], stored: Mapping[str, Any]) -> dict[str, Any]:
        """The request as completions have it. Raises RequestRefused where it is malformed, or can't be honoured.

        `stored` is what `response` kept of the open episode's earlier calls.
        """
        ...

    def streams(self, body: Mapping[str, Any]) -> bool:
        """Whether the client wants events."""
        ...

    def response(self, completion: Json, request: Json, body: Json, stored: Stored) -> Json:
        """The whole response, of a completion."""
        ...

    def events(self, response: Mapping[str, Any], body: Mapping[str, Any]) -> list[bytes]:
        """The response as server-sent events. Whoever has the last has the whole reply."""
        ...

    @property
    def media_type(self) -> str:
        """The content type of a stream."""
        ...

    @property
    def waiting(self) -> bytes:
        """What a stream says while the answer is not there yet."""
        ...

    def error(self, status: int, message: str, code: str | None, param: str | None) -> dict[str, Any]:
        """The response that says an error."""
        ...

    def error_event(self, error: Mapping[str, Any]) -> bytes:
        """An error in the middle of a stream."""
        ...


class Vendor(Dialect, Protocol):
    """A dialect that has a list of models."""

    def model(self, name: str) -> dict[str, Any]:
        """One model."""
        ...

    def models(self, names: list[str]) -> dict[str, Any]:
        """The models that answer."""
        ...


class Counter(Dialect, Protocol):
    """A dialect whose requests may be counted instead of answered."""

    def count(self, tokens: int) -> dict[str, Any]:
        """The response that says how many tokens a request has."""
        ...


DIALECTS: dict[str, Dialect] = {
    "chat/completions": CHAT,
    "completions": TEXT,
    "responses": RESPONSES,
    "messages": MESSAGES,
}
"""The routes that the policy answers, beside Gemini's, which have parameters."""

COUNTERS: dict[str, Counter] = {"messages/count_tokens": COUNT, "responses/input_tokens": RESPONSES}
"""The routes that count a request's tokens."""

UNSERVED = {
    "responses/compact": "no conversation is compacted; shorten the input yourself",
    "conversations": "no conversation has an id; set previous_response_id, or send the items as input",
    "threads": "there are no assistants; send the whole conversation to chat/completions or responses",
    "assistants": "there are no assistants; send the whole conversation to chat/completions or responses",
}
"""Routes of the vendors' own conversations that the policy does not have, and what to do."""


def instead_of(route: str) -> str:
    """What to do where the policy does not serve a route; empty where there is nothing to say."""
    if re.fullmatch(r"responses/[^/]+/cancel", route):
        return "no response is made in the background"
    return next((hint for name, hint in UNSERVED.items() if f"{route}/".startswith(f"{name}/")), "")


_GEMINI = re.compile(r"(?:^|/)models/([^:/]+(?:/[^:/]+)*):(generateContent|streamGenerateContent|countTokens)$")
_VERSION = re.compile(r"(?:v\d\w*/)+")


@dataclass(frozen=True, slots=True)
class ApiRoute:
    """What a path asks for."""

    route: str
    """The path without what stands before: a version, a deployment, another host's own."""
    dialect: Dialect | None
    """What its requests and replies are spelt in; None: the policy answers nothing there."""
    counter: Counter | None = None
    """The dialect, where only a count of tokens is wanted."""


@lru_cache(maxsize=4096)
def endpoint(path: str, query: str = "") -> ApiRoute:
    """What a request's path asks for, with whatever version or prefix: `v1/chat/completions`, `v1/v1/messages`, …"""
    path = path.strip("/")
    match = _GEMINI.search(path)
    if match is not None:
        name, method = unquote(match[1]), match[2]
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
    """Whose API a request speaks where its route does not say: by the headers and the version in the path."""
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
"""What becomes of each field of a request, by dialect."""
