"""What validation says beside its mean: a false alarm is rare, a drop is told, and by key it ends
the run."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import ajet
from ajet_sdk.errors import MissingResource
from ajet_sdk.reporting.held_out import (
    MIN_TASKS,
    compare,
    dropped,
    rewards_by_set,
    sets_of,
)
from ajet_sdk.reporting.loggers import Loggers
from ajet_sdk.reporting.notices import STEPS, unstable
from ajet_sdk.run import train
from ajet_sdk.tasks.load import load_tasks
from ajet_sdk.trace.reader import open_trace
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Episode, Reward, Run, Task
from ajet_tools.trace.compare.advice import not_carried_over
from tests.sdk.test_local_backbone import job, length, talk

REWARDS = st.dictionaries(st.integers(0, 30).map(str), st.floats(-10, 10), min_size=0, max_size=31)


@given(REWARDS, REWARDS, st.integers(1, 20))
def test_a_change_is_of_shared_tasks_and_mirrors(
    before: dict[str, float], after: dict[str, float], many: int
) -> None:
    change = compare(before, after, many)
    shared = before.keys() & after.keys()
    possible = len(shared) >= MIN_TASKS and 2 ** -len(shared) <= 0.025 / many * (1 + 1e-9)
    assert (change is not None) == possible
    back = compare(after, before, many)
    wider = compare(before, after, many + 1)
    if change is None or back is None or wider is None:
        return
    assert (
        change.tasks == len(shared)
        and change.low <= change.after - change.before + 1e-9 <= change.high + 2e-9
    )
    assert back.low == pytest.approx(-change.high, abs=1e-9) and back.high == pytest.approx(
        -change.low, abs=1e-9
    )
    assert wider.low <= change.low + 1e-12 and wider.high >= change.high - 1e-12
    assert compare(
        before, {task: reward - 1 for task, reward in before.items()}
    ) is None or dropped(before, {task: reward - 1 for task, reward in before.items()}, {})


@pytest.mark.slow
@pytest.mark.parametrize(("tasks", "sets"), [(8, 14), (8, 1), (12, 5)])
def test_chance_alone_is_seldom_called_a_drop(tasks: int, sets: int) -> None:
    """At most 2.5 % of validations, whatever the number of sets: four attempts a task, tasks of all
    difficulties."""
    draw, alarms, trials = np.random.default_rng(0), 0, 200
    for _ in range(trials):
        ids = {f"f={number}": {f"{number}-{i}" for i in range(tasks)} for number in range(sets)}
        solved = {task: draw.beta(0.7, 0.7) for of in ids.values() for task in sorted(of)}
        before, after = (
            {task: draw.binomial(4, p) / 4 for task, p in solved.items()} for _ in range(2)
        )
        alarms += bool(dropped(before, after, ids))
    assert alarms / trials < 0.04


def test_a_set_that_falls_is_named_though_the_mean_rises() -> None:
    before = {f"old{i}": 1.0 for i in range(10)} | {f"new{i}": 0.0 for i in range(40)}
    after = {f"old{i}": (i % 4) / 4 for i in range(10)} | {f"new{i}": 1.0 for i in range(40)}
    sets = {
        "family=new": {t for t in before if t[0] == "n"},
        "family=old": {t for t in before if t[0] == "o"},
    }
    assert list(dropped(before, after, sets)) == ["family=old"]


def test_rewards_are_reported_by_set() -> None:
    tasks = [
        Task(main_query=str(i), metadata={"family": "ab"[i % 2], "level": i}) for i in range(4)
    ]
    episodes = [
        Episode(task=task, rewards=(Reward(value=float(i)),)) for i, task in enumerate(tasks)
    ]
    episodes.append(Episode(task=tasks[0], status="failed"))
    sets = sets_of([*tasks, Task(main_query="without")], ["family"])
    means = {"val/reward/family=a": 1.0, "val/reward/family=b": 2.0}
    assert rewards_by_set("val/reward", episodes, sets, None) == means
    with_failures = {"val/reward/family=a": pytest.approx(1 / 3), "val/reward/family=b": 2.0}
    assert rewards_by_set("val/reward", episodes, sets, -1.0) == with_failures


RISING, FLAT = {step: step / 20 for step in range(1, 17)}, dict.fromkeys(range(1, 17), 0.5)
SAME = {str(i): 0.0 for i in range(40)}


def test_training_that_does_not_carry_over_is_told() -> None:
    better = dict.fromkeys(SAME, 0.6)
    assert "carry over" in not_carried_over(RISING, compare(SAME, SAME), 16)
    assert not_carried_over(RISING, compare(SAME, better), 16) == ""
    assert not_carried_over(FLAT, compare(SAME, SAME), 16) == ""
    assert (
        not_carried_over(RISING, None, 16) == "" == not_carried_over(RISING, compare(SAME, SAME), 4)
    )


@pytest.mark.parametrize(
    ("name", "values", "told"),
    [
        (
            "entropy",
            [1.0] * STEPS + [0.05, 0.04],
            "train/entropy fell from 1 (first 8 steps) to 0.04",
        ),
        ("entropy", [1.0] * STEPS + [0.05, 0.5], ""),
        (
            "grad_norm",
            [0.3] * STEPS + [9.0, 8.0],
            "train/grad_norm rose from 0.3 (first 8 steps) to 8",
        ),
        ("logprob_gap_mean", [1e-6] * STEPS + [1e-3, 1e-3], ""),
        ("logprob_gap_mean", [1e-3] * STEPS + [0.1, 0.1], "train/logprob_gap_mean rose from 0.001"),
        ("loss", [-0.01] * STEPS + [-3.0, 4.0], "train/loss rose from 0.01 (first 8 steps) to 4"),
        ("loss", [-0.01] * (STEPS - 1) + [-3.0, 4.0], ""),
    ],
)
def test_numbers_that_leave_their_range_are_told(name: str, values: list[float], told: str) -> None:
    history = {f"train/{name}": dict(enumerate(values, 1))}
    assert unstable(history).get(f"train/{name}", "").startswith(told) and bool(
        unstable(history)
    ) == bool(told)
    solved = {**history, "train/solved_share": dict.fromkeys(history[f"train/{name}"], 1.0)}
    assert name != "entropy" or unstable(solved) == {}


def test_the_trace_tells_what_fell_and_which_tasks_teach_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tasks = [Task(main_query=str(i), metadata={"family": "ab"[i % 2]}) for i in range(20)]

    def episode(task: Task, step: int, reward: float, **more: object) -> Episode:
        return Episode(run_id="r", task=task, step=step, rewards=(Reward(value=reward),), **more)

    with TraceWriter(tmp_path / "run" / "trace.duckdb") as writer:
        writer.put(Run(run_id="r"))
        for step in (0, 2):
            for task in tasks:
                fell = step == 2 and task.metadata["family"] == "a"
                writer.put(
                    episode(task, step, 0.0 if fell else 1.0, split="val", decoding="sampled")
                )
                writer.put(episode(task, step, 1.0, split="val", decoding="greedy"))
        for attempt in range(16):
            writer.put(
                *(
                    episode(Task(main_query=f"t{i}"), 1, float(i == 0 and attempt == 0))
                    for i in range(3)
                )
            )
    sets = sets_of(tasks, ["family"])
    with TraceWriter(tmp_path / "trace.duckdb") as writer, caplog.at_level(logging.WARNING, "ajet"):
        metrics = tmp_path / "run" / "metrics"
        loggers = Loggers([], directory=metrics, run_id="r", writer=writer, total_steps=2)
        loggers.log(0, {"val/reward": 1.0})
        assert not loggers.held_out(0, sets) and not caplog.records
        loggers.log(2, {"val/reward": 0.5})
        assert loggers.held_out(2, sets)
    drop, signal = (record.getMessage() for record in caplog.records)
    assert (
        "fell since step 0: family=a 1.000 → 0.000 (-1.000, interval -1.000 to -1.000, 10 tasks)"
        in drop
    )
    assert "all validation tasks 1.000 → 0.500" in drop and "family=b" not in drop
    assert (
        "2 of 3 training tasks gave every attempt the same reward so far (2 never solved; 0 always)"
        in signal
    )


def test_validation_tasks_whose_episodes_begin_to_fail_are_a_drop(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They have no reward to be compared; a fault of the infrastructure says nothing about the
    policy."""
    with TraceWriter(tmp_path / "run" / "trace.duckdb") as writer:
        writer.put(Run(run_id="r"))
        for step, failing in ((0, {}), (1, {"infrastructure": True}), (2, {})):
            for i in range(2 * MIN_TASKS):
                worth = (
                    {"status": "failed", **failing}
                    if step and i % 2
                    else {"rewards": (Reward(value=1.0),)}
                )
                task = Task(main_query=str(i), metadata={"family": "ab"[i % 2]})
                writer.put(
                    Episode(
                        run_id="r", task=task, step=step, split="val", decoding="sampled", **worth
                    )
                )
    tasks = [
        Task(main_query=str(i), metadata={"family": "ab"[i % 2]}) for i in range(2 * MIN_TASKS)
    ]
    dropped_at = []
    with TraceWriter(tmp_path / "trace.duckdb") as writer, caplog.at_level(logging.WARNING, "ajet"):
        metrics = tmp_path / "run" / "metrics"
        loggers = Loggers([], directory=metrics, run_id="r", writer=writer, total_steps=2)
        for step in (0, 1, 2):
            loggers.log(step, {"val/reward": 1.0})
            dropped_at.append(loggers.held_out(step, sets_of(tasks, ["family"])))
    assert dropped_at == [False, False, True]
    (told,) = (record.getMessage() for record in caplog.records)
    assert (
        "the share of sound validation episodes fell since step 0: family=b 1.000 → 0.000" in told
    )


def files_by_name(tmp_path: Path, model: Path, **trainer: object) -> ajet.Config:
    config = job(tmp_path, model, test_freq=1, save_freq=0, **trainer)
    named = {}
    for name in ("old", "new"):
        rows = [{"question": f"Say {name} {i}.", "family": name[0]} for i in range(MIN_TASKS)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        named[name] = str(tmp_path / f"{name}.jsonl")
    reader = config.task_reader
    files = reader.jsonl_dataset_file
    validation = files.validation.model_copy(update={"file_path": named})
    files = files.model_copy(update={"validation": validation})
    return config.model_copy(
        update={"task_reader": reader.model_copy(update={"jsonl_dataset_file": files})}
    )


def test_files_named_apart_are_sets(tmp_path: Path) -> None:
    config = files_by_name(tmp_path, tmp_path)
    found = [(task.main_query, task.metadata["validation_set"]) for task in load_tasks(config).val]
    assert (
        found[0] == ("Say old 0.", "old")
        and found[-1] == ("Say new 7.", "new")
        and len(found) == 16
    )
    (tmp_path / "new.jsonl").unlink()
    with pytest.raises(MissingResource, match=r"validation\.file_path\.new: there is no file"):
        load_tasks(config)


@pytest.mark.slow
def test_validation_may_be_greedy_alone(tmp_path: Path, tiny_model: Path) -> None:
    @ajet.judge
    def falling(output: str, episode: Episode) -> float:
        return length(output) if episode.split == "train" else float(episode.step < 1)

    config = files_by_name(tmp_path, tiny_model, total_steps=3, val_pass_n=0, stop_when=["drop"])
    tuned = train(config, workflow=talk, judge=falling)
    assert tuned.history["val/reward"] == tuned.history["val/greedy_reward"] == {0: 1.0, 1: 0.0}
    with open_trace(config.directory) as trace:
        sql = (
            "SELECT DISTINCT decoding, count(*) AS n FROM episodes WHERE split = 'val' GROUP BY ALL"
        )
        assert trace.query(sql).to_pylist() == [{"decoding": "greedy", "n": 2 * 2 * MIN_TASKS}]


@pytest.mark.slow
def test_a_run_whose_validation_falls_ends_by_key(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    @ajet.judge
    def falling(output: str, episode: Episode) -> float:
        fell = episode.step >= 1 and episode.task.metadata.get("validation_set") == "old"
        return length(output) if episode.split == "train" else float(not fell)

    config = files_by_name(
        tmp_path, tiny_model, total_steps=5, val_by=["family"], stop_when=["drop"]
    )
    tuned = train(config, workflow=talk, judge=falling)
    assert tuned.history["val/reward"] == {0: 1.0, 1: 0.5} and tuned.best == tiny_model
    printed = capsys.readouterr().out
    assert "stopped after step 1 of 5: the validation reward fell" in printed
    assert "validation_set: new 1.000 (greedy 1.000)  old 0.000 (greedy 0.000)" in printed
    with open_trace(config.directory) as trace:
        sql = "SELECT name FROM metrics WHERE step = 1 AND name LIKE 'val/reward/%' ORDER BY name"
        names = [row["name"].removeprefix("val/reward/") for row in trace.query(sql).to_pylist()]
    assert names == ["family=n", "family=o", "validation_set=new", "validation_set=old"]
