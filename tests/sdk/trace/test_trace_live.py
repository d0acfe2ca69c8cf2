"""A live run gives rows over its own loopback route; a reader needs not know whether it does."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import duckdb
import httpx
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from ajet_sdk.errors import QueryError, TraceLocked
from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.protocols import Stop
from ajet_sdk.trace.live import post
from ajet_sdk.trace.owner import ROWS_PATH, Owner, announce, owner_of, process_started, retract
from ajet_sdk.trace.reader import calls_of, episodes, open_trace
from ajet_sdk.trace.rows import RowsOf
from ajet_sdk.trace.schema import COLUMNS
from ajet_sdk.trace.sources import Sources
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Call, Episode, Metric, Run
from tests.serving import live_trace

ROOT = Path(__file__).parents[3]


@pytest.fixture
def live(tmp_path: Path) -> Iterator[tuple[httpx.Client, TraceWriter]]:
    """A run's writer, and a client with its token."""
    with TraceWriter(tmp_path / "trace.duckdb") as writer:
        writer.put(Run(run_id="r"))
        writer.flush()
        headers = {"Authorization": "Bearer s3cret"}
        with (
            live_trace(writer) as url,
            httpx.Client(base_url=url, trust_env=False, headers=headers) as client,
        ):
            yield client, writer


@pytest.mark.slow
def test_a_reader_knows_what_its_questions_cost_the_run_and_counts_no_waiting(
    tmp_path: Path,
) -> None:
    with TraceWriter(tmp_path / "trace.duckdb") as writer:
        writer.put(Run(run_id="r"))
        writer.flush()
        with live_trace(writer):
            reader = open_trace(tmp_path)
            before, began = reader.spent, time.process_time()
            for _ in range(20):
                reader.query("SELECT * FROM runs")
            cost, all_of_it = reader.spent - before, time.process_time() - began
            exchanges = 20 * 0.002
            assert exchanges < cost < exchanges + all_of_it, (
                "of this process, which asks and answers"
            )
    after = reader.spent
    reader.query("SELECT * FROM runs")
    assert reader.spent == after, "a file costs no run anything"


@pytest.mark.slow
def test_a_reader_follows_a_run_from_live_to_rest(tmp_path: Path) -> None:
    path = tmp_path / "trace.duckdb"
    at = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc)
    call = Call(episode_id="e", prompt_ids=[1, 2], output_ids=[3], logprobs=[-0.5], started_at=at)
    with TraceWriter(path) as writer:
        writer.put(
            Run(run_id="r"), call, Metric(run_id="r", step=1, name="train/reward", value=0.5, at=at)
        )
        writer.flush()
        with live_trace(writer):
            reader = open_trace(tmp_path)
            assert reader.query("SELECT status FROM runs").to_pylist() == [{"status": "running"}]
            assert calls_of(reader, "e") == [call]
            assert (
                reader.query(
                    'SELECT name FROM metrics WHERE "at" = ? AND step = ?', [at, 1]
                ).num_rows
                == 1
            )
            with pytest.raises(QueryError, match="exactly one SELECT"):
                reader.query("DELETE FROM runs")
            writer.put(Episode(episode_id="e", run_id="r"))
            writer.flush()
            assert [e.calls for e in episodes(reader, "r")] == [(call,)]
        with pytest.raises(TraceLocked, match="this process"):
            reader.query("SELECT * FROM runs")
        writer.put(Run(run_id="r", status="finished"))
    assert reader.query("SELECT status FROM runs").to_pylist() == [{"status": "finished"}]


def test_the_route_refuses_strangers_and_nonsense(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t.duckdb") as writer, live_trace(writer) as url:
        good = {"Authorization": "Bearer s3cret"}
        with httpx.Client(base_url=url, trust_env=False) as client:
            for headers in (
                {},
                {"Authorization": "Bearer wrong"},
                {"Authorization": "Basic s3cret"},
            ):
                answer = client.post(ROWS_PATH, json={"table": "runs"}, headers=headers)
                assert answer.status_code == 401 and "gateway.json" in answer.json()["error"]
            for body in (b"", b"[]", b"{}", b'{"table": "runs", "columns": 3}', b"\xff"):
                assert client.post(ROWS_PATH, content=body, headers=good).status_code == 400
            rows = {"table": "runs", "columns": ["run_id"]}
            assert client.post(ROWS_PATH, json=rows, headers=good).status_code == 200
            for table in ("range(3)", "duckdb_secrets()", "calls_full", "runs, episodes"):
                refused = client.post(ROWS_PATH, json={**rows, "table": table}, headers=good)
                assert refused.status_code == 400 and "there is no table" in refused.json()["error"]
            assert client.post(ROWS_PATH, content=b"x" * (2 << 20), headers=good).status_code == 413
            assert client.get(ROWS_PATH, headers=good).status_code == 405


HUNGRY = [
    "list_sum(range(2000000000))",
    "(SELECT len(repeat('x', 3000000000)))",
    (
        "(WITH RECURSIVE t(x) AS (SELECT 'x' UNION ALL SELECT x || x FROM t) SELECT max(len(x))"
        " FROM t)"
    ),
    "(SELECT string_agg(a.call_id, '') FROM calls a, calls b, calls c)",
    "list_transform([1], lambda x: lpad('', 2000000000, 'y'))",
    "(FROM generate_series(1, 1000000000000))",
    "run_id\", repeat('x', 3000000000) AS \"y",
    "run_id FROM runs a, runs b --",
]


@pytest.mark.slow
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    hungry=st.sampled_from(HUNGRY) | st.text(max_size=20),
    field=st.sampled_from(
        ["table", "columns", "by", "after", "most", "sql", "query", "parameters"]
    ),
    path=st.sampled_from([ROWS_PATH, "/trace/query"]),
)
def test_a_live_run_works_out_nothing_that_it_is_sent(
    live: tuple[httpx.Client, TraceWriter], hungry: str, field: str, path: str
) -> None:
    """Wherever a text is put: no part of it is run."""
    client, _ = live
    wanted: dict[str, Any] = (
        {"table": "runs", "columns": ["run_id"]} if path == ROWS_PATH else {"sql": "SELECT 1"}
    )
    wanted[field] = [hungry] if field == "columns" else hungry
    assume(
        hungry not in [*COLUMNS, *COLUMNS["runs"], "meta"]
        and not (field in ("after", "most") and _number(hungry))
    )
    assert client.post(path, json=wanted).status_code in (400, 404)


def _number(text: str) -> bool:
    try:
        int(text)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("hungry", HUNGRY)
def test_a_value_to_look_for_is_a_value(
    live: tuple[httpx.Client, TraceWriter], hungry: str
) -> None:
    client, _ = live
    wanted = {"table": "runs", "columns": ["run_id"], "by": "run_id", "among": [hungry, "r"]}
    answer = client.post(ROWS_PATH, json=wanted)
    assert pa.ipc.open_stream(answer.content).read_all()["run_id"].to_pylist() == ["r"]


@pytest.mark.slow
def test_an_answer_of_several_rows_is_bounded_and_a_reader_still_gets_them_all(
    live: tuple[httpx.Client, TraceWriter],
) -> None:
    client, writer = live
    large = "x" * (12 << 20)
    writer.put(
        *(Call(call_id=f"c{i}", episode_id="e", response={"said": f"{i}{large}"}) for i in range(8))
    )
    writer.flush()
    sizes = "SELECT call_id, len(response) AS size FROM calls"
    answer = client.post(ROWS_PATH, json={"table": "calls", "columns": ["response"]})
    assert answer.status_code == 400 and "larger than 64 MiB" in answer.json()["error"]
    for which in ("", " WHERE episode_id = 'e'"):
        found = open_trace(writer.path).query(sizes + which).to_pylist()
        assert sorted(row["call_id"] for row in found) == [f"c{i}" for i in range(8)]
        assert all(row["size"] > len(large) for row in found)


def test_sql_on_a_live_run_is_worked_out_by_the_one_who_asks(
    live: tuple[httpx.Client, TraceWriter],
) -> None:
    _, writer = live
    reader = open_trace(writer.path)
    reader.query("SELECT * FROM runs")
    spent = reader.spent
    assert reader.query("SELECT sum(range) AS n FROM range(200000)").to_pylist() == [
        {"n": 19999900000}
    ]
    assert reader.spent == spent


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT run_id FROM runs",
        "SELECT count(*) FROM calls JOIN episodes USING (episode_id)",
        "SELECT a.call_id FROM calls a, calls b ORDER BY ALL",
    ],
)
def test_why_rows_could_not_be_read_is_the_error_of_a_query(tmp_path: Path, sql: str) -> None:
    """Wherever in the query DuckDB asks for them; a reader decides by its type."""

    def ask(*_: object) -> pa.Table:
        raise TraceLocked("held by another")

    file = tmp_path / "trace.duckdb"
    owner = Owner(file.name, os.getpid(), "", socket.gethostname())
    with pytest.raises(TraceLocked):
        Sources(ask).query([file], {file: owner}, sql, (), None)


def test_a_run_reads_its_own_file_and_those_of_others_without_a_request(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "trace-node.duckdb") as node:
        node.put(Call(call_id="c", episode_id="e", output_ids=[1]), Episode(episode_id="e"))
    with TraceWriter(tmp_path / "trace.duckdb") as writer:
        announce(writer.path, "http://127.0.0.1:9", "nobody listens there")
        with open_trace(writer.path, writer=writer) as alone:
            writer.put(Run(run_id="r"))
            assert alone.query("SELECT run_id FROM runs").to_pylist() == [{"run_id": "r"}]
        with open_trace(tmp_path, writer=writer) as both:
            writer.put(Metric(run_id="r", step=1, name="m", value=float("nan")))
            sql = "SELECT (SELECT count(*) FROM calls) AS calls, m.value > 1 AS v FROM metrics m"
            assert both.query(sql).to_pylist() == [{"calls": 1, "v": True}], "NaN as in DuckDB"
            assert both.spent == 0


@pytest.mark.parametrize(
    ("where", "ids"),
    [
        ("episode_id = 'e1'", {"e1"}),
        ("episode_id = 'e1' AND index >= 0", {"e1"}),
        ("episode_id IN ('e1', 'e2') AND index >= 0", {"e1", "e2"}),
        ("episode_id IN ('e1', 'e2') OR index = 3", None),
        ("episode_id = 'e1' OR index = 3", None),
        ("episode_id NOT IN ('e1', 'e2')", None),
        ("episode_id <> 'e1'", None),
        ("response->>'$.said' = '(episode_id == \"e1\")'", None),
        ("model = 'x) and (episode_id == \"e1\")'", None),
    ],
)
def test_only_rows_with_the_ids_that_a_query_names_are_asked_for(
    tmp_path: Path, where: str, ids: set[str] | None
) -> None:
    """And the answer is that of a file at rest."""
    with TraceWriter(tmp_path / "trace.duckdb") as writer:
        writer.put(*(Call(episode_id=f"e{i}", index=i, model="x") for i in range(5)))
        writer.flush()
        asked: list[RowsOf] = []

        def ask(_: Path, owner: Owner, stop: object, wanted: RowsOf) -> pa.Table:
            asked.append(wanted)
            return wanted.read(writer.query)

        owner = Owner(writer.path.name, os.getpid(), "", socket.gethostname())
        sql = f"SELECT episode_id FROM calls WHERE {where} ORDER BY ALL"
        found = Sources(ask).query([writer.path], {writer.path: owner}, sql, (), None)
        assert found == writer.query(sql)
        [wanted] = asked
        assert (set(wanted.among) if wanted.by else None) == ids
        assert "request" not in wanted.columns


class Held(TraceWriter):
    """Answers a query only once it may; `asked` is set when it has a query."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.asked, self.may = threading.Event(), threading.Event()

    def query(self, *arguments: Any, **keywords: Any) -> pa.Table:
        self.asked.set()
        self.may.wait()
        return super().query(*arguments, **keywords)


@pytest.mark.slow
def test_a_query_that_runs_keeps_no_writer_from_closing_its_file(tmp_path: Path) -> None:
    begun, ended = threading.Event(), threading.Event()

    class Watched(Stop):
        def by(self, interrupt: Callable[[], None]) -> AbstractContextManager[None]:
            begun.set()
            return super().by(interrupt)

    def endless() -> None:
        sql = (
            "SELECT count(*) FROM range(1000000) a, range(1000000) b WHERE (a.range * b.range) %"
            " 7 = 3"
        )
        with pytest.raises(QueryError, match="canceled"):
            writer.query(sql, stop=Watched())
        ended.set()

    with (
        TraceWriter(tmp_path / "trace.duckdb", on_error="raise") as writer,
        ThreadPoolExecutor() as pool,
    ):
        writer.put(Run(run_id="r"))
        writer.flush()
        running = pool.submit(endless)
        begun.wait()
        writer.close()
        assert ended.is_set()
        running.result()
    with duckdb.connect(str(tmp_path / "trace.duckdb")) as file:
        assert file.execute("SELECT run_id FROM runs").fetchall() == [("r",)]


@pytest.mark.slow
def test_a_reader_whose_query_a_stopping_gateway_cancels_asks_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not `HTTP 500`: the rows are in the file, once the process has closed it, however long that
    takes here."""
    monkeypatch.setattr("ajet_sdk.trace.reader._OPENING", 600.0)
    with Held(tmp_path / "trace.duckdb") as writer, ThreadPoolExecutor() as pool:
        writer.put(Run(run_id="r"))
        writer.flush()
        with Gateway(writer):
            rows = pool.submit(
                lambda: open_trace(tmp_path).query("SELECT run_id FROM runs").to_pylist()
            )
            writer.asked.wait()
        writer.close()
        writer.may.set()
        assert rows.result() == [{"run_id": "r"}]


def test_writer_and_gateway_may_announce_in_either_order(tmp_path: Path) -> None:
    path = tmp_path / "trace.duckdb"
    announce(path, "http://127.0.0.1:9", "t")
    writer = TraceWriter(path)
    owner = owner_of(path)
    assert owner and owner.writes and owner.url == "http://127.0.0.1:9" and owner.token == "t"
    assert json.loads((tmp_path / "gateway.json").read_text())["pid"] == os.getpid()
    retract(path)
    owner = owner_of(path)
    assert owner and owner.writes and owner.url is None and owner.token is None
    writer.close()
    assert list(tmp_path.glob("*.json")) == []


@pytest.mark.slow
def test_another_process_reads_live_and_dead_files_as_one(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "a.duckdb") as dead:
        dead.put(
            Run(run_id="old"),
            Call(call_id="a", episode_id="old", prompt_ids=[1, 2], output_ids=[3]),
        )
        dead.put(Call(call_id="b", episode_id="old", prompt_ids=[1, 2, 3, 4], output_ids=[5]))
    code = f"""
from pathlib import Path
from ajet_sdk.trace.reader import open_trace, calls_of
reader = open_trace(Path({str(tmp_path)!r}))
print(sorted((row["run_id"], row["status"]) for row in reader.query("SELECT * FROM runs").to_pylist()))
print(reader.query("SELECT prompt_ids FROM calls_full ORDER BY call_id").to_pylist())
print([c.prompt_ids.tolist() for c in calls_of(reader, "new")])
"""
    with TraceWriter(tmp_path / "b.duckdb") as writer, TraceWriter(tmp_path / "c.duckdb") as other:
        writer.put(
            Run(run_id="new"), Call(call_id="c", episode_id="new", prompt_ids=[7], output_ids=[8])
        )
        other.put(Run(run_id="newer"))
        writer.flush()
        other.flush()
        with live_trace(writer), live_trace(other, "another"):
            assert len(list(tmp_path.glob("*gateway.json"))) == 2
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            done = subprocess.run(
                [sys.executable, "-c", code],
                env=environment,
                capture_output=True,
                text=True,
                check=True,
            )
    runs, prompts, new = done.stdout.splitlines()
    assert runs == "[('new', 'running'), ('newer', 'running'), ('old', 'interrupted')]"
    assert prompts == "[{'prompt_ids': [1, 2]}, {'prompt_ids': [1, 2, 3, 4]}, {'prompt_ids': [7]}]"
    assert new == "[[7]]"
    assert done.stderr == ""


@pytest.mark.slow
def test_a_reader_that_nobody_closes_leaves_no_thread_at_the_interpreters_end(
    tmp_path: Path,
) -> None:
    """DuckDB aborts the process where a daemon thread closes it after that."""
    path = tmp_path / "trace.duckdb"
    with TraceWriter(path) as writer:
        writer.put(Run(run_id="r"))
    program = f"""
import atexit, threading, time

@atexit.register
def last():
    until = time.monotonic() + 600
    while any(isinstance(one, threading.Timer) for one in threading.enumerate()) and time.monotonic() < until:
        time.sleep(0.01)
    print([one.name for one in threading.enumerate() if isinstance(one, threading.Timer)])

from pathlib import Path
from ajet_sdk.trace import reader
reader._LINGER = 60
kept = reader.open_trace(Path({str(path)!r}))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


DYING = """
import os, socket, struct, sys
with socket.create_server(("127.0.0.1", 0)) as server:
    print(server.getsockname()[1], flush=True)
    client, _ = server.accept()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()
    sys.stdin.read()
    os._exit(0)
"""


def test_a_process_that_loses_its_connections_before_it_ends_is_gone() -> None:
    """As a killed one does."""
    process = subprocess.Popen(
        [sys.executable, "-c", DYING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdin is not None
    url = f"http://127.0.0.1:{process.stdout.readline().strip()}"
    owner = Owner(
        "t.duckdb",
        process.pid,
        process_started(process.pid),
        socket.gethostname(),
        url=url,
        token="x",
    )
    ending = threading.Timer(0.2, process.stdin.close)
    ending.start()
    assert owner.alive and post(owner, ROWS_PATH, {}) is None
    ending.join()
    assert process.wait(10) == 0


def test_a_file_that_is_being_closed_is_waited_for(tmp_path: Path) -> None:
    """Between the end of its gateway and of its writer a file is neither at rest nor served; its
    rows are not left out meanwhile."""
    with TraceWriter(tmp_path / "before.duckdb") as before:
        before.put(Episode(episode_id="before"))
    writer = TraceWriter(tmp_path / "closing.duckdb")
    with Gateway(writer):
        writer.put(Episode(episode_id="closing"))
        writer.flush()
    closing = threading.Timer(0.5, writer.close)
    closing.start()
    try:
        with open_trace(tmp_path) as reader:
            found = reader.query("SELECT episode_id FROM episodes ORDER BY ALL")
            assert found["episode_id"].to_pylist() == ["before", "closing"]
    finally:
        closing.join()
