"""Parses spans of OpenTelemetry, LangSmith and Langfuse, and groups them by trace on disk.

OpenTelemetry: OTLP (`resourceSpans`, also with snake_case keys), `span.to_json()` of the Python SDK
(also Phoenix's export of OpenInference spans), and rows of agent-lightning's store
(`Span.model_dump()`, 0.2 and later). LangSmith: `Run.model_dump_json()` of `Client.list_runs`.
Langfuse: observations (pages of the API, and traces with their observations) in either spelling of
keys; its SDK sends OTLP.
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

from ajet_sdk.capture.events import first_of

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
    """Trace id, or rollout and attempt: common to the spans of an episode."""
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
    order: int = 0
    """Sequence number in the source."""


def spans_of(value: Mapping[str, object]) -> Iterator[Span]:
    """Parse the spans of an OpenTelemetry row. Raises ValueError, TypeError or KeyError for an
    unknown format."""
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


def _sdk(
    value: Mapping[str, object], ids: Mapping[str, object], trace: str, order: int = 0
) -> Span:
    """Parse a span of the SDK or of agent-lightning's store."""
    status = value.get("status")
    status = status if isinstance(status, Mapping) else {}
    code = status.get("status_code") or value.get("status_code")
    message = status.get("description") or value.get("status_message")
    return Span(
        trace=trace,
        span_id=_hex(ids["span_id"]),
        parent_id=_hex(value.get("parent_id")) or None,
        name=str(value.get("name", "")),
        start=_moment(value.get("start_time")),
        end=_moment(value.get("end_time")),
        error=str(message or "error") if str(code).upper().endswith("ERROR") else None,
        attributes=flat(_object(value.get("attributes"), "attributes")),
        events=_events(value.get("events")),
        resource=flat(
            _object(_object(value.get("resource"), "resource").get("attributes"), "attributes")
        ),
        order=order,
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


def total_cost(details: object) -> float | None:
    """Return the `total` of costs by kind, or else their sum; None without costs, or for invalid
    numbers."""
    if not isinstance(details, Mapping) or not details:
        return None
    try:
        return float(details["total"]) if "total" in details else sum(map(float, details.values()))
    except (TypeError, ValueError):
        return None


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


LANGSMITH = ("run_type", "trace_id")
LANGFUSE = (
    ("traceId", "startTime"),
    ("trace_id", "start_time", "project_id"),
    ("observations", "projectId"),
)
"""Keys that identify the format of a row."""


def observed_spans(row: Mapping[str, object]) -> Iterator[Span]:
    """Parse the spans of a LangSmith or Langfuse row. Raises ValueError, TypeError or KeyError for
    another format."""
    if "run_type" in row:
        yield _run(row)
        for child in _objects(row.get("child_runs"), "child_runs"):
            yield from observed_spans(child)
    elif "data" in row:
        for observation in _objects(row["data"], "data"):
            yield from observed_spans(observation)
    elif "observations" in row:
        yield _observation(
            {**row, "traceId": row["id"], "startTime": _get(row, "timestamp"), "type": "TRACE"}
        )
        for observation in _objects(row["observations"], "observations"):
            yield _observation(observation, str(row["id"]))
    else:
        yield _observation(row)


def _run(run: Mapping[str, object]) -> Span:
    extra, asked, answered = (_mapping(run.get(name)) for name in ("extra", "inputs", "outputs"))
    about = _mapping(extra.get("metadata"))
    reply = _mapping(answered["output"]) if answered.keys() == {"output"} else answered
    usage = _mapping(reply.get("usage_metadata") or reply.get("usage"))
    cost = first_of({**usage, "of run": run.get("total_cost")}, ("of run", "total_cost", "cost"))
    settings = {
        name: value for name, value in asked.items() if name not in ("messages", "tools", "model")
    }
    settings |= _mapping(extra.get("invocation_params"))
    is_call = run["run_type"] == "llm"
    return Span(
        trace=_bare_id(run["trace_id"]),
        span_id=_bare_id(run["id"]),
        parent_id=_bare_id(run.get("parent_run_id")) or None,
        name=str(run.get("name", "")),
        start=_moment(run.get("start_time")),
        end=_moment(run.get("end_time") or run.get("start_time")),
        error=str(run["error"]).strip() if run.get("error") else None,
        attributes=_present(
            {
                "openinference.span.kind": run["run_type"],
                "input.value": asked,
                "output.value": (
                    answered.get("output") if answered.keys() == {"output"} else answered
                ),
                "gen_ai.request.model": (
                    asked.get("model") or about.get("ls_model_name") if is_call else None
                ),
                "gen_ai.response.id": answered.get("id") if is_call else None,
                "llm.invocation_parameters": settings if is_call else None,
                "llm.token_count.prompt": first_of(
                    {**run, **usage}, ("input_tokens", "prompt_tokens")
                ),
                "llm.token_count.completion": first_of(
                    {**run, **usage}, ("output_tokens", "completion_tokens")
                ),
                "llm.cost.total": total_cost({"total": cost}),
            }
        ),
        events=[
            _score(name, _mapping(of).get("avg"))
            for name, of in _mapping(run.get("feedback_stats")).items()
        ],
    )


def _observation(of: Mapping[str, object], parent: str | None = None) -> Span:
    usage = _mapping(_get(of, "usageDetails") or of.get("usage"))
    costs = _get(of, "totalCost"), _get(of, "calculatedTotalCost"), _get(usage, "totalCost")
    cost = next((cost for cost in costs if cost is not None), None)
    failed = of.get("level") == "ERROR"
    return Span(
        trace=_bare_id(_get(of, "traceId")),
        span_id=_bare_id(of["id"]),
        parent_id=_bare_id(_get(of, "parentObservationId")) or parent,
        name=str(of.get("name") or ""),
        start=_moment(_get(of, "startTime")),
        end=_moment(_get(of, "endTime") or _get(of, "startTime")),
        error=str(_get(of, "statusMessage") or "error") if failed else None,
        attributes=_present(
            {
                "langfuse.observation.type": of["type"],
                "input.value": of.get("input"),
                "output.value": of.get("output"),
                "gen_ai.request.model": _get(of, "model") or _get(of, "providedModelName"),
                "llm.invocation_parameters": _get(of, "modelParameters"),
                "llm.token_count.prompt": usage.get("input"),
                "llm.token_count.completion": usage.get("output"),
                "llm.cost.total": total_cost(
                    {"total": cost} if cost is not None else _get(of, "costDetails")
                ),
            }
        ),
        events=[
            _score(s["name"], s.get("value"), s.get("comment"))
            for s in _objects(of.get("scores"), "scores")
        ],
    )


def _score(name: object, value: object, comment: object = None) -> tuple[str, dict[str, object]]:
    of = {"name": name, "score.value": value, "explanation": comment}
    return "gen_ai.evaluation.result", {
        f"gen_ai.evaluation.{key}": item for key, item in of.items()
    }


def _bare_id(value: object) -> str:
    return str(value or "").replace("-", "")


def _mapping(value: object) -> Mapping[str, object]:
    return value if isinstance(value, Mapping) else {}


def _present(values: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in values.items() if value is not None}


class Spool:
    """A temporary file that groups spans by trace, in order of first appearance, as a source may
    mix its traces."""

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
        self._file.execute(
            "INSERT INTO spans SELECT place, ? FROM traces WHERE trace = ?", (text, span.trace)
        )

    def traces(self) -> Iterator[tuple[str, list[Span]]]:
        self._file.execute("CREATE INDEX by_place ON spans (place)")
        for place, trace in self._file.execute("SELECT place, trace FROM traces ORDER BY place"):
            span_rows = self._file.execute(
                "SELECT span FROM spans WHERE place = ? ORDER BY rowid", (place,)
            )
            yield trace, [_span(text) for (text,) in span_rows]

    def __enter__(self) -> Spool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._file.close()
        self._directory.cleanup()


def _span(text: str) -> Span:
    plain = json.loads(text)
    return Span(**{**plain, "events": [(name, attributes) for name, attributes in plain["events"]]})
