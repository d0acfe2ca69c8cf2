"""JSON of requests and responses, as bytes, fast."""

from __future__ import annotations

import json
from collections.abc import MutableMapping
from typing import Any

from pydantic_core import from_json

from ajet_sdk.types import Json as Json
from ajet_sdk.types import JsonView

Stored = MutableMapping[str, Json]
"""An open episode's responses and conversations, by their ids."""


def json_bytes(value: object) -> bytes:
    """Compact JSON in UTF-8; lone surrogates (a reply cut inside a character) become escapes."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":")).encode()


def event_bytes(event: JsonView) -> bytes:
    """A server-sent event that has the name of its type."""
    return f"event: {event['type']}\ndata: ".encode() + json_bytes(event) + b"\n\n"


def json_value(data: bytes | str) -> Any:
    """Parse JSON. Raises ValueError, RecursionError."""
    try:
        return from_json(data)
    except ValueError:  # lone surrogates, deep nesting, UTF-16: the slower reader takes them
        return json.loads(data)


def json_text(value: object) -> str:
    """JSON as written in tool calls: one call has one spelling, whatever dialect it comes from."""
    return json.dumps(value, ensure_ascii=False)


def joined(parts: list[Json]) -> str | list[Json]:
    """The content of a message: the texts joined by newlines, or the parts where one is not text."""
    if any(part["type"] != "text" for part in parts):
        return parts
    return "\n".join(part["text"] for part in parts)


def assistant(texts: list[str], reasoning: str, calls: list[Json]) -> Json:
    """A reply as a message."""
    message: Json = {"role": "assistant", "content": "".join(texts) if texts else None}
    return message | ({"reasoning_content": reasoning} if reasoning else {}) | ({"tool_calls": calls} if calls else {})


def arguments_of(function: JsonView) -> Json:
    """A tool call's arguments as an object. Text that is no object becomes `INVALID_JSON`, as Anthropic names it."""
    try:
        value = json_value(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"INVALID_JSON": function["arguments"]}
