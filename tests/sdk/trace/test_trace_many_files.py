"""A trace of many files answers as if it were one: the files of a cluster's nodes, or of an agent's
processes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path

import duckdb
import pytest

from ajet_sdk.errors import TraceError, TraceVersionError
from ajet_sdk.trace.feedback import give
from ajet_sdk.trace.reader import calls_of, episodes, open_trace
from ajet_sdk.trace.schema import TABLES
from ajet_sdk.trace.sources import FEW
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Call, Episode, Feedback, LedgerEntry, Metric, Reward, Run, Task

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
BEGAN = datetime(2026, 1, 1, tzinfo=timezone.utc)
NODES = FEW + 9


def write_node(file: Path, node: int) -> None:
    with TraceWriter(file) as writer:
        if node == 0:
            writer.put(
                Run(run_id="run", name="nodes", started_at=BEGAN, config={"ajet": {"seed": 1}})
            )  # running
        for i in range(2):
            at = BEGAN + timedelta(seconds=10 * node + i)
            name = f"e{node}x{i}"
            calls = [
                Call(call_id=f"{name}c{turn}", episode_id=name, index=turn, agent=f"a{turn}", started_at=at,
                     ended_at=at, request={"messages": [{"role": "user", "content": f"ask {name} {turn}"}]},
                     prompt_ids=[1, 2], output_ids=[3] * (1 + turn))
                for turn in range(2)
            ]  # fmt: skip
            rewards = (Reward(value=(node + i) % 3 / 2, reason="because"),)
            task = Task(task_id=f"t{node}", main_query="q")
            ended = Episode(episode_id=name, run_id="run", step=node, task=task, rewards=rewards, started_at=at,
                            ended_at=at)  # fmt: skip
            writer.put(*calls, ended, LedgerEntry(run_id="run", episode_id=name, call_id=f"{name}c0", outcome="trained",
                                                  tokens=1, step=node))  # fmt: skip
        if node == 1:
            writer.put(
                *(Metric(run_id="run", step=i, name="m", value=i, at=BEGAN) for i in range(21_000))
            )


def one_file(directory: Path, file: Path) -> None:
    """The rows of a directory's trace files in one new file."""
    with TraceWriter(file):
        pass
    with duckdb.connect(str(file)) as connection:
        for i, source in enumerate(sorted(directory.glob("*.duckdb"))):
            connection.execute(f"ATTACH '{source}' AS s{i} (READ_ONLY)")
            for table in TABLES:
                connection.execute(f"INSERT INTO {table} BY NAME FROM s{i}.{table}")


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A directory of many files, and the same as one file."""
    directory = tmp_path_factory.mktemp("nodes")
    for node in range(NODES):
        write_node(directory / ("trace.duckdb" if node == 0 else f"trace-{node:02}.duckdb"), node)
    give(directory, Feedback(episode_id="e5x1", score=0.5, comment="so so"))
    one = tmp_path_factory.mktemp("one") / "whole.duckdb"
    one_file(directory, one)
    return directory, one


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT run_id, name, status, config FROM runs",
        "SELECT count(*), count(DISTINCT task_id), sum(step) FROM episodes",
        (
            "SELECT episode_id, task, output FROM episodes WHERE episode_id IN ('e3x1', 'e20x0')"
            " ORDER BY ALL"
        ),
        "SELECT episode_id, sum(value * weight) FROM rewards GROUP BY ALL ORDER BY ALL",
        "SELECT reason, count(*) FROM rewards GROUP BY ALL",
        "SELECT agent, sum(len(output_ids)) FROM calls GROUP BY ALL ORDER BY ALL",
        "SELECT call_id, response FROM calls WHERE call_id = 'e7x1c1'",
        (
            "SELECT call_id, prompt_ids, messages FROM calls_full WHERE episode_id = 'e11x0' ORDER"
            " BY ALL"
        ),
        "SELECT count(*), sum(value) FROM metrics",
        (
            "SELECT outcome, sum(tokens) FROM ledger JOIN episodes USING (episode_id) WHERE"
            " task->>'$.main_query' = 'q' GROUP BY ALL"
        ),
        "SELECT episode_id, comment FROM feedback",
        (
            "SELECT episode_id, (SELECT count(*) FROM calls c WHERE c.episode_id = e.episode_id AND"
            " response IS NOT NULL) FROM episodes e WHERE e.task_id = 't9' ORDER BY ALL"
        ),
        "FROM trained",
    ],
)
def test_many_files_answer_as_one(nodes: tuple[Path, Path], sql: str) -> None:
    many, one = (open_trace(path) for path in nodes)
    assert many.query(sql).to_pylist() == one.query(sql).to_pylist()
    many.close()
    one.close()


def test_objects_of_many_files(nodes: tuple[Path, Path]) -> None:
    many, one = (open_trace(path) for path in nodes)
    assert calls_of(many, "e12x1") == calls_of(one, "e12x1") != []
    assert episodes(many, "run") == episodes(one, "run") != []
    many.close()
    one.close()


def test_the_files_of_a_run_among_many(tmp_path: Path) -> None:
    for number in range(FEW + 2):
        with TraceWriter(tmp_path / f"r{number}" / "trace.duckdb") as writer:
            writer.put(Run(run_id=f"r{number}"))
    with TraceWriter(tmp_path / "r3" / "trace-worker.duckdb") as writer:
        writer.put(
            Call(call_id="c", episode_id="e", output_ids=[1]),
            Episode(episode_id="e", run_id="r3"),
        )
    with open_trace(tmp_path) as reader:
        names = {file.relative_to(tmp_path).as_posix() for file in reader.of_run("r3").files()}
        assert names == {"r3/trace.duckdb", "r3/trace-worker.duckdb"}
        assert reader.of_run("r4").files() == [tmp_path / "r4" / "trace.duckdb"]
        assert [call.call_id for call in calls_of(reader.of_run("r3"), "e")] == ["c"]
        assert reader.of_run("unknown") is reader
        with reader.steady():
            counted = reader.of_run("r3").query("SELECT count(*) AS n FROM runs")
            assert counted["n"].to_pylist() == [1]
    with open_trace(tmp_path / "r3") as few:
        assert few.of_run("r3") is few


def test_a_table_is_found_however_a_query_spells_it(nodes: tuple[Path, Path]) -> None:
    with open_trace(nodes[0]) as reader:
        for sql in (
            'SELECT count(*) AS n FROM "EPISODES"',
            "WITH e AS (FROM Episodes) SELECT count(*) AS n FROM e",
            "SELECT count(*) AS n FROM (SELECT 1 FROM calls_full WHERE index = 0)",
        ):
            assert reader.query(sql)["n"].to_pylist() == [2 * NODES], sql


def test_what_is_written_between_queries_is_seen(tmp_path: Path) -> None:
    for node in range(FEW + 2):
        write_node(tmp_path / f"trace-{node:02}.duckdb", 2 * node)
    with open_trace(tmp_path) as reader:
        count = "SELECT count(*) AS n FROM episodes"
        before = reader.query(count)["n"][0].as_py()
        with TraceWriter(tmp_path / "trace-03.duckdb") as writer:
            writer.put(Episode(episode_id="late", run_id="run"))
        assert reader.query(count)["n"][0].as_py() == before + 1
        write_node(tmp_path / "trace-later.duckdb", 99)
        assert reader.query(count)["n"][0].as_py() == before + 3
        (tmp_path / "trace-00.duckdb").unlink()
        assert reader.query(count)["n"][0].as_py() == before + 1


def test_one_of_many_that_is_no_trace_is_named(tmp_path: Path) -> None:
    for node in range(FEW + 2):
        write_node(tmp_path / f"trace-{node:02}.duckdb", node + 2)
    duckdb.connect(str(tmp_path / "trace-zz.duckdb")).execute("CREATE TABLE t (a INTEGER)")
    reader = open_trace(tmp_path)
    assert reader.query("SELECT count(*) AS n FROM episodes")["n"][0].as_py() == 2 * (FEW + 2)
    [reason] = reader.skipped.values()
    assert "trace-zz.duckdb is a DuckDB file but not an ajet trace" in reason
    with pytest.raises(TraceVersionError, match=r"trace-zz\.duckdb"):
        open_trace(*sorted(tmp_path.glob("*.duckdb")))


def test_databases_of_something_else_are_passed_over_unless_they_are_named(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "run" / "trace.duckdb") as writer:
        writer.put(Run(run_id="run"))
    for place in (tmp_path / "shop.duckdb", tmp_path / "run" / "shop.duckdb"):
        duckdb.connect(str(place)).execute("CREATE TABLE t (a INTEGER)")
    for folder in (tmp_path, tmp_path / "run"):
        with open_trace(folder) as reader:
            assert len(reader.files()) == 1 and not reader.skipped
    with open_trace(tmp_path / "run", tmp_path / "shop.duckdb") as reader:
        assert list(reader.skipped) == [tmp_path / "shop.duckdb"]
    (tmp_path / "run" / "trace.duckdb").unlink()
    with pytest.raises(
        TraceVersionError, match=r"shop\.duckdb is a DuckDB file but not an ajet trace"
    ):
        open_trace(tmp_path)


def test_a_broken_file_is_skipped_below_a_directory_and_not_in_it(tmp_path: Path) -> None:
    for name in ("a", "b"):
        with TraceWriter(tmp_path / name / "trace.duckdb") as writer:
            writer.put(
                Run(run_id=name),
                *(Metric(run_id=name, step=i, name="m", value=i) for i in range(50_000)),
            )
    file = tmp_path / "b" / "trace.duckdb"
    with file.open("r+b") as cut:
        cut.truncate(file.stat().st_size // 2)
    reader = open_trace(tmp_path)
    assert reader.query("SELECT run_id FROM runs").to_pylist() == [{"run_id": "a"}] and list(
        reader.skipped
    ) == [file]
    with pytest.raises(TraceError, match=r"b/trace\.duckdb"):
        open_trace(tmp_path / "b")


def test_a_copy_elsewhere_below_is_counted_once(tmp_path: Path) -> None:
    write_node(tmp_path / "a" / "trace.duckdb", 0)
    (tmp_path / "b").mkdir()
    shutil.copy(tmp_path / "a" / "trace.duckdb", tmp_path / "b" / "copy.duckdb")
    reader = open_trace(tmp_path)
    assert reader.query("SELECT count(*) AS n FROM episodes")["n"][0].as_py() == 2
    assert "run run is also in" in next(iter(reader.skipped.values()))


def test_copies_beside_each_other_are_counted_once_and_the_run_s_own_file_first(
    tmp_path: Path,
) -> None:
    write_node(tmp_path / "launcher_record" / "trace.duckdb", 0)
    for name in ("copy.duckdb", "trace_copy.duckdb"):  # written later, and nearer
        shutil.copy(tmp_path / "launcher_record" / "trace.duckdb", tmp_path / name)
    reader = open_trace(tmp_path)
    assert reader.skipped.keys() == {tmp_path / "copy.duckdb", tmp_path / "trace_copy.duckdb"}
    assert all("is also in" in why for why in reader.skipped.values())
    reader.close()


def test_of_many_files_what_is_left_out_is_in_no_answer(tmp_path: Path) -> None:
    """Tables are copied before it is known which files are copies, others are copied later, and
    some read in place."""
    for node in range(2, FEW + 4):
        write_node(tmp_path / f"trace-{node:02}.duckdb", node)
    duckdb.connect(str(tmp_path / "trace-05x.duckdb")).execute("CREATE TABLE t (a INTEGER)")
    with open_trace(*sorted(tmp_path.glob("trace-??.duckdb"))) as whole:
        write_node(tmp_path / "trace-00.duckdb", 0)
        (tmp_path / "below").mkdir()
        shutil.copy(tmp_path / "trace-00.duckdb", tmp_path / "below" / "copy.duckdb")
        with TraceWriter(tmp_path / "cut" / "trace.duckdb") as writer:
            writer.put(*(Metric(run_id="cut", step=i, name="m", value=i) for i in range(50_000)))
        cut = tmp_path / "cut" / "trace.duckdb"
        os.truncate(cut, cut.stat().st_size // 2)
        with open_trace(tmp_path) as reader:
            assert set(reader.skipped) == {
                tmp_path / "trace-05x.duckdb",
                tmp_path / "below" / "copy.duckdb",
                cut,
            }
            for table in ("episodes", "calls", "rewards", "ledger", "metrics"):
                count = f"SELECT count(*) AS n FROM {table}"
                of_first = {"episodes": 2, "calls": 4, "rewards": 2, "ledger": 2, "metrics": 0}[
                    table
                ]
                assert (
                    reader.query(count)["n"][0].as_py()
                    == whole.query(count)["n"][0].as_py() + of_first
                )
            last = f"e{FEW + 3}x1"
            assert calls_of(reader, last) == calls_of(whole, last) != []
            booked = "SELECT call_id, tokens FROM ledger WHERE call_id = 'e9x1c0'"
            assert reader.query(booked).to_pylist() == whole.query(booked).to_pylist() != []


def test_a_broken_file_among_many_in_a_directory_hides_no_other(tmp_path: Path) -> None:
    for node in range(2, FEW + 4):
        write_node(tmp_path / f"trace-{node:02}.duckdb", node)
    write_node(tmp_path / "trace-99.duckdb", 1)
    os.truncate(tmp_path / "trace-99.duckdb", (tmp_path / "trace-99.duckdb").stat().st_size // 2)
    with open_trace(tmp_path) as reader:
        assert [file.name for file in reader.skipped] == ["trace-99.duckdb"]
        assert len(reader.files()) == FEW + 2
    with pytest.raises(TraceError, match=r"trace-99\.duckdb"):
        open_trace(tmp_path / "trace-99.duckdb")


def test_a_run_that_begins_below_is_seen(tmp_path: Path) -> None:
    write_node(tmp_path / "a" / "trace.duckdb", 0)
    reader = open_trace(tmp_path)
    with TraceWriter(tmp_path / "trace.duckdb") as writer:
        writer.put(Run(run_id="other"))
    assert reader.query("SELECT count(*) AS n FROM runs")["n"][0].as_py() == 2


def test_files_at_rest_are_read_without_an_http_client(nodes: tuple[Path, Path]) -> None:
    code = (
        "import sys; from pathlib import Path; from ajet_tools.cli.app import app\ntry:"
        f" app(['trace', 'ls', {str(nodes[1])!r}])\nexcept SystemExit: pass\nprint('loaded:', [m"
        " for m in ('httpx', 'openai', 'starlette', 'uvicorn') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == "loaded: []", done.stderr


def test_a_query_that_reads_nothing_is_answered(nodes: tuple[Path, Path]) -> None:
    with open_trace(nodes[0]) as reader:
        assert reader.query("SELECT task, error FROM episodes WHERE false").to_pylist() == []
        assert reader.query("EXPLAIN SELECT task FROM episodes").num_rows
