"""The tables of a trace, and query results as files."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from uuid import uuid4

import pyarrow as pa

from ajet_sdk.errors import ConfigError
from ajet_sdk.protocols import TraceReader
from ajet_sdk.reporting.output import json_default
from ajet_sdk.trace.query import rows_of
from ajet_sdk.trace.schema import COLUMNS
from ajet_sdk.whole_file import remove_draft

FORMATS = ("csv", "jsonl", "parquet")


def tables(reader: TraceReader) -> dict[str, dict[str, str]]:
    """Table -> column -> type, of everything that a query may name. `calls_full` has prompts and requests whole."""
    whole = reader.query("SELECT * FROM calls_full LIMIT 0").schema
    return {**COLUMNS, "calls_full": {field.name: str(field.type) for field in whole}}


def result_of(reader: TraceReader, sql: str) -> pa.Table:
    """The result of one SELECT or EXPLAIN; a column's name that comes twice gets a number. Raises QueryError."""
    table = reader.query(sql)
    return table.rename_columns(distinct(table.column_names))


def distinct(names: Sequence[str]) -> list[str]:
    """Names that all differ: `a, a` becomes `a, a:1`."""
    unique: list[str] = []
    for name in names:
        number, new = 0, name
        while new in unique:
            number += 1
            new = f"{name}:{number}"
        unique.append(new)
    return unique


def save_result(table: pa.Table, path: Path) -> int:
    """Write a result as CSV, JSON lines or Parquet, as the file's name says; returns how many rows.

    The file appears whole or not at all, and none is overwritten. Raises ConfigError where it cannot be.
    """
    path = path.expanduser()
    kind = path.suffix.lstrip(".").lower()
    if kind not in FORMATS:
        raise ConfigError(f"{path.name or path}: unknown format; the name must end in .csv, .jsonl or .parquet")
    if path.exists():
        raise ConfigError(f"{path} already exists; choose another name")
    part = path.with_name(f".{path.name}.{uuid4().hex[:8]}")
    try:
        {"csv": _write_csv, "jsonl": _write_lines, "parquet": _write_parquet}[kind](table, part)
        part.replace(path)
    except (OSError, pa.ArrowException) as error:
        remove_draft(part)
        raise ConfigError(f"{path} could not be written: {error}") from error
    return len(table)


def _write_csv(table: pa.Table, path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(table.column_names)
        for row in rows_of(table):
            writer.writerow(csv_value(value) for value in row.values())


def csv_value(value: object) -> object:
    """A cell of CSV: lists and structs as JSON."""
    return json.dumps(value, ensure_ascii=False, default=json_default) if isinstance(value, list | dict) else value


def _write_lines(table: pa.Table, path: Path) -> None:
    with path.open("w", encoding="utf-8") as file:
        for row in rows_of(table):
            file.write(json.dumps(row, ensure_ascii=False, default=json_default) + "\n")


def _write_parquet(table: pa.Table, path: Path) -> None:
    import pyarrow.parquet as pq

    pq.write_table(table, path)


def spelled(value: object) -> str:
    """A value as text: JSON on several lines where it is JSON."""
    if value is None:
        return "null"
    if isinstance(value, str):
        if value[:1] in ("{", "["):
            try:
                return json.dumps(json.loads(value), ensure_ascii=False, indent=2)
            except ValueError:
                return value
        return value
    if isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False, indent=2, default=json_default)
    return json.dumps(value, ensure_ascii=False, default=json_default) if isinstance(value, list) else str(value)
