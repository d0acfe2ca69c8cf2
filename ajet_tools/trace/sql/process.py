"""A user's SQL, in a process of its own under the system's limits: what it takes, nobody else loses.

DuckDB counts what its tables and joins hold, not what one value takes: `repeat('x', 3000000000)` is 6 GB. So the
question is asked in a process that may have only so much memory and is ended when it is over time or called off. Of a
run that lives only rows are copied: the training process runs nothing of it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING

import ajet_sdk.errors as errors
from ajet_sdk.errors import AjetError, QueryError
from ajet_sdk.protocols import Stop

if TYPE_CHECKING:
    import pyarrow as pa

MEMORY = 1536 << 20
"""Bytes of address space that a question may take, beside the libraries."""
_NO_MEMORY = ("bad_alloc", "MemoryError", "can't start new thread")
_SECONDS = 120.0
"""By the clock, copying of live files included; DuckDB itself is stopped after 30 s."""
_ROOT = str(Path(__file__).resolve().parents[3])
_START = (
    "import sys; sys.path[:] = [{root!r}, *(p for p in sys.path if p)]\n"
    "from ajet_tools.trace.sql.child import main; main({path!r}, {memory}, {read_only})"
)


class SqlProcess:
    """Answers questions about the trace at `path`, found as `open_located` finds it; it starts at once.

    One question at a time. It is started anew after one that was called off, or needed too much.
    """

    def __init__(self, path: Path | None, *, memory: int = MEMORY, read_only: bool = False) -> None:
        named = None if path is None else str(path)
        self._start = _START.format(root=_ROOT, path=named, memory=memory, read_only=read_only)
        self._memory = memory
        self._lock = threading.Lock()
        self._process, self._errors = self._started()

    def ask(self, sql: str, stop: Stop | None = None) -> pa.Table:
        """The result of one SELECT or EXPLAIN. Raises QueryError, and TraceError where there is no such trace."""
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
                    raise QueryError(f"the query was stopped after {_SECONDS:g} s; narrow it") from None
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
                    with suppress(BrokenPipeError):  # the rest of a question
                        file.close()

    def _started(self) -> tuple[subprocess.Popen[bytes], IO[bytes]]:
        stderr_file = tempfile.TemporaryFile()  # noqa: SIM115
        process = subprocess.Popen(
            [sys.executable, "-c", self._start], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr_file,
            start_new_session=True,  # Ctrl-C and F9 are ours to answer
        )  # fmt: skip
        return process, stderr_file

    def _answer(self, sql: str) -> pa.Table:
        import pyarrow as pa

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
                ):  # what it took may not be free again for the next question
                    self._process.kill()
                    self._process.wait()
                kind = getattr(errors, head["error"], QueryError)
                raise (kind if issubclass(kind, AjetError) else QueryError)(head["message"])
            return pa.ipc.open_stream(answer).read_all()
        except (BrokenPipeError, pa.ArrowInvalid, OSError) as error:
            raise self._end() from error

    def _end(self) -> _Ended:
        """The message for a process that ended during a query."""
        code = self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode("utf-8", "replace").strip().splitlines()
        if code < 0 or (lines and any(sign in lines[-1] for sign in _NO_MEMORY)):
            return _Ended(
                f"{QueryError.TOO_MUCH} ({self._memory >> 20} MiB) and was stopped; narrow it (by run_id or "
                "episode_id), select fewer columns or add a LIMIT"
            )
        return _Ended(f"the query was killed (exit code {code}): {lines[-1] if lines else 'no message'}")


class _Ended(Exception):
    """The process has ended."""
