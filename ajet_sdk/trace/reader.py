"""Reading a trace: live through its owner, else the file itself, several files as one; and records as objects."""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ajet_sdk.errors import QueryError, TraceError, TraceLocked
from ajet_sdk.protocols import TraceReader
from ajet_sdk.trace.database import check_version, explain, has_tables, locked, unborn
from ajet_sdk.trace.live import QUERY_PATH, Owner, owner_of, pack, post, refusal, settled_owner
from ajet_sdk.trace.prefixes import Placed, Stored, rebuild
from ajet_sdk.trace.query import SETTINGS, select
from ajet_sdk.trace.schema import CALLS_FULL, COLUMNS, RUNS_AT_REST, SINCE, TABLES, empty
from ajet_sdk.types import Call, Episode, Reward

__all__ = ["calls_of", "episodes", "ledger_balance", "open_trace", "stored_calls", "trace_files"]

_LINGER = 0.3
_RACE = 2.0
_PATIENCE = 20.0


def open_trace(path: Path, *more: Path) -> TraceReader:
    """Open a trace to read: a file, an experiment directory, or several files (of a directory, or named), read as one.

    Nothing stays open between queries, so that a reader never keeps a writer out and sees a run start and end: each
    query asks the live owner where there is one, and reads the file where there is none. Raises TraceError where there
    is no trace, TraceVersionError where it is newer or foreign, TraceLocked where its owner answers no queries.
    """
    files = {file.resolve(): file for one in (path, *more) for file in trace_files(Path(one))}
    reader = _Trace(list(files.values()))
    reader.query("SELECT 1")
    return reader


def trace_files(path: Path) -> list[Path]:
    """The trace files of a path: itself, or those of a directory."""
    if path.is_dir():
        files = sorted(file for file in path.glob("*.duckdb") if not unborn(file))
        if not files:
            raise TraceError(f"there is no trace (*.duckdb) in {path}; a run writes one to launcher_record/NAME/")
        return files
    if not path.exists() or unborn(path):
        raise TraceError(f"there is no trace at {path}: {'it is empty' if path.exists() else 'no such file'}")
    return [path]


class _Trace:
    """A TraceReader over files that may each have a live owner."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files
        self._rest = _AtRest(files)
        # At the interpreter's end too: DuckDB aborts where a daemon thread closes it then.
        weakref.finalize(self, self._rest.close)

    def query(self, sql: str, parameters: Sequence[Any] = ()) -> pa.Table:
        started = seen = time.monotonic()
        while True:
            try:
                return self._query(sql, parameters)
            except TraceLocked:  # someone may have taken the file, for a moment, after we had looked for an owner
                at, owners = time.monotonic(), [owner for owner in map(owner_of, self._files) if owner]
                if any(not owner.brief for owner in owners) or at - seen > _RACE or at - started > _PATIENCE:
                    raise
                seen = at if owners else seen
            time.sleep(0.02)

    def _query(self, sql: str, parameters: Sequence[Any]) -> pa.Table:
        owned = {file: owner for file in self._files if (owner := settled_owner(file))}
        if owned:
            self.close()
        if len(self._files) == 1 and owned:
            answer = _ask(self._files[0], owned[self._files[0]], sql, parameters)
            if answer is not None:
                return answer
            owned = {}
        if owned:
            with _attach(self._files, owned) as connection:
                return _run(connection, sql, parameters)
        with self._rest.opened() as connection:
            return _run(connection, sql, parameters)

    def close(self) -> None:
        """Let go of the files, unless a query is running; the next query opens them again."""
        self._rest.close()


class _AtRest:
    """The files opened read-only, kept for a moment after the last query."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files
        self._lock = threading.RLock()  # a finalizer may run in the thread that holds it
        self._connection: duckdb.DuckDBPyConnection | None = None
        self._users = 0
        self._release: threading.Timer | None = None

    @contextmanager
    def opened(self) -> Iterator[duckdb.DuckDBPyConnection]:
        with self._lock:
            self._connection = self._connection or _attach(self._files, {})
            self._users += 1
            connection = self._connection
        try:
            yield connection
        finally:
            with self._lock:
                self._users -= 1
                if self._release:
                    self._release.cancel()
                self._release = threading.Timer(_LINGER, self.close)
                self._release.daemon = True
                self._release.start()

    def close(self) -> None:
        with self._lock:
            if self._users:
                return
            if self._release:
                self._release.cancel()
                self._release = None
            if self._connection:
                self._connection.close()
                self._connection = None


def _attach(files: Sequence[Path], owned: Mapping[Path, Owner]) -> duckdb.DuckDBPyConnection:
    connection = duckdb.connect(config={k: v for k, v in SETTINGS.items() if k != "enable_external_access"})
    try:
        for i, file in enumerate(files):
            _add(connection, f"t{i}", file, owned.get(file))
        for table in TABLES:
            parts = [f"FROM {table}_{i}" for i in range(len(files))]
            connection.execute(f"CREATE VIEW {table} AS {' UNION ALL BY NAME '.join(parts)}")
        connection.execute("SET enable_external_access = false")
    except TraceError:
        connection.close()
        raise
    return connection


def _run(connection: duckdb.DuckDBPyConnection, sql: str, parameters: Sequence[Any]) -> pa.Table:
    if "calls_full" in sql.lower():  # the one view that takes time to make
        connection.cursor().execute(CALLS_FULL)
    return select(connection, sql, parameters)


def _ask(file: Path, owner: Owner, sql: str, parameters: Sequence[Any]) -> pa.Table | None:
    """The live owner's answer; None where it is gone since."""
    if not owner.url:
        raise locked(file, owner.pid)
    answer = post(owner, QUERY_PATH, {"sql": sql, "parameters": pack(parameters)})
    if answer is None:
        return None
    if answer.status_code != 200:
        raise QueryError(refusal(answer))
    return pa.ipc.open_stream(answer.content).read_all()


def _add(connection: duckdb.DuckDBPyConnection, name: str, file: Path, owner: Owner | None) -> None:
    """Make the tables of one file visible as views of that number; a copy of them where it is being written."""
    if owner:
        connection.execute(f"ATTACH ':memory:' AS {name}")
        _copy(connection, name, file, owner)
    else:
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
        if table == "runs" and table in present and not owner:
            rows = RUNS_AT_REST.format(runs=f"{name}.runs")
        connection.execute(f"CREATE VIEW {table}_{name[1:]} AS {rows}")


def _copy(connection: duckdb.DuckDBPyConnection, name: str, file: Path, owner: Owner) -> None:
    """Copy the tables of a file that is being written into the database `name`."""

    def ask(sql: str) -> pa.Table:
        rows = _ask(file, owner, sql, ())
        if rows is None:
            raise TraceError(f"the run that writes {file} has just ended; ask again")
        return rows

    [meta] = ask("SELECT schema_version FROM meta").to_pylist()
    for table, columns in COLUMNS.items():
        if SINCE.get(table, 1) > meta["schema_version"]:
            continue
        connection.register("_rows", ask(f"SELECT * FROM {table}"))
        typed = ", ".join(f'"{column}"::{kind} AS "{column}"' for column, kind in columns.items())
        connection.execute(f"CREATE TABLE {name}.{table} AS SELECT {typed} FROM _rows")
        connection.unregister("_rows")


def calls_of(reader: TraceReader, episode_id: str) -> list[Call]:
    """The calls of one episode in order of completion, prompts and requests whole."""
    table = reader.query("SELECT * FROM calls WHERE episode_id = ? ORDER BY index, started_at", [episode_id])
    return _calls(table).get(episode_id, [])


def episodes(
    reader: TraceReader,
    run_id: str | None = None,
    step: int | None = None,
    *,
    split: str | None = None,
    episode_ids: Sequence[str] | None = None,
    superseded: bool = False,
) -> list[Episode]:
    """Finished episodes with their calls and rewards, oldest first; those rolled back by a resume only if asked."""
    conditions, values = [] if superseded else ["NOT superseded"], list[Any]()
    for name, value in (("run_id", run_id), ("step", step), ("split", split)):
        if value is not None:
            conditions.append(f"{name} = ?")
            values.append(value)
    if episode_ids is not None:
        conditions.append("episode_id IN (SELECT unnest(?::VARCHAR[]))")
        values.append(list(episode_ids))
    where = f"WHERE {' AND '.join(conditions)}" if conditions else ""
    rows = reader.query(f"SELECT * FROM episodes {where} ORDER BY started_at, episode_id", values).to_pylist()
    chosen = f"(SELECT episode_id FROM episodes {where})"
    calls = _calls(reader.query(f"SELECT * FROM calls WHERE episode_id IN {chosen} ORDER BY index, started_at", values))
    rewards: dict[str, list[Reward]] = {}
    for row in reader.query(f"SELECT * FROM rewards WHERE episode_id IN {chosen}", values).to_pylist():
        rewards.setdefault(row.pop("episode_id"), []).append(Reward(**row))
    return [_episode(row, calls.get(row["episode_id"], []), rewards.get(row["episode_id"], [])) for row in rows]


def ledger_balance(reader: TraceReader, run_id: str) -> list[str]:
    """One line for each trainable call of a run whose ledger does not add up to its output ids; none: it balances."""
    sql = """
        WITH booked AS (SELECT call_id, sum(tokens)::BIGINT AS tokens FROM ledger WHERE run_id = $1 GROUP BY call_id),
        sampled AS (
            SELECT call_id, c.episode_id, coalesce(len(output_ids), 0) AS tokens
            FROM calls c LEFT JOIN episodes e USING (episode_id)
            WHERE trainable AND phase = 'rollout' AND e.run_id = $1
              OR call_id IN (SELECT call_id FROM booked))
        SELECT call_id, s.episode_id, coalesce(s.tokens, 0) AS sampled, coalesce(b.tokens, 0) AS booked
        FROM sampled s FULL JOIN booked b USING (call_id)
        WHERE coalesce(s.tokens, 0) <> coalesce(b.tokens, 0) ORDER BY ALL"""
    return [
        f"call {row['call_id']} of episode {row['episode_id'] or 'unknown'}: "
        f"{row['sampled']} tokens sampled, {row['booked']} in the ledger"
        for row in reader.query(sql, [run_id]).to_pylist()
    ]


def _episode(row: dict[str, Any], calls: Sequence[Call], rewards: Sequence[Reward]) -> Episode:
    plain = {name: value for name, value in row.items() if name not in ("task_id", "superseded")}
    parsed = {name: json.loads(row[name]) for name in ("task", "output", "metrics")}
    return Episode(**{**plain, **parsed, "calls": tuple(calls), "rewards": tuple(rewards)})


def _calls(table: pa.Table) -> dict[str, list[Call]]:
    """Rows of `calls`, of whole episodes -> calls by episode."""
    lists = {name: _arrays(table[name]) for name in ("prompt_suffix", "output_ids", "logprobs")}
    rows = table.drop_columns(list(lists)).to_pylist()
    whole = rebuild(stored_calls(table))
    found: dict[str, list[Call]] = {}
    for i, row in enumerate(rows):
        call = _call(row, {name: values[i] for name, values in lists.items()}, *whole[row["call_id"]])
        found.setdefault(row["episode_id"], []).append(call)
    return found


def stored_calls(table: pa.Table) -> list[Stored]:
    """Rows of `calls` -> what is stored of their prompts, for `rebuild`."""
    prompts, outputs = _arrays(table["prompt_suffix"]), _arrays(table["output_ids"])
    names = ["call_id", "parent_call_id", "prefix_len", "prefix_messages", "messages_suffix"]
    return [
        Stored(
            row["call_id"],
            Placed(row["parent_call_id"], row["prefix_len"], row["prefix_messages"]),
            prompts[i],
            outputs[i],
            row["messages_suffix"],
        )
        for i, row in enumerate(table.select(names).to_pylist())
    ]


_STORED_ONLY = ("parent_call_id", "prefix_len", "prefix_messages", "messages_suffix")


def _call(row: Mapping[str, Any], lists: Mapping[str, Any], ids: npt.NDArray[np.int32], messages: list[Any]) -> Call:
    request = json.loads(row["request"])
    if row["messages_suffix"] is not None:
        request = {"messages": messages, **request}
    plain = {name: value for name, value in row.items() if name not in _STORED_ONLY}
    parsed = {"request": request, "response": json.loads(row["response"]), "sampling": json.loads(row["sampling"])}
    prompt = None if lists["prompt_suffix"] is None else ids
    return Call(**{**plain, **parsed}, prompt_ids=prompt, output_ids=lists["output_ids"], logprobs=lists["logprobs"])


def _arrays(column: pa.ChunkedArray) -> list[npt.NDArray[Any] | None]:
    """A list column as numpy slices, without a Python object per token."""
    found: list[npt.NDArray[Any] | None] = []
    for chunk in column.chunks:
        values = chunk.values.to_numpy(zero_copy_only=False)
        offsets = chunk.offsets.to_numpy()
        valid = chunk.is_valid().to_numpy(zero_copy_only=False)
        found += [values[offsets[i] : offsets[i + 1]] if valid[i] else None for i in range(len(chunk))]
    return found
