"""Provides the files of a trace as tables of a connection: files at rest are attached, live ones
mirrored.

A mirror copies the columns that queries read, and is updated before each query.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import duckdb
import pyarrow as pa

from ajet_sdk.errors import QueryError, TraceError, TraceVersionError
from ajet_sdk.protocols import Stop
from ajet_sdk.trace.database import other_version
from ajet_sdk.trace.gathered import FEW, Gathered, Stamp, attach, quoted, runs_of, stamp_of
from ajet_sdk.trace.owner import VERSION, Owner, RowsOf
from ajet_sdk.trace.query import SETTINGS, Planner, Scan, select
from ajet_sdk.trace.schema import (
    CALLS_FULL,
    COLUMNS,
    SCHEMA_VERSION,
    TABLES,
    at_rest,
    empty,
    every_column,
)

Owned = Mapping[Path, Owner]

_Scans = Mapping[str, Scan]

_Stamps = Mapping[Path, Stamp]
"""Stamps of the files at rest, if there are many; else empty."""


AskOwner = Callable[[Path, Owner, "Stop | None", RowsOf], pa.Table]
"""Requests rows from the live owner of a file."""

_LINGER = 0.3

_LINGER_LIVE = 5.0
"""Longer, since without attached files no writer is blocked."""


class Attached:
    """Runs queries over several files. Files at rest stay open only briefly after the last query.

    Few files at rest are read in place; of many, the small columns are gathered first, and a query
    opens those files whose other columns it reads.
    """

    def __init__(self, ask: AskOwner) -> None:
        self._ask = ask
        self.is_steady = False
        """Files at rest stay open between the queries of a command, too."""
        self._free = threading.Condition(
            threading.RLock()
        )  # a finalizer may run in the thread that holds it
        self._following = threading.Lock()
        self._connection: duckdb.DuckDBPyConnection | None = None
        self._files: tuple[Path, ...] = ()
        self._owned: dict[Path, Owner] = {}
        self._attached: dict[Path, bool] = {}
        """Attached files, and whether each has tables."""
        self._gathered: Gathered | None = None
        self._mirrors: dict[Path, Mirror] = {}
        self._registered = 0
        self._users = 0
        self._release: threading.Timer | None = None
        self._planner: Planner | None = None
        self._scratch: Path | None = None

    def query(
        self,
        files: Sequence[Path],
        owned: Owned,
        known: _Stamps,
        sql: str,
        parameters: Sequence[object],
        stop: Stop | None,
    ) -> pa.Table:
        """Run a SELECT or EXPLAIN over all files, given their owners and known stamps, if any."""
        free = [file for file in files if file not in owned]
        stamps = (
            {file: known[file] if file in known else stamp_of(file) for file in free}
            if len(free) > FEW
            else {}
        )
        scans: Mapping[str, Scan] = {}
        if owned or stamps:
            with self._following:
                self._planner = self._planner or Planner()
            scans = self._planner.scans(sql, parameters)
        with self._opened(tuple(files), dict(owned), stamps, scans) as connection:
            views = self._views(connection, scans, stamps, stop)
            return select(
                connection, sql, parameters, stop=stop, prepare=partial(_prepare, sql, views)
            )

    def look(self, stamps: _Stamps) -> dict[Path, list[str] | TraceError]:
        """The runs of each file at rest, or its error; many files are gathered for later
        queries."""
        if len(stamps) <= FEW:
            try:
                return self._runs_of(tuple(stamps))
            except (TraceError, duckdb.Error, OSError):  # then each file is checked separately
                return runs_of(list(stamps))
        with self._free:
            while self._users:
                self._free.wait()
            self.close()
            self._gathered = self._new_gathered(stamps)
            return self._gathered.look()

    def _runs_of(self, files: tuple[Path, ...]) -> dict[Path, list[str] | TraceError]:
        """The runs of each file, which stay attached for the next query."""
        runs: dict[Path, list[str] | TraceError] = {}
        with self._opened(files, {}, {}, {}) as connection:
            cursor = connection.cursor()
            for i, file in enumerate(files):
                rows = (
                    cursor.execute(f"SELECT run_id FROM t{i}.main.runs").fetchall()
                    if self._attached[file]
                    else []
                )
                runs[file] = [run for (run,) in rows]
            cursor.close()
        return runs

    def close(self) -> None:
        """Close the files, unless a query is running; copies are kept."""
        with self._free:
            if self._users:
                return
            if self._release:
                self._release.cancel()
                self._release = None
            if self._connection:
                self._connection.close()
                self._connection = None

    def end(self) -> None:
        self.close()
        if self._scratch:
            shutil.rmtree(self._scratch, ignore_errors=True)

    @contextmanager
    def _opened(
        self, files: tuple[Path, ...], owned: dict[Path, Owner], stamps: _Stamps, scans: _Scans
    ) -> Iterator[duckdb.DuckDBPyConnection]:
        with self._free:
            while (connection := self._serving(files, owned, stamps, scans)) is None:
                if self._users:
                    self._free.wait()
                    continue
                self.close()
                self._files, self._owned = files, owned
                self._connection = self._attach(stamps, scans)
            self._users += 1
        try:
            yield connection
        finally:
            with self._free:
                self._users -= 1
                if self._release:
                    self._release.cancel()
                has_rest = len(owned) < len(files)
                self._release = threading.Timer(
                    _LINGER if has_rest and not self.is_steady else _LINGER_LIVE, self.close
                )
                self._release.daemon = True
                self._release.start()
                self._free.notify_all()

    def _serving(
        self, files: tuple[Path, ...], owned: Owned, stamps: _Stamps, scans: _Scans
    ) -> duckdb.DuckDBPyConnection | None:
        """The open connection, if it has everything that a query needs."""
        connection = self._connection
        if connection is None or (self._files, self._owned) != (files, owned):
            return None
        if stamps:
            gathered = self._gathered
            if gathered is None or gathered.stamps != stamps or not scans.keys() <= gathered.tables:
                return None
            if not _where_they_lie(gathered, connection, scans) <= self._attached.keys():
                return None
        return connection

    def _attach(self, stamps: _Stamps, scans: _Scans) -> duckdb.DuckDBPyConnection:
        connection = duckdb.connect(
            config={k: v for k, v in SETTINGS.items() if k != "enable_external_access"}
        )
        try:
            for file, owner in self._owned.items():
                before = self._mirrors.get(file)
                if before is None or (before.owner.pid, before.owner.started) != (
                    owner.pid,
                    owner.started,
                ):
                    self._mirrors[file] = Mirror(
                        self._new("m", before.name if before else None), owner
                    )
                self._attach_scratch(connection, self._mirrors[file].name)
            free = {i: file for i, file in enumerate(self._files) if file not in self._owned}
            if stamps:
                gathered = self._gather(connection, stamps, scans)
                apart = _where_they_lie(gathered, connection, scans)
                self._attached = attach(
                    connection, {i: file for i, file in free.items() if file in apart}
                )
            else:
                self._attached = attach(connection, free)
                schema = (
                    "rest" if self._owned else "main"
                )  # with live files it is only a part of the table
                connection.execute(f"CREATE SCHEMA IF NOT EXISTS {schema}")
                for table in TABLES:
                    sources = [
                        at_rest(table, f"t{i}") for i, file in free.items() if self._attached[file]
                    ]
                    rows = " UNION ALL BY NAME ".join(sources) or empty(table)
                    connection.execute(f"CREATE VIEW {schema}.{table} AS {rows}")
            connection.execute("SET enable_external_access = false")
        except (TraceError, duckdb.Error):
            connection.close()
            raise
        return connection

    def _gather(
        self, connection: duckdb.DuckDBPyConnection, stamps: _Stamps, scans: _Scans
    ) -> Gathered:
        """Attach the gathered copy of the current files, with all tables that a query reads."""
        gathered = self._gathered
        if gathered is None or not stamps.items() <= gathered.stamps.items():
            gathered = self._gathered = self._new_gathered(stamps)
        elif gathered.stamps != stamps:
            gathered.keep(stamps)
        if not scans.keys() <= gathered.tables:
            gathered.copy(scans)
        self._attach_scratch(connection, gathered.file.name)
        return gathered

    def _new_gathered(self, stamps: _Stamps) -> Gathered:
        name = self._new("g", self._gathered.file.name if self._gathered else None)
        return Gathered((self._scratch or Path()) / name, stamps)

    def _new(self, kind: str, before: str | None) -> str:
        """A new database name; removes the file of the replaced one."""
        if self._scratch is None:
            self._scratch = Path(tempfile.mkdtemp(prefix="ajet-trace-"))
        if before:
            (self._scratch / before).unlink(missing_ok=True)
        self._registered += 1
        return f"{kind}{self._registered}"

    def _attach_scratch(self, connection: duckdb.DuckDBPyConnection, name: str) -> None:
        connection.execute(f"ATTACH {quoted((self._scratch or Path()) / name)} AS {name}")

    def _views(
        self,
        connection: duckdb.DuckDBPyConnection,
        scans: _Scans,
        stamps: _Stamps,
        stop: Stop | None,
    ) -> dict[str, tuple[str, dict[str, pa.Table]]]:
        """Update live files; returns for each table its SQL, and rows for it by name."""
        if not (self._owned or stamps):
            return {}
        views = {table: (empty(table), dict[str, pa.Table]()) for table in TABLES}
        with self._following:
            for table, scan in scans.items():
                parts, tables = (
                    self._at_rest(connection, table, scan, stamps),
                    dict[str, pa.Table](),
                )
                for file, owner in self._owned.items():
                    ask = partial(self._ask, file, owner, stop)
                    part, rows = self._mirrors[file].update(connection, table, scan, ask)
                    parts.append(part)
                    tables |= rows
                views[table] = " UNION ALL BY NAME ".join(parts) or empty(table), tables
        return views

    def _at_rest(
        self, connection: duckdb.DuckDBPyConnection, table: str, scan: Scan, stamps: _Stamps
    ) -> list[str]:
        if self._gathered is None or not stamps:
            return [f"FROM memory.rest.{table}"]
        copied = self._gathered.source(table, scan)
        apart = self._gathered.files(connection, table, scan)
        lying = [
            at_rest(table, f"t{i}")
            for i, f in enumerate(self._files)
            if f in apart and self._attached[f]
        ]
        return [copied, *lying] if copied else lying


def _where_they_lie(
    gathered: Gathered, connection: duckdb.DuckDBPyConnection, scans: _Scans
) -> set[Path]:
    """Files that a query reads in place."""
    return {
        file for table, scan in scans.items() for file in gathered.files(connection, table, scan)
    }


def _prepare(
    sql: str,
    views: Mapping[str, tuple[str, Mapping[str, pa.Table]]],
    cursor: duckdb.DuckDBPyConnection,
) -> None:
    for table, (source, tables) in views.items():
        for name, rows in tables.items():
            cursor.register(name, rows)
        cursor.execute(f"CREATE TEMP VIEW {table} AS {source}")
    if "calls_full" in sql.lower():  # the one view that takes time to make
        cursor.execute(CALLS_FULL.replace("VIEW", "TEMP VIEW", 1))


Ask = Callable[[RowsOf], pa.Table]


@dataclass(slots=True)
class _Copied:
    """The copied part of a table."""

    columns: frozenset[str]
    mark: int
    rows: int = 0
    last: int = -1
    """Row id of the last row."""


class Mirror:
    """A copy of a live file's tables, as far as queries have read them, in the database `name` of a
    connection.

    A run only adds rows, except for its row in `runs` and rollbacks of a resume, after which tables
    are copied again.
    """

    def __init__(self, name: str, owner: Owner) -> None:
        self.name = name
        self.owner = owner
        self._copied: dict[str, _Copied] = {}
        self._checked = False

    def update(
        self, connection: duckdb.DuckDBPyConnection, table: str, scan: Scan, ask: Ask
    ) -> tuple[str, dict[str, pa.Table]]:
        """Update the columns of a scan; returns SQL for every column of a table, and rows that it
        uses by name.

        A query for a few episodes gets their rows directly if its columns are not copied: messages
        and token ids are most of a trace, and a person reads one episode after another.
        """
        if not self._checked:
            [meta] = ask(VERSION).to_pylist()
            if meta["schema_version"] != SCHEMA_VERSION:
                raise TraceVersionError(other_version(self.owner.trace, meta["schema_version"]))
            self._checked = True
        known = self._copied.get(table)
        if scan.ids is not None and not (known and scan.columns <= known.columns):
            name = f"rows_{self.name}_{table}"
            column, values = scan.ids
            read = scan.columns | {column}
            among = tuple(value[1:-1] for value in sorted(values))
            wanted = RowsOf(table=table, columns=tuple(sorted(read)), by=column, among=among)
            return f"{every_column(table, read)} FROM {name}", {
                name: pa.concat_tables(_pages(wanted, ask))
            }
        if not any(self._follow(connection, table, scan.columns, ask) for _ in range(2)):
            raise TraceError(f"{self.owner.trace} changed while it was read; try again")
        return f"{every_column(table, self._copied[table].columns)} FROM {self.name}.{table}", {}

    def _follow(
        self, connection: duckdb.DuckDBPyConnection, table: str, columns: frozenset[str], ask: Ask
    ) -> bool:
        """Copy new rows of a table, or all of it if columns are missing or rows have changed.

        False if a checkpoint has renumbered the rows meanwhile: the next call copies all.
        """
        [there] = ask(RowsOf(table=table)).to_pylist()
        known = self._copied.get(table)
        changed = known is None or there["n"] < known.rows or there["mark"] != known.mark
        if known is None or changed or not columns <= known.columns:
            columns |= known.columns if known else frozenset()
            typed = ", ".join(
                f'"{name}" {kind}' for name, kind in COLUMNS[table].items() if name in columns
            )
            connection.execute(
                f"CREATE OR REPLACE TABLE {self.name}.{table} ({typed or 'nothing INTEGER'})"
            )
            known = self._copied[table] = _Copied(columns, there["mark"])
        if known.rows < there["n"]:
            wanted = RowsOf(
                table=table, columns=tuple(sorted(known.columns or {next(iter(COLUMNS[table]))}))
            )
            for rows in _pages(wanted.model_copy(update={"after": known.last}), ask):
                if not len(rows):
                    break
                connection.register("_rows", rows)
                casts = [
                    f'"{n}"::{kind} AS "{n}"'
                    for n, kind in COLUMNS[table].items()
                    if n in known.columns
                ]
                selected = ", ".join(casts) or "NULL::INTEGER"
                connection.execute(f"INSERT INTO {self.name}.{table} SELECT {selected} FROM _rows")
                connection.unregister("_rows")
                known.rows += len(rows)
                known.last = rows["_row"][-1].as_py()
        whole = known.rows >= int(there["n"])
        if not whole:
            del self._copied[table]
        return whole


def _pages(wanted: RowsOf, ask: Ask) -> Iterator[pa.Table]:
    """Requests rows in parts, with fewer rows if an answer would be too large."""
    while True:
        try:
            rows = ask(wanted)
        except QueryError:
            if wanted.most == 1:
                raise
            wanted = wanted.model_copy(update={"most": max(1, wanted.most // 8)})
            continue
        yield rows
        if len(rows) < wanted.most:
            return
        wanted = wanted.model_copy(update={"after": rows["_row"][-1].as_py()})
