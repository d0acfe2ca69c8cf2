"""AgentScope Studio's database (`database.sqlite`): its span table, which has OTLP's names and GenAI attributes.

Runs are Studio's runs; messages shown in its chat window are not read, for the calls hold them.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import datetime, timezone
from pathlib import Path

from ajet_sdk.capture.events import parsed
from ajet_sdk.errors import TraceError
from ajet_sdk.tasks.json_rows import BadRows
from ajet_sdk.types import Run
from ajet_tools.trace.imports.otlp import parse_traces
from ajet_tools.trace.imports.sink import UNKNOWN_TIME, Parsed
from ajet_tools.trace.imports.spans import Span, otlp_span


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


def _run(row: Mapping[str, object]) -> Run:
    try:
        at = datetime.fromisoformat(str(row.get("timestamp")))  # `2025-01-31 12:00:00.000`
    except ValueError:
        at = UNKNOWN_TIME
    at = at if at.tzinfo else at.replace(tzinfo=timezone.utc)
    name = "/".join(str(row[key]) for key in ("project", "name") if row.get(key))
    status = {"running": "interrupted", "done": "finished"}.get(str(row.get("status", "")).lower(), "finished")
    return Run(run_id=str(row["id"]), name=name, status=status, started_at=at)  # type: ignore[arg-type]


def _traces(file: sqlite3.Connection) -> Iterator[tuple[str, list[Span]]]:
    for (trace,) in file.execute("SELECT traceId FROM span_table GROUP BY traceId ORDER BY min(startTimeUnixNano)"):
        span_rows = file.execute("SELECT * FROM span_table WHERE traceId = ?", (trace,))
        yield str(trace), [_span(dict(row)) for row in span_rows]


def _span(row: Mapping[str, object]) -> Span:
    """A row as a span; nested columns are JSON texts."""
    structures = {name: parsed(row.get(name)) for name in ("attributes", "events", "status")}
    return otlp_span({**row, **structures}, {"ajet.run_id": row["runId"]} if row.get("runId") else {})
