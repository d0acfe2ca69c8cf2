"""The writer of a trace file: any thread puts records, and a background thread writes them."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Literal, TypeVar
from uuid import uuid4

import duckdb
import pyarrow as pa

from ajet_sdk.errors import QueryError, TraceError
from ajet_sdk.protocols import Stop
from ajet_sdk.trace.below import in_and_below
from ajet_sdk.trace.database import (
    explain,
    insert,
    keep_private,
    move_to_step,
    open_to_write,
    supersede,
    undeliver,
)
from ajet_sdk.trace.encoding import Record, StoredCalls, encode, size_of
from ajet_sdk.trace.journal import IDS, Journal, id_of, left_behind, records_of, trace_of
from ajet_sdk.trace.owner import retract
from ajet_sdk.trace.pictures import StoredPictures
from ajet_sdk.trace.query import RESULT_BYTES, select
from ajet_sdk.types import Call

_LOG = logging.getLogger("ajet.trace")
_QUEUE_BYTES = 256 << 20
_QUEUE_RECORDS = 65_536
_RETRY_SECONDS = 1.0
_BATCH = 2048
_CLOSE_SECONDS = 5.0
_JOURNAL_BYTES = 64 << 20
_Command = Callable[[duckdb.DuckDBPyConnection], None]
_T = TypeVar("_T")


class _Order:
    """Statements to run between records, as one transaction."""

    def __init__(self, command: _Command) -> None:
        self.command = command
        self.done = threading.Event()

    def run(self, connection: duckdb.DuckDBPyConnection) -> None:
        self.command(connection)
        self.done.set()


def take_over(*places: Path) -> None:
    """Write records that killed processes left in journals, of these files or below directories, to
    their traces."""
    left: set[Path] = set()
    for place in places:
        if place.is_dir():
            left.update(*map(left_behind, {place, *(file.parent for file in in_and_below(place))}))
        else:
            left.update(left_behind(place.parent, place.name))
    for trace in set(map(trace_of, left)):
        try:
            TraceWriter(trace).close()
        except TraceError as error:
            _LOG.warning(
                "The journal that a killed process left beside %s could not be read yet: %s",
                trace,
                error,
            )


class TraceWriter(AbstractContextManager["TraceWriter"]):
    """Owns a trace file and writes records to it in batches, in the background.

    `put` never waits for the disk; the queue is bounded by count and bytes. With `on_error="raise"`
    (a run), failing to open the file raises here, and failing to write it raises TraceError from
    the next `put`, `flush` or `close`, while the records are retried. With `on_error="warn"` (a
    deployed agent) nothing is raised: the first failure is logged, and records are queued until the
    queue is full, then dropped.

    After `put` a record survives the event in `survives`, a kill of the process or a crash of the
    machine: it is in a journal until it is in the file. Opening a file takes over the journals of
    killed processes.

    `path` is a file, or a directory in which this process gets its own file.
    """

    def __init__(
        self,
        path: Path,
        *,
        on_error: Literal["raise", "warn"] = "raise",
        flush_ms: int = 250,
        flush_rows: int = 256,
        survives: Literal["kill", "crash"] | None = None,
        close_at_exit: bool = True,
    ) -> None:
        path = Path(path).absolute()  # a workflow may change the working directory
        if path.is_dir() or not path.suffix:
            self.path = path / f"trace-{uuid4().hex[:12]}.duckdb"
        else:
            self.path = path
        self._raises = on_error == "raise"
        self._interval = flush_ms / 1000
        self._rows = flush_rows
        self._pid = os.getpid()
        self._queue: deque[Record | _Order] = deque()
        self._bytes = 0
        self._put = 0
        self._written = 0
        self._changed = threading.Condition()
        self._urgent = False
        self._closing = False
        self._warned = False
        if survives:
            self._else_kept = (
                "and in a journal beside the file, if that can be written; who opens the file next"
                " takes it over"
            )
        else:
            self._else_kept = "and are lost if the process ends before this does"
        self._failure: TraceError | None = None
        self._stored = StoredCalls(StoredPictures(self._picture))
        self._taken: list[Record | _Order] = []
        self._pending = 0
        self._batch = 0
        self._took = 0.0
        self._opened = False
        self._reading = threading.Condition()
        self._queries: list[Stop] = []
        self._root: duckdb.DuckDBPyConnection | None = None
        self._connection: duckdb.DuckDBPyConnection | None = None
        self._journal: Journal | None = None
        self._open_first()
        if survives:
            self._journal = self._kept(lambda: Journal(self.path, synced=survives == "crash"))
        self._thread = threading.Thread(target=self._work, name="ajet-trace-writer", daemon=True)
        self._thread.start()
        if close_at_exit:
            atexit.register(self.close)

    def put(self, *records: Record) -> None:
        """Queue records: a Run is an upsert, a Call belongs to a running episode, an Episode ends
        it.

        An Episode stores its own row and its rewards; its calls are put one by one as they finish.
        """
        if os.getpid() != self._pid:  # before the lock, which a fork may have left locked
            self._drop("this process was forked from the writing process")
            return
        size = sum(map(size_of, records))
        with self._changed:
            full = (
                self._bytes + size > _QUEUE_BYTES
                or len(self._queue) + len(records) > _QUEUE_RECORDS
            )
            closed = self._closing
            if not full and not closed:
                first = not self._queue
                self._queue.extend(records)
                self._bytes += size
                self._put += len(records)
                if first or len(self._queue) >= self._rows:
                    self._changed.notify_all()
        if full or closed:
            self._drop("the writer is closed" if closed else "the disk is too slow")
        elif journal := self._journal:  # after queueing, so that it is never in neither
            self._kept(lambda: journal.append(records))
            if journal.size > _JOURNAL_BYTES:
                self.flush(_CLOSE_SECONDS)
        if self._failure:
            self._raise_failure()

    def _kept(self, write: Callable[[], _T]) -> _T | None:
        """Write the journal; reports a failure like one of the trace file, and returns None."""
        try:
            return write()
        except OSError as error:
            self._report(explain(self.path, error))
            return None

    def _raise_failure(self) -> None:
        """Raise the disk's error as a new exception, since each of many threads would add its
        traceback."""
        if self._raises and self._failure:
            raise type(self._failure)(*self._failure.args)

    def flush(self, timeout: float | None = 30.0) -> bool:
        """Wait until all records put so far are in the file; False after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            target = self._put
            while self._written < target:
                self._urgent = True
                self._changed.notify_all()
                if deadline is None:
                    remaining = None
                else:
                    remaining = deadline - time.monotonic()
                if (
                    self._failure
                    or not self._thread.is_alive()
                    or (remaining is not None and remaining <= 0)
                ):
                    break
                self._changed.wait(0.5 if remaining is None else min(remaining, 0.5))
            done = self._written >= target
        self._raise_failure()
        return done

    def query(
        self,
        sql: str,
        parameters: Sequence[object] = (),
        stop: Stop | None = None,
        *,
        most_bytes: int = RESULT_BYTES,
    ) -> pa.Table:
        """Run a SELECT or EXPLAIN of ajet itself on the live file, from any thread; it sees all
        flushed records.

        It runs in this process, so that the SQL must not come from outside. Raises QueryError.
        """
        stop = stop or Stop()
        with self._reading:
            root = self._root
            if root is None:
                raise QueryError(f"the trace {self.path} is not open and cannot be queried")
            self._queries.append(stop)
        try:
            return select(root, sql, parameters, stop=stop, most_bytes=most_bytes)
        finally:
            with self._reading:
                self._queries.remove(stop)
                self._reading.notify_all()

    @property
    def is_open(self) -> bool:
        """Whether `query` can read the file now."""
        return self._root is not None

    def supersede(
        self,
        run_id: str,
        after_step: int,
        booked: Sequence[str] = (),
        kept: Sequence[str] = (),
        lost: Sequence[str] = (),
    ) -> None:
        """Roll a run back to `after_step` for a resume: tokens of later steps become `superseded`.

        Calls without ledger entries, left by a kill before their step ended, get them, except for
        those `booked` in another file; metrics and `trained` rows of later steps are deleted.
        Episodes `kept` stay as they are: a later step trains them. Episodes `lost` are of earlier
        steps, and never reached the trainer: they become superseded, too.
        """
        order = _Order(
            lambda connection: supersede(connection, run_id, after_step, booked, kept, lost)
        )
        with self._changed:
            self._queue.append(order)
            self._put += 1
            self._urgent = True
            self._changed.notify_all()
        while not order.done.wait(0.5):
            if self._failure:
                raise self._failure
            if not self._thread.is_alive():
                raise TraceError(f"the trace writer of {self.path} has stopped")

    def move_to_step(self, episode_ids: Sequence[str], step: int) -> None:
        """Set the step of episodes that were put with another, and of what the ledger has of them.
        Doesn't wait."""
        order = _Order(lambda connection: move_to_step(connection, episode_ids, step))
        with self._changed:
            if not self._closing:
                self._queue.append(order)
                self._put += 1

    def undelivered(self, episode_id: str, request_id: str, error: str) -> None:
        """Set the error of a request's calls that were put without one. Doesn't wait."""
        order = _Order(lambda connection: undeliver(connection, episode_id, request_id, error))
        with self._changed:
            if not self._closing:
                self._queue.append(order)
                self._put += 1

    def close(self) -> None:
        """Write the remaining records, close the file and release its ownership. Raises as
        `put`."""
        atexit.unregister(self.close)
        if os.getpid() != self._pid:
            return
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout=None if self._raises else _CLOSE_SECONDS)
        self._raise_failure()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open_first(self) -> None:
        """Create the file before records can be put, so that they don't wait for it."""
        try:
            self._open()
        except TraceError as error:
            if self._raises:
                raise
            self._report(error)
        else:
            for journal in left_behind(self.path.parent, self.path.name):
                self._take_over(journal)

    def _take_over(self, journal: Path) -> None:
        """Queue a killed process's unwritten records; the journal is deleted once they are
        written."""
        by_id = {id_of(record): record for record in records_of(journal)}
        stored = " UNION ALL ".join(
            f"SELECT {column} AS id FROM {table}" for table, column in IDS.items()
        )
        known = self.query(
            f"SELECT id FROM ({stored}) WHERE id IN (SELECT unnest($1::VARCHAR[]))", [list(by_id)]
        )
        fresh = [
            record for name, record in by_id.items() if name not in set(known.column(0).to_pylist())
        ]
        self._know_calls_of(fresh)
        self._bytes += sum(map(size_of, fresh))
        self._queue.extend([*fresh, _Order(lambda _: journal.unlink(missing_ok=True))])
        self._put += len(fresh) + 1

    def _know_calls_of(self, records: Sequence[Record]) -> None:
        """Let calls refer to earlier calls of their episodes that a killed process has written."""
        begun = list({record.episode_id for record in records if isinstance(record, Call)})
        sql = "SELECT episode_id, call_id FROM calls WHERE episode_id IN (SELECT unnest($1::VARCHAR[]))"
        for row in self.query(sql, [begun]).to_pylist():
            self._stored.know(row["episode_id"], row["call_id"])

    def _picture(self, digest: str) -> bytes | None:
        """The file of a picture in the trace, if it is there."""
        if self._root is None:
            return None
        with self._root.cursor() as cursor:  # with the optimizer: only this row's file is read
            found = cursor.execute("SELECT data FROM pictures WHERE digest = ?", [digest])
            row = found.fetchone()
        return None if row is None else bytes(row[0] or b"")

    def _open(self) -> None:
        root = open_to_write(self.path, again=self._opened)
        self._connection = root.cursor()
        self._connection.execute(
            "PRAGMA disable_optimizer"
        )  # useless for an INSERT, and a third of its time
        row = self._connection.execute("SELECT batch FROM meta").fetchone()
        committed = row[0] if row else 0
        if self._opened and committed > self._batch:
            self._settle(self._pending)  # the failure came after the commit
        self._batch = committed
        self._opened = True
        self._root = root

    def _work(self) -> None:
        try:
            while self._turn():
                pass
        finally:
            self._release()
            with self._changed:
                if self._written < self._put and not self._failure:
                    self._failure = TraceError(
                        f"the trace writer of {self.path} stopped: see the log"
                    )
                self._changed.notify_all()

    def _turn(self) -> bool:
        """Write due records; False once closed and empty."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._taken or self._due())
            self._changed.wait_for(self._due, timeout=self._pause())
            self._urgent = False
            closing = self._closing
            while self._queue and len(self._taken) < _BATCH:
                self._taken.append(self._queue.popleft())
        if not self._taken and not (self._root is None and not closing):
            return not closing
        began = time.monotonic()
        if self._write():
            self._took = time.monotonic() - began
            return True
        if closing:
            return False
        with self._changed:
            self._changed.wait_for(lambda: self._closing, timeout=_RETRY_SECONDS)
        return True

    def _pause(self) -> float:
        """Records put during the last write wait for its end, this pause, and the next write: one
        interval in total."""
        return max(self._interval / 5, self._interval - 2 * self._took)

    def _due(self) -> bool:
        return self._closing or self._urgent or len(self._queue) >= self._rows

    def _write(self) -> bool:
        """Write the taken records in order; after a failure the rest stays taken."""
        try:
            if self._root is None:
                self._open()
            while self._taken:
                self._write_some()
        except duckdb.OutOfMemoryException as error:
            _LOG.debug("a batch is waiting for memory that a query uses: %s", error)
            self._stored.clear()
            return False
        except (duckdb.Error, pa.ArrowException, OSError, MemoryError, TraceError) as error:
            self._stored.clear()
            self._release(final=False)
            self._report(error if isinstance(error, TraceError) else explain(self.path, error))
            return False
        self._failure = None
        return True

    def _write_some(self) -> None:
        """Write the records up to the next order in one transaction, or run that order."""
        connection = self._connection
        if connection is None:
            raise TraceError(f"the trace {self.path} is not open")
        first = self._taken[0]
        if isinstance(first, _Order):
            first.run(connection)
            self._settle(1)
            return
        records = []
        for item in self._taken:
            if isinstance(item, _Order):
                break
            records.append(item)
        self._pending = len(records)
        insert(connection, encode(records, self._stored), self._batch + 1)
        keep_private(self.path)
        self._batch += 1
        self._settle(len(records))

    def _settle(self, count: int) -> None:
        settled = self._taken[:count]
        self._taken = self._taken[count:]
        with self._changed:
            self._bytes -= sum(size_of(item) for item in settled if not isinstance(item, _Order))
            self._written += count
            if self._journal and self._written == self._put:
                self._kept(self._journal.clear)
            self._changed.notify_all()

    def _drop(self, reason: str) -> None:
        error = TraceError(f"dropping records for the trace {self.path}: {reason}")
        if self._raises:
            raise error
        if not self._warned:
            self._warned = True
            _LOG.warning("%s", error)

    def _report(self, error: TraceError) -> None:
        if self._raises:
            self._failure = type(error)(
                *error.args
            )  # without its traceback, whose frames refer to the connection
        elif not self._warned:
            self._warned = True
            _LOG.warning(
                "%s. The agent continues. Its records wait in memory (%d at most) %s. Given a"
                " directory, each process writes files of its own.",
                error,
                _QUEUE_RECORDS,
                self._else_kept,
            )
        with self._changed:
            self._changed.notify_all()

    def _release(self, *, final: bool = True) -> None:
        with self._reading:  # DuckDB closes no file during a query
            root = self._root
            self._root = None
            for query in self._queries:
                query.set()
            self._reading.wait_for(lambda: not self._queries)
        connection = self._connection
        self._connection = None
        try:
            if connection:
                connection.close()
            if root:
                root.close()
        except duckdb.Error as error:
            self._report(explain(self.path, error))
        if final and self._journal and self._written == self._put:
            self._kept(self._journal.remove)
        if final and self._opened:
            retract(self.path, writes=True)
