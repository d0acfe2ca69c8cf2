"""Parses spans of OpenTelemetry: OTLP (`resourceSpans`, also with snake_case keys), and
`span.to_json()` of the Python SDK (also Phoenix's export of OpenInference spans)."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

_NESTED = (
    "gen_ai.input.messages",
    "gen_ai.output.messages",
    "gen_ai.system_instructions",
    "gen_ai.tool.definitions",
    "gen_ai.tool.call.arguments",
    "gen_ai.tool.call.result",
    "agentscope.function.input",
    "agentscope.function.output",
)
"""Attributes whose nested values are one value."""


@dataclass(frozen=True)
class Span:
    """A span with flat attributes (`a.b.0.c`) and times in nanoseconds since 1970 (None if
    unknown)."""

    trace: str
    span_id: str
    parent_id: str | None
    name: str
    start: int | None
    end: int | None
    error: str | None = None
    """Message of an error status."""
    attributes: dict[str, object] = field(default_factory=dict)
    events: list[tuple[str, dict[str, object]]] = field(default_factory=list)
    resource: dict[str, object] = field(default_factory=dict)


def spans_of(value: Mapping[str, Any]) -> Iterator[Span]:
    """Parse the spans of an OpenTelemetry row. Raises ValueError, TypeError, KeyError or
    AttributeError for an unknown format."""
    groups = _get(value, "resourceSpans")
    context = value.get("context")
    if isinstance(groups, list):
        for group in _objects(groups, "resourceSpans"):
            resource = _attributes(_object(group.get("resource"), "resource").get("attributes"))
            for scope in _objects(_get(group, "scopeSpans"), "scopeSpans"):
                for span in _objects(scope.get("spans"), "spans"):
                    yield otlp_span(span, resource)
    elif isinstance(context, Mapping) and "trace_id" in context:
        yield _sdk_span(value, context)
    else:
        raise ValueError("it has neither resourceSpans nor a context with a trace_id")


def _get(value: Mapping[str, Any], name: str) -> Any:
    """Look up a key in camelCase or snake_case."""
    if name in value:
        return value[name]
    return value.get(re.sub(r"[A-Z]", lambda letter: f"_{letter[0].lower()}", name))


def _object(value: object, name: str) -> Mapping[str, Any]:
    """Return a JSON object, or an empty one for an absent value. Raises TypeError."""
    if value and not isinstance(value, Mapping):
        raise TypeError(f"{name} is not an object (got {type(value).__name__})")
    return value if isinstance(value, Mapping) else {}


def _objects(value: object, name: str) -> list[Mapping[str, Any]]:
    """Return a JSON array of objects, or an empty one for an absent value. Raises TypeError."""
    if value and not isinstance(value, list):
        raise TypeError(f"{name} is not a list (got {type(value).__name__})")
    if isinstance(value, list):
        return [_object(item, name) for item in value]
    return []


def otlp_span(span: Mapping[str, Any], resource: dict[str, object]) -> Span:
    """Parse a span with OTLP's names, in either spelling of protobuf's JSON."""
    status = _object(span.get("status"), "status")
    is_error = status.get("code") in (2, "STATUS_CODE_ERROR", "ERROR")
    return Span(
        trace=_hex(_get(span, "traceId")),
        span_id=_hex(_get(span, "spanId")),
        parent_id=_hex(_get(span, "parentSpanId")) or None,
        name=str(span.get("name", "")),
        start=moment(_get(span, "startTimeUnixNano")),
        end=moment(_get(span, "endTimeUnixNano")),
        error=str(status.get("message") or "error") if is_error else None,
        attributes=_attributes(span.get("attributes")),
        events=_events(span.get("events")),
        resource=resource,
    )


def _sdk_span(value: Mapping[str, Any], context: Mapping[str, object]) -> Span:
    """Parse a span of the SDK, or of Phoenix, whose status is a text."""
    status = value.get("status")
    status = status if isinstance(status, Mapping) else {}
    code = status.get("status_code") or value.get("status_code")
    message = status.get("description") or value.get("status_message")
    return Span(
        trace=_hex(context["trace_id"]),
        span_id=_hex(context["span_id"]),
        parent_id=_hex(value.get("parent_id")) or None,
        name=str(value.get("name", "")),
        start=moment(value.get("start_time")),
        end=moment(value.get("end_time")),
        error=str(message or "error") if str(code).upper().endswith("ERROR") else None,
        attributes=_attributes(value.get("attributes")),
        events=_events(value.get("events")),
        resource=_attributes(_object(value.get("resource"), "resource").get("attributes")),
    )


def _events(value: object) -> list[tuple[str, dict[str, object]]]:
    events = []
    for event in _objects(value, "events"):
        events.append((str(event.get("name", "")), _attributes(event.get("attributes"))))
    return events


def _attributes(value: object) -> dict[str, object]:
    """Return flat attributes, of an object or of OTLP's pairs of key and value."""
    if not isinstance(value, Mapping):
        value = _pairs(value)
    flat: dict[str, object] = {}
    _flatten(value, "", flat)
    return flat


def _flatten(value: Any, path: str, into: dict[str, object]) -> None:
    """Objects and lists of objects are flattened by path; lists of other values are kept."""
    items: list[tuple[object, object]] = []
    if path not in _NESTED:
        if isinstance(value, Mapping):
            items = list(value.items())
        elif isinstance(value, list) and all(isinstance(item, Mapping) for item in value):
            items = list(enumerate(value))
    if not items and path:
        into[path] = value
    for key, item in items:
        _flatten(item, f"{path}.{key}" if path else str(key), into)


def _pairs(value: object) -> dict[str, object]:
    pairs = {}
    for pair in _objects(value, "attributes"):
        pairs[str(pair["key"])] = _any_value(pair.get("value"))
    return pairs


def _any_value(value: object) -> object:
    if not isinstance(value, Mapping):
        return value
    for name in ("stringValue", "boolValue", "doubleValue", "bytesValue"):
        if _get(value, name) is not None:
            return _get(value, name)
    number = _get(value, "intValue")
    if number is not None:
        return int(number)  # protobuf's JSON writes it as text
    array = _get(value, "arrayValue")
    if array is not None:
        return [_any_value(item) for item in _object(array, "arrayValue").get("values") or ()]
    pairs = _get(value, "kvlistValue")
    if pairs is None:
        return None
    return _pairs(_object(pairs, "kvlistValue").get("values"))


def _hex(value: object) -> str:
    """Normalize an id to hex: OTLP JSON uses hex, protobuf's JSON base64."""
    text = str(value or "").removeprefix("0x").lower()
    if re.fullmatch(r"[0-9a-f]*", text):
        return text
    try:
        return base64.b64decode(str(value), validate=True).hex()
    except (binascii.Error, ValueError):
        return text


def moment(value: object) -> int | None:
    """Convert a time (ISO text, seconds or nanoseconds) to nanoseconds since 1970."""
    if value in (None, "", 0, "0"):
        return None
    if isinstance(value, int | float):
        # seconds until the year 3 million, or nanoseconds since 1970
        if value > 1e14:
            return int(value)
        return int(value * 1e6) * 1000
    if str(value).isdigit():
        return int(str(value))
    time = datetime.fromisoformat(str(value).replace("Z", "+00:00"))
    if time.tzinfo is None:
        time = time.replace(tzinfo=timezone.utc)
    return int(time.timestamp() * 1e6) * 1000
