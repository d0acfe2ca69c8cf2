"""One question to a trace, answered in dicts."""

from __future__ import annotations

from typing import Any

from ajet_sdk.protocols import TraceReader

__all__ = ["Row", "rows"]

Row = dict[str, Any]


def rows(reader: TraceReader, sql: str, *parameters: Any) -> list[Row]:
    """The rows of one SELECT."""
    found: list[Row] = reader.query(sql, list(parameters)).to_pylist()
    return found
