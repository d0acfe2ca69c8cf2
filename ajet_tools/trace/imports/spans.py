"""Spans in the three forms in which OpenTelemetry traces are written down as JSON, as one form.

OTLP (`resourceSpans`, also with snake_case keys), the Python SDK's `span.to_json()` (also Phoenix's export of
OpenInference spans), and the rows of agent-lightning's store (`Span.model_dump()`, 0.2 and later).

Spans sorted by trace on disk: the spans of one trace may stand anywhere in a file of any size.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import sqlite3
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType

KEPT_WHOLE = (
    "gen_ai.input.messages", "gen_ai.output.messages", "gen_ai.system_instructions", "gen_ai.tool.definitions",
    "gen_ai.tool.call.arguments", "gen_ai.tool.call.result", "agentscope.function.input", "agentscope.function.output",
)  # fmt: skip
"""Attributes whose values stay nested."""


@dataclass(frozen=True)
class Span:
    """One span, its attributes flat (`a.b.0.c`), its times in nanoseconds since 1970 (None where unknown)."""

    trace: str
    """What the spans of one episode share: the trace's id, or a rollout and its attempt."""
    span_id: str
    parent_id: str | None
    name: str
    start: int | None
    end: int | None
    error: str | None = None
    """The status' message where the status is an error."""
    attributes: dict[str, object] = field(default_factory=dict)
    events: list[tuple[str, dict[str, object]]] = field(default_factory=list)
    resource: dict[str, object] = field(default_factory=dict)
    order: int = 0
    """Where a source numbers its spans."""


def spans_of(value: Mapping[str, object]) -> Iterator[Span]:
    """The spans of one JSON object. Raises ValueError, TypeError or KeyError for one that is not of a known form."""
    groups = value.get("resourceSpans", value.get("resource_spans"))
    context = value.get("context")
    if isinstance(groups, list):
        for group in groups:
            yield from _otlp(_object(group, "resourceSpans"))
    elif "rollout_id" in value and "span_id" in value:
        trace = f"{value['rollout_id']}:{value.get('attempt_id', '')}"
        value = {**value, "status": _object(value.get("status"), "status")}
        yield _sdk(value, value, trace, _integer(value.get("sequence_id") or 0))
    elif isinstance(context, Mapping) and "trace_id" in context:
        yield _sdk(value, context, _hex(context["trace_id"]))
    else:
        raise ValueError("it has no resourceSpans, no context with a trace_id, no rollout_id")


def get(value: Mapping[str, object], name: str) -> object:
    """A key in either spelling of protobuf's JSON."""
    return value.get(name, value.get(re.sub(r"[A-Z]", lambda m: "_" + m[0].lower(), name)))


def _otlp(group: Mapping[str, object]) -> Iterator[Span]:
    resource = _attributes(_object(group.get("resource"), "resource").get("attributes"))
    for scope in objects(get(group, "scopeSpans"), "scopeSpans"):
        for span in objects(scope.get("spans"), "spans"):
            yield otlp_span(span, resource)


def _object(value: object, name: str) -> Mapping[str, object]:
    """A JSON object; empty where there is none. Raises TypeError."""
    if isinstance(value, Mapping):
        return value
    if value:
        raise TypeError(f"{name} is not an object (got {type(value).__name__})")
    return {}


def objects(value: object, name: str) -> list[Mapping[str, object]]:
    """A JSON array of objects; empty where there is none. Raises TypeError."""
    if value and not isinstance(value, list):
        raise TypeError(f"{name} is not a list (got {type(value).__name__})")
    return [_object(item, f"an item of {name}") for item in value] if isinstance(value, list) else []


def _events(value: object) -> list[tuple[str, dict[str, object]]]:
    return [(str(e.get("name", "")), _attributes(e.get("attributes"))) for e in objects(value, "events")]


def otlp_span(span: Mapping[str, object], resource: dict[str, object]) -> Span:
    """A span with OTLP's names, in either spelling of protobuf's JSON."""
    status = _object(span.get("status"), "status")
    failed = status.get("code") in (2, "STATUS_CODE_ERROR", "ERROR")
    return Span(
        trace=_hex(get(span, "traceId")),
        span_id=_hex(get(span, "spanId")),
        parent_id=_hex(get(span, "parentSpanId")) or None,
        name=str(span.get("name", "")),
        start=_nanos(get(span, "startTimeUnixNano")),
        end=_nanos(get(span, "endTimeUnixNano")),
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
    return {str(pair["key"]): _any_value(pair.get("value")) for pair in objects(value, "attributes")}


def _any_value(value: object) -> object:
    if not isinstance(value, Mapping):
        return value
    for name in ("stringValue", "boolValue", "doubleValue", "bytesValue"):
        content = get(value, name)
        if content is not None:
            return content
    number = get(value, "intValue")
    if number is not None:
        return _integer(number)
    array, pairs = get(value, "arrayValue"), get(value, "kvlistValue")
    if array is not None:
        values = _object(array, "arrayValue").get("values")
        return [_any_value(v) for v in values] if isinstance(values, list) else []
    return None if pairs is None else _pairs(_object(pairs, "kvlistValue").get("values"))


def _integer(value: object) -> int:
    """A number that JSON may hold as text. Raises ValueError."""
    return int(value) if isinstance(value, int | float) else int(str(value))


def _hex(value: object) -> str:
    """An id as hex: OTLP JSON has hex, protobuf's own JSON base64."""
    text = str(value or "").removeprefix("0x").lower()
    if re.fullmatch(r"[0-9a-f]*", text):
        return text
    try:
        return base64.b64decode(str(value), validate=True).hex()
    except (binascii.Error, ValueError):
        return text


def _nanos(value: object) -> int | None:
    return _integer(value) if value not in (None, "", 0, "0") else None


def _sdk(value: Mapping[str, object], ids: Mapping[str, object], trace: str, order: int = 0) -> Span:
    """A span as the SDK writes it, also in agent-lightning's store."""
    status = value.get("status")
    status = status if isinstance(status, Mapping) else {}
    code = status.get("status_code") or value.get("status_code")
    message = status.get("description") or value.get("status_message")
    return Span(
        trace=trace,
        span_id=_hex(ids["span_id"]),
        parent_id=_hex(value.get("parent_id")) or None,
        name=str(value.get("name", "")),
        start=moment(value.get("start_time")),
        end=moment(value.get("end_time")),
        error=str(message or "error") if str(code).upper().endswith("ERROR") else None,
        attributes=flat(_object(value.get("attributes"), "attributes")),
        events=_events(value.get("events")),
        resource=flat(_object(_object(value.get("resource"), "resource").get("attributes"), "attributes")),
        order=order,
    )


def moment(value: object) -> int | None:
    """A time as nanoseconds: ISO text, seconds, or nanoseconds."""
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


def total_cost(details: object) -> float | None:
    """The total of costs by kind: as it is given, else their sum. None where there are none, or one is no number."""
    if not isinstance(details, Mapping) or not details:
        return None
    try:
        return float(details["total"]) if "total" in details else sum(map(float, details.values()))
    except (TypeError, ValueError):
        return None


def flat(values: Mapping[str, object], before: str = "") -> dict[str, object]:
    """Nested attributes as one level: objects and lists of objects by their path; plain lists stay."""
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


class Spool:
    """A temporary file of spans that returns them by trace, in the order of the traces' first spans."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="ajet-import-")
        self._file = sqlite3.connect(Path(self._directory.name) / "spans.sqlite")
        self._file.executescript(
            "PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF;"
            "CREATE TABLE traces (place INTEGER PRIMARY KEY, trace TEXT UNIQUE);"
            "CREATE TABLE spans (place INTEGER, span TEXT);"
        )

    def add(self, span: Span) -> None:
        self._file.execute("INSERT OR IGNORE INTO traces (trace) VALUES (?)", (span.trace,))
        text = json.dumps(asdict(span))
        self._file.execute("INSERT INTO spans SELECT place, ? FROM traces WHERE trace = ?", (text, span.trace))

    def traces(self) -> Iterator[tuple[str, list[Span]]]:
        self._file.execute("CREATE INDEX by_place ON spans (place)")
        for place, trace in self._file.execute("SELECT place, trace FROM traces ORDER BY place"):
            span_rows = self._file.execute("SELECT span FROM spans WHERE place = ? ORDER BY rowid", (place,))
            yield trace, [_span(text) for (text,) in span_rows]

    def __enter__(self) -> Spool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()
        self._directory.cleanup()


def _span(text: str) -> Span:
    plain = json.loads(text)
    return Span(**{**plain, "events": [(name, attributes) for name, attributes in plain["events"]]})
