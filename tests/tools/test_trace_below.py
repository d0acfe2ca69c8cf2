"""Several experiments below a directory are one list, and a run is named by its id, its name or its path."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone
from pathlib import Path

import duckdb
import pytest
from typer.testing import CliRunner, Result

from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Call, Episode, Reward, Run, Task
from ajet_tools.cli.app import app

NAMES = ("one", "two", "three", "four", "five")
ASK = {"role": "user", "content": "2+2"}
SAID = {"choices": [{"message": {"role": "assistant", "content": "4"}}]}
BEGAN = datetime(2026, 1, 1, tzinfo=timezone.utc)


@pytest.fixture(scope="module")
def experiments(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five experiments below a directory, and a database of somebody else's, which every test only reads."""
    here = tmp_path_factory.mktemp("below")
    for i, name in enumerate(NAMES):
        at = BEGAN + timedelta(days=i)
        with TraceWriter(here / "launcher_record" / name / "trace.duckdb") as writer:
            writer.put(Run(run_id=f"{i}cafe", name=name, status="finished", started_at=at, ended_at=at))
            for task in range(6):
                episode_id = f"{name}{task}"
                writer.put(
                    Call(episode_id=episode_id, started_at=at, ended_at=at, request={"messages": [ASK]}, response=SAID),
                    Episode(episode_id=episode_id, run_id=f"{i}cafe", split="val", task=Task(task_id=f"t{task}"),
                            rewards=(Reward(value=float(i % 2)),), started_at=at, ended_at=at),
                )  # fmt: skip
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
    assert [run["name"] for run in listed["runs"]] == list(reversed(NAMES)) and listed["run_id"] == "4cafe"
    assert "foreign.duckdb" not in done.stderr, "nobody named it"
    counted = trace("sql", "SELECT count(*) AS n FROM episodes", *path, "--json")
    assert json.loads(counted.stdout) == [{"n": 30}] and ("foreign.duckdb" in counted.stderr) == (len(done.stderr) > 0)


@pytest.mark.slow
@pytest.mark.parametrize("named", ["one", "0caf", "launcher_record/one", "launcher_record/one/trace.duckdb"])
def test_a_run_by_id_name_or_path(record: Path, named: str) -> None:
    assert json.loads(trace("show", named, "--json").stdout)["run_id"] == "0cafe"
    assert json.loads(trace("ls", "--run", named, "--json").stdout)["run_id"] == "0cafe"
    assert json.loads(trace("ledger", "--run", named, "--json").stdout)["run_id"] == "0cafe"
    whole = trace("export", "--run", named, "--include-validation")
    exported = [json.loads(line) for line in whole.stdout.splitlines()]
    assert {row["run_id"] for row in exported} == {"0cafe"}
    found = json.loads(trace("diff", named, "launcher_record/two", "--json").stdout)
    assert (found["a"]["run_id"], found["b"]["run_id"], len(found["tasks"])) == ("0cafe", "1cafe", 6)


@pytest.mark.parametrize("arguments", [["ls"], ["show"], ["diff", "one"], ["ledger", "--run"], ["sql", "FROM runs"]])
def test_a_mistyped_path_is_named(record: Path, arguments: list[str]) -> None:
    done = trace(*arguments, "launcher_rekord/one")
    assert done.exit_code != 0 and "launcher_rekord/one" in done.stderr


@pytest.mark.slow
def test_check_looks_at_each(record: Path) -> None:
    assert trace("check").stdout.count(": no violations") == 5
