"""Many files at rest as one table each: their small columns, copied once; they tell which files hold the rest.

A union of a thousand files costs a second to plan, for each query again. What most queries read is small.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import duckdb

from ajet_sdk.trace.database import check_version, check_whole, explain, has_tables
from ajet_sdk.trace.scans import Scan
from ajet_sdk.trace.schema import COLUMNS, SCHEMA_VERSION, at_rest

__all__ = ["AT_ONCE", "FEW", "Gathered", "Stamp", "attach", "stamp_of"]

FEW = 16
"""So many files are read where they lie."""
AT_ONCE = 32
"""Files attached at a time: with each the statements of all take longer, and there is a limit to open files."""
_ROWS = 20_000
"""A table of more rows is read where it lies."""
_TOGETHER = frozenset({"runs", "episodes", "rewards", "calls"})
"""What a list of episodes reads: attaching the files costs more than copying a table."""
_SMALL = frozenset({"VARCHAR", "INTEGER", "DOUBLE", "BOOLEAN", "TIMESTAMPTZ"})
_COPIED = {table: [name for name, kind in columns.items() if kind in _SMALL] for table, columns in COLUMNS.items()} | {
    "calls": ["call_id", "episode_id", "agent", "phase", "trainable", "policy_version", "started_at"]
}

Stamp = tuple[int, ...]


class Gathered:
    """The small columns of files at rest in the database `name` of a connection; it lasts as long as the files stay."""

    def __init__(self, name: str, stamps: Mapping[Path, Stamp]) -> None:
        self.name = name
        self._stamps = dict(stamps)
        self._tables: set[str] = set()
        self._large: dict[str, set[Path]] = {}

    def is_of(self, stamps: Mapping[Path, Stamp]) -> bool:
        """Whether it was copied from just these files, as they are now."""
        return self._stamps == stamps

    def has(self, tables: Iterable[str]) -> bool:
        """Whether these tables have been copied."""
        return self._tables >= set(tables)

    def copy(self, connection: duckdb.DuckDBPyConnection, tables: Iterable[str]) -> None:
        """Copy tables that are not here yet. Raises TraceError where a file is no trace, or cannot be read."""
        wanted = (set(tables) | _TOGETHER) - self._tables
        for table in wanted:
            typed = ", ".join(f'"{name}" {COLUMNS[table][name]}' for name in _COPIED[table])
            connection.execute(f"CREATE OR REPLACE TABLE {self.name}.{table} (file INTEGER, {typed})")
            self._large[table] = set()
        files, session = list(self._stamps), connection.cursor()
        session.execute("PRAGMA disable_optimizer")  # a fifth of the time, and nothing in a plain copy to find
        for start in range(0, len(files), AT_ONCE):
            part = dict(enumerate(files[start : start + AT_ONCE], start))
            self._copy(session, part, attach(session, part), sorted(wanted))
            for i in part:
                session.execute(f"DETACH t{i}")
        self._tables |= wanted

    def _copy(
        self,
        connection: duckdb.DuckDBPyConnection,
        part: Mapping[int, Path],
        versions: Mapping[Path, int],
        tables: Sequence[str],
    ) -> None:
        sql = "SELECT database_name, table_name, estimated_size FROM duckdb_tables()"
        sizes = {(database, table): size for database, table, size in connection.execute(sql).fetchall()}
        for table in tables:
            listed = ", ".join(f'"{name}"' for name in _COPIED[table])
            sources = []
            for i, file in part.items():
                size = sizes.get((f"t{i}", table), 0)
                if size > _ROWS:
                    self._large[table].add(file)
                elif size:
                    sources.append(f"SELECT {i}, {listed} FROM ({at_rest(table, f't{i}', versions[file])})")
            if sources:
                connection.execute(f"INSERT INTO {self.name}.{table} {' UNION ALL '.join(sources)}")

    def answers(self, table: str, scan: Scan) -> bool:
        """Whether what a query reads of a table has been copied, but for tables that are large."""
        return scan.columns <= set(_COPIED[table])

    def files(self, connection: duckdb.DuckDBPyConnection, table: str, scan: Scan) -> set[Path]:
        """The files that must be read where they lie."""
        if self.answers(table, scan):
            return self._large[table]
        files = list(self._stamps)
        if scan.ids is None:
            return set(files)
        column, values = scan.ids
        among = ", ".join(sorted(values))
        sql = f'SELECT DISTINCT file FROM {self.name}.{table} WHERE "{column}" IN ({among})'
        return self._large[table] | {files[row[0]] for row in connection.cursor().execute(sql).fetchall()}

    def source(self, table: str, scan: Scan) -> str | None:
        """A SELECT of every column of what was copied; those not read are NULL. None where it doesn't answer."""
        if not self.answers(table, scan):
            return None
        listed = ", ".join(
            f'"{name}"' if name in _COPIED[table] else f'NULL::{kind} AS "{name}"'
            for name, kind in COLUMNS[table].items()
        )
        return f"SELECT {listed} FROM {self.name}.{table}"


def attach(connection: duckdb.DuckDBPyConnection, files: Mapping[int, Path]) -> dict[Path, int]:
    """Attach files at rest read-only, as `t` and their number: the version of each; 0 where it has no tables yet.

    Raises TraceError for the first that cannot be read, TraceVersionError where it is newer or foreign.
    """
    for i, file in files.items():
        try:
            connection.execute(f"ATTACH '{str(file).replace(chr(39), chr(39) * 2)}' AS t{i} (READ_ONLY)")
        except (duckdb.Error, OSError) as error:
            raise explain(file, error) from error
    if not files:
        return {}
    check_whole(connection, {f"t{i}": file for i, file in files.items()})
    try:
        together = " UNION ALL ".join(f"SELECT {i}, schema_version FROM t{i}.main.meta" for i in files)
        found = connection.execute(together).fetchall()
        versions = {files[i]: version for i, version in found}
        if len(found) == len(files) and all(isinstance(v, int) and v <= SCHEMA_VERSION for v in versions.values()):
            return versions
    except duckdb.Error:  # then each by itself tells which it was
        versions = {}
    for i, file in files.items():
        try:  # a file without tables: its owner was killed before it had made them
            versions[file] = check_version(connection, file, f"t{i}.main") if has_tables(connection, f"t{i}") else 0
        except duckdb.Error as error:
            raise explain(file, error) from error
    return versions


def stamp_of(file: Path) -> Stamp:
    """What differs once a file has been written to."""
    found: list[int] = []
    for part in (str(file), f"{file}.wal"):
        try:
            about = os.stat(part)  # noqa: PTH116 - a Path for each of a thousand files takes longer
            found += [about.st_ino, about.st_size, about.st_mtime_ns]
        except FileNotFoundError:
            found.append(-1)
    return tuple(found)
