"""Opens trace files for writing, with checks and specific errors."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import duckdb
import pyarrow as pa

from ajet_sdk.errors import NotATrace, TraceError, TraceLocked, TraceVersionError
from ajet_sdk.trace.digests import amending, keyed_digests, seal
from ajet_sdk.trace.owner import announce, retract, settled_owner
from ajet_sdk.trace.query import SETTINGS
from ajet_sdk.trace.schema import (
    SAMPLED,
    SCHEMA_VERSION,
    STORAGE_VERSION,
    create_statements,
)

_LOG = logging.getLogger("ajet.trace")
_READER_WAIT = 5.0
_WRITING = {
    **SETTINGS,
    "checkpoint_threshold": "128MB",
    "storage_compatibility_version": STORAGE_VERSION,
}
"""Each checkpoint rewrites the last row group, which at DuckDB's default of 16 MB took half of the
time."""


def open_to_write(
    path: Path, *, again: bool = False, brief: bool = False
) -> duckdb.DuckDBPyConnection:
    """Open or create a trace file as its only owner, announced in gateway.json; mark a dead owner's
    runs interrupted.

    `again`: this process owns the file and reopens it after a disk failure. `brief`: open it for a
    single write; runs are unchanged, and other processes wait. Raises TraceLocked if a live process
    owns it, TraceVersionError if it is newer or no trace, TraceError if it cannot be read or
    written.
    """
    owner = None if again else settled_owner(path)
    if owner and (owner.writes or owner.pid != os.getpid()):
        raise locked(path, owner.pid)
    connection = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not again:
            announce(
                path, writes=True, brief=brief
            )  # before opening: readers leave the file to its owner
            if unborn(path):
                path.unlink()  # its owner was killed while creating the file: it is empty
        is_new = not path.exists()
        connection = _connect(path)
        if is_new:
            path.chmod(0o600)
        [(name,)] = connection.execute("SELECT current_database()").fetchall()
        check_whole(connection, {name: path})
        _prepare(connection, path)
        keep_private(path)
        if not again and not brief:
            _interrupt(connection)
    except (duckdb.Error, OSError, TraceError) as error:
        if connection:
            connection.close()
        if not again:
            retract(path, writes=True)
        raise explain(path, error) from error
    return connection


def keep_private(path: Path) -> None:
    """Give the WAL of a trace, which DuckDB makes readable for all, the permissions of the file."""
    log = path.with_name(path.name + ".wal")
    with contextlib.suppress(FileNotFoundError):
        wanted = path.stat().st_mode & 0o777
        if log.stat().st_mode & 0o777 != wanted:
            log.chmod(wanted)


def _connect(path: Path) -> duckdb.DuckDBPyConnection:
    """Connect, waiting for readers that have the file open during a query."""
    deadline = time.monotonic() + _READER_WAIT
    while True:
        try:
            return duckdb.connect(str(path), config=dict(_WRITING))
        except duckdb.Error as error:
            if not _LOCKED.search(str(error)) or time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def _prepare(connection: duckdb.DuckDBPyConnection, path: Path) -> None:
    """Create the tables of an empty database."""
    if has_tables(connection):
        check_version(connection, path)
        return
    with transaction(connection):
        for statement in create_statements():
            connection.execute(statement)


def has_tables(connection: duckdb.DuckDBPyConnection, database: str | None = None) -> bool:
    sql = (
        "SELECT 1 FROM duckdb_tables() WHERE database_name = coalesce($1, current_database())"
        " LIMIT 1"
    )
    return bool(connection.execute(sql, [database]).fetchall())


_HEADERS = 3 * 4096


def unborn(path: Path) -> bool:
    """Whether a file is empty, or a DuckDB file without complete headers."""
    try:
        about = os.stat(path)  # noqa: PTH116 - a Path for each of a thousand files takes longer
    except (FileNotFoundError, NotADirectoryError):
        return False
    if not stat.S_ISREG(about.st_mode) or about.st_size >= _HEADERS:
        return False
    start = path.read_bytes()[:12]
    return not start.strip(b"\0") or start[8:] == b"DUCK"


def check_whole(connection: duckdb.DuckDBPyConnection, files: Mapping[str, Path]) -> None:
    """Raise TraceError if the end of an open file is missing: its remaining rows would seem
    complete.

    `files` are the connection's, by database name. A DuckDB file has three headers of 4 KiB and
    blocks, with their number in a header. A checkpoint cuts off free blocks at the end without
    updating it, so that the last block in use is searched. No file is opened here, since closing it
    would release DuckDB's lock.
    """
    sql = "SELECT database_name, total_blocks, block_size FROM pragma_database_size()"
    for name, blocks, block in connection.execute(sql).fetchall():
        path = files.get(name)
        if path is None or (size := path.stat().st_size) >= _HEADERS + blocks * block:
            continue
        try:
            last = _last_block(connection, name)
        except duckdb.Error:
            last = blocks - 1
        if size < (whole := _HEADERS + (last + 1) * block):
            raise TraceError(
                f"{path} is truncated: it has {size:,} of {whole:,} bytes. It is not read, since it"
                " would look complete; copy it again"
            )


def _last_block(connection: duckdb.DuckDBPyConnection, name: str) -> int:
    used = [f"SELECT max(block_id) AS last FROM pragma_metadata_info('{name}')"]
    sql = "SELECT table_name FROM duckdb_tables() WHERE database_name = $1"
    for (table,) in connection.execute(sql, [name]).fetchall():
        of = f"FROM pragma_storage_info('{name}.main.{table}')"
        used += [f"SELECT max(block_id) {of}", f"SELECT max(list_max(additional_block_ids)) {of}"]
    [row] = connection.execute(f"SELECT max(last) FROM ({' UNION ALL '.join(used)})").fetchall()
    return int(row[0] or 0)


@contextlib.contextmanager
def transaction(connection: duckdb.DuckDBPyConnection) -> Iterator[None]:
    """Runs the block as a transaction."""
    connection.execute("BEGIN")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(duckdb.Error):  # a failed commit ends the transaction itself
            connection.execute("ROLLBACK")
        raise


def _interrupt(connection: duckdb.DuckDBPyConnection) -> None:
    """Marks the running runs of a dead owner as interrupted."""
    running = [
        run
        for (run,) in connection.execute(
            "SELECT run_id FROM runs WHERE status = 'running'"
        ).fetchall()
    ]
    if running:
        with (
            transaction(connection),
            amending(connection, "runs", "list_contains(?, run_id)", [running]),
        ):
            connection.execute("UPDATE runs SET status = 'interrupted' WHERE status = 'running'")


def check_version(connection: duckdb.DuckDBPyConnection, path: Path, schema: str = "main") -> None:
    """Raise TraceVersionError unless the trace in `schema` has this ajet's version."""
    try:
        row = connection.execute(f"SELECT schema_version FROM {schema}.meta").fetchone()
    except (duckdb.CatalogException, duckdb.BinderException) as error:
        raise NotATrace(
            f"{path} is a DuckDB file but not an ajet trace (it has no table meta.schema_version);"
            " check the path"
        ) from error
    if row is None or not isinstance(row[0], int):
        version = repr(row[0]) if row else "missing"
        raise NotATrace(
            f"{path} is not an ajet trace (its meta.schema_version is {version}); check the path"
        )
    if row[0] != SCHEMA_VERSION:
        raise TraceVersionError(other_version(path, row[0]))


def other_version(path: Path | str, version: int) -> str:
    """The message about a trace of another version."""
    if version > SCHEMA_VERSION:
        age = "a newer"
        advice = "update with: pip install -U ajet"
    else:
        age = "an older"
        advice = (
            "carry it over: `ajet trace export --format native` there, `ajet trace import` here"
        )
    return (
        f"{path} was written by {age} ajet (schema {version}; this version reads {SCHEMA_VERSION});"
        f" {advice}"
    )


def locked(path: Path, pid: int | None) -> TraceLocked:
    """The error for a file owned by a live process."""
    if pid == os.getpid():
        return TraceLocked(
            f"{path} is already being written by this process (pid {pid}); use its TraceWriter"
        )
    holder = "another process" if pid is None else f"process {pid}"
    return TraceLocked(
        f"{path} is locked by {holder}, which is still running. Wait for it, stop it, or choose"
        " another experiment_name"
    )


_LOCKED = re.compile(
    r"Could not set lock|Conflicting lock|different configuration|file handle conflict", re.I
)
_PID = re.compile(r"\(PID (\d+)\)")
_FOREIGN = re.compile(r"not a valid DuckDB|Corrupt|Serialization Error|version number", re.I)
_CUT_OFF = re.compile(r"Could not read enough bytes", re.I)
_DENIED = re.compile(r"Permission denied|Read-only file system|Operation not permitted", re.I)
_FULL = re.compile(r"No space left|File too large|quota|could not write all", re.I)


def explain(path: Path, error: Exception) -> TraceError:
    """Convert a DuckDB error into one of ours with advice."""
    text = str(error)
    if isinstance(error, TraceError):
        return error
    if _LOCKED.search(text):
        match = _PID.search(text)
        return locked(
            path, int(match[1]) if match else os.getpid() if "onfiguration" in text else None
        )
    if _FULL.search(text):
        return TraceError(
            f"the disk of {path} is full. What was written is intact; free some space. ({text})"
        )
    if isinstance(error, PermissionError) or _DENIED.search(text):
        return TraceError(
            f"{path} cannot be opened: permission denied. Change its permissions or choose another"
            f" path. ({text})"
        )
    if _CUT_OFF.search(text):
        return TraceError(f"{path} is truncated; copy it again. ({text})")
    if _FOREIGN.search(text):
        return TraceVersionError(
            f"{path} is not a trace that DuckDB {duckdb.__version__} can open. ({text})"
        )
    return TraceError(f"the trace {path} cannot be used: {text}")


def insert(
    connection: duckdb.DuckDBPyConnection, tables: Mapping[str, pa.Table], batch: int
) -> None:
    """Write a batch in a transaction. A row that DuckDB cannot store is logged and skipped."""
    try:
        _insert(connection, tables, batch)
    except duckdb.DataError:
        for table, rows in tables.items():
            for i in range(len(rows)):
                try:
                    _insert(connection, {table: rows.slice(i, 1)}, batch)
                except duckdb.DataError as error:
                    _LOG.warning("Could not store a row of %s in the trace: %s", table, error)


def _insert(
    connection: duckdb.DuckDBPyConnection, tables: Mapping[str, pa.Table], batch: int
) -> None:
    with transaction(connection):
        for table, rows in tables.items():
            connection.register("_batch", rows)
            replaced = "run_id IN (SELECT run_id FROM _batch)"
            if table == "runs":
                with amending(connection, table, replaced):
                    connection.execute(f"DELETE FROM runs WHERE {replaced}")
            connection.execute(f"INSERT INTO {table} SELECT * FROM _batch")
            connection.unregister("_batch")
        seal(
            connection,
            [digest for table, rows in tables.items() for digest in keyed_digests(table, rows)],
        )
        connection.execute("UPDATE meta SET batch = ?", [batch])


_LATER = (
    "SELECT episode_id FROM episodes WHERE run_id = $run AND split IS DISTINCT FROM 'trial'"
    " AND (step > $step OR episode_id IN (SELECT unnest($lost::VARCHAR[])))"
    " AND episode_id NOT IN (SELECT unnest($kept::VARCHAR[]))"
)
"""Trials stay: a resumed run has the tasks that they selected."""


def supersede(
    connection: duckdb.DuckDBPyConnection,
    run_id: str,
    after_step: int,
    booked: Sequence[str] = (),
    kept: Sequence[str] = (),
    lost: Sequence[str] = (),
) -> None:
    """Mark the part of a run after a step as rolled back; see TraceWriter.supersede."""
    values = {"run": run_id, "step": after_step}
    with_kept = {**values, "kept": list(kept)}
    with_lost = {**with_kept, "lost": list(lost)}
    unbooked = f"""
        SELECT $run, coalesce(e.step, $step + 1), c.episode_id, c.call_id,
            if(e.split = 'trial', 'evaluation', 'superseded'), {SAMPLED}
        FROM calls c LEFT JOIN episodes e USING (episode_id)
        WHERE c.trainable AND c.phase = 'rollout' AND {SAMPLED} > 0
          AND (e.run_id = $run AND (e.step > $step OR e.split = 'trial'
                   OR e.episode_id IN (SELECT unnest($lost::VARCHAR[])))
               OR e.episode_id IS NULL AND c.started_at >= (SELECT min(started_at) FROM runs WHERE run_id = $run))
          AND c.episode_id NOT IN (SELECT unnest($kept::VARCHAR[]))
          AND c.call_id NOT IN (SELECT call_id FROM ledger) AND c.call_id NOT IN (SELECT unnest($booked::VARCHAR[]))"""
    later = "run_id = $run AND step > $step"
    with _optimized(connection), transaction(connection):
        with amending(connection, "ledger", "run_id = $run", {"run": run_id}):
            connection.execute(
                f"INSERT INTO ledger {unbooked}", {**with_lost, "booked": list(booked)}
            )
            connection.execute(
                f"UPDATE ledger SET outcome = 'superseded' WHERE {later} AND episode_id NOT IN "
                "(SELECT episode_id FROM episodes WHERE run_id = $run AND split = 'trial')"
                " AND episode_id NOT IN (SELECT unnest($kept::VARCHAR[]))",
                with_kept,
            )
        with amending(connection, "episodes", f"episode_id IN ({_LATER})", with_lost):
            connection.execute(
                f"UPDATE episodes SET superseded = true WHERE episode_id IN ({_LATER})", with_lost
            )
        for table in ("metrics", "trained"):
            with amending(connection, table, later, values):
                connection.execute(f"DELETE FROM {table} WHERE {later}", values)


@contextlib.contextmanager
def _optimized(connection: duckdb.DuckDBPyConnection) -> Iterator[None]:
    """Enables the optimizer, which a writer's connection doesn't need for its inserts."""
    connection.execute("PRAGMA enable_optimizer")
    try:
        yield
    finally:
        connection.execute("PRAGMA disable_optimizer")


def move_to_step(
    connection: duckdb.DuckDBPyConnection, episode_ids: Sequence[str], step: int
) -> None:
    """Set the step of episodes, and of their entries in the ledger."""
    chosen = "list_contains($ids, episode_id)"
    ids = {"ids": list(episode_ids)}
    with transaction(connection):
        for table in ("episodes", "ledger"):
            with amending(connection, table, chosen, ids):
                connection.execute(
                    f"UPDATE {table} SET step = $step WHERE {chosen}", {**ids, "step": step}
                )


def undeliver(
    connection: duckdb.DuckDBPyConnection, episode_id: str, request_id: str, error: str
) -> None:
    """Set the error of a request's calls without one."""
    calls = "episode_id = $episode AND request_id = $request"
    ids = {"episode": episode_id, "request": request_id}
    with transaction(connection), amending(connection, "calls", calls, ids):
        connection.execute(
            f"UPDATE calls SET error = $error WHERE {calls} AND error IS NULL",
            {**ids, "error": error},
        )
