"""Parses spans of OpenTelemetry: OTLP (`resourceSpans`, also with snake_case keys), and
`span.to_json()` of the Python SDK (also Phoenix's export of OpenInference spans)."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone

KEPT_WHOLE = (
    "gen_ai.input.messages",
    "gen_ai.output.messages",
    "gen_ai.system_instructions",
    "gen_ai.tool.definitions",
    "gen_ai.tool.call.arguments",
    "gen_ai.tool.call.result",
    "agentscope.function.input",
    "agentscope.function.output",
)
"""Attributes with nested values."""


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


def spans_of(value: Mapping[str, object]) -> Iterator[Span]:
    """Parse the spans of an OpenTelemetry row. Raises ValueError, TypeError or KeyError for an
    unknown format."""
    groups = value.get("resourceSpans", value.get("resource_spans"))
    context = value.get("context")
    if isinstance(groups, list):
        for group in groups:
            yield from _otlp(_object(group, "resourceSpans"))
    elif isinstance(context, Mapping) and "trace_id" in context:
        yield _sdk(value, context)
    else:
        raise ValueError("it has neither resourceSpans nor a context with a trace_id")


def _get(value: Mapping[str, object], name: str) -> object:
    """Look up a key in camelCase or snake_case."""
    return value.get(name, value.get(re.sub(r"[A-Z]", lambda m: "_" + m[0].lower(), name)))


def _otlp(group: Mapping[str, object]) -> Iterator[Span]:
    resource = _attributes(_object(group.get("resource"), "resource").get("attributes"))
    for scope in _objects(_get(group, "scopeSpans"), "scopeSpans"):
        for span in _objects(scope.get("spans"), "spans"):
            yield otlp_span(span, resource)


def _object(value: object, name: str) -> Mapping[str, object]:
    """Return a JSON object, or an empty one. Raises TypeError."""
    if isinstance(value, Mapping):
        return value
    if value:
        raise TypeError(f"{name} is not an object (got {type(value).__name__})")
    return {}


def _objects(value: object, name: str) -> list[Mapping[str, object]]:
    """Return a JSON array of objects, or an empty one. Raises TypeError."""
    if value and not isinstance(value, list):
        raise TypeError(f"{name} is not a list (got {type(value).__name__})")
    return (
        [_object(item, f"an item of {name}") for item in value] if isinstance(value, list) else []
    )


def _events(value: object) -> list[tuple[str, dict[str, object]]]:
    return [
        (str(e.get("name", "")), _attributes(e.get("attributes")))
        for e in _objects(value, "events")
    ]


def otlp_span(span: Mapping[str, object], resource: dict[str, object]) -> Span:
    """Parse a span with OTLP's names, in either spelling of protobuf's JSON."""
    status = _object(span.get("status"), "status")
    failed = status.get("code") in (2, "STATUS_CODE_ERROR", "ERROR")
    return Span(
        trace=_hex(_get(span, "traceId")),
        span_id=_hex(_get(span, "spanId")),
        parent_id=_hex(_get(span, "parentSpanId")) or None,
        name=str(span.get("name", "")),
        start=_nanos(_get(span, "startTimeUnixNano")),
        end=_nanos(_get(span, "endTimeUnixNano")),
        error=str(status.get("message") or "error") if failed else None,
        attributes=_attributes(span.get("attributes")),
        events=_events(span.get("events")),
        resource=resource,
    )


def _attributes(pairs: object) -> dict[str, object]:
    if isinstance(pairs, Mapping):
        return flat(pairs)
    return flat(_pairs(pairs))


def _pairs(value: object) -> dict[str, object]:
    return {
        str(pair["key"]): _any_value(pair.get("value")) for pair in _objects(value, "attributes")
    }


def _any_value(value: object) -> object:
    if not isinstance(value, Mapping):
        return value
    for name in ("stringValue", "boolValue", "doubleValue", "bytesValue"):
        content = _get(value, name)
        if content is not None:
            return content
    number = _get(value, "intValue")
    if number is not None:
        return _integer(number)
    array, pairs = _get(value, "arrayValue"), _get(value, "kvlistValue")
    if array is not None:
        values = _object(array, "arrayValue").get("values")
        return [_any_value(v) for v in values] if isinstance(values, list) else []
    return None if pairs is None else _pairs(_object(pairs, "kvlistValue").get("values"))


def _integer(value: object) -> int:
    """Parse a number, possibly written as text. Raises ValueError."""
    return int(value) if isinstance(value, int | float) else int(str(value))


def _hex(value: object) -> str:
    """Normalize an id to hex: OTLP JSON uses hex, protobuf's JSON base64."""
    text = str(value or "").removeprefix("0x").lower()
    if re.fullmatch(r"[0-9a-f]*", text):
        return text
    try:
        return base64.b64decode(str(value), validate=True).hex()
    except (binascii.Error, ValueError):
        return text


def _nanos(value: object) -> int | None:
    return _integer(value) if value not in (None, "", 0, "0") else None


def _sdk(value: Mapping[str, object], context: Mapping[str, object]) -> Span:
    """Parse a span of the SDK."""
    status = value.get("status")
    status = status if isinstance(status, Mapping) else {}
    code = status.get("status_code") or value.get("status_code")
    message = status.get("description") or value.get("status_message")
    resource = _object(value.get("resource"), "resource")
    return Span(
        trace=_hex(context["trace_id"]),
        span_id=_hex(context["span_id"]),
        parent_id=_hex(value.get("parent_id")) or None,
        name=str(value.get("name", "")),
        start=_moment(value.get("start_time")),
        end=_moment(value.get("end_time")),
        error=str(message or "error") if str(code).upper().endswith("ERROR") else None,
        attributes=flat(_object(value.get("attributes"), "attributes")),
        events=_events(value.get("events")),
        resource=flat(_object(resource.get("attributes"), "attributes")),
    )


def _moment(value: object) -> int | None:
    """Convert a time (ISO text, seconds or nanoseconds) to nanoseconds."""
    if value in (None, ""):
        return None
    if isinstance(value, int | float):
        return int(value) if value > 1e14 else int(value * 1e6) * 1000
    text = str(value)
    if text.isdigit():
        return int(text)
    parsed = datetime.fromisoformat(text.replace("Z", "+00:00"))
    parsed = parsed if parsed.tzinfo else parsed.replace(tzinfo=timezone.utc)
    return int(parsed.timestamp() * 1e6) * 1000


def flat(values: Mapping[str, object], before: str = "") -> dict[str, object]:
    """Flatten nested attributes: objects and lists of objects by path; plain lists are kept."""
    result: dict[str, object] = {}
    for key, value in values.items():
        path = f"{before}{key}"
        if path in KEPT_WHOLE:
            result[path] = value
        elif isinstance(value, Mapping) and value:
            result |= flat(value, f"{path}.")
        elif isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            for i, item in enumerate(value):
                result |= flat(item, f"{path}.{i}.")
        else:
            result[path] = value
    return result
