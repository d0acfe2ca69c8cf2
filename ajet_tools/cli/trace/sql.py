"""`ajet trace sql`: queries a trace in SQL."""

from __future__ import annotations

import csv
import io
import json
import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

from rich.console import Console
from typer import Argument, Option

from ajet_sdk.errors import ConfigError
from ajet_sdk.protocols import TraceReader
from ajet_sdk.reporting.output import json_default, visible
from ajet_sdk.trace.query import rows_of
from ajet_sdk.whole_file import write_whole
from ajet_tools.cli.result import Result, TextResult
from ajet_tools.cli.trace.options import Where
from ajet_tools.text import tables as render
from ajet_tools.trace.locate import open_located

if TYPE_CHECKING:
    import pyarrow as pa

_MOST_ROWS = 100
"""Rows of a table that is printed for people."""


@dataclass(frozen=True)
class RowsResult(Result):
    """The rows of a query; `--json` has all of them, a table the first ones."""

    rows: pa.Table
    paged = True

    def document(self) -> object:
        return list(rows_of(self.rows))

    def show(self, out: Console) -> None:
        if self.rows.column_names == ["explain_key", "explain_value"]:
            for row in self.rows.to_pylist():
                out.print(visible(row["explain_value"]), soft_wrap=True)
            return
        out.print(render.table(list(rows_of(self.rows.slice(0, _MOST_ROWS))), out.width))
        if len(self.rows) > _MOST_ROWS:
            note = f"{_MOST_ROWS} of {len(self.rows):,} rows; --json, --csv and --out have all"
            out.print(note, style="dim")
        elif not len(self.rows):
            out.print("no rows", style="dim")


@dataclass(frozen=True)
class CsvResult(Result):
    """The rows of a query as CSV, on stdout."""

    rows: pa.Table

    def document(self) -> object:
        return list(rows_of(self.rows))

    def show(self, out: Console) -> None:
        _write_csv(self.rows, sys.stdout)


@dataclass(frozen=True)
class SavedResult(TextResult):
    """The rows of a query, written to a file."""

    rows: int
    path: Path

    beside_rows = True

    def lines(self) -> list[str]:
        return [f"{self.rows:,} rows written to {self.path}"]


def sql(
    query: Annotated[
        str, Argument(help="One SELECT or EXPLAIN; `-` reads it from stdin.", show_default=False)
    ],
    path: Where = None,
    as_csv: Annotated[bool, Option("--csv", help="Print CSV with a header.")] = False,
    out: Annotated[Path | None, Option("--out", "-o", metavar="FILE")] = None,
) -> RowsResult | CsvResult | SavedResult:
    """Query a trace in SQL (DuckDB's dialect): one SELECT or EXPLAIN, read-only, at most 30 s.

    Tables: runs, episodes, calls, rewards, metrics, ledger, trained, feedback. `calls` stores only
    the new part of each prompt; the view `calls_full` has whole prompts and requests.

    Args:
        out: Write a .csv, .jsonl or .parquet file; an existing file is not overwritten.

    \b
    ajet trace sql "FROM metrics WHERE name = 'train/reward' ORDER BY step"
    ajet trace sql "SELECT agent, count(*) FROM calls GROUP BY agent" run.duckdb
    ajet trace sql "SELECT prompt_ids FROM calls_full LIMIT 1" --json
    ajet trace sql - --csv < query.sql > rows.csv
    ajet trace sql "FROM ledger" -o ledger.parquet
    """
    # Not Path.exists, which fails for a query in place of the path: it is too long for a name.
    if os.path.exists(query) and (path is None or not os.path.exists(path)):  # noqa: PTH110
        first = shlex.quote(str(path or "FROM runs"))
        raise ConfigError(
            f"the query comes before the trace; type: ajet trace sql {first} {shlex.quote(query)}"
        )
    reader, _ = open_located(path)
    with reader:
        table = _result(reader, sys.stdin.read() if query == "-" else query)
    if out is not None:
        _save(table, out.expanduser())
        return SavedResult(len(table), out)
    if as_csv:
        return CsvResult(table)
    return RowsResult(table)


def _result(reader: TraceReader, query: str) -> pa.Table:
    """Run a query; repeated column names are numbered: `a, a` becomes `a, a:1`."""
    table = reader.query(query)
    unique: list[str] = []
    for name in table.column_names:
        number = 0
        new = name
        while new in unique:
            number += 1
            new = f"{name}:{number}"
        unique.append(new)
    return table.rename_columns(unique)


def _save(table: pa.Table, path: Path) -> None:
    """Write a new file: CSV, JSON lines or Parquet, by its suffix."""
    if path.suffix not in (".csv", ".jsonl", ".parquet"):
        raise ConfigError(f"{path}: the name must end in .csv, .jsonl or .parquet")
    if path.exists():
        raise ConfigError(f"{path} already exists; choose another name")
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        file = io.BytesIO()
        pq.write_table(table, file)
        content = file.getvalue()
    else:
        text = io.StringIO()
        if path.suffix == ".csv":
            _write_csv(table, text)
        else:
            for row in rows_of(table):
                line = json.dumps(row, ensure_ascii=False, default=json_default)
                text.write(f"{line}\n")
        content = text.getvalue().encode("utf-8", "surrogatepass")
    try:
        write_whole(path, content)
    except OSError as error:
        raise ConfigError(f"{path} could not be written: {error}") from error


def _write_csv(table: pa.Table, file: TextIO) -> None:
    """Write CSV; lists and structs are JSON, and a terminal gets no control characters."""

    def cell(value: object) -> object:
        if isinstance(value, list | dict):
            value = json.dumps(value, ensure_ascii=False, default=json_default)
        if isinstance(value, str) and file.isatty():
            return visible(value)
        return value

    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(table.column_names)
    for row in rows_of(table):
        writer.writerow(cell(value) for value in row.values())
