"""`ajet train --sweep` and `ajet trace compare`: many runs, one after the other and side by
side."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Episode, Reward, Run, Task, new_id
from ajet_tools.cli.app import app

SWEEP = [
    *(
        "train",
        "--conf",
        "config.yaml",
        "--backbone",
        "debug",
        "ajet.model.scripted=replies.py:reply",
    ),
    *("ajet.experiment_name=many", "--sweep", "rollout.num_repeat=2,3", "--sweep", "seed=0,1"),
]
POINTS = [
    "num_repeat=2,seed=0",
    "num_repeat=2,seed=1",
    "num_repeat=3,seed=0",
    "num_repeat=3,seed=1",
]


def ajet(*arguments: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, [*arguments], env={"COLUMNS": "120"})
    assert done.exit_code == code, done.output
    return done.output


@pytest.fixture
def starter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    ajet("init", str(tmp_path / "demo"))
    monkeypatch.chdir(tmp_path / "demo")
    return tmp_path / "demo"


@pytest.mark.slow
def test_a_sweep_trains_every_combination_and_goes_on_where_it_was_ended(starter: Path) -> None:
    said = ajet(*SWEEP)
    assert [line for line in said.splitlines() if line.startswith("run ")] == [
        f"run {i} of 4: {name}" for i, name in enumerate(POINTS, 1)
    ]
    directory = starter / "launcher_record" / "many"
    assert sorted(path.name for path in directory.iterdir()) == POINTS
    assert "the sweep was started" in ajet(*SWEEP, code=2)
    (directory / POINTS[1] / "trace.duckdb").unlink()
    again = ajet(*SWEEP, "--resume")
    assert [line.endswith("finished before") for line in again.splitlines() if line.startswith("run ")] == [
        True, False, True, True,
    ]  # fmt: skip
    compared = json.loads(ajet("trace", "compare", str(directory), "--json"))
    settings = [run["settings"] for run in compared["runs"]]
    assert {(s["ajet.rollout.num_repeat"], s["ajet.trainer_common.seed"]) for s in settings} == {
        (2, 0), (2, 1), (3, 0), (3, 1),
    }  # fmt: skip
    assert [len(group["runs"]) for group in compared["groups"]] == [2, 2]


@pytest.mark.parametrize(
    ("sweep", "message"),
    [
        (
            "num_repeat=2",
            "num_repeat is ambiguous: rollout.num_repeat or rollout.val_kwargs.num_repeat",
        ),
        ("sed=1", "there is no key sed; did you mean seed?"),
        ("seed=", "--sweep takes KEY=VALUE,VALUE"),
        ("seed=1,x", "trainer_common.seed must be a whole number"),
    ],
)
def test_a_sweep_that_means_nothing_is_refused_before_a_run(
    starter: Path, sweep: str, message: str
) -> None:
    assert message in " ".join(
        ajet("train", "--conf", "config.yaml", "--sweep", sweep, code=2).split()
    )
    assert not (starter / "launcher_record").exists()


@pytest.mark.slow
def test_runs_are_compared_by_settings_seeds_and_tasks(tmp_path: Path) -> None:
    start = datetime(2026, 1, 1, tzinfo=timezone.utc)
    for i, (lr, seed, reward) in enumerate(
        [(1e-4, seed, 0.5 + seed / 100) for seed in range(6)] + [(3e-4, 0, 0.9), (3e-4, 1, 0.7)]
    ):
        config = {
            "ajet": {
                "experiment_name": str(i),
                "trainer_common": {"optim": {"lr": lr}, "seed": seed},
            }
        }
        run = Run(run_id=f"run{i}", name=f"r{i}", backbone="local", config=config, status="finished",
                  started_at=start + timedelta(hours=i), ended_at=start + timedelta(hours=i + 1))  # fmt: skip
        of_run = Episode(run_id=run.run_id, split="val", decoding="sampled")
        with TraceWriter(tmp_path / run.name / "trace.duckdb") as writer:
            writer.put(run)
            for step in (0, 10):
                for name, value in (("easy", 1.0), ("hard", reward * 2 - 1 if step else 0.0)):
                    task, rewards = (
                        Task(task_id=name, main_query=f"Is it {name}?"),
                        (Reward(value=value),),
                    )
                    fresh = {"episode_id": new_id(), "step": step, "task": task, "rewards": rewards}
                    writer.put(of_run.model_copy(update=fresh))
    compared = json.loads(ajet("trace", "compare", str(tmp_path), "--json"))
    best, other = compared["groups"]
    assert best["settings"] == {"ajet.trainer_common.optim.lr": 3e-4} and best["of"] == "last_val"
    assert (best["mean"], best["low"], best["high"]) == pytest.approx((0.8, 0.7, 0.9))
    assert (
        other["mean"] == pytest.approx(0.525)
        and 0.5 <= other["low"] < 0.525 < other["high"] <= 0.55
    )
    table = ajet("trace", "compare", str(tmp_path))
    assert "lr" in table and "over seeds" in table and "r7" in table
    tasks = json.loads(ajet("trace", "compare", str(tmp_path), "--by-task", "--json"))["rewards"]
    assert len(tasks) == 8 * 2 * 2
    heat = ajet("trace", "compare", str(tmp_path), "--by-task").splitlines()
    assert heat[1].startswith("Is it hard?") and heat[2].startswith("Is it easy?"), (
        "what differs most comes first"
    )
    history = json.loads(ajet("trace", "compare", str(tmp_path), "--task", "HARD", "--json"))[
        "rewards"
    ]
    assert [row["step"] for row in history] == [0, 10]
    assert (history[0]["r6"], history[1]["r6"], history[1]["r7"]) == pytest.approx((0, 0.8, 0.4))
    assert "several tasks fit 'is it'" in ajet(
        "trace", "compare", str(tmp_path), "--task", "is it", code=2
    )
