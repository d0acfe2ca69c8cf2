"""JSON of requests and responses, as bytes, fast."""

from __future__ import annotations

import json
from collections.abc import Mapping, MutableMapping
from typing import Any

from pydantic_core import from_json

Json = dict[str, Any]
Stored = MutableMapping[str, Any]
"""What dialects keep of an open episode's responses, by their ids."""


def json_bytes(value: Any) -> bytes:
    """Compact JSON in UTF-8; lone surrogates (a reply cut inside a character) become escapes."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":")).encode()


def json_value(data: bytes | str) -> Any:
    """The value that JSON says. Raises ValueError, RecursionError."""
    try:
        return from_json(data)
    except ValueError:  # lone surrogates, deep nesting, UTF-16: the slower reader takes them
        return json.loads(data)


def json_text(value: Any) -> str:
    """JSON as tool calls spell it, so that one call is spelt alike whatever dialect it comes from."""
    return json.dumps(value, ensure_ascii=False)


def joined(parts: list[dict[str, Any]]) -> Any:
    """A message's content of parts: one string where all is text, whose blocks stand on lines of their own."""
    if any(part["type"] != "text" for part in parts):
        return parts
    return "\n".join(part["text"] for part in parts)


def arguments_of(function: Mapping[str, Any]) -> dict[str, Any]:
    """A tool call's arguments as an object; what is none is its one value, under the name that Anthropic gives it."""
    try:
        value = json_value(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"INVALID_JSON": function["arguments"]}
