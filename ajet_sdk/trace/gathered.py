"""Copies the small columns of many files at rest to one database, which also tells which files have
the rest.

Planning a union of a thousand files takes a second for each query. Most queries read only small
columns.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import duckdb

from ajet_sdk.errors import TraceError
from ajet_sdk.trace.database import check_version, check_whole, explain, has_tables
from ajet_sdk.trace.query import SETTINGS, Scan
from ajet_sdk.trace.schema import COLUMNS, SCHEMA_VERSION, every_column, selected

FEW = 16
"""Largest number of files to read in place."""
AT_ONCE = 32
"""Number of files attached at once: each slows down all statements, and open files are limited."""
_ROWS = 20_000
"""Largest table to copy, in rows."""
_TOGETHER = frozenset({"runs", "episodes", "rewards", "calls", "metrics", "ledger"})
"""Tables for lists of runs and episodes, copied together: attaching the files takes longer than
copying a table."""
_SMALL = frozenset({"VARCHAR", "INTEGER", "DOUBLE", "BOOLEAN", "TIMESTAMPTZ"})
_COPIED = {
    table: [name for name, kind in columns.items() if kind in _SMALL]
    for table, columns in COLUMNS.items()
} | {
    "calls": [
        "call_id",
        "episode_id",
        "agent",
        "phase",
        "trainable",
        "policy_version",
        "started_at",
    ],
    "runs": list(COLUMNS["runs"]),  # a row or two a file, whose config every list of runs reads
}

Stamp = tuple[int, ...]


class Gathered:
    """A database `file` with the small columns of files at rest; valid until a file changes."""

    def __init__(self, file: Path, stamps: Mapping[Path, Stamp]) -> None:
        self.file = file
        self._numbered = list(stamps)
        self.stamps = dict(stamps)
        """Stamps of the copied files at the time."""
        self.tables: set[str] = set()
        self._large: dict[str, set[Path]] = {}

    def look(self) -> dict[Path, list[str] | TraceError]:
        """Copies what lists of episodes read; returns the runs of each file, or its error."""
        runs: dict[Path, list[str]] = {file: [] for file in self._numbered}
        with self._opened() as connection:
            failed = self._copy(connection, _TOGETHER)
            for i, run in connection.execute(
                f"SELECT file, run_id FROM {self.file.name}.runs"
            ).fetchall():
                runs[self._numbered[i]].append(run)
        self.stamps = {file: stamp for file, stamp in self.stamps.items() if file not in failed}
        return {**runs, **failed}

    def keep(self, files: Collection[Path]) -> None:
        gone = [
            str(i)
            for i, file in enumerate(self._numbered)
            if file in self.stamps and file not in files
        ]
        with self._opened() as connection:
            for table in self.tables:
                connection.execute(
                    f"DELETE FROM {self.file.name}.{table} WHERE file IN ({', '.join(gone)})"
                )
                self._large[table].intersection_update(files)
        self.stamps = {file: self.stamps[file] for file in files}

    def copy(self, tables: Iterable[str]) -> None:
        """Copy missing tables. Raises TraceError if a file is not a trace, or cannot be read."""
        with self._opened() as connection:
            for error in self._copy(connection, (set(tables) | _TOGETHER) - self.tables).values():
                raise error

    @contextmanager
    def _opened(self) -> Iterator[duckdb.DuckDBPyConnection]:
        # one thread: passing the few rows of each table to another takes longer than reading them
        with duckdb.connect(
            config={**SETTINGS, "enable_external_access": True, "threads": 1}
        ) as connection:
            connection.execute(
                "PRAGMA disable_optimizer"
            )  # useless for a plain copy, and a fifth of its time
            connection.execute(f"ATTACH {quoted(self.file)} AS {self.file.name}")
            yield connection

    def _copy(
        self, connection: duckdb.DuckDBPyConnection, tables: Collection[str]
    ) -> dict[Path, TraceError]:
        """Copies tables; returns the errors of unreadable files."""
        for table in tables:
            typed = ", ".join(f'"{name}" {COLUMNS[table][name]}' for name in _COPIED[table])
            connection.execute(
                f"CREATE OR REPLACE TABLE {self.file.name}.{table} (file INTEGER, {typed})"
            )
            self._large[table] = set()
        numbers = {file: i for i, file in enumerate(self._numbered) if file in self.stamps}
        parsed: dict[str, duckdb.Statement] = {}

        def take(part: Sequence[Path], _: Mapping[Path, bool]) -> None:
            sql = "SELECT database_name, table_name, estimated_size FROM duckdb_tables()"
            sizes = {
                (database, table): size
                for database, table, size in connection.execute(sql).fetchall()
            }
            first, large = numbers[part[0]], []
            connection.begin()
            try:
                for table in tables:
                    small = []
                    for i, file in enumerate(part):
                        size = sizes.get((f"t{i}", table), 0)
                        if size > _ROWS and table != "runs":
                            large.append((table, file))
                        elif size:
                            columns = selected(table, _COPIED[table])
                            small.append(
                                f"SELECT {numbers[file] - first} AS file, {columns} FROM"
                                f" t{i}.main.{table}"
                            )
                    if small:
                        into = (
                            f"INSERT INTO {self.file.name}.{table} SELECT file + $first, * EXCLUDE"
                            " (file)"
                        )
                        sql = f"{into} FROM ({' UNION ALL '.join(small)})"
                        if sql not in parsed:  # parsing takes as long as the rest
                            [parsed[sql]] = connection.extract_statements(sql)
                        connection.execute(parsed[sql], {"first": first})
            except duckdb.Error:
                connection.rollback()
                raise
            connection.commit()
            for table, file in large:
                self._large[table].add(file)

        failed = each(connection, list(numbers), take)
        self.tables.update(tables)
        return failed

    def answers(self, table: str, scan: Scan) -> bool:
        """Whether a query's columns of a table are copied; large tables are not."""
        return scan.columns <= set(_COPIED[table])

    def files(self, connection: duckdb.DuckDBPyConnection, table: str, scan: Scan) -> set[Path]:
        """Files that must be read in place."""
        if self.answers(table, scan):
            return self._large[table]
        if scan.ids is None:
            return set(self.stamps)
        column, values = scan.ids
        among = ", ".join(sorted(values))
        sql = f'SELECT DISTINCT file FROM {self.file.name}.{table} WHERE "{column}" IN ({among})'
        return self._large[table] | {
            self._numbered[i] for (i,) in connection.cursor().execute(sql).fetchall()
        }

    def source(self, table: str, scan: Scan) -> str | None:
        """A SELECT of every column of the copy, NULL if not copied; None if columns of the scan are
        missing."""
        if not self.answers(table, scan):
            return None
        return f"{every_column(table, _COPIED[table])} FROM {self.file.name}.{table}"


def runs_of(files: Sequence[Path]) -> dict[Path, list[str] | TraceError]:
    """The runs of each file at rest, or its error."""
    runs: dict[Path, list[str] | TraceError] = {file: [] for file in files}
    with duckdb.connect() as connection:

        def take(part: Sequence[Path], has_runs: Mapping[Path, bool]) -> None:
            sources = [
                f"SELECT {i}, run_id FROM t{i}.main.runs"
                for i, file in enumerate(part)
                if has_runs[file]
            ]
            rows = connection.execute(" UNION ALL ".join(sources)).fetchall() if sources else []
            runs.update({file: [run for at, run in rows if part[at] == file] for file in part})

        return runs | each(connection, files, take)


def each(
    connection: duckdb.DuckDBPyConnection,
    files: Sequence[Path],
    take: Callable[[Sequence[Path], Mapping[Path, bool]], None],
) -> dict[Path, TraceError]:
    """Attaches files at rest in batches and calls `take` with each; returns the errors of
    unreadable files.

    `take` gets files, attached as `t0`, `t1`, ..., and whether each has tables. After an error it
    is called again for fewer files.
    """
    failed: dict[Path, TraceError] = {}
    for start in range(0, len(files), AT_ONCE):
        part = files[start : start + AT_ONCE]
        error: Exception | None = None
        try:
            take(part, attach(connection, dict(enumerate(part))))
        except (duckdb.Error, TraceError, OSError) as raised:
            error = raised
        finally:
            connection.execute(
                "; ".join(f"DETACH DATABASE IF EXISTS t{i}" for i in range(len(part)))
            )
        if error and len(part) > 1:
            half = len(part) // 2
            failed |= each(connection, part[:half], take) | each(connection, part[half:], take)
        elif error:
            failed[part[0]] = explain(part[0], error)
    return failed


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
