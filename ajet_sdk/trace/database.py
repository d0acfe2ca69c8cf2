"""Opening a trace file to write: the checks, and an error for each way in which it can fail."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import duckdb

from ajet_sdk.errors import TraceError, TraceLocked, TraceVersionError
from ajet_sdk.trace.live import announce, owner_of
from ajet_sdk.trace.query import SETTINGS
from ajet_sdk.trace.schema import SCHEMA_VERSION, create_statements

__all__ = ["check_version", "explain", "open_to_write"]

_PID = re.compile(r"\(PID (\d+)\)")
_READER_WAIT = 5.0


def open_to_write(path: Path) -> duckdb.DuckDBPyConnection:
    """Open or create a trace file as its one owner, say so in gateway.json, and mark runs of a dead owner interrupted.

    Raises TraceLocked where a live process owns it, TraceVersionError where it is newer or foreign, TraceError where it
    cannot be read or written.
    """
    owner = owner_of(path)
    if owner:
        raise locked(path, owner.pid)
    fresh = not path.exists() or path.stat().st_size == 0
    connection = _connect(path)
    try:
        if fresh:
            _create(connection)
        else:
            check_version(connection, path)
            connection.execute("UPDATE runs SET status = 'interrupted' WHERE status = 'running'")
        announce(path)
    except (duckdb.Error, OSError) as error:
        connection.close()
        raise explain(path, error) from error
    except TraceError:
        connection.close()
        raise
    return connection


def _connect(path: Path) -> duckdb.DuckDBPyConnection:
    """A reader at rest holds the file for the length of one query: wait for it."""
    deadline = time.monotonic() + _READER_WAIT
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return duckdb.connect(str(path), config=dict(SETTINGS))
        except (duckdb.Error, OSError) as error:
            clear = explain(path, error)
            if not isinstance(clear, TraceLocked) or owner_of(path) or time.monotonic() > deadline:
                raise clear from error
            time.sleep(0.05)


def _create(connection: duckdb.DuckDBPyConnection) -> None:
    connection.execute("BEGIN")
    for statement in create_statements():
        connection.execute(statement)
    connection.execute("COMMIT")


def check_version(connection: duckdb.DuckDBPyConnection, path: Path, schema: str = "main") -> None:
    """Raises TraceVersionError unless `schema` is a trace that this ajet can read."""
    try:
        row = connection.execute(f"SELECT schema_version FROM {schema}.meta").fetchone()
    except (duckdb.CatalogException, duckdb.BinderException) as error:
        raise TraceVersionError(
            f"{path} is a DuckDB file but not an ajet trace (it has no table meta.schema_version); give another path"
        ) from error
    if row is None or row[0] > SCHEMA_VERSION:
        raise TraceVersionError(
            f"{path} was written by a newer ajet (schema {row[0] if row else '?'}, this ajet reads {SCHEMA_VERSION}); "
            "update it: pip install -U ajet"
        )


def locked(path: Path, pid: int | None, serves: bool = False) -> TraceLocked:
    """The error for a file that another process owns."""
    if pid == os.getpid():
        return TraceLocked(f"{path} is already being written by this process (pid {pid}): use that TraceWriter")
    who = f"process {pid}" if pid else "another process"
    what = "query it live" if serves else "wait until it ends"
    return TraceLocked(f"{path} is being written by {who}, which is alive: {what}, or give another experiment_name")


def explain(path: Path, error: Exception) -> TraceError:
    """The same failure as an error of ours that says what to do."""
    text = str(error)
    if "lock" in text and ("Conflicting" in text or "Could not set lock" in text):
        found = _PID.search(text)
        return locked(path, int(found[1]) if found else None)
    if "different configuration" in text or "already attached" in text or "Unique file handle conflict" in text:
        return locked(path, os.getpid())
    if "not a valid DuckDB" in text or "Corrupt" in text or "Serialization Error" in text:
        return TraceVersionError(f"{path} is not a trace file that this DuckDB ({duckdb.__version__}) can open: {text}")
    if isinstance(error, PermissionError) or "ermission denied" in text or "Read-only file system" in text:
        return TraceError(f"{path} cannot be written: {text}. Make its directory writable or give another path")
    if "No space left" in text or "File too large" in text or "Disk quota" in text:
        return TraceError(f"the disk of {path} is full: {text}. What was written before is intact; free some space")
    return TraceError(f"the trace {path} cannot be used: {text}")
