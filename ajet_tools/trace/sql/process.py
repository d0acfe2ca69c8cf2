"""Runs SQL queries of users in a child process with limits on memory and time.

DuckDB limits the memory of tables and joins, but not of single values: `repeat('x', 3000000000)`
takes 6 GB. The child process has a memory limit, and is killed on timeout or cancellation. Of a
live run it only copies rows; the training process never executes such a query.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

import pyarrow as pa

import ajet_sdk.errors as errors
from ajet_sdk.errors import AjetError, QueryError
from ajet_sdk.protocols import Stop, TraceReader
from ajet_tools.trace.locate import open_located
from ajet_tools.trace.sql.console import result_of

MEMORY = 1536 << 20
"""Address space of a query in bytes, besides the libraries."""
_NO_MEMORY = ("bad_alloc", "MemoryError", "can't start new thread")
_SECONDS = 120.0
"""Wall-clock limit, including the copy of live files; DuckDB queries are stopped after 30 s."""
_ROOT = str(Path(__file__).resolve().parents[3])
_START = (
    "import sys; sys.path[:] = [{root!r}, *(p for p in sys.path if p)]\n"
    "from ajet_tools.trace.sql.process import answer; answer({path!r}, {memory}, {read_only})"
)


class SqlProcess:
    """A child process that queries the trace at `path`, opened by `open_located`.

    Starts immediately, answers one query at a time, and restarts after a query that was cancelled
    or exceeded a limit.
    """

    def __init__(self, path: Path | None, *, memory: int = MEMORY, read_only: bool = False) -> None:
        named = None if path is None else str(path)
        self._start = _START.format(root=_ROOT, path=named, memory=memory, read_only=read_only)
        self._memory = memory
        self._lock = threading.Lock()
        self._process, self._errors = self._started()

    def ask(self, sql: str, stop: Stop | None = None) -> pa.Table:
        """Run a SELECT or EXPLAIN. Raises QueryError, or TraceError for a missing trace."""
        stop = stop or Stop()
        with self._lock:
            if self._process.poll() is not None:
                self._process, self._errors = self._started()
                if stop.is_set:
                    raise QueryError("the query was canceled")
            late = threading.Event()

            def end() -> None:
                late.set()
                self._process.kill()

            timer = threading.Timer(_SECONDS, end)
            timer.daemon = True
            timer.start()
            try:
                with stop.by(self._process.kill):
                    return self._answer(sql)
            except _Ended as ended:
                if stop.is_set:
                    raise QueryError("the query was canceled") from None
                if late.is_set():
                    raise QueryError(
                        f"the query was stopped after {_SECONDS:g} s; narrow it"
                    ) from None
                raise QueryError(str(ended)) from None
            finally:
                timer.cancel()

    def close(self) -> None:
        """End the process and any running query."""
        self._process.kill()
        with self._lock:
            self._process.wait()
            for file in (self._process.stdin, self._process.stdout, self._errors):
                if file is not None:
                    with suppress(BrokenPipeError):  # unsent part of a query
                        file.close()

    def _started(self) -> tuple[subprocess.Popen[bytes], IO[bytes]]:
        stderr_file = tempfile.TemporaryFile()  # noqa: SIM115
        process = subprocess.Popen(
            [sys.executable, "-c", self._start],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr_file,
            start_new_session=True,  # Ctrl-C is handled by the parent
        )
        return process, stderr_file

    def _answer(self, sql: str) -> pa.Table:
        question, answer = self._process.stdin, self._process.stdout
        assert question is not None and answer is not None
        try:
            question.write(json.dumps(sql).encode() + b"\n")
            question.flush()
            head = json.loads(answer.readline() or "null")
            if head is None:
                raise self._end()
            if "error" in head:
                if head["message"].startswith(
                    QueryError.TOO_MUCH
                ):  # its memory may not be released
                    self._process.kill()
                    self._process.wait()
                kind = getattr(errors, head["error"], QueryError)
                raise (kind if issubclass(kind, AjetError) else QueryError)(head["message"])
            return pa.ipc.open_stream(answer).read_all()
        except (BrokenPipeError, pa.ArrowInvalid, OSError) as error:
            raise self._end() from error

    def _end(self) -> _Ended:
        """Return the error for a process that ended during a query."""
        code = self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode("utf-8", "replace").strip().splitlines()
        if code < 0 or (lines and any(sign in lines[-1] for sign in _NO_MEMORY)):
            return _Ended(
                f"{QueryError.TOO_MUCH} ({self._memory >> 20} MiB) and was stopped; narrow it (by"
                " run_id or episode_id), select fewer columns or add a LIMIT"
            )
        return _Ended(
            f"the query was killed (exit code {code}): {lines[-1] if lines else 'no message'}"
        )


class _Ended(Exception):
    """The child process has ended."""


def answer(path: str | None, memory: int, read_only: bool) -> None:
    """Answer queries in the child process: a line of JSON each, answered by a line of JSON and an
    Arrow stream."""
    answers = os.fdopen(os.dup(1), "wb")
    with Path(os.devnull).open("wb") as nothing:
        os.dup2(nothing.fileno(), 1)  # DuckDB prints a progress bar after two seconds
    _limit(memory)
    reader: TraceReader | None = None
    for line in sys.stdin.buffer:
        try:
            reader = reader or open_located(None if path is None else Path(path), read_only)[0]
            result = result_of(reader, json.loads(line))
        except AjetError as error:
            _send(answers, {"error": type(error).__name__, "message": str(error)})
            continue
        _send(answers, {"rows": len(result)})
        with pa.ipc.new_stream(answers, result.schema) as stream:
            stream.write_table(result)
        answers.flush()


def _send(answers: IO[bytes], head: dict[str, object]) -> None:
    answers.write(json.dumps(head).encode() + b"\n")
    answers.flush()


def _limit(memory: int) -> None:
    """Limit this process to `memory` bytes more than it has now."""
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + memory
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    else:  # macOS accepts the limit without enforcing it
        threading.Thread(target=_watch, args=(memory,), daemon=True).start()


def _watch(memory: int) -> None:
    unit = 1 if sys.platform == "darwin" else 1024
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit + memory
    while resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit < most:
        time.sleep(0.02)
    os.kill(os.getpid(), 9)
