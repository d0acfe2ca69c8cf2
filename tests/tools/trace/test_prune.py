"""Pruning: a run goes with all that belongs to it, and nothing else does."""

from __future__ import annotations

import re
import subprocess
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import duckdb
import pytest

from ajet_sdk.errors import ConfigError, TraceLocked, TraceVersionError
from ajet_sdk.pictures import picture_of
from ajet_sdk.trace.limits import age, size
from ajet_sdk.trace.reader import episodes, open_trace
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Call, Episode, Feedback, LedgerEntry, Metric, Reward, Run, Trained
from ajet_tools.trace.files.check import check, edited
from ajet_tools.trace.files.prune import beyond_size, older_than, prune, run_sizes
from tests.drawings import part, png

START = datetime(2026, 1, 1, tzinfo=timezone.utc)
DAY = timedelta(days=1)
ROOT = Path(__file__).parents[3]
TABLES = ("runs", "episodes", "calls", "rewards", "metrics", "ledger", "trained", "feedback")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Three runs, a day each; the second was killed in the middle of an episode."""
    file = tmp_path / "trace.duckdb"
    with TraceWriter(file) as writer:
        for day, name in enumerate(("old", "mid", "new")):
            at = START + day * DAY
            ended: dict[str, Any] = (
                {} if name == "mid" else {"ended_at": at + DAY / 2, "status": "finished"}
            )
            writer.put(Run(run_id=name, started_at=at, backbone="debug", **ended))
            call = Call(
                call_id=f"{name}-c",
                episode_id=f"{name}-e",
                started_at=at,
                ended_at=at,
                prompt_ids=[1],
                output_ids=[2],
                logprobs=[0],
                request={"messages": [{"role": "user", "content": name * 5000}]},
            )
            writer.put(call, Metric(run_id=name, step=1, name="x", value=1, at=at))
            named: dict[str, Any] = {
                "run_id": name,
                "step": 0,
                "episode_id": f"{name}-e",
                "call_id": f"{name}-c",
            }
            writer.put(
                Episode(
                    episode_id=f"{name}-e",
                    run_id=name,
                    rewards=(Reward(value=1),),
                    started_at=at,
                    ended_at=at,
                ),
                LedgerEntry(**named, outcome="trained", tokens=1),
                Trained(**named, advantages=[1], logprobs=[0], entropy=[0]),
                Feedback(episode_id=f"{name}-e"),
            )
            open_call = {"call_id": f"{name}-open", "episode_id": f"{name}-cut"}
            if name == "mid":
                writer.put(Call(started_at=at + DAY / 4, ended_at=at + DAY / 4, **open_call))
    return file


def held(path: Path) -> dict[str, set[str]]:
    with open_trace(path) as reader:
        ids = {
            table: "run_id" if table in ("runs", "metrics", "ledger", "trained") else "episode_id"
            for table in TABLES
        }
        return {
            t: {row[id] for row in reader.query(f"SELECT DISTINCT {id} FROM {t}").to_pylist()}
            for t, id in ids.items()
        }


@pytest.mark.slow
def test_a_run_goes_with_all_that_belongs_to_it(path: Path) -> None:
    prune(path, ["mid"])
    found = held(path)
    assert (
        found["calls"]
        == found["episodes"]
        == found["rewards"]
        == found["feedback"]
        == {"old-e", "new-e"}
    )
    assert (
        found["runs"] == found["metrics"] == found["ledger"] == found["trained"] == {"old", "new"}
    )
    assert check(path) == []
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.slow
def test_another_run_keeps_its_cut_off_episodes(path: Path) -> None:
    before, after = prune(path, ["old", "new"])
    assert after < before
    assert held(path)["calls"] == {"mid-e", "mid-cut"}
    assert check(path) == []


def test_runs_are_chosen_by_age_and_size(path: Path) -> None:
    with open_trace(path) as reader:
        runs = run_sizes(reader, path)
    assert [(r.run_id, r.status, r.episodes, r.calls, r.feedback) for r in runs] == [
        ("old", "finished", 1, 1, 1), ("mid", "interrupted", 1, 2, 1), ("new", "finished", 1, 1, 1)
    ]  # fmt: skip
    assert runs[0].last == START + DAY / 2 and runs[1].last == START + DAY
    assert 0 < sum(r.bytes for r in runs) <= path.stat().st_size
    assert [r.run_id for r in older_than(runs, START + DAY)] == ["old"]
    assert [r.run_id for r in beyond_size(runs, path.stat().st_size)] == []
    assert [r.run_id for r in beyond_size(runs, runs[1].bytes + runs[2].bytes)] == ["old"]
    assert [r.run_id for r in beyond_size(runs, 0)] == [
        "old",
        "mid",
    ], "the newest stays whatever its size"


def test_a_live_trace_is_refused(path: Path) -> None:
    with TraceWriter(path), pytest.raises(TraceLocked, match="prune it after the run has ended"):
        prune(path, ["old"])


def test_what_is_no_trace_is_refused_and_untouched(tmp_path: Path) -> None:
    other = tmp_path / "other.duckdb"
    with duckdb.connect(str(other)) as connection:
        connection.execute("CREATE TABLE customers (name VARCHAR)")
    before = other.read_bytes()
    with pytest.raises(TraceVersionError, match="not an ajet trace"):
        prune(other, ["r"])
    assert other.read_bytes() == before


def test_ages_and_sizes_are_read_or_refused() -> None:
    assert age("30d", "keep") == timedelta(days=30) and age(" 1.5H ", "keep") == timedelta(
        minutes=90
    )
    assert (
        size("500MB", "keep") == 500_000_000
        and size("2 GiB", "keep") == 2 << 30
        and size("10", "keep") == 10
    )
    for text in ("", "30", "d", "-3d", "3 months"):
        with pytest.raises(ConfigError, match="keep takes"):
            age(text, "keep")
    for text in ("", "MB", "-1MB", "5PB"):
        with pytest.raises(ConfigError, match="keep takes"):
            size(text, "keep")


KILLED = """
import os, sys
from pathlib import Path
from ajet_tools.trace.files.prune import prune
left = [int(sys.argv[2])]
def said(what):
    left[0] -= 1
    if not left[0]:
        os.kill(os.getpid(), 9)
prune(Path(sys.argv[1]), ["old"], on_stage=said)
"""


@pytest.mark.slow
@pytest.mark.parametrize("moment", [1, 6])
def test_a_kill_leaves_the_old_file_whole(path: Path, moment: int) -> None:
    before = held(path)
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(path), str(moment)], cwd=ROOT, capture_output=True
    )
    assert done.returncode == -9
    assert held(path) == before
    assert {e.episode_id for e in episodes(open_trace(path.parent))} == {
        "old-e",
        "mid-e",
        "new-e",
    }, "a draft is no trace"
    prune(path, ["old"])
    assert list(path.parent.iterdir()) == [path], "what the killed one left is gone"


FULL = """
import resource, sys
from pathlib import Path
from ajet_tools.trace.files.prune import prune
resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, 64 << 10))
try:
    prune(Path(sys.argv[1]), ["old"])
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.slow
def test_a_full_disk_leaves_the_old_file_whole(path: Path) -> None:
    before = held(path)
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(path)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout.startswith(f"TraceError the disk of {path} is full"), (
        done.stdout + done.stderr
    )
    assert held(path) == before
    assert [file.name for file in path.parent.iterdir()] == ["trace.duckdb"]


@pytest.mark.slow
def test_the_oldest_duckdb_that_is_supported_can_read_a_new_file(
    path: Path, tmp_path: Path
) -> None:
    [oldest] = re.findall(r'"duckdb>=(\d+\.\d+)', (ROOT / "pyproject.toml").read_text())
    with TraceWriter(tmp_path / "new.duckdb") as writer:
        writer.put(Run(run_id="r", status="finished"))
    prune(path, ["old"])
    formats = []
    for name in ("new.duckdb", path.name):
        with duckdb.connect(str(tmp_path / name), read_only=True) as connection:
            sql = "SELECT tags['storage_version'] FROM duckdb_databases() WHERE path IS NOT NULL"
            formats += connection.execute(sql).fetchall()
    assert formats == [(f"v{oldest}.0+",)] * 2


def test_a_picture_goes_with_the_last_run_that_has_it(tmp_path: Path) -> None:
    path = tmp_path / "trace.duckdb"
    common, single = png(1), png(2)
    with TraceWriter(path) as writer:
        for name, seen in (("old", [common, single]), ("new", [common])):
            messages = [{"role": "user", "content": [part(data) for data in seen]}]
            writer.put(
                Run(run_id=name, started_at=START, ended_at=START, status="finished"),
                Call(call_id=name, episode_id=name, request={"messages": messages}),
                Episode(episode_id=name, run_id=name, started_at=START, ended_at=START),
            )
    with open_trace(path) as reader:
        [kept] = episodes(reader, "new")
    prune(path, ["old"])
    assert check(path) == [] and edited(path) is None
    with open_trace(path) as reader:
        assert episodes(reader) == [kept]
        digests = reader.query("SELECT digest FROM pictures").to_pylist()
    assert digests == [{"digest": picture_of(common).digest}]
