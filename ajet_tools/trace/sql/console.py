"""Tables of a trace, and export of query results to files."""

from __future__ import annotations

import csv
import json
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
    """Return the types of all columns by table. `calls_full` has whole prompts and requests."""
    whole = reader.query("SELECT * FROM calls_full LIMIT 0").schema
    return {**COLUMNS, "calls_full": {field.name: str(field.type) for field in whole}}


def result_of(reader: TraceReader, sql: str) -> pa.Table:
    """Run a SELECT or EXPLAIN; repeated column names are numbered: `a, a` becomes `a, a:1`. Raises
    QueryError."""
    table = reader.query(sql)
    unique: list[str] = []
    for name in table.column_names:
        number, new = 0, name
        while new in unique:
            number += 1
            new = f"{name}:{number}"
        unique.append(new)
    return table.rename_columns(unique)


def save_result(table: pa.Table, path: Path) -> int:
    """Write a result as CSV, JSON lines or Parquet, by file suffix, and return the number of rows.

    The write is atomic and never overwrites a file. Raises ConfigError if it fails.
    """
    import pyarrow.parquet as pq

    path = path.expanduser()
    kind = path.suffix.lstrip(".").lower()
    if kind not in FORMATS:
        raise ConfigError(
            f"{path.name or path}: unknown format; the name must end in .csv, .jsonl or .parquet"
        )
    if path.exists():
        raise ConfigError(f"{path} already exists; choose another name")
    part = path.with_name(f".{path.name}.{uuid4().hex[:8]}")
    try:
        if kind == "parquet":
            pq.write_table(table, part)
        else:
            with part.open("w", newline="", encoding="utf-8") as file:
                if kind == "csv":
                    writer = csv.writer(file)
                    writer.writerow(table.column_names)
                    writer.writerows(map(csv_value, row.values()) for row in rows_of(table))
                else:
                    lines = (
                        json.dumps(row, ensure_ascii=False, default=json_default)
                        for row in rows_of(table)
                    )
                    file.writelines(f"{line}\n" for line in lines)
        part.replace(path)
    except (OSError, pa.ArrowException) as error:
        remove_draft(part)
        raise ConfigError(f"{path} could not be written: {error}") from error
    return len(table)


def csv_value(value: object) -> object:
    """Convert a value to a CSV cell: lists and structs become JSON."""
    return (
        json.dumps(value, ensure_ascii=False, default=json_default)
        if isinstance(value, list | dict)
        else value
    )


def spelled(value: object) -> str:
    """Format a value as text; JSON is indented."""
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
    return (
        json.dumps(value, ensure_ascii=False, default=json_default)
        if isinstance(value, list)
        else str(value)
    )
