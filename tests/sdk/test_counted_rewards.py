"""One definition of the reward of an episode that failed: in metrics, in comparisons, for the best
checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

import ajet
from ajet_sdk.backbones.shared.validation import validation_metrics
from ajet_sdk.config.config import Config, load_config
from ajet_sdk.reporting.held_out import task_rewards
from ajet_sdk.run import run, train
from ajet_sdk.trace.counted import COUNTED, counted_reward, counted_rewards, failed_by_itself
from ajet_sdk.trace.reader import open_trace
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Episode, Reward, Run, Task
from ajet_tools.trace.files.audit import audit
from ajet_tools.trace.queries.episodes import rewards_by_step, step_episodes
from ajet_tools.trace.queries.experiments import task_rewards as rewards_of_runs
from ajet_tools.trace.queries.runs import overview

SOUND = {"rewards": (Reward(value=1.0), Reward(name="style", value=0.5, weight=0.5))}
ENDINGS: dict[str, tuple[dict[str, Any], bool]] = {
    "sound": (SOUND, False),
    "without reward": ({}, False),
    "raised": ({"status": "failed", "cause": "ValueError", "error": "ValueError: no"}, True),
    "too long": (
        {"status": "failed", "cause": "ContextOverflow", "error": "ContextOverflow: 9"},
        True,
    ),
    "refused": (
        {"status": "failed", "cause": "RequestRefused", "error": "RequestRefused: 9"},
        True,
    ),
    "without cause": ({"status": "failed"}, True),
    "judge": (
        {"status": "failed", "cause": "ValueError", "error": "judge exact: ValueError: no"},
        False,
    ),
    "engine": ({"status": "failed", "cause": "EngineError", "error": "EngineError: no"}, False),
    "infrastructure": (
        {"status": "failed", "cause": "OSError", "error": "OSError", "infrastructure": True},
        False,
    ),
    "timeout": (
        {"status": "timeout", "cause": "EpisodeTimeout", "error": "EpisodeTimeout: 600 s"},
        False,
    ),
    "aborted": ({"status": "aborted", "error": "stopped"}, False),
}


@pytest.mark.parametrize("failure_reward", [None, 0.0, -1.0])
def test_python_and_sql_count_the_same_reward(tmp_path: Path, failure_reward: float | None) -> None:
    episodes = {
        name: Episode(run_id="r", step=1, split="val", **values)
        for name, (values, _) in ENDINGS.items()
    }
    config = {"ajet": {"rollout": {"failure_reward": failure_reward}}}
    with TraceWriter(tmp_path / "trace.duckdb") as writer:
        writer.put(Run(run_id="r", name="r", config=config, backbone="local"))
        writer.put(*episodes.values())
    with open_trace(tmp_path) as trace:
        rows = trace.query(f"SELECT * FROM {COUNTED}", []).to_pylist()
        stored = {row["episode_id"]: row["reward"] for row in rows}
    for name, episode in episodes.items():
        assert failed_by_itself(episode) is ENDINGS[name][1], name
        expected = failure_reward if ENDINGS[name][1] else None
        if name == "sound":
            expected = 1.25
        assert counted_reward(episode, failure_reward) == stored[episode.episode_id] == expected, (
            name
        )


def test_a_trace_without_a_run_counts_sound_episodes(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "trace.duckdb") as writer:
        writer.put(Episode(run_id="lost", **SOUND), Episode(run_id="lost", status="failed"))
    with open_trace(tmp_path) as trace:
        rewards = [row["reward"] for row in trace.query(f"SELECT * FROM {COUNTED}", []).to_pylist()]
    assert sorted(rewards, key=str) == [1.25, None]


def test_validation_metrics_count_failures_with_a_failure_reward() -> None:
    tasks = [Task(main_query=str(i), metadata={"kind": "ab"[i % 2]}) for i in range(4)]
    episodes = [
        Episode(
            task=task,
            split="val",
            **(SOUND if i % 2 else {"status": "failed", "cause": "ValueError"}),
        )
        for i, task in enumerate(tasks)
    ]
    sets = {
        "kind=a": {tasks[0].task_id, tasks[2].task_id},
        "kind=b": {tasks[1].task_id, tasks[3].task_id},
    }
    without = validation_metrics(episodes, episodes, 1, sets, None)
    assert without["val/reward"] == without["val/greedy_reward"] == 1.25
    assert "val/reward/kind=a" not in without
    counted = validation_metrics(episodes, episodes, 1, sets, 0.0)
    assert counted["val/reward"] == counted["val/greedy_reward"] == 0.625
    assert counted["val/reward/kind=a"] == 0.0 and counted["val/reward/kind=b"] == 1.25


class Broke(ValueError):
    """A bug of the agent."""


@ajet.workflow
async def fails_on_odd_tasks(question: str, model: ajet.Model) -> str:
    reply = await model.chat([{"role": "user", "content": question}])
    if int(question.split()[1]) % 2:
        raise Broke(question)
    return reply["content"] or ""


@ajet.judge
def always(output: str) -> float:
    return 1.0


def config_of(tmp_path: Path, model: Path | None, failure_reward: float | None) -> Config:
    files = {}
    for name in ("training", "validation"):
        file = tmp_path / f"{name}.jsonl"
        rows = [{"question": f"Say {i} of {name}.", "answer": "x"} for i in range(4)]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        files[name] = {"file_path": str(file)}
    source: dict[str, Any] = {"path": str(model)} if model else {"scripted": f"{__file__}->replies"}
    return load_config(
        values={
            "experiment_name": "counted",
            "experiment_dir": str(tmp_path / "experiment"),
            "backbone": "local",
            "model": source,
            "task_reader": {"type": "jsonl_dataset_file", "jsonl_dataset_file": files},
            "data": {"train_batch_size": 4},
            "rollout": {
                "num_repeat": 2,
                "max_model_len": 128,
                "max_response_length_in_one_turn": 4,
                "failure_reward": failure_reward,
                "min_sound_share": 0.1,
                "max_retries": 0,
            },
            "trainer_common": {
                "total_steps": 1,
                "val_before_train": True,
                "val_pass_n": 2,
                "save_freq": 1,
                "use_kl_loss": False,
                "logger": ["console"],
            },
        }
    )


def replies(ask: object) -> str:
    return "yes"


@pytest.mark.slow
@pytest.mark.parametrize("failure_reward", [None, 0.0])
def test_a_run_reports_one_validation_reward(
    tmp_path: Path, tiny_model: Path, failure_reward: float | None
) -> None:
    config = config_of(tmp_path, tiny_model, failure_reward)
    tuned = train(config, workflow=fails_on_odd_tasks, judge=always)
    expected = 1.0 if failure_reward is None else 0.5
    assert tuned.metrics["val/reward"] == tuned.metrics["val/greedy_reward"] == expected
    assert tuned.metrics["val/pass@1"] == 0.5
    with open_trace(config.directory) as trace:
        [view] = overview(trace)
        assert view["last_val"] == view["last_greedy"] == expected
        by_step = rewards_by_step(trace, view["run_id"])
        assert set(by_step["val", "sampled"].values()) == {expected}
        rewards = [e["reward"] for e in step_episodes(trace, view["run_id"], "val", 1, "sampled")]
        assert fmean(value for value in rewards if value is not None) == expected
        before, _ = task_rewards(trace, view["run_id"], 0, 1)
        assert fmean(before.values()) == expected and len(before) == (
            2 if failure_reward is None else 4
        )
        of_runs = [
            row["reward"] for row in rewards_of_runs(trace, [view["run_id"]]) if row["step"] == 1
        ]
        assert fmean(of_runs) == expected
    if failure_reward is not None:
        assert audit(config.directory).differs == ()


def test_the_score_of_a_run_counts_failures(tmp_path: Path) -> None:
    for failure_reward, expected in ((None, 1.0), (0.0, 0.5), (-1.0, 0.0)):
        directory = tmp_path / str(failure_reward)
        directory.mkdir()
        config = config_of(directory, None, failure_reward)
        tasks = [
            Task(main_query=f"Say {i}.", metadata={"question": f"Say {i} now."}) for i in range(4)
        ]
        report = run(config, workflow=fails_on_odd_tasks, judge=always, tasks=tasks)
        assert report.reward == expected
        assert counted_rewards(report.episodes, failure_reward)
