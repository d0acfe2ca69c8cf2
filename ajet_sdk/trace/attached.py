"""The files of a trace as the tables of one connection: those at rest attached, those that are written mirrored."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import duckdb
import pyarrow as pa

from ajet_sdk.errors import TraceError
from ajet_sdk.stop import Stop
from ajet_sdk.trace.database import check_version, explain, has_tables
from ajet_sdk.trace.live import Owner
from ajet_sdk.trace.mirror import Mirror
from ajet_sdk.trace.query import SETTINGS, select
from ajet_sdk.trace.scans import Planner
from ajet_sdk.trace.schema import CALLS_FULL, RUNS_AT_REST, TABLES, empty

__all__ = ["Attached"]

Owned = Mapping[Path, Owner]


class AskOwner(Protocol):
    """Asks the live owner of a file."""

    def __call__(self, file: Path, owner: Owner, sql: str, stop: Stop | None = None) -> pa.Table: ...


_LINGER = 0.3
_LINGER_LIVE = 5.0
"""With no file attached nobody is kept out."""


class Attached:
    """Answers queries over several files. Files at rest are held open for a moment after the last query only."""

    def __init__(self, ask: AskOwner) -> None:
        self._ask = ask
        self._free = threading.Condition(threading.RLock())  # a finalizer may run in the thread that holds it
        self._following = threading.Lock()
        self._connection: duckdb.DuckDBPyConnection | None = None
        self._files: tuple[Path, ...] = ()
        self._owned: dict[Path, Owner] = {}
        self._mirrors: dict[Path, Mirror] = {}
        self._made = 0
        self._users = 0
        self._release: threading.Timer | None = None
        self._planner: Planner | None = None
        self._scratch: Path | None = None

    def query(
        self, files: Sequence[Path], owned: Owned, sql: str, parameters: Sequence[Any], stop: Stop | None
    ) -> pa.Table:
        """One SELECT or EXPLAIN over all files, of which some have an owner."""
        with self._opened(tuple(files), dict(owned)) as connection:
            views = self._followed(connection, sql, parameters, stop) if owned else {}
            return select(connection, sql, parameters, stop=stop, prepare=partial(_prepare, sql, views))

    def close(self) -> None:
        """Let go of the files, unless a query is running. What was copied of live ones stays."""
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
        """Close, and remove what was copied."""
        self.close()
        if self._scratch:
            shutil.rmtree(self._scratch, ignore_errors=True)

    @contextmanager
    def _opened(self, files: tuple[Path, ...], owned: dict[Path, Owner]) -> Iterator[duckdb.DuckDBPyConnection]:
        with self._free:
            while (self._files, self._owned) != (files, owned) and self._users:
                self._free.wait()
            if (self._files, self._owned) != (files, owned):
                self.close()
            if self._connection is None:
                self._files, self._owned = files, owned
                self._connection = self._attach(files, owned)
            self._users += 1
            connection = self._connection
        try:
            yield connection
        finally:
            with self._free:
                self._users -= 1
                if self._release:
                    self._release.cancel()
                self._release = threading.Timer(_LINGER if len(owned) < len(files) else _LINGER_LIVE, self.close)
                self._release.daemon = True
                self._release.start()
                self._free.notify_all()

    def _attach(self, files: tuple[Path, ...], owned: Owned) -> duckdb.DuckDBPyConnection:
        connection = duckdb.connect(config={k: v for k, v in SETTINGS.items() if k != "enable_external_access"})
        try:
            for i, file in enumerate(files):
                if file in owned:
                    self._add_mirror(connection, file, owned[file])
                else:
                    _add(connection, f"t{i}", file)
            for table in TABLES:
                rest = [f"FROM {table}_{i}" for i, file in enumerate(files) if file not in owned]
                connection.execute(f"CREATE VIEW {table} AS {' UNION ALL BY NAME '.join(rest) or empty(table)}")
            connection.execute("SET enable_external_access = false")
        except TraceError:
            connection.close()
            raise
        return connection

    def _add_mirror(self, connection: duckdb.DuckDBPyConnection, file: Path, owner: Owner) -> None:
        """Attach what has been copied of a live file; nothing yet where it has another owner now."""
        if self._scratch is None:
            self._scratch = Path(tempfile.mkdtemp(prefix="ajet-trace-"))
        before = self._mirrors.get(file)
        if before is None or (before.owner.pid, before.owner.started) != (owner.pid, owner.started):
            if before:
                (self._scratch / before.name).unlink(missing_ok=True)
            self._made += 1
            self._mirrors[file] = Mirror(f"m{self._made}", owner)
        name = self._mirrors[file].name
        connection.execute(f"ATTACH '{str(self._scratch / name).replace(chr(39), chr(39) * 2)}' AS {name}")

    def _followed(
        self, connection: duckdb.DuckDBPyConnection, sql: str, parameters: Sequence[Any], stop: Stop | None
    ) -> dict[str, tuple[str, dict[str, pa.Table]]]:
        """Bring up to date what a query reads of live files: table -> its SQL, and rows for it by name."""
        with self._following:
            self._planner = self._planner or Planner()
            scans = self._planner.scans(sql, parameters)
            views: dict[str, tuple[str, dict[str, pa.Table]]] = {}
            for table in TABLES:
                if table not in scans:
                    continue
                parts, given = [f"FROM memory.main.{table}"], dict[str, pa.Table]()
                for file, owner in self._owned.items():
                    ask = partial(self._ask, file, owner, stop=stop)
                    part, rows = self._mirrors[file].update(connection, table, scans[table], ask)
                    parts.append(part)
                    given |= rows
                views[table] = " UNION ALL BY NAME ".join(parts), given
            return views


def _prepare(
    sql: str, views: Mapping[str, tuple[str, Mapping[str, pa.Table]]], cursor: duckdb.DuckDBPyConnection
) -> None:
    """Views that only this query sees."""
    for table, (source, given) in views.items():
        for name, rows in given.items():
            cursor.register(name, rows)
        cursor.execute(f"CREATE TEMP VIEW {table} AS {source}")
    if "calls_full" in sql.lower():  # the one view that takes time to make
        cursor.execute(CALLS_FULL.replace("VIEW", "TEMP VIEW", 1))


def _add(connection: duckdb.DuckDBPyConnection, name: str, file: Path) -> None:
    """Make the tables of one file at rest visible as views of that number."""
    quoted = str(file).replace("'", "''")
    try:
        connection.execute(f"ATTACH '{quoted}' AS {name} (READ_ONLY)")
        if has_tables(connection, name):  # else its owner was killed before it had made them
            check_version(connection, file, schema=name)
    except (duckdb.Error, OSError) as error:
        raise explain(file, error) from error
    listed = connection.execute("SELECT table_name FROM duckdb_tables() WHERE database_name = ?", [name]).fetchall()
    present = {row[0] for row in listed}
    for table in TABLES:
        rows = f"FROM {name}.{table}" if table in present else empty(table)
        if table == "runs" and table in present:
            rows = RUNS_AT_REST.format(runs=f"{name}.runs")
        connection.execute(f"CREATE VIEW {table}_{name[1:]} AS {rows}")
