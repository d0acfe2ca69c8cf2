"""`ajet trace prune check` as a person types them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ajet_sdk.trace.reader import open_trace
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Call, Episode, Metric, Run
from ajet_tools.cli.app import app


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An experiment with two runs, the first of long ago, in the current directory."""
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "launcher_record" / "math" / "trace.duckdb"
    long_ago = datetime.now(timezone.utc) - timedelta(days=90)
    with TraceWriter(file) as writer:
        for name, at in (("aaa", long_ago), ("bbb", long_ago + timedelta(days=89))):
            writer.put(
                Run(
                    run_id=name,
                    name=f"[b]{name}\x1b[31m",
                    status="finished",
                    started_at=at,
                    ended_at=at,
                )
            )
            writer.put(
                Call(call_id=f"{name}-c", episode_id=f"{name}-e", started_at=at, ended_at=at)
            )
            writer.put(Episode(episode_id=f"{name}-e", run_id=name, started_at=at, ended_at=at))
    return file


def ajet(*arguments: str, code: int = 0, input: str | None = None) -> str:
    result = CliRunner().invoke(app, ["trace", *arguments], env={"COLUMNS": "120"}, input=input)
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else result.output


def runs(path: Path) -> list[str]:
    with open_trace(path) as reader:
        return [
            row["run_id"] for row in reader.query("SELECT run_id FROM runs ORDER BY 1").to_pylist()
        ]


@pytest.mark.slow
def test_prune_says_what_goes_and_asks(path: Path) -> None:
    said = ajet("prune", "--older-than", "30d", "--dry-run")
    assert "1 run goes" in said and "aaa" in said and "bbb" not in said and "\x1b" not in said
    assert "Aborted" in ajet("prune", "--older-than", "30d", input="n\n", code=1)
    assert runs(path) == ["aaa", "bbb"]
    assert " -> " in ajet("prune", "--older-than", "30d", input="y\n")
    assert runs(path) == ["bbb"]
    assert "No runs to delete" in ajet("prune", "--older-than", "30d", "--yes")


@pytest.mark.slow
def test_prune_by_run_and_size(path: Path) -> None:
    done = json.loads(ajet("prune", str(path), "--run", "b", "--yes", "--json"))
    assert [one["run_id"] for one in done["runs"]] == ["bbb"] and done["dry_run"] is False
    assert runs(path) == ["aaa"]
    assert (
        json.loads(ajet("prune", str(path), "--keep-size", "1kB", "--dry-run", "--json"))["runs"]
        == []
    )
    for arguments in (
        [],
        ["--older-than", "soon"],
        ["--keep-size", "much"],
    ):
        ajet("prune", str(path), *arguments, code=2)
    assert "Aborted" in ajet("prune", str(path), "--run", "aaa", "--json", input="n\n", code=1)
    assert "no run 'zzz'" in ajet("prune", str(path), "--run", "zzz", "--yes", code=2)


@pytest.mark.slow
def test_prune_of_a_directory_takes_each_run_from_its_own_file(path: Path) -> None:
    with TraceWriter(path.with_name("second.duckdb")) as writer:
        at = datetime.now(timezone.utc) - timedelta(days=40)
        writer.put(Run(run_id="ccc", status="finished", started_at=at, ended_at=at))
    done = json.loads(ajet("prune", str(path.parent), "--older-than", "30d", "--yes", "--json"))
    assert [(Path(one["file"]).name, one["run_id"]) for one in done["runs"]] == [
        ("trace.duckdb", "aaa"),
        ("second.duckdb", "ccc"),
    ]
    assert runs(path.parent) == ["bbb"]


@pytest.mark.slow
def test_check_exits_with_one_where_anything_is_broken(path: Path) -> None:
    assert ajet("check").startswith("launcher_record/math/trace.duckdb: no violations (")
    assert json.loads(ajet("check", str(path), "--json")) == {
        "traces": 1,
        "sound": True,
        "broken": [],
    }
    with TraceWriter(path) as writer:
        writer.put(
            *(Metric(run_id=f"\x1b[31mnobody-{i}", step=0, name="x", value=0) for i in range(30))
        )
    said = ajet("check", str(path), code=1)
    assert "runs of metrics: a metric belongs to a run that does not exist (30)" in said
    assert "\\x1b[31mnobody-1" in said and "\x1b" not in said and "and 10 more" in said
    result = CliRunner().invoke(app, ["trace", "check", str(path), "--json"])
    broken: list[dict[str, Any]] = json.loads(result.stdout)["broken"]
    assert result.exit_code == 1 and broken[0]["count"] == 30 and len(broken[0]["ids"]) == 20


def test_a_live_trace_is_checked_and_otherwise_left_alone(path: Path) -> None:
    with TraceWriter(path):
        said = ajet("prune", str(path), "--run", "aaa", "--yes", code=1)
        assert f"process {os.getpid()}" in said or f"pid {os.getpid()}" in said


SERVICE = (
    "import sys, ajet; tracing = ajet.trace(sys.argv[1]); print('ready', flush=True); input();"
    " tracing.close()"
)


@pytest.mark.slow
def test_prune_takes_the_finished_files_of_a_directory_that_a_service_writes_to(path: Path) -> None:
    command = [sys.executable, "-c", SERVICE, str(path.parent)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as service:
        assert service.stdout is not None and service.stdout.readline() == "ready\n"
        [live] = set(path.parent.glob("*.duckdb")) - {path}
        done = CliRunner().invoke(
            app, ["trace", "prune", str(path.parent), "--older-than", "0s", "--yes"]
        )
        assert done.exit_code == 0, done.output
        assert f"being written: {live}" in done.stderr
        kept = runs(path.parent)
        assert len(kept) == 1 and kept[0] not in ("aaa", "bbb")
        assert f"no run '{kept[0]}'" in ajet(
            "prune", str(path.parent), "--run", kept[0], "--yes", code=2
        )
        service.communicate("\n")
    assert service.returncode == 0
