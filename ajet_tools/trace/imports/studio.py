"""AgentScope Studio's database (`database.sqlite`): its span table, in the layouts of 1.0 (2025) and since.

The older layout has `parentId`, ISO times and nested attributes of AgentScope's own; the newer one OTLP's names and
GenAI attributes. Runs are Studio's runs; messages shown in its chat window are not read, for the calls hold them.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ajet_sdk.errors import TraceError
from ajet_sdk.tasks.json_rows import BadRows
from ajet_sdk.types import Run
from ajet_tools.trace.imports.otlp import parse_traces
from ajet_tools.trace.imports.sink import UNKNOWN_TIME, Parsed, text_of
from ajet_tools.trace.imports.spans import Span, flat


def is_sqlite(start: bytes) -> bool:
    """Whether a file begins as an SQLite database does."""
    return start.startswith(b"SQLite format 3\0")


def read(path: Path, bad: BadRows, left_out: Counter[str]) -> Iterator[Parsed]:
    """Studio's runs, and an episode for each trace. Raises TraceError where the file is no database of Studio's."""
    try:
        file = sqlite3.connect(f"file:{path.resolve().as_posix()}?mode=ro", uri=True)
        try:
            file.row_factory = sqlite3.Row
            tables = {row["name"] for row in file.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            if "span_table" not in tables:
                raise TraceError(f"{path.name} is not an AgentScope Studio database: it has no span_table")
            if "run_table" in tables:
                yield from (Parsed(run=_run(dict(row))) for row in file.execute("SELECT * FROM run_table"))
            yield from parse_traces(_traces(file), bad, left_out)
        finally:
            file.close()
    except sqlite3.Error as error:
        raise TraceError(f"cannot read {path.name} as an SQLite database: {error}") from error


def _run(row: Mapping[str, Any]) -> Run:
    at = _moment(row.get("timestamp"))
    name = "/".join(str(row[key]) for key in ("project", "name") if row.get(key))
    status = {"running": "interrupted", "done": "finished"}.get(str(row.get("status", "")).lower(), "finished")
    return Run(run_id=str(row["id"]), name=name, status=status, started_at=at)  # type: ignore[arg-type]


def _traces(file: sqlite3.Connection) -> Iterator[tuple[str, list[Span]]]:
    columns = {row["name"] for row in file.execute("PRAGMA table_info(span_table)")}
    start = "startTimeUnixNano" if "startTimeUnixNano" in columns else "startTime"
    for (trace,) in file.execute(f"SELECT traceId FROM span_table GROUP BY traceId ORDER BY min({start})"):
        found = file.execute("SELECT * FROM span_table WHERE traceId = ?", (trace,))
        yield str(trace), [_span(dict(row)) for row in found]


def _span(row: Mapping[str, Any]) -> Span:
    status = _json(row.get("status"))
    code = status.get("code") if isinstance(status, Mapping) else status
    message = status.get("message") if isinstance(status, Mapping) else row.get("statusMessage")
    given = _json(row.get("attributes"))
    return Span(
        trace=str(row["traceId"]),
        span_id=str(row.get("spanId") or row["id"]),
        parent_id=text_of(row.get("parentSpanId", row.get("parentId"))),
        name=str(row.get("name") or ""),
        start=_nanos(row.get("startTimeUnixNano", row.get("startTime"))),
        end=_nanos(row.get("endTimeUnixNano", row.get("endTime"))),
        error=str(message or "error") if code in (2, "2", "ERROR", "error", "STATUS_CODE_ERROR") else None,
        attributes=flat(given if isinstance(given, Mapping) else {}),
        resource={"ajet.run_id": row["runId"]} if row.get("runId") else {},
        events=_events(_json(row.get("events"))),
    )


def _events(value: Any) -> list[tuple[str, dict[str, Any]]]:
    found = [event for event in value if isinstance(event, Mapping)] if isinstance(value, list) else []
    return [(str(event.get("name", "")), flat(event.get("attributes") or {})) for event in found]


def _json(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def _nanos(value: Any) -> int | None:
    if value in (None, ""):
        return None
    text = str(value)
    return int(text) if text.isdigit() else int(_moment(text).timestamp() * 1e6) * 1000


def _moment(value: Any) -> datetime:
    """Studio's run times: ISO, or `2025-01-31 12:00:00.000`."""
    try:
        parsed = datetime.fromisoformat(str(value).replace("Z", "+00:00"))
    except ValueError:
        return UNKNOWN_TIME
    return parsed if parsed.tzinfo else parsed.replace(tzinfo=timezone.utc)
