"""Converts the values of a query's result to Python and JSON.

DuckDB's HUGEINT, which every sum of integers is, comes from Arrow as a decimal; a date may be infinite or beyond the
year 9999, which Python's is not; an interval has months, which are no number of days.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date, timedelta
from decimal import Decimal
from typing import Any

import pyarrow as pa

_AT_ONCE = 4096
_UNITS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_DAY = 86_400


def rows_of(table: pa.Table) -> Iterator[dict[str, object]]:
    """The rows of a result, some thousand at a time.

    Whole numbers are int, whatever their type there, and other decimals Decimal. What Python's types cannot hold
    (infinite dates and times, years beyond 9999, intervals) is text as DuckDB writes it.
    """
    for start in range(0, len(table), _AT_ONCE):
        part = table.slice(start, _AT_ONCE)
        columns = [_values(column) for column in part.columns]
        yield from (dict(zip(table.column_names, row, strict=True)) for row in zip(*columns, strict=True))


def _values(column: pa.ChunkedArray) -> list[object]:
    if not _is_plain(column.type):
        return [value_of(scalar) for scalar in column]
    try:
        values: list[object] = column.to_pylist()
        return values
    except (OverflowError, ValueError):  # out of the range of Python's types
        return [value_of(scalar) for scalar in column]


def _is_plain(kind: pa.DataType) -> bool:
    """Whether Arrow's own conversion of a type is right, unless it fails."""
    types = pa.types
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _is_plain(kind.value_type)
    if types.is_struct(kind):
        return all(_is_plain(field.type) for field in kind)
    return not (types.is_decimal(kind) or types.is_interval(kind) or types.is_map(kind) or types.is_union(kind))


def value_of(scalar: pa.Scalar) -> Any:
    """A value of any type, as `rows_of` has it."""
    kind, types = scalar.type, pa.types
    if not scalar.is_valid:
        return None
    if types.is_union(kind) or types.is_dictionary(kind) or isinstance(kind, pa.BaseExtensionType):
        return value_of(scalar.value)
    if types.is_map(kind):
        pairs = [(value_of(item[0]), value_of(item[1])) for item in scalar.values]
        return dict(pairs) if all(isinstance(key, str) for key, _ in pairs) else [list(pair) for pair in pairs]
    if types.is_struct(kind):
        return {field.name: value_of(scalar[index]) for index, field in enumerate(kind)}
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return [value_of(item) for item in scalar.values]
    if types.is_interval(kind):
        return _interval(scalar.as_py())
    if types.is_date(kind) or types.is_timestamp(kind):
        return _time(scalar)
    value = scalar.as_py()
    return int(value) if isinstance(value, Decimal) and types.is_decimal(kind) and kind.scale == 0 else value


def _time(scalar: pa.Scalar) -> Any:
    try:
        return scalar.as_py()
    except (OverflowError, ValueError):
        kind, count = scalar.type, scalar.value
    unit = 1 if pa.types.is_date32(kind) else _UNITS[kind.unit] * _DAY if pa.types.is_timestamp(kind) else 86_400_000
    most = 2**31 - 1 if pa.types.is_date32(kind) else 2**63 - 1
    if abs(count) == most:
        return "infinity" if count > 0 else "-infinity"
    days, remainder = divmod(count, unit)
    year, month, day = _calendar(days)
    text = f"{year:04d}-{month:02d}-{day:02d}" if year > 0 else f"{1 - year:04d}-{month:02d}-{day:02d} (BC)"
    if not pa.types.is_timestamp(kind):
        return text
    seconds, fraction = divmod(remainder * _DAY, unit)
    digits = f"{fraction * 10**9 // unit:09d}".rstrip("0")
    clock = f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}{f'.{digits}' if digits else ''}"
    return f"{text} {clock}{'+00' if kind.tz else ''}"


def _calendar(days: int) -> tuple[int, int, int]:
    """Year, month and day of a day since 1970-01-01, by the Gregorian calendar before its time, too.

    A cycle of 400 years has 146,097 days, so that the date in the cycle from 2000 on is Python's.
    """
    cycles, days_left = divmod(days - 10_957, 146_097)
    inside = date(2000, 1, 1) + timedelta(days=days_left)
    return inside.year + 400 * cycles, inside.month, inside.day


def _interval(value: pa.MonthDayNano) -> str:
    """`1 year 2 months 3 days 04:05:06`, as DuckDB writes it."""
    years, months = divmod(abs(value.months), 12)
    sign = -1 if value.months < 0 else 1
    counts = ((sign * years, "year"), (sign * months, "month"), (value.days, "day"))
    parts = [f"{n} {name}{'' if abs(n) == 1 else 's'}" for n, name in counts if n]
    seconds, nanoseconds = divmod(abs(value.nanoseconds), 10**9)
    digits = f"{nanoseconds:09d}".rstrip("0")
    clock = f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}{f'.{digits}' if digits else ''}"
    if value.nanoseconds or not parts:
        parts.append(f"{'-' if value.nanoseconds < 0 else ''}{clock}")
    return " ".join(parts)
