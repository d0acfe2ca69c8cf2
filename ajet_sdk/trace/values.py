"""Converts values of a query's result to Python and JSON.

DuckDB's HUGEINT, the type of sums of integers, is a decimal in Arrow. Values outside of Python's types become text in
DuckDB's format: intervals, whose months have no fixed number of days, infinite dates, and dates after the year 9999.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal

import duckdb
import pyarrow as pa

_AT_ONCE = 4096
_TIMES = re.compile(r"\b(INTERVAL|DATE|TIMESTAMP\w*( WITH TIME ZONE)?)\b")
"""DuckDB types with values outside of Python's types."""


def rows_of(table: pa.Table) -> Iterator[dict[str, object]]:
    """Yields rows of a result, converted in batches. Whole decimals become int, others Decimal."""
    for start in range(0, len(table), _AT_ONCE):
        columns = [values_of(column) for column in table.slice(start, _AT_ONCE).columns]
        yield from (dict(zip(table.column_names, row, strict=True)) for row in zip(*columns, strict=True))


def values_of(column: pa.ChunkedArray) -> list[object]:
    """Converts a column of any type to Python values."""
    kind = str(column.type)
    if "interval" in kind:
        column = _with_times_as_text(column)
    try:
        values: list[object] = column.to_pylist()
    except (OverflowError, ValueError):  # a time out of the range of Python's types
        values = _with_times_as_text(column).to_pylist()
    return [_plain(value) for value in values] if "decimal" in kind or "map" in kind else values


def _with_times_as_text(column: pa.ChunkedArray) -> pa.ChunkedArray:
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        relation = connection.from_arrow(pa.table({"value": column}))
        kind = _TIMES.sub("VARCHAR", str(relation.types[0]))
        return relation.project(f"value::{kind} AS value").to_arrow_table()["value"]


def _plain(value: object) -> object:
    """Converts whole decimals to int, and maps (lists of pairs) with text keys to dict."""
    if isinstance(value, Decimal):
        return int(value) if value.as_tuple().exponent == 0 else value
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if not isinstance(value, list):
        return value
    if value and all(isinstance(item, tuple) for item in value):
        pairs = [(_plain(key), _plain(item)) for key, item in value]
        return dict(pairs) if all(isinstance(key, str) for key, _ in pairs) else [list(pair) for pair in pairs]
    return [_plain(item) for item in value]
