"""Reads files at rest, which no process writes: attached to a connection, or a part of them after
another."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import duckdb
import pyarrow as pa

from ajet_sdk.errors import TraceError
from ajet_sdk.trace.database import check_version, check_whole, explain, has_tables, transaction
from ajet_sdk.trace.query import SETTINGS
from ajet_sdk.trace.schema import COLUMNS, SCHEMA_VERSION, selected
from ajet_sdk.trace.scratch import open_scratch

_AT_ONCE = 32
"""Number of files attached at once: each slows down all statements, and open files are limited."""
_ROWS = 20_000
"""Largest table of a file to keep, in rows."""
Stamp = tuple[int, ...]
RunsOrError = list[str] | TraceError


def stamp_of(file: Path) -> Stamp:
    """A stamp that changes whenever the file is written."""
    stamp: list[int] = []
    for part in (str(file), f"{file}.wal"):
        try:
            about = os.stat(part)  # noqa: PTH116 - a Path for each of a thousand files takes longer
            stamp += [about.st_ino, about.st_size, about.st_mtime_ns]
        except FileNotFoundError:
            stamp.append(-1)
    return tuple(stamp)


def runs_of(files: Sequence[Path]) -> dict[Path, RunsOrError]:
    """The runs of each file at rest, or its error."""
    numbered = dict(enumerate(files))
    runs: dict[Path, RunsOrError] = {file: [] for file in files}
    rows, failed = read_parts(numbered, {"runs": ["run_id"]})
    for row in rows["runs"].to_pylist():
        ids = runs[numbered[row["file"]]]
        if isinstance(ids, list):
            ids.append(row["run_id"])
    return runs | failed


def read_parts(
    files: Mapping[int, Path],
    columns: Mapping[str, Sequence[str]],
    large: dict[str, set[int]] | None = None,
) -> tuple[dict[str, pa.Table], dict[Path, TraceError]]:
    """Columns of tables with the number of each row's file, and the errors of unreadable files.

    With `large`, tables of more rows than are kept are left out, and named there.
    """
    failed: dict[Path, TraceError] = {}
    with _connected() as connection:
        connection.execute("PRAGMA disable_optimizer")  # useless for a plain copy
        copy = _Copy(connection, columns, large)
        numbers = list(files)
        waiting = [numbers[i : i + _AT_ONCE] for i in range(0, len(numbers), _AT_ONCE)]
        while waiting:
            part = waiting.pop()
            try:
                copy.add({i: files[i] for i in part})
            except (duckdb.Error, TraceError, OSError) as error:
                half = len(part) // 2
                if half:  # which file it was is found by halving
                    waiting += [part[:half], part[half:]]
                else:
                    file = files[part[0]]
                    failed[file] = explain(file, error)
        rows = {table: connection.sql(f"FROM {table}").to_arrow_table() for table in columns}
    return rows, failed


class _Copy:
    """Copies columns of tables of attached files to temporary tables of a connection."""

    def __init__(
        self,
        connection: duckdb.DuckDBPyConnection,
        columns: Mapping[str, Sequence[str]],
        large: dict[str, set[int]] | None,
    ) -> None:
        self._connection = connection
        self._columns = columns
        self._large = large
        self._parsed: dict[str, duckdb.Statement] = {}
        for table, names in columns.items():
            typed = ", ".join(f'"{name}" {COLUMNS[table][name]}' for name in names)
            connection.execute(f"CREATE TEMP TABLE {table} (file INTEGER, {typed})")

    def add(self, files: Mapping[int, Path]) -> None:
        """Copy from all of a few files, or from none if one is unreadable."""
        attached = dict(enumerate(files.values()))
        numbers = list(files)
        connection = self._connection
        try:
            has_tables_of = attach(connection, attached)
            sql = "SELECT database_name, table_name, estimated_size FROM duckdb_tables()"
            sizes = {
                (name, table): rows for name, table, rows in connection.execute(sql).fetchall()
            }
            with transaction(connection):
                for table, names in self._columns.items():
                    listed = selected(table, names)
                    selects = []
                    for i, file in attached.items():
                        rows = sizes.get((f"t{i}", table), 0)
                        if self._large is not None and rows > _ROWS and table != "runs":
                            self._large[table].add(numbers[i])
                        elif has_tables_of[file] and rows:
                            source = f"t{i}.main.{table}"
                            selects.append(f"SELECT $numbers[{i + 1}], {listed} FROM {source}")
                    if selects:
                        insert = f"INSERT INTO temp.{table} {' UNION ALL '.join(selects)}"
                        connection.execute(self._statement(insert), {"numbers": numbers})
        finally:
            _detach(connection, attached)

    def _statement(self, sql: str) -> duckdb.Statement:
        if sql not in self._parsed:  # parsing takes as long as the rest
            [self._parsed[sql]] = self._connection.extract_statements(sql)
        return self._parsed[sql]


def read_in_place(
    files: Sequence[Path], table: str, columns: Sequence[str], where: str
) -> Iterator[pa.Table]:
    """Yields columns of a table of files at rest, a part after another. Raises TraceError for an
    unreadable file."""
    if not files:
        return
    listed = selected(table, columns)
    with _connected() as connection:
        for start in range(0, len(files), _AT_ONCE):
            part = dict(enumerate(files[start : start + _AT_ONCE]))
            has_tables_of = attach(connection, part)
            sources = [f"t{i}.main.{table}" for i, file in part.items() if has_tables_of[file]]
            rows = " UNION ALL ".join(f"SELECT {listed} FROM {name} {where}" for name in sources)
            if rows:
                for batch in connection.sql(rows).to_arrow_reader(_ROWS):
                    yield pa.Table.from_batches([batch])
            _detach(connection, part)


def _connected() -> duckdb.DuckDBPyConnection:
    # One thread: passing the few rows of each table to another takes longer than reading them.
    settings = {**SETTINGS, "enable_external_access": True, "threads": 1}
    connection = open_scratch(settings)
    connection.execute("SET TimeZone = 'UTC'")
    return connection


def _detach(connection: duckdb.DuckDBPyConnection, files: Iterable[int]) -> None:
    connection.execute("; ".join(f"DETACH DATABASE IF EXISTS t{i}" for i in files))


def attach(connection: duckdb.DuckDBPyConnection, files: Mapping[int, Path]) -> dict[Path, bool]:
    """Attach files at rest read-only, as `t` and their number; returns whether each has tables.

    Raises TraceError for the first unreadable file, TraceVersionError for one of another version,
    NotATrace.
    """
    for i, file in files.items():
        try:
            connection.execute(f"ATTACH {quoted(file)} AS t{i} (READ_ONLY, TYPE duckdb)")
        except (duckdb.Error, OSError) as error:
            raise explain(file, error) from error
    if not files:
        return {}
    check_whole(connection, {f"t{i}": file for i, file in files.items()})
    with suppress(duckdb.Error):  # then each file is checked separately
        together = " UNION ALL ".join(
            f"SELECT {i}, schema_version FROM t{i}.main.meta" for i in files
        )
        rows = connection.execute(together).fetchall()
        if {i for i, version in rows if version == SCHEMA_VERSION} == files.keys():
            return dict.fromkeys(files.values(), True)
    made: dict[Path, bool] = {}
    for i, file in files.items():
        try:
            made[file] = has_tables(
                connection, f"t{i}"
            )  # false if its owner was killed before creating them
            if made[file]:
                check_version(connection, file, f"t{i}.main")
        except duckdb.Error as error:
            raise explain(file, error) from error
    return made


def quoted(file: Path) -> str:
    return "'" + str(file).replace("'", "''") + "'"
