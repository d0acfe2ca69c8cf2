"""Runs queries over the files of a trace: a few at rest are attached, of all others the rows that
a query scans are read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import duckdb
import pyarrow as pa

from ajet_sdk.errors import QueryError, TraceError
from ajet_sdk.protocols import Stop
from ajet_sdk.trace.at_rest import RunsOrError, Stamp, attach, runs_of, stamp_of
from ajet_sdk.trace.owner import Owner
from ajet_sdk.trace.query import SETTINGS, select
from ajet_sdk.trace.rows import RowsOf, all_rows
from ajet_sdk.trace.scanned import ManyFiles, ScannedTable
from ajet_sdk.trace.schema import CALLS_FULL, COLUMNS, TABLES, at_rest, empty, every_column
from ajet_sdk.trace.scratch import open_scratch

FEW = 16
"""Largest number of files at rest to attach for a query."""

AskOwner = Callable[[Path, Owner, "Stop | None", RowsOf], pa.Table]
"""Requests rows from the live owner of a file."""


class Sources:
    """The files of a trace. Files at rest are open during queries only, unless `is_steady`."""

    def __init__(self, ask: AskOwner) -> None:
        self._ask = ask
        self.is_steady = False
        """Files at rest stay open between the queries of a command, too."""
        self._many = ManyFiles()
        self._following = threading.Lock()
        # A finalizer may run in the thread that holds it.
        self._free = threading.Condition(threading.RLock())
        self._connection: duckdb.DuckDBPyConnection | None = None
        self._attached: Sequence[Path] = ()
        self._users = 0

    def look(self, stamps: Mapping[Path, Stamp]) -> dict[Path, RunsOrError]:
        """The runs of each file at rest, or its error."""
        if len(stamps) <= FEW:
            return runs_of(list(stamps))
        return self._follow(stamps)

    def _follow(self, stamps: Mapping[Path, Stamp]) -> dict[Path, RunsOrError]:
        with self._following:
            return self._many.follow(stamps)

    def files_of(self, run_id: str) -> list[Path]:
        """The files with a run, if there were many files when they were looked at."""
        with self._following:
            return self._many.files_of(run_id)

    def query(
        self,
        files: Sequence[Path],
        owned: Mapping[Path, Owner],
        sql: str,
        parameters: Sequence[object],
        stop: Stop | None,
    ) -> pa.Table:
        """Run a SELECT or EXPLAIN over all files, given the owners of live ones."""
        resting = [file for file in files if file not in owned]
        is_many = len(resting) > FEW
        if is_many:
            looked = self._follow(
                {**self._many.stamps, **{file: stamp_of(file) for file in resting}}
            )
            for file in resting:
                if isinstance(error := looked[file], TraceError):
                    raise error
        scanned: list[ScannedTable] = []
        if owned or is_many:
            read = partial(self._read, resting if is_many else [], owned, stop)
            scanned = [ScannedTable(table, read) for table in tables_in(sql)]
        with self._opened([] if is_many else resting) as connection:
            prepare = partial(_prepare, sql, scanned)
            try:
                return select(connection, sql, parameters, stop=stop, prepare=prepare)
            except QueryError as error:
                for table in scanned:
                    if table.failure and not (stop and stop.is_set):
                        raise table.failure from error
                raise

    def _read(
        self, many: Sequence[Path], owned: Mapping[Path, Owner], stop: Stop | None, wanted: RowsOf
    ) -> Iterator[pa.Table]:
        if many:
            with self._following:
                yield from self._many.read(many, wanted)
        for file, owner in owned.items():
            yield from all_rows(wanted, partial(self._ask, file, owner, stop))

    @contextmanager
    def _opened(self, files: Sequence[Path]) -> Iterator[duckdb.DuckDBPyConnection]:
        """A connection with views of the tables of these files, shared by concurrent queries."""
        with self._free:
            while self._users and self._attached != files:
                self._free.wait()
            if self._connection is None or self._attached != files:
                self.close()
                self._connection = _connect(files)
                self._attached = files
            self._users += 1
            connection = self._connection
        try:
            yield connection
        finally:
            with self._free:
                self._users -= 1
                if not self.is_steady:
                    self.close()
                self._free.notify_all()

    def close(self) -> None:
        """Close the files, unless a query is running."""
        with self._free:
            if self._connection and not self._users:
                self._connection.close()
                self._connection = None


def _connect(files: Sequence[Path]) -> duckdb.DuckDBPyConnection:
    # SQL may open no files, once those of the trace are attached.
    settings = {k: v for k, v in SETTINGS.items() if k != "enable_external_access"}
    connection = open_scratch(settings)
    try:
        has_tables = attach(connection, dict(enumerate(files)))
        for table in TABLES:
            sources = [at_rest(table, f"t{i}") for i, file in enumerate(files) if has_tables[file]]
            rows = " UNION ALL BY NAME ".join(sources) or empty(table)
            connection.execute(f"CREATE VIEW {table} AS {rows}")
        connection.execute("SET enable_external_access = false")
    except (TraceError, duckdb.Error):
        connection.close()
        raise
    return connection


def tables_in(sql: str) -> list[str]:
    """The tables that a query may name: a view of each takes time to make."""
    text = sql.lower()
    if "u&" in text:  # names may be spelled with escapes
        return list(TABLES)
    return [table for table in TABLES if table in text]


def _prepare(sql: str, tables: Sequence[ScannedTable], cursor: duckdb.DuckDBPyConnection) -> None:
    """Add the scanned tables to the views, for the query of a cursor."""
    for table in tables:
        cursor.register(f"scanned_{table.name}", table.dataset())
        rows = f"{every_column(table.name, COLUMNS[table.name])} FROM scanned_{table.name}"
        resting = f"FROM memory.main.{table.name} UNION ALL BY NAME {rows}"
        cursor.execute(f"CREATE TEMP VIEW {table.name} AS {resting}")
    if "calls_full" in sql.lower():  # the one view that takes time to make
        cursor.execute(CALLS_FULL.replace("VIEW", "TEMP VIEW", 1))
