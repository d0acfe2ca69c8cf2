"""A user's SQL has a process of its own, whose limits hold whatever one value takes; a live run
sees none of it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from ajet_sdk.errors import QueryError, TraceError
from ajet_sdk.protocols import Stop
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Call, Metric, Run
from ajet_tools.trace.sql.process import MEMORY, SqlProcess
from tests.serving import live_trace

pytestmark = pytest.mark.slow

HUGE = [
    "select list_sum(range(2000000000))",
    "select len(repeat('x',3000000000))",
    "select len(list(range)) from range(400000000)",
    "select string_agg(repeat('y', 1000), '') from range(10000000)",
]


@pytest.fixture
def asked() -> list[bytes]:
    """What the live owner of the trace was asked."""
    return []


class _Heard:
    def __init__(self, app: ASGIApp, asked: list[bytes]) -> None:
        self.app, self.asked = app, asked

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def heard() -> object:
            message = await receive()
            self.asked.append(message.get("body", b""))
            return message

        await self.app(scope, heard, send)  # type: ignore[arg-type]


@pytest.fixture(params=["at rest", "live"])
def trace(request: pytest.FixtureRequest, tmp_path: Path, asked: list[bytes]) -> Iterator[Path]:
    path = tmp_path / "trace.duckdb"
    with TraceWriter(path) as writer:
        writer.put(
            Run(run_id="r"), Call(call_id="c", episode_id="e", prompt_ids=[1, 2], output_ids=[3])
        )
        writer.put(
            *(Metric(run_id="r", step=i, name="train/reward", value=i / 2) for i in range(3))
        )
        writer.flush()
        if request.param == "live":
            with live_trace(writer, middleware=[Middleware(_Heard, asked=asked)]):
                yield path
            return
    yield path


def test_a_question_is_answered_and_what_is_new_is_seen(trace: Path) -> None:
    with closing(SqlProcess(trace)) as process:
        assert process.ask("SELECT sum(value) AS a, sum(step) AS a FROM metrics").to_pylist() == [
            {"a": 1.5, "a:1": 3}
        ]
        assert process.ask("SELECT prompt_ids FROM calls_full").to_pylist() == [
            {"prompt_ids": [1, 2]}
        ]
        with pytest.raises(QueryError, match="exactly one SELECT"):
            process.ask("DROP TABLE runs")
        assert process.ask("FROM runs").num_rows == 1


def test_what_takes_too_much_is_one_message_and_the_next_question_is_answered(
    trace: Path, asked: list[bytes]
) -> None:
    with closing(SqlProcess(trace)) as process:
        for sql in HUGE:
            limits = (  # whichever is first
                r"needs more memory than a query may have|larger than 512 MiB|stopped after"
            )
            with pytest.raises(QueryError, match=limits) as caught:
                process.ask(sql)
            assert "\n" not in str(caught.value)
            assert process.ask("SELECT count(*) AS n FROM metrics").to_pylist() == [{"n": 3}]
    assert not any(
        word in body
        for body in asked
        for word in (b"repeat", b"range", b'count(*) AS n FROM metrics"')
    )


def test_the_limit_is_the_systems(trace: Path) -> None:
    """Measured from outside: the most that the process, and whoever it asks, ever held."""
    program = f"""
import resource, sys
from pathlib import Path
from contextlib import closing
from ajet_sdk.errors import QueryError
from ajet_tools.trace.sql.process import SqlProcess
with closing(SqlProcess(Path({str(trace)!r}))) as process:
    for sql in {HUGE!r}:
        try:
            process.ask(sql)
            print("answered", sql)
        except QueryError:
            pass
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert "answered" not in done.stdout
    assert int(done.stdout) * (1 if sys.platform == "darwin" else 1024) < MEMORY + (512 << 20)


def test_a_process_that_dies_is_a_message(trace: Path) -> None:
    """As where the system ends it for want of memory."""
    with (
        closing(SqlProcess(trace, memory=1 << 20)) as process,
        pytest.raises(QueryError, match=r"memory|was stopped|was killed"),
    ):
        process.ask("SELECT len(repeat('x', 100000000))")


def test_called_off_it_ends_at_once_and_the_next_is_answered(trace: Path) -> None:
    endless = (
        "SELECT count(*) FROM range(10000000000) a, range(1000000) b WHERE a.range % 7 = b.range"
        " % 11"
    )
    with closing(SqlProcess(trace)) as process:
        assert process.ask("SELECT 1 AS one").num_rows == 1
        stop = Stop()
        threading.Timer(0.3, stop.set).start()
        with pytest.raises(QueryError, match="canceled"):
            process.ask(endless, stop)
        assert process.ask("SELECT 2 AS two").to_pylist() == [{"two": 2}]


def test_no_trace_is_what_it_always_was(tmp_path: Path) -> None:
    with (
        closing(SqlProcess(tmp_path)) as process,
        pytest.raises(TraceError, match="there is no trace"),
    ):
        process.ask("SELECT 1")


def test_it_ends_with_the_one_who_asks(tmp_path: Path, trace: Path) -> None:
    program = f"""
import os
from pathlib import Path
from ajet_tools.trace.sql.process import SqlProcess
process = SqlProcess(Path({str(trace)!r}))
process.ask("SELECT 1")
print(process._process.pid, flush=True)
os.kill(os.getpid(), 9)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    pid = int(done.stdout)
    for _ in range(1000):
        try:
            os.kill(pid, 0)
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return
        except (ProcessLookupError, FileNotFoundError):
            return
        threading.Event().wait(0.02)
    raise AssertionError("it is still there")
