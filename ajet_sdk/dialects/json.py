"""Reads and writes the JSON of requests and responses."""

from __future__ import annotations

import json
from collections.abc import MutableMapping
from typing import Any

from pydantic_core import from_json

from ajet_sdk.types import Json as Json
from ajet_sdk.types import JsonView

Stored = MutableMapping[str, Json]
"""Responses and conversations of an open episode, by id."""


def json_bytes(value: object) -> bytes:
    """Encode as compact JSON in UTF-8; lone surrogates (of a reply cut inside a character) are
    escaped."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":")).encode()


def event_bytes(event: JsonView) -> bytes:
    """Encode a server-sent event, named by its type."""
    return f"event: {event['type']}\ndata: ".encode() + json_bytes(event) + b"\n\n"


def json_value(data: bytes | str) -> Any:
    """Parse JSON. Raises ValueError, RecursionError."""
    try:
        return from_json(data)
    except ValueError:  # the slower parser accepts lone surrogates, deep nesting and UTF-16
        return json.loads(data)


def json_text(value: object) -> str:
    """Encode the arguments of a tool call, equally for all dialects."""
    return json.dumps(value, ensure_ascii=False)


def joined(parts: list[Json]) -> str | list[Json]:
    """The content of a message: the texts joined by newlines, or the parts unless all are text."""
    if any(part["type"] != "text" for part in parts):
        return parts
    return "\n".join(part["text"] for part in parts)


_TO_STANDARD = str.maketrans("-_", "+/")


def data_url(media_type: object, data: object) -> str:
    """The URL of a picture's base64; Google's SDK writes it with the alphabet for URLs."""
    body = data.translate(_TO_STANDARD) if isinstance(data, str) else ""
    return f"data:{media_type};base64,{body}"


def assistant(texts: list[str], reasoning: str, calls: list[Json]) -> Json:
    """Make the message of a reply."""
    message: Json = {"role": "assistant", "content": "".join(texts) if texts else None}
    return (
        message
        | ({"reasoning_content": reasoning} if reasoning else {})
        | ({"tool_calls": calls} if calls else {})
    )


def arguments_of(function: JsonView) -> Json:
    """Parse the arguments of a tool call; text that is no object is returned under `INVALID_JSON`,
    as by Anthropic."""
    try:
        value = json_value(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, dict):
        return value
    return {"INVALID_JSON": function["arguments"]}
