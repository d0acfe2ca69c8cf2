"""A database that SQL of a model may read: one SELECT at a time, in a process with limits, of
DuckDB or SQLite.

A model's SQL may ask for gigabytes, for other files, for another connection's memory. So it runs in
a process that has the file open for reading and nothing else: no other file, no setting, no second
statement, no table of its own.
"""

from __future__ import annotations

import json
import math
import os
import resource
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import date, datetime, timedelta
from datetime import time as clock
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from urllib.parse import quote
from uuid import UUID

__all__ = ["Database", "QueryError", "Row", "opened"]

Row = list[object]
"""Numbers, texts, truth values and nulls as JSON has them; anything else as `{kind: text}`."""
ROWS, CHARACTERS = 2_000, 1_000_000
"""Of a result, at most."""
SECONDS, MEMORY = 1.0, 1 << 30
"""Processor time of a query, and bytes beyond what the process begins with."""
PATIENCE = 60.0
"""Seconds by the clock after which a process is given up."""


class QueryError(Exception):
    """What is wrong with a query, in a line; the database is as it was."""


class Database:
    """A file of DuckDB (`.duckdb`) or SQLite; the process starts with the first query and ends with
    this one."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def query(self, sql: str) -> list[Row]:
        """The rows of one SELECT. Raises QueryError."""
        with self._lock:
            reply = self._ask(sql) or self._ask(
                sql
            )  # a process that was ended from outside is started again
        if reply is None:
            raise QueryError("the query needs too much memory or time")
        if "error" in reply:
            raise QueryError(str(reply["error"]))
        return list(reply["rows"])

    def tables(self) -> dict[str, list[str]]:
        """Table -> its columns."""
        with self._lock:
            reply = self._ask(None) or {}
        return dict(reply["tables"])

    def _ask(self, sql: str | None) -> dict[str, object] | None:
        """None where the process ended."""
        if not self.path.is_file():
            raise FileNotFoundError(f"there is no database {self.path}")
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(self.path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        process = self._process
        timer = threading.Timer(PATIENCE, process.kill)
        timer.daemon = True
        timer.start()
        try:
            process.stdin.write(json.dumps(sql) + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())
        except (OSError, ValueError):
            process.kill()
            process.wait()
            return None
        finally:
            timer.cancel()


@lru_cache(maxsize=64)
def opened(path: str) -> Database:
    return Database(path)


# In the process

Run = Callable[[str], Iterator[tuple[object, ...]]]


def serve(path: str) -> None:
    run, interrupt, tables = open_duckdb(path) if path.endswith(".duckdb") else open_sqlite(path)
    deadline = Deadline(interrupt)
    if sys.platform == "linux":
        now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, now + MEMORY))
    for line in sys.stdin:
        sql = json.loads(line)
        reply = {"tables": tables} if sql is None else answer(run, sql, deadline)
        try:
            sys.stdout.write(json.dumps(reply) + "\n")
            sys.stdout.flush()
        except BrokenPipeError:  # whoever asked has ended
            os._exit(0)


def answer(run: Run, sql: str, deadline: Deadline) -> dict[str, object]:
    rows, size = [], 0
    try:
        with deadline:
            for row in run(sql):
                rows.append([plain(value) for value in row])
                size += sum(len(str(value)) for value in rows[-1])
                if len(rows) > ROWS or size > CHARACTERS:
                    raise QueryError(
                        f"the result has more than {ROWS:,} rows or {CHARACTERS:,} characters"
                    )
    except MemoryError:
        return {"error": "the query needs too much memory"}
    except Exception as error:  # noqa: BLE001  # whatever the query does, it is the query's
        late = f"the query took more than {SECONDS:g} s"
        return {
            "error": (
                late
                if deadline.passed
                else str(error).strip().partition("\n")[0] or type(error).__name__
            )
        }
    return {"rows": rows}


class Deadline:
    """Interrupts a query that has used its processor time; a busy machine does not shorten it."""

    def __init__(self, interrupt: Callable[[], None]) -> None:
        self._interrupt, self._end, self.passed = interrupt, math.inf, False
        threading.Thread(target=self._watch, daemon=True).start()

    def __enter__(self) -> None:
        self.passed, self._end = False, time.process_time() + SECONDS

    def __exit__(self, *error: object) -> None:
        self._end = math.inf

    def _watch(self) -> None:
        while True:
            time.sleep(0.02)
            if time.process_time() > self._end:
                self.passed = True
                self._interrupt()


def open_duckdb(path: str) -> tuple[Run, Callable[[], None], dict[str, list[str]]]:
    import duckdb

    limits = {"threads": 1, "memory_limit": "256MB", "max_temp_directory_size": "0KB"}
    database = duckdb.connect(path, read_only=True, config=limits)
    columns = database.execute(
        "SELECT table_name, column_name FROM information_schema.columns ORDER BY table_name,"
        " ordinal_position"
    ).fetchall()
    database.execute("SET enable_external_access = false; SET lock_configuration = true")

    def run(sql: str) -> Iterator[tuple[object, ...]]:
        statements = database.extract_statements(sql)
        if [statement.type for statement in statements] != [duckdb.StatementType.SELECT]:
            raise QueryError("a query is one SELECT")
        found = database.execute(statements[0])
        while rows := found.fetchmany(500):
            yield from rows

    return run, database.interrupt, grouped(columns)


def open_sqlite(path: str) -> tuple[Run, Callable[[], None], dict[str, list[str]]]:
    database = sqlite3.connect(f"file:{quote(os.path.abspath(path))}?mode=ro", uri=True)  # noqa: PTH100
    database.text_factory = lambda data: data.decode(errors="replace")
    columns = database.execute(
        "SELECT t.name, c.name FROM sqlite_master t JOIN pragma_table_info(t.name) c WHERE t.type"
        " IN ('table', 'view')"
    ).fetchall()
    reads = (
        sqlite3.SQLITE_SELECT,
        sqlite3.SQLITE_READ,
        sqlite3.SQLITE_FUNCTION,
        sqlite3.SQLITE_RECURSIVE,
    )
    database.set_authorizer(
        lambda action, *what: sqlite3.SQLITE_OK if action in reads else sqlite3.SQLITE_DENY
    )
    if sys.version_info >= (3, 11):
        database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, CHARACTERS)
    return database.execute, database.interrupt, grouped(columns)


def grouped(columns: list[tuple[str, str]]) -> dict[str, list[str]]:
    tables: dict[str, list[str]] = {}
    for table, column in columns:
        tables.setdefault(table, []).append(column)
    return tables


def plain(value: object) -> object:
    """A value as JSON has it. Raises QueryError for a number that is not finite."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float | Decimal):
        if not math.isfinite(value):
            raise QueryError(f"the result has a number that is not finite ({value})")
        return float(value)
    if isinstance(value, bytes | bytearray):
        return {"bytes": value.hex()}
    if isinstance(value, date | datetime | clock | timedelta | UUID):
        return {"time" if not isinstance(value, UUID) else "uuid": str(value)}
    if isinstance(value, list | tuple):
        return {"list": json.dumps([plain(one) for one in value])}
    if isinstance(value, dict):
        return {"struct": json.dumps({str(name): plain(one) for name, one in value.items()})}
    return {type(value).__name__: str(value)}


if __name__ == "__main__":
    serve(sys.argv[1])
