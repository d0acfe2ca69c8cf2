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
from typing import Any

KEPT_WHOLE = (
    "gen_ai.input.messages", "gen_ai.output.messages", "gen_ai.system_instructions", "gen_ai.tool.definitions",
    "gen_ai.tool.call.arguments", "gen_ai.tool.call.result", "agentscope.function.input", "agentscope.function.output",
)  # fmt: skip
"""Attributes whose value is a structure, wherever it was not written as text."""


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
    attributes: dict[str, Any] = field(default_factory=dict)
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    resource: dict[str, Any] = field(default_factory=dict)
    order: int = 0
    """Where a source numbers its spans."""

    def plain(self) -> dict[str, Any]:
        """As JSON can hold it; `Span(**...)` gives it back."""
        return asdict(self)


def spans_of(value: Mapping[str, Any]) -> Iterator[Span]:
    """The spans of one JSON object. Raises ValueError, TypeError or KeyError for one that is not of a known form."""
    groups = value.get("resourceSpans", value.get("resource_spans"))
    if isinstance(groups, list):
        for group in groups:
            yield from _otlp(group)
    elif "rollout_id" in value and "span_id" in value:
        yield _lightning(value)
    elif isinstance(value.get("context"), Mapping) and "trace_id" in value["context"]:
        yield _sdk(value)
    else:
        raise ValueError("it has no resourceSpans, no context with a trace_id, no rollout_id")


def _get(value: Mapping[str, Any], name: str) -> Any:
    """A key in either spelling of protobuf's JSON."""
    return value.get(name, value.get(re.sub(r"[A-Z]", lambda m: "_" + m[0].lower(), name)))


def _otlp(group: Mapping[str, Any]) -> Iterator[Span]:
    resource = _attributes((group.get("resource") or {}).get("attributes"))
    for scope in _get(group, "scopeSpans") or []:
        for span in scope.get("spans") or []:
            yield otlp_span(span, resource)


def otlp_span(span: Mapping[str, Any], resource: dict[str, Any]) -> Span:
    """A span with OTLP's names, in either spelling of protobuf's JSON."""
    status = span.get("status") or {}
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
        events=[(str(e.get("name", "")), _attributes(e.get("attributes"))) for e in span.get("events") or []],
        resource=resource,
    )


def _attributes(pairs: Any) -> dict[str, Any]:
    if isinstance(pairs, Mapping):
        return flat(pairs)
    return flat({pair["key"]: _any_value(pair.get("value")) for pair in pairs or []})


def _any_value(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    for name in ("stringValue", "boolValue", "doubleValue", "bytesValue"):
        content = _get(value, name)
        if content is not None:
            return content
    number = _get(value, "intValue")
    if number is not None:
        return int(number)
    for name in ("arrayValue", "kvlistValue"):
        inner = _get(value, name)
        if inner is not None:
            values = inner.get("values") or []
            if name == "arrayValue":
                return [_any_value(v) for v in values]
            return {pair["key"]: _any_value(pair.get("value")) for pair in values}
    return None


def _hex(value: Any) -> str:
    """An id as hex: OTLP JSON has hex, protobuf's own JSON base64."""
    text = str(value or "").removeprefix("0x").lower()
    if re.fullmatch(r"[0-9a-f]*", text):
        return text
    try:
        return base64.b64decode(str(value), validate=True).hex()
    except (binascii.Error, ValueError):
        return text


def _nanos(value: Any) -> int | None:
    return int(value) if value not in (None, "", 0, "0") else None


def _sdk(value: Mapping[str, Any]) -> Span:
    context = value["context"]
    status = value.get("status") or {}
    code = status.get("status_code") if isinstance(status, Mapping) else value.get("status_code")
    code = code or value.get("status_code")
    message = status.get("description") if isinstance(status, Mapping) else None
    message = message or value.get("status_message")
    return Span(
        trace=_hex(context["trace_id"]),
        span_id=_hex(context["span_id"]),
        parent_id=_hex(value.get("parent_id")) or None,
        name=str(value.get("name", "")),
        start=_moment(value.get("start_time")),
        end=_moment(value.get("end_time")),
        error=str(message or "error") if str(code).upper().endswith("ERROR") else None,
        attributes=flat(value.get("attributes") or {}),
        events=[(str(e.get("name", "")), flat(e.get("attributes") or {})) for e in value.get("events") or []],
        resource=flat((value.get("resource") or {}).get("attributes") or {}),
    )


def _lightning(value: Mapping[str, Any]) -> Span:
    status = value.get("status") or {}
    failed = str(status.get("status_code", "")).upper() == "ERROR"
    return Span(
        trace=f"{value['rollout_id']}:{value.get('attempt_id', '')}",
        span_id=_hex(value["span_id"]),
        parent_id=_hex(value.get("parent_id")) or None,
        name=str(value.get("name", "")),
        start=_moment(value.get("start_time")),
        end=_moment(value.get("end_time")),
        error=str(status.get("description") or "error") if failed else None,
        attributes=flat(value.get("attributes") or {}),
        events=[(str(e.get("name", "")), flat(e.get("attributes") or {})) for e in value.get("events") or []],
        resource=flat((value.get("resource") or {}).get("attributes") or {}),
        order=int(value.get("sequence_id") or 0),
    )


def _moment(value: Any) -> int | None:
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


def flat(values: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Nested attributes as one level: objects and lists of objects by their path; plain lists stay."""
    result: dict[str, Any] = {}
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
    """A temporary file of spans, read back a trace at a time in the order in which the traces were first met."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="ajet-import-")
        self._file = sqlite3.connect(Path(self._directory.name) / "spans.sqlite")
        self._file.executescript(
            "PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF;"
            "CREATE TABLE traces (place INTEGER PRIMARY KEY, trace TEXT UNIQUE);"
            "CREATE TABLE spans (place INTEGER, span TEXT);"
        )

    def add(self, span: Span) -> None:
        """Keep a span."""
        self._file.execute("INSERT OR IGNORE INTO traces (trace) VALUES (?)", (span.trace,))
        text = json.dumps(span.plain())
        self._file.execute("INSERT INTO spans SELECT place, ? FROM traces WHERE trace = ?", (text, span.trace))

    def traces(self) -> Iterator[tuple[str, list[Span]]]:
        """Each trace and its spans."""
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
