"""A live run answers queries over its own loopback route; a reader needs not know whether it does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette

from ajet_sdk.errors import QueryError, TraceLocked
from ajet_sdk.trace.live import QUERY_PATH, announce, live_routes, owner_of, retract
from ajet_sdk.trace.reader import calls_of, episodes, open_trace
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Call, Episode, Metric, Run

ROOT = Path(__file__).parents[3]


@contextmanager
def served(writer: TraceWriter, token: str = "s3cret") -> Iterator[str]:
    app = Starlette(routes=live_routes(writer, token))
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    announce(writer.path, url, token)
    try:
        yield url
    finally:
        retract(writer.path)
        server.should_exit = True
        thread.join()


def test_a_reader_knows_what_its_questions_cost_the_run_and_counts_no_waiting(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "trace.duckdb") as writer:
        writer.put(Run(run_id="r"))
        writer.flush()
        with served(writer):
            reader = open_trace(tmp_path)
            before, began = reader.spent, time.process_time()
            for _ in range(20):
                reader.query("SELECT sum(range) FROM range(200000)")
            cost, all_of_it = reader.spent - before, time.process_time() - began
            exchanges = 20 * 0.002
            assert exchanges < cost < exchanges + all_of_it, "of this process, which asks and answers"
    after = reader.spent
    reader.query("SELECT * FROM runs")
    assert reader.spent == after, "a file costs no run anything"


def test_a_reader_follows_a_run_from_live_to_rest(tmp_path: Path) -> None:
    path = tmp_path / "trace.duckdb"
    at = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc)
    call = Call(episode_id="e", prompt_ids=[1, 2], output_ids=[3], logprobs=[-0.5], started_at=at)
    with TraceWriter(path) as writer:
        writer.put(Run(run_id="r"), call, Metric(run_id="r", step=1, name="train/reward", value=0.5, at=at))
        writer.flush()
        with served(writer):
            reader = open_trace(tmp_path)
            assert reader.query("SELECT status FROM runs").to_pylist() == [{"status": "running"}]
            assert calls_of(reader, "e") == [call]
            assert reader.query('SELECT name FROM metrics WHERE "at" = ? AND step = ?', [at, 1]).num_rows == 1
            with pytest.raises(QueryError, match="exactly one SELECT"):
                reader.query("DELETE FROM runs")
            writer.put(Episode(episode_id="e", run_id="r"))
            writer.flush()
            assert [e.calls for e in episodes(reader, "r")] == [(call,)]
        with pytest.raises(TraceLocked, match="this process"):
            reader.query("SELECT 1")
        writer.put(Run(run_id="r", status="finished"))
    assert reader.query("SELECT status FROM runs").to_pylist() == [{"status": "finished"}]


def test_the_route_refuses_strangers_and_nonsense(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t.duckdb") as writer, served(writer) as url:
        good = {"Authorization": "Bearer s3cret"}
        with httpx.Client(base_url=url, trust_env=False) as client:
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic s3cret"}):
                answer = client.post(QUERY_PATH, json={"sql": "SELECT 1"}, headers=headers)
                assert answer.status_code == 401 and "gateway.json" in answer.json()["error"]
            for body in (b"", b"[]", b"{}", b'{"sql": "SELECT 1", "parameters": 3}', b"\xff"):
                assert client.post(QUERY_PATH, content=body, headers=good).status_code == 400
            refused = client.post(QUERY_PATH, json={"sql": "DROP TABLE runs"}, headers=good)
            assert refused.status_code == 400 and "exactly one SELECT" in refused.json()["error"]
            assert client.post(QUERY_PATH, content=b"x" * (2 << 20), headers=good).status_code == 413
            assert client.get(QUERY_PATH, headers=good).status_code == 405


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


def test_another_process_reads_live_and_dead_files_as_one(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "a.duckdb") as dead:
        dead.put(Run(run_id="old"), Call(call_id="a", episode_id="old", prompt_ids=[1, 2], output_ids=[3]))
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
        writer.put(Run(run_id="new"), Call(call_id="c", episode_id="new", prompt_ids=[7], output_ids=[8]))
        other.put(Run(run_id="newer"))
        writer.flush()
        other.flush()
        with served(writer), served(other, "another"):
            assert len(list(tmp_path.glob("*gateway.json"))) == 2
            environment = {**os.environ, "PYTHONPATH": str(ROOT)}
            done = subprocess.run(
                [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
            )
    runs, prompts, new = done.stdout.splitlines()
    assert runs == "[('new', 'running'), ('newer', 'running'), ('old', 'interrupted')]"
    assert prompts == "[{'prompt_ids': [1, 2]}, {'prompt_ids': [1, 2, 3, 4]}, {'prompt_ids': [7]}]"
    assert new == "[[7]]"
    assert done.stderr == ""


def test_a_reader_that_nobody_closes_leaves_no_thread_at_the_interpreters_end(tmp_path: Path) -> None:
    """DuckDB aborts the process where a daemon thread closes it after that."""
    path = tmp_path / "trace.duckdb"
    with TraceWriter(path) as writer:
        writer.put(Run(run_id="r"))
    program = f"""
import atexit, threading, time

@atexit.register
def last():
    until = time.monotonic() + 5
    while any(isinstance(one, threading.Timer) for one in threading.enumerate()) and time.monotonic() < until:
        time.sleep(0.01)
    print([one.name for one in threading.enumerate() if isinstance(one, threading.Timer)])

from pathlib import Path
from ajet_sdk.trace import reader
reader._LINGER = 60
kept = reader.open_trace(Path({str(path)!r}))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
