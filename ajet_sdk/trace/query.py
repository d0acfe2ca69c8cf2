"""Runs a SELECT read-only, with limits of time and size, and converts values.

DuckDB's HUGEINT, the type of sums of integers, is a decimal in Arrow. Values outside of Python's
types become text in DuckDB's format: intervals, whose months have no fixed number of days, infinite
dates, and dates after the year 9999.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from functools import lru_cache
from itertools import pairwise

import duckdb
import pyarrow as pa

from ajet_sdk.errors import QueryError
from ajet_sdk.protocols import Stop
from ajet_sdk.trace.schema import create_statements
from ajet_sdk.trace.scratch import open_scratch

TIMEOUT = 30.0
"""Seconds of processor time of a query. On a busy machine it may take longer."""
_WAITS = 10
"""A query is stopped after this many times its limit by the clock, such as one that waits for a
disk."""

RESULT_BYTES = 512 << 20

SETTINGS: dict[str, str | bool | int | float | list[str]] = {
    "enable_external_access": False,
    "autoinstall_known_extensions": False,
    "autoload_known_extensions": False,
    "memory_limit": "768MB",
    "threads": 2,
}
"""Settings of every connection: no access to files, network or extensions from SQL, and limited
memory."""

_FORBIDDEN = re.compile(
    r"arrow_scan\w*|(pandas|python)_\w+|(force_)?checkpoint|query(_table)?|json_execute_serialized_sql"
    r"|(enable|disable|truncate|register|deregister)_\w+|\w+_(database|external_resource|grammar_extension)"
)
"""Functions that run text as SQL, read memory by address, or change the process or its files."""

_ROWS = 2048
"""Rows between two checks of the size: DuckDB's vector size."""


def select(
    root: duckdb.DuckDBPyConnection,
    sql: str,
    parameters: Sequence[object] = (),
    *,
    timeout: float = TIMEOUT,
    stop: Stop | None = None,
    most_bytes: int = RESULT_BYTES,
    prepare: Callable[[duckdb.DuckDBPyConnection], None] | None = None,
) -> pa.Table:
    """Run exactly one SELECT or EXPLAIN on a cursor of `root`, in a read-only transaction.

    `prepare` can create temporary views on the cursor for this query. Raises QueryError for another
    statement, after `timeout` seconds of processor time, if canceled by `stop`, for an error, or if
    the result is larger than `most_bytes`.
    """
    stop = stop or Stop()
    try:
        cursor = root.cursor()
    except duckdb.Error as error:
        raise QueryError(f"the trace was closed: {error}") from error
    try:
        statement = only_statement(cursor, sql)
        limit = _Limit(timeout)
        late = threading.Event()
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(limit.pause()):
                if limit.is_over():
                    late.set()
                    cursor.interrupt()
                    return

        threading.Thread(target=watch, name="ajet-query-limit", daemon=True).start()
        try:
            with stop.by(cursor.interrupt):
                cursor.execute("SET TimeZone = 'UTC'")
                if prepare:
                    prepare(cursor)
                cursor.execute("BEGIN TRANSACTION READ ONLY")
                return _collect(cursor, statement, parameters, limit, stop, most_bytes)
        except (duckdb.Error, pa.ArrowException, OSError, MemoryError) as error:
            if stop.is_set:
                raise _stopped() from error
            if late.is_set():
                raise _too_slow(timeout) from error
            if isinstance(error, duckdb.OutOfMemoryException | MemoryError):
                detail = str(error).partition("\n")[0] or "out of memory"
                narrower = (
                    "narrow it (by run_id or episode_id), select fewer columns or add a LIMIT"
                )
                raise QueryError(f"{QueryError.TOO_MUCH}; {narrower} ({detail})") from error
            raise QueryError(f"the query failed: {error}") from error
        finally:
            ended.set()
    finally:
        cursor.close()


@lru_cache(maxsize=1)
def _no_rows() -> duckdb.DuckDBPyConnection:
    connection = open_scratch(SETTINGS)
    for statement in create_statements():
        connection.execute(statement)
    return connection


def check_select(sql: str, parameters: Sequence[object] = ()) -> None:
    """Raise QueryError for a SELECT that does not fit the tables of a trace; no trace is read."""
    select(_no_rows(), sql, parameters)


class _Limit:
    """A limit of processor time, of this process: other processes of a busy machine don't count."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._began = time.monotonic()
        self._used = time.process_time()

    def is_over(self) -> bool:
        passed = time.monotonic() - self._began
        used = time.process_time() - self._used
        return passed >= self.seconds and (used >= self.seconds or passed >= _WAITS * self.seconds)

    def pause(self) -> float:
        """Seconds until the limit can be over at the earliest."""
        return max(self.seconds - (time.monotonic() - self._began), min(0.1, self.seconds / 4))


def only_statement(cursor: duckdb.DuckDBPyConnection, sql: str) -> duckdb.Statement:
    """Parse a text as one SELECT or EXPLAIN. Raises QueryError for anything else."""
    try:
        statements = cursor.extract_statements(sql)
    except duckdb.Error as error:
        raise QueryError(f"the query cannot be parsed: {error}") from error
    allowed = (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN)
    if len(statements) != 1 or statements[0].type not in allowed:
        kinds = ", ".join(s.type.name for s in statements) or "nothing"
        raise QueryError(
            f"a query must be exactly one SELECT or EXPLAIN (got {kinds}); traces are read-only"
        )
    for name in _called(sql):
        if _FORBIDDEN.fullmatch(name):
            raise QueryError(f"the function {name}() is not available in queries on a trace")
    return statements[0]


def _called(sql: str) -> Iterator[str]:
    """Yields names before a `(`, tokenized by DuckDB, so that quotes and comments cannot hide
    them."""
    text = sql.encode()
    tokens = duckdb.tokenize(sql)
    ends = [*(at for at, _ in tokens[1:]), len(text)]
    parts = [
        text[at:end].decode()
        for (at, kind), end in zip(tokens, ends, strict=True)
        if kind != duckdb.token_type.comment
    ]
    for name, after in pairwise(parts):
        if after.startswith("("):
            yield name.strip().strip('"').lower()


def _collect(
    cursor: duckdb.DuckDBPyConnection,
    statement: duckdb.Statement,
    parameters: Sequence[object],
    limit: _Limit,
    stop: Stop,
    most_bytes: int,
) -> pa.Table:
    result = cursor.sql(statement, params=list(parameters) or None)
    reader = result.to_arrow_reader(_ROWS)
    batches: list[pa.RecordBatch] = []
    size = 0
    for batch in reader:
        batches.append(batch)
        size += batch.nbytes
        if size > most_bytes:
            raise QueryError(
                f"the result is larger than {most_bytes >> 20} MiB; select fewer columns or add a"
                " LIMIT"
            )
        if stop.is_set:
            raise _stopped()
        if limit.is_over():
            raise _too_slow(limit.seconds)
    return pa.Table.from_batches(batches, reader.schema)


def _too_slow(timeout: float) -> QueryError:
    return QueryError(
        f"the query was stopped after {timeout:g} s of processor time; narrow it (by run_id or"
        " episode_id) or add a LIMIT"
    )


def _stopped() -> QueryError:
    return QueryError("the query was canceled")


_AT_ONCE = 4096
_TIMES = re.compile(r"\b(INTERVAL|DATE|TIMESTAMP\w*( WITH TIME ZONE)?)\b")
"""DuckDB types with values outside of Python's types."""


def rows_of(table: pa.Table) -> Iterator[dict[str, object]]:
    """Yields rows of a result, converted in batches. Whole decimals become int, others Decimal."""
    for start in range(0, len(table), _AT_ONCE):
        columns = [values_of(column) for column in table.slice(start, _AT_ONCE).columns]
        yield from (
            dict(zip(table.column_names, row, strict=True)) for row in zip(*columns, strict=True)
        )


def values_of(column: pa.ChunkedArray) -> list[object]:
    """Converts a column of any type to Python values."""
    kind = str(column.type)
    if "interval" in kind:
        column = _with_times_as_text(column)
    try:
        values: list[object] = column.to_pylist()
    except (OverflowError, ValueError):  # a time out of the range of Python's types
        values = _with_times_as_text(column).to_pylist()
    if "decimal" in kind or "map" in kind:
        return [_plain(value) for value in values]
    return values


def _with_times_as_text(column: pa.ChunkedArray) -> pa.ChunkedArray:
    with open_scratch() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        relation = connection.from_arrow(pa.table({"value": column}))
        kind = _TIMES.sub("VARCHAR", str(relation.types[0]))
        return relation.project(f"value::{kind} AS value").to_arrow_table()["value"]


def _plain(value: object) -> object:
    """Converts whole decimals to int, and maps (lists of pairs) with text keys to dict."""
    if isinstance(value, Decimal):
        return int(value) if value.as_tuple().exponent == 0 else value
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if not isinstance(value, list):
        return value
    if value and all(isinstance(item, tuple) for item in value):
        pairs = [(_plain(key), _plain(item)) for key, item in value]
        if all(isinstance(key, str) for key, _ in pairs):
            return dict(pairs)
        return [list(pair) for pair in pairs]
    return [_plain(item) for item in value]
