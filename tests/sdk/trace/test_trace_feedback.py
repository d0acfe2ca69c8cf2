"""Feedback reaches the file whoever has it: a live run, nobody, one of several; or an error says
what to do."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import duckdb
import httpx
import pytest

from ajet_sdk.errors import QueryError, TraceError, TraceLocked
from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.trace.feedback import give
from ajet_sdk.trace.live import FEEDBACK_PATH
from ajet_sdk.trace.owner import owner_of
from ajet_sdk.trace.reader import open_trace
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Call, Episode, Feedback, Run

ROOT = Path(__file__).parents[3]


def a_trace(path: Path, name: str = "e") -> Path:
    """A run that was killed: its row says `running` to this day."""
    with TraceWriter(path) as writer:
        writer.put(
            Run(run_id=f"run-{name}"),
            Call(call_id=f"{name}-0", episode_id=name),
            Episode(episode_id=name),
        )
        writer.put(Call(call_id=f"{name}-late", episode_id=f"{name}-running"))
    return path


def stored(path: Path) -> list[Feedback]:
    return [
        Feedback(**row)
        for row in open_trace(path).query("FROM feedback ORDER BY comment").to_pylist()
    ]


def test_at_rest_it_goes_into_the_file_and_changes_nothing_else(tmp_path: Path) -> None:
    path = a_trace(tmp_path / "trace.duckdb")
    good = Feedback(
        episode_id="e",
        author="me",
        score=1.0,
        comment="a [b]\x1b[31m \U0001f986 \x00",
        correction="4",
    )
    on_call = Feedback(episode_id="e-running", call_id="e-late", comment="b")
    give(path, good, on_call)
    give(path, again := Feedback(episode_id="e", comment="c"))
    assert stored(path) == [good, on_call, again]
    with duckdb.connect(str(path), read_only=True) as connection:
        assert connection.execute("SELECT status FROM runs").fetchall() == [("running",)]
        assert connection.execute("SELECT count(*) FROM calls").fetchall() == [(2,)]
    assert open_trace(path).query("SELECT status FROM runs").to_pylist() == [
        {"status": "interrupted"}
    ]
    assert list(tmp_path.iterdir()) == [path], "nobody owns it any more"


@pytest.mark.slow
def test_a_live_run_takes_it_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "trace.duckdb"
    with TraceWriter(path) as writer, Gateway(writer):
        writer.put(Run(run_id="r"), Call(call_id="c", episode_id="e"))
        writer.flush()
        give(tmp_path, first := Feedback(episode_id="e", call_id="c", score=-1, comment="a"))
        assert [Feedback(**row) for row in writer.query("FROM feedback").to_pylist()] == [first]
        writer.put(Episode(episode_id="e", run_id="r"))
        writer.flush()
        give(path, second := Feedback(episode_id="e", comment="b"))
    assert stored(path) == [first, second]


@pytest.mark.slow
def test_of_several_files_it_is_the_one_that_holds_the_episode(tmp_path: Path) -> None:
    one, two = a_trace(tmp_path / "one.duckdb", "x"), a_trace(tmp_path / "two.duckdb", "y")
    give(
        tmp_path,
        Feedback(episode_id="y", comment="for y"),
        Feedback(episode_id="x", comment="for x"),
    )
    assert [f.comment for f in stored(one)] == ["for x"]
    assert [f.comment for f in stored(two)] == ["for y"]


def test_what_is_not_there_gets_none_and_nothing_is_stored(tmp_path: Path) -> None:
    path = a_trace(tmp_path / "trace.duckdb")
    fine = Feedback(episode_id="e")
    with pytest.raises(QueryError, match="no episode nowhere"):
        give(path, fine, Feedback(episode_id="nowhere"))
    with pytest.raises(QueryError, match="episode e has no call e-late"):
        give(path, fine, Feedback(episode_id="e", call_id="e-late"))
    with pytest.raises(TraceError, match="no trace"):
        give(tmp_path / "absent.duckdb", fine)
    assert stored(path) == []


def test_a_writer_without_a_gateway_is_named_with_what_to_do(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "trace.duckdb") as writer:
        writer.put(Episode(episode_id="e"))
        writer.flush()
        with pytest.raises(TraceLocked, match="this process"):
            give(tmp_path, Feedback(episode_id="e"))


def test_the_route_takes_feedback_and_nothing_else(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "trace.duckdb") as writer, Gateway(writer) as gateway:
        good = {"Authorization": f"Bearer {gateway.token}"}
        with httpx.Client(base_url=gateway.url, trust_env=False) as client:
            row = {"episode_id": "e", "comment": "hi"}
            for headers in ({}, {"Authorization": "Bearer wrong"}):
                assert client.post(FEEDBACK_PATH, json=[row], headers=headers).status_code == 401
            for body in (
                b"",
                b"{}",
                b"[{}]",
                json.dumps([{**row, "table": "runs"}]).encode(),
                b"\xff",
            ):
                assert client.post(FEEDBACK_PATH, content=body, headers=good).status_code == 400
            large = json.dumps([{**row, "comment": "x" * (2 << 20)}]).encode()
            assert client.post(FEEDBACK_PATH, content=large, headers=good).status_code == 413
            assert client.get(FEEDBACK_PATH, headers=good).status_code == 405
            assert writer.query("FROM feedback").num_rows == 0
            assert client.post(FEEDBACK_PATH, json=[row], headers=good).json() == {"written": 1}
        assert writer.query("SELECT comment FROM feedback").to_pylist() == [{"comment": "hi"}]


@pytest.mark.slow
def test_readers_and_givers_wait_for_the_moment_that_it_takes(tmp_path: Path) -> None:
    path = a_trace(tmp_path / "trace.duckdb")
    failed: list[Exception] = []
    done = threading.Event()

    def read() -> None:
        reader = open_trace(path)
        try:
            while not done.is_set():
                reader.query("SELECT count(*) FROM feedback")
                done.wait(0.01)
        except TraceError as error:
            failed.append(error)
        finally:
            reader.close()

    thread = threading.Thread(target=read)
    thread.start()
    code = f"""
from pathlib import Path
from ajet_sdk.trace.feedback import give
from ajet_sdk.types import Feedback
for i in range(5):
    give(Path({str(path)!r}), Feedback(episode_id="e"))
"""
    try:
        givers = [
            subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.PIPE)
            for _ in range(2)
        ]
        assert [giver.communicate()[1].decode() for giver in givers] == ["", ""]
    finally:
        done.set()
        thread.join()
    assert failed == []
    assert len(stored(path)) == 10


FULL = """
import os, resource, sys
from pathlib import Path
from ajet_sdk.trace.feedback import give
from ajet_sdk.types import Feedback
size = sum(file.stat().st_size for file in Path(sys.argv[1]).parent.iterdir())
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 4096, size + 4096))
noise = os.urandom(1 << 20).hex()
try:
    give(Path(sys.argv[1]), Feedback(episode_id="e", comment="small"), Feedback(episode_id="e", comment=noise))
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.slow
def test_a_full_disk_is_said_and_nothing_is_half_written(tmp_path: Path) -> None:
    path = a_trace(tmp_path / "trace.duckdb")
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(path)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout.startswith(f"TraceError the disk of {path} is full"), (
        done.stdout + done.stderr
    )
    assert owner_of(path) is None
    assert stored(path) == []
    give(path, Feedback(episode_id="e", comment="there is room again"))
    assert len(stored(path)) == 1


HOLDS = """
import duckdb, sys
connection = duckdb.connect(sys.argv[1], read_only=True)
print("open", flush=True)
sys.stdin.readline()
"""


@pytest.mark.slow
def test_a_file_that_another_program_holds_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = a_trace(tmp_path / "trace.duckdb")
    monkeypatch.setattr("ajet_sdk.trace.database._READER_WAIT", 0.2)
    child = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert child.stdout and child.stdout.readline() == b"open\n"
        with pytest.raises(TraceLocked, match=f"locked by process {child.pid}"):
            give(path, Feedback(episode_id="e"))
    finally:
        child.communicate(b"\n")
    assert owner_of(path) is None
    give(path, Feedback(episode_id="e"))
    assert len(stored(path)) == 1
