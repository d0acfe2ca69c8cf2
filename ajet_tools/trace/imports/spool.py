"""Spans sorted by trace on disk: the spans of one trace may stand anywhere in a file of any size."""

from __future__ import annotations

import json
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from ajet_tools.trace.imports.spans import Span

__all__ = ["Spool"]


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
            found = self._file.execute("SELECT span FROM spans WHERE place = ? ORDER BY rowid", (place,))
            yield trace, [_span(text) for (text,) in found]

    def __enter__(self) -> Spool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()
        self._directory.cleanup()


def _span(text: str) -> Span:
    plain = json.loads(text)
    return Span(**{**plain, "events": [(name, attributes) for name, attributes in plain["events"]]})
