"""One question to a trace, answered in dicts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ajet_sdk.protocols import TraceReader

__all__ = ["Row", "among", "rows"]

Row = dict[str, Any]


def rows(reader: TraceReader, sql: str, *parameters: Any) -> list[Row]:
    """The rows of one SELECT."""
    found: list[Row] = reader.query(sql, list(parameters)).to_pylist()
    return found


_FEW = 64


def among(column: str, ids: Sequence[str], first: int = 1) -> tuple[str, list[Any]]:
    """The condition that a column has one of some ids, and its parameters, numbered from `first` on.

    A few are named outright, so that of live files, and of many, only those rows and files are read.
    """
    if 0 < len(ids) <= _FEW:
        return f"{column} IN ({', '.join(f'${first + i}' for i in range(len(ids)))})", list(ids)
    return f"{column} IN (SELECT unnest(${first}::VARCHAR[]))", [list(ids)]
