"""Several experiments below a directory are one list, and a run is named by its id, its name or its
path."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path

import duckdb
import pytest
from typer.testing import CliRunner, Result

from ajet_sdk.trace.reader import open_trace
from ajet_sdk.trace.sources import FEW
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Call, Episode, LedgerEntry, Reward, Run, Task
from ajet_tools.cli.app import app

NAMES = ("one", "two", "three", "four", "five")
ASK = {"role": "user", "content": "2+2"}
SAID = {"choices": [{"message": {"role": "assistant", "content": "4"}}]}
BEGAN = datetime(2026, 1, 1, tzinfo=timezone.utc)


@pytest.fixture(scope="module")
def experiments(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five experiments below a directory, and a database of somebody else's, which every test only
    reads."""
    here = tmp_path_factory.mktemp("below")
    for i, name in enumerate(NAMES):
        at = BEGAN + timedelta(days=i)
        with TraceWriter(here / "launcher_record" / name / "trace.duckdb") as writer:
            writer.put(
                Run(run_id=f"{i}cafe", name=name, status="finished", started_at=at, ended_at=at)
            )
            for task in range(6):
                episode_id = f"{name}{task}"
                writer.put(
                    Call(
                        episode_id=episode_id,
                        started_at=at,
                        ended_at=at,
                        request={"messages": [ASK]},
                        response=SAID,
                    ),
                    Episode(
                        episode_id=episode_id,
                        run_id=f"{i}cafe",
                        split="val",
                        task=Task(task_id=f"t{task}"),
                        rewards=(Reward(value=float(i % 2)),),
                        started_at=at,
                        ended_at=at,
                    ),
                )
    duckdb.connect(str(here / "foreign.duckdb")).execute("CREATE TABLE t (a INTEGER)")
    return here


@pytest.fixture
def record(experiments: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(experiments)
    return experiments / "launcher_record"


def trace(*arguments: str) -> Result:
    done = CliRunner().invoke(app, ["trace", *arguments])
    assert "Traceback" not in done.output
    return done


@pytest.mark.slow
@pytest.mark.parametrize("path", [[], ["."], ["launcher_record"]])
def test_all_runs_below_are_one_list(record: Path, path: list[str]) -> None:
    done = trace("ls", *path, "--json")
    listed = json.loads(done.stdout)
    assert [run["name"] for run in listed["runs"]] == list(reversed(NAMES)) and listed[
        "run_id"
    ] == "4cafe"
    assert "foreign.duckdb" not in done.stderr, "nobody named it"
    counted = trace("sql", "SELECT count(*) AS n FROM episodes", *path, "--json")
    assert json.loads(counted.stdout) == [{"n": 30}] and ("foreign.duckdb" in counted.stderr) == (
        len(done.stderr) > 0
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "named", ["one", "0caf", "launcher_record/one", "launcher_record/one/trace.duckdb"]
)
def test_a_run_by_id_name_or_path(record: Path, named: str) -> None:
    assert json.loads(trace("show", named, "--json").stdout)["run_id"] == "0cafe"
    assert json.loads(trace("ls", named, "--json").stdout)["run_id"] == "0cafe"
    assert json.loads(trace("ledger", named, "--json").stdout)["run_id"] == "0cafe"
    whole = trace("export", named, "--include-validation", "--include-failures")
    exported = [json.loads(line) for line in whole.stdout.splitlines()]
    assert {row["run_id"] for row in exported} == {"0cafe"}
    found = json.loads(trace("compare", named, "launcher_record/two", "--json").stdout)
    assert (found["a"]["run_id"], found["b"]["run_id"], len(found["tasks"])) == (
        "0cafe",
        "1cafe",
        6,
    )


@pytest.mark.parametrize(
    "arguments", [["ls"], ["show"], ["compare", "one"], ["ledger"], ["sql", "FROM runs"]]
)
def test_a_mistyped_path_is_named(record: Path, arguments: list[str]) -> None:
    done = trace(*arguments, "launcher_rekord/one")
    assert done.exit_code != 0 and "launcher_rekord/one" in done.stderr


@pytest.mark.slow
def test_check_looks_at_each(record: Path) -> None:
    assert trace("check").stdout.count(": no violations") == 5


@pytest.mark.parametrize(
    "command", [["ls"], ["show"], ["sql", "SELECT count(*) AS n FROM episodes"]]
)
@pytest.mark.parametrize("broken", ["truncated", "unreadable"])
def test_a_broken_trace_hides_no_other(
    record: Path, tmp_path: Path, command: list[str], broken: str
) -> None:
    folder = Path(shutil.copytree(record / "one", tmp_path / "one"))
    data = (folder / "trace.duckdb").read_bytes()
    bad = folder / "zz.duckdb"
    bad.write_bytes(data[: len(data) * 2 // 3] if broken == "truncated" else b"\0" * 20_000)
    done = trace(*command, str(folder))
    assert done.exit_code == 0, done.output
    assert "zz.duckdb" in done.stderr
    named = trace("ls", str(bad))
    assert named.exit_code != 0


def test_pandas_is_left_out(tmp_path: Path) -> None:
    package = tmp_path / "pandas"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from ajet_tools.cli.pandas_import import leave_pandas_out\n"
        "leave_pandas_out()\n"
        "import pyarrow as pa\n"
        "pa.array([1]); assert 'pandas' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        ["ls"],
        ["show", "one0"],
        ["compare", "one", "two"],
        ["ledger", "one"],
        ["check"],
        ["sql", "FROM runs"],
        ["export", "two", "--include-validation"],
    ],
    ids=lambda command: command[0],
)
def test_no_command_on_a_trace_imports_pandas(
    record: Path, tmp_path: Path, command: list[str]
) -> None:
    package = tmp_path / "pandas"
    package.mkdir()
    (package / "__init__.py").write_text(
        f"open({str(tmp_path / 'imported')!r}, 'w').close()\nraise ImportError"
    )
    done = subprocess.run(
        [sys.executable, "-m", "ajet", "trace", *command],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=record,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "imported").exists()


@pytest.mark.slow
def test_a_run_among_many_is_told_as_it_is_alone(tmp_path: Path) -> None:
    for number in range(FEW + 1):
        file = tmp_path / f"run{number}" / "trace.duckdb"
        write_training(file, f"r{number:02}ab", float(number % 2))
    for command in (["explain"], ["show"], ["ledger"]):
        among = trace(*command, "r03ab", str(tmp_path), "--json")
        alone = trace(*command, "r03ab", str(tmp_path / "run3"), "--json")
        assert among.exit_code == alone.exit_code == 0, among.output
        assert json.loads(among.stdout) == json.loads(alone.stdout)


def write_training(file: Path, run_id: str, reward: float) -> None:
    """Two steps of eight episodes, whose reward falls or rises."""
    with TraceWriter(file) as writer:
        writer.put(Run(run_id=run_id, status="finished", started_at=BEGAN, ended_at=BEGAN))
        for step, task in itertools.product((1, 2), range(8)):
            episode_id = f"{run_id}{step}{task}"
            call = Call(
                call_id=f"{episode_id}c",
                episode_id=episode_id,
                trainable=True,
                request={"messages": [ASK]},
                response=SAID,
                output_ids=[1, 2],
            )
            earned = Reward(value=reward if step == 1 else 1 - reward)
            booked = LedgerEntry(
                run_id=run_id,
                step=step,
                episode_id=episode_id,
                call_id=call.call_id,
                outcome="trained",
                tokens=2,
            )
            ended = Episode(
                episode_id=episode_id,
                run_id=run_id,
                step=step,
                split="train",
                task=Task(task_id=f"t{task}", main_query="2+2"),
                rewards=(earned,),
            )
            writer.put(call, booked, ended)


def test_a_command_of_many_queries_looks_for_files_once(record: Path, tmp_path: Path) -> None:
    with open_trace(shutil.copytree(record, tmp_path / "record")) as reader, reader.steady():
        before = reader.query("SELECT count(*) AS n FROM runs").to_pylist()
        files = reader.files()
        Path(files[0]).with_name("later.duckdb").write_bytes(Path(files[0]).read_bytes())
        assert reader.query("SELECT count(*) AS n FROM runs").to_pylist() == before
        assert reader.files() == files
