"""Rewriting a trace file: a verified copy that takes its place in one step.

Nothing is changed in place. A copy grows beside the file, is compared with it, and replaces it; killed at any moment,
either the old file or the new one is there, whole.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import duckdb

from ajet_sdk.errors import TraceError, TraceLocked
from ajet_sdk.trace.database import explain, open_to_write
from ajet_sdk.trace.limits import bytes_of, log_of
from ajet_sdk.trace.owner import process_started, retract, settled_owner
from ajet_sdk.trace.reader import trace_files
from ajet_sdk.trace.schema import COLUMNS, STORAGE_VERSION, create_statements
from ajet_sdk.whole_file import remove_draft

OnStage = Callable[[str], None]
"""Called with the name of each stage, in a few words."""


_SMALL = 16 << 20
_SMALL_BLOCK = 16384
"""DuckDB gives each table whole blocks of 256 KiB: most of a small file is then empty."""


def refuse_live(path: Path, what: str) -> None:
    """Raises TraceLocked where a live process owns the file."""
    owner = settled_owner(path)
    if owner:
        raise TraceLocked(f"{path} is being written by process {owner.pid}; {what} it after the run has ended")


@contextmanager
def rewriting(path: Path, what: str) -> Iterator[duckdb.DuckDBPyConnection]:
    """A connection with the file as `source` and a new, empty trace as `fresh`, which then takes the file's place.

    `what` names the command in errors. Nothing is replaced where the block raises; failures of the disk come out as
    TraceError.
    """
    [path] = trace_files(path.resolve())
    refuse_live(path, what)
    draft = _draft_of(path)
    try:
        _settle(path)
        with _fresh_trace(draft, path) as connection:
            yield connection
            connection.execute("CHECKPOINT fresh; DETACH fresh")
            shutil.copymode(path, draft)
            draft.replace(path)  # the source is held until now: no writer can have opened it
    except (duckdb.Error, OSError) as error:
        raise explain(path, error) from error
    finally:
        remove_draft(draft)
        remove_draft(log_of(draft))


def _draft_of(path: Path) -> Path:
    """Where this process lets a copy grow; what killed processes left of theirs is removed."""
    for left in path.parent.glob(f".{path.name}.*.draft*"):
        pid = left.name.removeprefix(f".{path.name}.").partition(".")[0]
        if pid.isdigit() and not process_started(int(pid)):
            shutil.rmtree(left) if left.is_dir() else left.unlink(missing_ok=True)
    return path.with_name(f".{path.name}.{os.getpid()}.draft")


@contextmanager
def _fresh_trace(draft: Path, source: Path) -> Iterator[duckdb.DuckDBPyConnection]:
    """A connection with a file attached read-only (`source`) and a new trace, `fresh`."""
    remove_draft(draft)
    spill = draft.with_name(draft.name + ".spill")
    spill.mkdir(exist_ok=True, mode=0o700)
    config = {"threads": 2, "memory_limit": "512MB", "temp_directory": str(spill), "autoload_known_extensions": False}
    connection = duckdb.connect(config=config)
    try:
        connection.execute("SET TimeZone = 'UTC'")
        connection.execute(f"ATTACH '{_quoted(source)}' AS source (READ_ONLY)")
        blocks = f", BLOCK_SIZE {_SMALL_BLOCK}" if bytes_of(source) < _SMALL else ""
        storage = f"STORAGE_VERSION '{STORAGE_VERSION}'"
        connection.execute(f"ATTACH '{_quoted(draft)}' AS fresh ({storage}{blocks}); USE fresh")
        draft.chmod(0o600)
        for statement in create_statements():
            connection.execute(statement)
        connection.execute("USE memory")
        yield connection
    finally:
        connection.close()
        shutil.rmtree(spill, ignore_errors=True)


def _quoted(path: Path) -> str:
    return str(path).replace("'", "''")


def _settle(path: Path) -> None:
    """Bring what is still in the log into the file."""
    open_to_write(path, brief=True).close()
    retract(path, writes=True)
    if log_of(path).exists():
        raise TraceError(f"{log_of(path)} could not be merged into {path}; is the disk full?")


def copy_rows(connection: duckdb.DuckDBPyConnection, table: str, where: str = "true") -> None:
    """Copy the rows of a table, as they are, into `fresh`."""
    columns = ", ".join(f'"{name}"' for name in COLUMNS[table])
    connection.execute(f"INSERT INTO fresh.{table} SELECT {columns} FROM source.{table} WHERE {where}")


def fingerprint(connection: duckdb.DuckDBPyConnection, table: str, where: str = "true") -> tuple[int, int]:
    """How many rows a table (`fresh.calls`) has, and the sum of their hashes: equal for equal rows in any order."""
    columns = ", ".join(f'"{name}"' for name in COLUMNS[table.partition(".")[2]])
    sql = f"SELECT count(*), coalesce(sum(hash({columns})::HUGEINT), 0) FROM {table} WHERE {where}"
    [row] = connection.execute(sql).fetchall()
    return int(row[0]), int(row[1])


def equal(connection: duckdb.DuckDBPyConnection, table: str, expected: tuple[int, int]) -> None:
    """Raises TraceError unless a table of `fresh` holds exactly what it should."""
    if fingerprint(connection, f"fresh.{table}") != expected:
        raise TraceError(f"the copy of the table {table} differs; nothing was replaced")
