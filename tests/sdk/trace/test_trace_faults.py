"""A killed owner, a live one, a foreign file, a forbidden directory, a full disk: a clear error,
and no data lost."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import duckdb
import pytest

from ajet_sdk.errors import TraceError, TraceLocked, TraceVersionError
from ajet_sdk.trace.owner import announce, owner_of, process_started
from ajet_sdk.trace.reader import calls_of, open_trace
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Call, Episode, Metric, Reward, Run

ROOT = Path(__file__).parents[3]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

START = """
import os, resource, sys, time
from pathlib import Path
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Call, Run

def call(i, episode="e"):
    ids = list(range(10 * (i + 1)))
    return Call(call_id=f"{episode}-{i}", episode_id=episode, index=i, prompt_ids=ids, output_ids=[i, i],
        request={"messages": [{"role": "user", "content": "x" * 50}] * (i % 50 + 1)})
"""


@contextmanager
def process(code: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(
        [sys.executable, "-c", START + code, *arguments],
        env=ENVIRONMENT,
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def output(child: subprocess.Popen[str]) -> str:
    assert child.stdout
    return child.stdout.readline().strip()


WRITES_FOREVER = """
writer = TraceWriter(Path(sys.argv[1]), flush_ms=20, flush_rows=8)
writer.put(Run(run_id="r"))
for i in range(100_000):
    writer.put(call(i % 50, f"e{i // 50}"))
    if i % 7 == 0:
        writer.flush()
        print(i + 1, flush=True)
    time.sleep(0.001)
"""


@pytest.mark.slow
@pytest.mark.parametrize("moment", range(2))
def test_a_kill_loses_at_most_what_was_not_flushed(tmp_path: Path, moment: int) -> None:
    path = tmp_path / "trace.duckdb"
    with process(WRITES_FOREVER, str(path)) as child:
        kept = int(output(child))
        deadline = time.monotonic() + random.Random(moment).uniform(0.05, 0.6)
        while time.monotonic() < deadline:
            kept = int(output(child))
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert (tmp_path / "gateway.json").exists(), "the dead owner could not clean up"
    with open_trace(path) as reader:
        assert reader.query("SELECT status FROM runs").to_pylist() == [{"status": "interrupted"}]
        rows = reader.query("SELECT episode_id, index FROM calls").to_pylist()
        numbers = sorted(int(row["episode_id"][1:]) * 50 + row["index"] for row in rows)
        assert numbers == list(range(len(numbers))), (
            "what was put first is there, once, without a gap"
        )
        assert len(numbers) >= kept
        first = calls_of(reader, "e0")
        assert [call.prompt_ids.tolist() for call in first if call.prompt_ids is not None] == [
            list(range(10 * (i + 1))) for i in range(len(first))
        ]
    with TraceWriter(path) as writer:
        assert writer.query("SELECT status FROM runs").to_pylist() == [{"status": "interrupted"}]
        writer.put(Run(run_id="r", status="finished"))
    assert open_trace(path).query("SELECT status FROM runs").to_pylist() == [{"status": "finished"}]


OWNS = """
writer = TraceWriter(Path(sys.argv[1]))
writer.put(call(0)); writer.flush()
print("open", flush=True)
sys.stdin.readline()
writer.close()
"""


@pytest.mark.slow
def test_a_live_owner_keeps_others_out_and_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.duckdb"
    with process(OWNS, str(path)) as child:
        assert output(child) == "open"
        assert (tmp_path / "gateway.json").stat().st_mode & 0o777 == 0o600
        for attempt in (lambda: TraceWriter(path), lambda: open_trace(path)):
            with pytest.raises(TraceLocked, match=rf"process {child.pid}.*another experiment_name"):
                attempt()
        (tmp_path / "gateway.json").unlink()
        with pytest.raises(TraceLocked, match=rf"process {child.pid}"):
            open_trace(path)
        child.communicate("\n")
    assert open_trace(path).query("SELECT count(*) AS n FROM calls").to_pylist() == [{"n": 1}]


def test_a_second_writer_in_the_same_process_is_told_so(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t.duckdb"), pytest.raises(TraceLocked, match="this process"):
        TraceWriter(tmp_path / "t.duckdb")


@pytest.mark.parametrize("stale", ["dead", "reused", "elsewhere", "garbage", "empty"])
def test_a_stale_gateway_file_is_replaced(tmp_path: Path, stale: str) -> None:
    path = tmp_path / "trace.duckdb"
    TraceWriter(path).close()
    announce(path, "http://127.0.0.1:1", "token", writes=True)
    file = tmp_path / "gateway.json"
    content = json.loads(file.read_text())
    content |= {
        "dead": {"pid": 2**22 - 3},
        "reused": {"started": "1"},
        "elsewhere": {"host": "gone"},
    }.get(stale, {})
    file.write_text({"garbage": "{", "empty": ""}.get(stale, json.dumps(content)))
    assert owner_of(path) is None
    assert open_trace(path).query("SELECT 1 AS one").num_rows == 1
    with TraceWriter(path):
        owner = owner_of(path)
        assert owner and owner.pid == os.getpid() and owner.started == process_started(os.getpid())
    assert not file.exists()


def test_a_newer_a_foreign_and_no_database_are_told_apart_and_left_alone(tmp_path: Path) -> None:
    newer, foreign, text, empty = (
        tmp_path / f"{name}.duckdb" for name in ("newer", "foreign", "text", "empty")
    )
    TraceWriter(newer).close()
    with duckdb.connect(str(newer)) as connection:
        connection.execute("UPDATE meta SET schema_version = 99")
    with duckdb.connect(str(foreign)) as connection:
        connection.execute("CREATE TABLE customers (name VARCHAR)")
    text.write_text("not a database, but long enough to be looked at by one\n" * 200)
    before = {file: file.read_bytes() for file in (newer, foreign, text)}
    for file, words in (
        (newer, "newer ajet.*99"),
        (foreign, "not an ajet trace"),
        (text, "not a trace"),
    ):
        for attempt in (TraceWriter, open_trace):
            with pytest.raises(TraceVersionError, match=words):
                attempt(file)
        assert file.read_bytes() == before[file]
    assert list(tmp_path.glob("*gateway.json")) == []
    empty.touch()
    with pytest.raises(TraceError, match="it is empty"):
        open_trace(empty)
    duckdb.connect(str(tmp_path / "begun.duckdb")).close()
    assert open_trace(tmp_path / "begun.duckdb").query("FROM runs").num_rows == 0, (
        "cut off before its tables were made"
    )
    TraceWriter(empty).close()
    assert open_trace(empty).query("SELECT 1 AS one").num_rows == 1
    with pytest.raises(TraceError, match="no trace"):
        open_trace(tmp_path / "absent.duckdb")


UNPRIVILEGED = """
if os.getuid() == 0:
    os.setuid(65534)
try:
    TraceWriter(Path(sys.argv[1]))
except Exception as error:
    print(type(error).__name__, error, flush=True)
"""


@pytest.mark.slow
def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    forbidden = tmp_path / "forbidden"
    forbidden.mkdir()
    forbidden.chmod(0o555)
    for parent in tmp_path.parents:
        if parent.owner() != "root" or parent == Path("/"):
            break
        parent.chmod(parent.stat().st_mode | 0o011)
    tmp_path.chmod(0o755)
    with process(UNPRIVILEGED, str(forbidden / "trace.duckdb")) as child:
        said, failed = child.communicate(timeout=300)
    if "Permission" in failed and "ModuleNotFound" not in said:
        pytest.skip("the unprivileged user cannot read this checkout")
    assert (
        said.startswith("TraceError") and "forbidden/trace.duckdb" in said and "permissions" in said
    ), said + failed


FULL = """
limit = int(sys.argv[3])
writer = TraceWriter(Path(sys.argv[1]), on_error=sys.argv[2], flush_ms=20)
writer.put(Run(run_id="r"), call(0)); writer.flush()
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
slowest = 0.0
try:
    for i in range(1, 400):
        started = time.perf_counter()
        writer.put(call(i % 50, f"e{i}"))
        slowest = max(slowest, time.perf_counter() - started)
        time.sleep(0.001)
    writer.flush(2)
    time.sleep(0.3)
    print("nothing raised", round(slowest, 3), flush=True)
except Exception as error:
    print(type(error).__name__, error, flush=True)
sys.stdin.readline()
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
time.sleep(3)
print(writer.query("SELECT count(DISTINCT call_id) AS a, count(*) AS b FROM calls").to_pylist(), flush=True)
print(writer._put, flush=True)
writer.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["raise", "warn"])
def test_a_full_disk_is_an_error_for_a_run_and_one_warning_for_an_agent(
    tmp_path: Path, mode: str
) -> None:
    path = tmp_path / "trace.duckdb"
    with process(FULL, str(path), mode, str(64 << 10)) as child:
        said = output(child)
        if mode == "raise":
            assert said.startswith("TraceError the disk of"), said
        else:
            assert said.startswith("nothing raised") and float(said.split()[-1]) < 1, said
        rest, warned = child.communicate("\n", timeout=300)
    rows, put = rest.splitlines()
    kept = json.loads(rows.replace("'", '"'))[0]
    assert kept["a"] == kept["b"] == int(put) - 1, (
        "all that was taken is written once there is room"
    )
    assert warned.count("is full") == (mode == "warn"), warned
    assert open_trace(path).query("SELECT count(*) AS n FROM calls").to_pylist() == [
        {"n": kept["a"]}
    ]


@pytest.mark.slow
def test_a_locked_file_never_delays_an_agent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "trace.duckdb"
    with process(OWNS, str(path)) as child:
        assert output(child) == "open"
        writer = TraceWriter(path, on_error="warn")
        metric = Metric(run_id="agent", step=0, name="n", value=0)
        started = time.perf_counter()
        for _ in range(70_000):
            writer.put(metric)
        assert (time.perf_counter() - started) / 70_000 < 0.001
        assert writer.flush(0.1) is False
        time.sleep(0.3)
        # other loggers may tell of threads that earlier tests have left
        said = [r for r in caplog.records if r.levelname == "WARNING" and r.name == "ajet.trace"]
        assert len(said) == 1
        assert str(child.pid) in said[0].getMessage() or "dropped" in said[0].getMessage()
        child.communicate("\n")
    assert writer.flush(60), "what was kept is written once the file is free"
    writer.close()
    [row] = open_trace(path).query("SELECT count(*) AS n FROM metrics").to_pylist()
    assert 60_000 < row["n"] < 70_000


@pytest.mark.slow
def test_a_reader_at_rest_never_keeps_a_new_run_out(tmp_path: Path) -> None:
    path = tmp_path / "trace.duckdb"
    TraceWriter(path).close()
    reading = """
from ajet_sdk.trace.reader import open_trace
from ajet_sdk.errors import TraceLocked
reader = open_trace(Path(sys.argv[1]))
print("open", flush=True)
while True:
    try:
        reader.query("SELECT * FROM runs")
    except TraceLocked as error:
        print("locked", flush=True)
        break
"""
    with process(reading, str(path)) as child:
        assert output(child) == "open"
        with TraceWriter(path) as writer:
            writer.put(Run())
            writer.flush()
            assert output(child) == "locked"


@pytest.fixture(scope="module")
def ten_megabytes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace of some 10 MB, as a run leaves it: many checkpoints' worth of calls, episodes and
    metrics."""
    path = tmp_path_factory.mktemp("whole") / "trace.duckdb"
    rng = random.Random(0)
    with TraceWriter(path) as writer:
        writer.put(Run(run_id="r", status="finished"))
        for i in range(600):
            text = rng.randbytes(12_000).hex()
            said = {"messages": [{"role": "user", "content": text}]}
            ids = [rng.randrange(150_000) for _ in range(200)]
            writer.put(Call(call_id=f"c{i}", episode_id=f"e{i}", request=said, prompt_ids=ids, output_ids=ids),
                       Episode(episode_id=f"e{i}", run_id="r", step=i, rewards=(Reward(value=1.0),)),
                       Metric(run_id="r", step=i, name="train/reward", value=i))  # fmt: skip
    assert path.stat().st_size > 8 << 20
    return path


@pytest.mark.parametrize("percent", [5, 25, 50, 75, 95, 99])
def test_a_file_cut_off_anywhere_is_one_error_and_never_a_table(
    ten_megabytes: Path, tmp_path: Path, percent: int
) -> None:
    path = tmp_path / "trace.duckdb"
    shutil.copy(ten_megabytes, path)
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size * percent // 100)
    with pytest.raises(TraceError, match=r"trace\.duckdb is truncated: .*opy it again"):
        open_trace(tmp_path)
    with pytest.raises(TraceError, match="is truncated"):
        TraceWriter(path)
    assert path.stat().st_size == ten_megabytes.stat().st_size * percent // 100 and not list(
        tmp_path.glob("*.json")
    )


@pytest.mark.slow
def test_a_file_that_a_checkpoint_made_shorter_is_whole(
    ten_megabytes: Path, tmp_path: Path
) -> None:
    """DuckDB cuts free blocks off its end and leaves their number in its header."""
    path = tmp_path / "trace.duckdb"
    shutil.copy(ten_megabytes, path)
    connection = duckdb.connect(str(path))
    sizes = []
    for statement in ("CREATE TABLE gone AS FROM calls", "DROP TABLE gone"):
        connection.execute(statement)
        connection.execute("CHECKPOINT")
        sizes.append(path.stat().st_size)
    connection.close()
    assert sizes[1] < sizes[0]
    with open_trace(path) as reader:
        assert reader.query("SELECT count(*) AS n FROM episodes")["n"][0].as_py() == 600
    TraceWriter(path).close()


RECORDS = """
import os, sys
from pathlib import Path
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Call, Episode, Feedback, LedgerEntry, Metric, Run, Trained

def records(step):
    names = {"run_id": "r", "step": step, "episode_id": f"e{step}", "call_id": f"c{step}"}
    return [
        Run(run_id="r"),
        Call(call_id=f"c{step}", episode_id=f"e{step}", output_ids=[1, 2]),
        Episode(episode_id=f"e{step}", run_id="r", step=step),
        LedgerEntry(**names, outcome="trained", tokens=1),
        LedgerEntry(**names, outcome="cut", tokens=1),
        Trained(**names, advantages=[1.0, float("nan")], logprobs=[0.0, 0.0], entropy=[0.0, 0.0]),
        Metric(run_id="r", step=step, name="train/reward", value=1.0),
        Feedback(feedback_id=f"f{step}", episode_id=f"e{step}", score=1.0),
    ]

writer = TraceWriter(Path(sys.argv[1]), survives="kill")
writer.put(*records(1))
if sys.argv[2] == "flushed":
    writer.flush()
writer.put(*records(2))
os.kill(os.getpid(), 9)
"""


@pytest.mark.slow
@pytest.mark.parametrize("first_step", ["flushed", "queued"])
def test_records_of_every_kind_survive_a_kill_once(tmp_path: Path, first_step: str) -> None:
    path = tmp_path / "trace.duckdb"
    with process(RECORDS, str(path), first_step) as child:
        assert child.wait() == -signal.SIGKILL
    TraceWriter(path).close()
    with open_trace(path) as trace:
        counts = {
            table: trace.query(f"SELECT count(*) AS n FROM {table}").to_pylist()[0]["n"]
            for table in ("runs", "calls", "episodes", "ledger", "trained", "metrics", "feedback")
        }
    assert counts.pop("ledger") == 4
    assert counts.pop("runs") == 1
    assert set(counts.values()) == {2}, counts
