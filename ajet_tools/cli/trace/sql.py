"""`ajet trace sql`: queries a trace in SQL."""

from __future__ import annotations

import csv
import shlex
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from ajet_sdk.errors import ConfigError
from ajet_sdk.reporting.output import echo, visible
from ajet_sdk.trace.query import rows_of
from ajet_tools.cli.options import AsJson, print_json
from ajet_tools.cli.trace.options import NoPager, Where
from ajet_tools.text import tables as render
from ajet_tools.text.tables import paged
from ajet_tools.trace.locate import located_files
from ajet_tools.trace.sql.console import csv_value, save_result
from ajet_tools.trace.sql.process import SqlProcess

if TYPE_CHECKING:
    import pyarrow as pa


def sql(
    query: Annotated[
        str, Argument(help="One SELECT or EXPLAIN; `-` reads it from stdin.", show_default=False)
    ],
    path: Where = None,
    limit: Annotated[int, Option("--limit", "-n", min=1)] = 100,
    as_csv: Annotated[bool, Option("--csv", help="Print CSV with a header.")] = False,
    out: Annotated[Path | None, Option("--out", "-o", metavar="FILE")] = None,
    no_pager: NoPager = False,
    as_json: AsJson = False,
) -> None:
    """Query a trace in SQL (DuckDB's dialect): one SELECT or EXPLAIN, read-only, at most 30 s.

    Tables: runs, episodes, calls, rewards, metrics, ledger, trained, feedback. `calls` stores only
    the new part of each prompt; the view `calls_full` has whole prompts and requests.

    Args:
        limit: Rows to print; JSON, CSV and files have all rows.
        out: Write a .csv, .jsonl or .parquet file; an existing file is not overwritten.

    \b
    ajet trace sql "FROM metrics WHERE name = 'train/reward' ORDER BY step"
    ajet trace sql "SELECT agent, count(*) FROM calls GROUP BY agent" run.duckdb
    ajet trace sql "SELECT prompt_ids FROM calls_full LIMIT 1" --json
    ajet trace sql - --csv < query.sql > rows.csv
    ajet trace sql "FROM ledger" -o ledger.parquet
    """
    if len(query.encode()) < 256 and Path(query).exists() and (path is None or not path.exists()):
        first = shlex.quote(str(path or "FROM runs"))
        raise ConfigError(
            f"the query comes before the trace; type: ajet trace sql {first} {shlex.quote(query)}"
        )
    if path is None or path.is_dir():
        located_files(path)  # logs which files are skipped
    with closing(SqlProcess(path)) as process:
        result = process.ask(sys.stdin.read() if query == "-" else query)
    if out is not None:
        echo(f"{save_result(result, out):,} rows written to {out}", err=True)
    elif as_json:
        print_json(list(rows_of(result)))
    elif as_csv:
        _print_csv(result)
    else:
        _print_table(result, limit, no_pager)


def _print_csv(result: pa.Table) -> None:
    """Prints CSV, with lists and structs as JSON, and without control characters on a terminal."""

    def cell(value: object) -> object:
        text = csv_value(value)
        return visible(text) if isinstance(text, str) and sys.stdout.isatty() else text

    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(result.column_names)
    for row in rows_of(result):
        writer.writerow(cell(value) for value in row.values())


def _print_table(result: pa.Table, limit: int, no_pager: bool) -> None:
    with paged(no_pager) as out:
        if result.column_names == ["explain_key", "explain_value"]:
            for row in result.to_pylist():
                out.print(visible(row["explain_value"]), soft_wrap=True)
            return
        out.print(render.table(list(rows_of(result.slice(0, limit))), out.width))
        if len(result) > limit:
            out.print(f"{limit:,} of {len(result):,} rows; for more, raise --limit", style="dim")
        elif not len(result):
            out.print("no rows", style="dim")
