"""`task_reader.type: growing`: tasks are added as a run trains, and a resumed run has the same
ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import ajet
from ajet_sdk.config.config import Config, load_config
from ajet_sdk.engines.reply_cache import ReplyCache
from ajet_sdk.errors import ConfigError
from ajet_sdk.run import train
from ajet_sdk.trace.reader import open_trace
from ajet_tools.cli.app import app
from tests.tiny_models import save_tiny

TEACHER = """
import json, random, re
from pathlib import Path

def reply(ask):
    prompt = ask.body["messages"][-1]["content"]
    Path(__file__).with_name("asked.txt").open("a").write("x")
    chance = random.Random(f"{ask.sampling.seed} {prompt}")
    words = ["".join(chance.sample("abcdefghijklmnopqrstuvwxyz", 7)) for _ in range(int(re.search(r"JSON array of ([0-9]+)", prompt)[1]))]
    return json.dumps([{"question": f"Say {word} and {word[::-1]}.", "answer": word} for word in words])
"""  # noqa: E501


def job(tmp_path: Path, rollout: Mapping[str, Any] | None = None, **trainer: Any) -> Config:
    """A model of random weights, whose episodes succeed half of the time, by the length of what it
    says."""
    tmp_path.mkdir(exist_ok=True)
    for name, words in (("seeds", ("yes", "no", "maybe", "so", "well")), ("val", ("never",))):
        rows = [{"question": f"Say {word}.", "answer": word} for word in words]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "teacher.py").write_text(TEACHER)
    files = {"training": {"file_path": str(tmp_path / "seeds.jsonl")}}
    files["validation"] = {"file_path": str(tmp_path / "val.jsonl")}
    generation = {"query_reader": {"jsonl_dataset_file": files}, "scripted": f"{tmp_path / 'teacher.py'}->reply",
                  "verify": "none", "num_workers": 1}  # fmt: skip
    return load_config(
        values={
            "experiment_name": "grows",
            "experiment_dir": str(tmp_path / "experiment"),
            "backbone": "local",
            "model": {"path": str(save_tiny(tmp_path.parent / "tiny"))},
            "task_reader": {
                "type": "growing",
                "data_generation": generation,
                "growing": {"every": 2, "tasks": 3, "attempts": 6},
            },
            "data": {"train_batch_size": 4},
            "rollout": {
                "num_repeat": 4,
                "temperature": 1.0,
                "max_model_len": 128,
                "deterministic": True,
                "max_response_length_in_one_turn": 6,
                **(rollout or {}),
            },
            "trainer_common": {
                "total_steps": 4,
                "val_pass_n": 2,
                "test_freq": 2,
                "save_freq": 1,
                "use_kl_loss": False,
                "logger": ["console"],
                **trainer,
            },
        }
    )


@ajet.workflow
async def talk(question: str, model: ajet.Model) -> str:
    reply = await model.chat([{"role": "user", "content": question}])
    return reply["content"] or ""


@ajet.judge
def even(output: str) -> tuple[float, bool]:
    return float(len(output)), len(output) % 2 == 0


def query(config: Config, sql: str) -> list[dict[str, Any]]:
    with open_trace(config.directory) as trace:
        return trace.query(sql).to_pylist()


def added(config: Config) -> dict[str, list[dict[str, Any]]]:
    def rounds() -> Iterator[tuple[str, list[dict[str, Any]]]]:
        for file in sorted(config.directory.glob("data/growing/*/step_*.json")):
            done = json.loads(file.read_text())
            rows = (file.parent / done["directory"] / "train.jsonl").read_text().splitlines()
            yield file.name, [json.loads(row) for row in rows]

    return dict(rounds())


TRIALS = """
    SELECT task_id, step, count(*) AS trials, count(*) FILTER (is_success) AS solved,
        count(DISTINCT group_id) AS groups, avg(superseded::INTEGER) AS superseded
    FROM episodes WHERE split = 'trial' GROUP BY ALL ORDER BY ALL"""


@pytest.mark.long
@pytest.mark.slow
def measurements(directory: Path, step: str) -> list[list[str]]:
    files = directory.glob(f"data/growing/*/{step}/.expand/replies.sqlite")
    return [entry for file in files for entry in ReplyCache(file).entries("measured ")]


@pytest.mark.slow
def test_a_run_adds_what_it_can_learn_from_and_a_resumed_one_has_the_same_tasks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    straight = job(tmp_path / "one")
    train(straight, workflow=talk, judge=even)
    assert "step 2: 3 tasks added to 8" in capsys.readouterr().out
    rounds = added(straight)
    assert list(rounds) == ["step_000000.json", "step_000002.json"] and all(
        len(rows) == 3 for rows in rounds.values()
    )
    for row in (row for rows in rounds.values() for row in rows):
        assert 0.2 <= row["metadata"]["pass_rate"] <= 0.8
    assert query(
        straight, "SELECT step, value FROM metrics WHERE name = 'tasks/total' ORDER BY step"
    ) == [
        {"step": 0, "value": 8.0},
        {"step": 2, "value": 11.0},
    ]
    assert len(query(straight, "SELECT DISTINCT step FROM metrics WHERE name = 'val/reward'")) == 2
    trained = query(
        straight,
        "SELECT DISTINCT task_id, CAST(task->'metadata'->>'added_after_step' AS INT) AS added,"
        " min(step) AS step FROM episodes WHERE split = 'train' GROUP BY ALL",
    )
    assert any(row["added"] == 0 for row in trained)
    assert all(row["step"] > row["added"] for row in trained if row["added"] is not None)
    assert {row["task_id"] for rows in rounds.values() for row in rows} >= {
        row["task_id"] for row in trained if row["added"] is not None
    }

    trials = query(straight, TRIALS)
    measured = measurements(straight.directory, "step_*")
    assert all((row["trials"], row["groups"], row["superseded"]) == (6, 1, 0) for row in trials)
    assert len(trials) == len(measured) > 6 and {row["step"] for row in trials} == {0, 2}
    assert {
        row["task_id"]: row["metadata"]["pass_rate"] for rows in rounds.values() for row in rows
    }.items() <= {row["task_id"]: round(row["solved"] / 6, 6) for row in trials}.items()
    booked = (
        "SELECT DISTINCT outcome FROM ledger JOIN episodes USING (episode_id) WHERE split = 'trial'"
    )
    assert query(straight, booked) == [{"outcome": "evaluation"}]
    assert not query(
        straight, "SELECT * FROM trained JOIN episodes USING (episode_id) WHERE split <> 'train'"
    )
    sizes = query(straight, "SELECT value FROM metrics WHERE name = 'train/episodes'")
    assert [row["value"] for row in sizes] == [16.0] * 4, "trials are in no metric of training"
    assert CliRunner().invoke(app, ["trace", "check", str(straight.directory)]).exit_code == 0

    train(job(tmp_path / "two", total_steps=3), workflow=talk, judge=even)
    asked = (tmp_path / "two" / "asked.txt").read_text()
    resumed = job(tmp_path / "two")
    train(resumed, workflow=talk, judge=even, resume=True)
    assert (tmp_path / "two" / "asked.txt").read_text() == asked, (
        "a round that is done is not made again"
    )
    assert [[row["question"] for row in rows] for rows in added(resumed).values()] == [
        [row["question"] for row in rows] for rows in rounds.values()
    ]
    sql = (
        "SELECT step, task_id, attempt, output FROM episodes WHERE split = 'train' AND step = 4"
        " ORDER BY ALL"
    )
    assert query(resumed, sql) == query(straight, sql)
    assert query(resumed, TRIALS) == trials


KILLED = """
import os, sys
from pathlib import Path
import ajet
from tests.tools.dataset import test_dataset_growing as growing

at = Path(sys.argv[1])

@ajet.workflow
async def talk(question: str, model: ajet.Model) -> str:
    if growing.measurements(at / "experiment", "step_000002*"):
        os._exit(9)
    return (await model.chat([{"role": "user", "content": question}]))["content"] or ""

growing.train(growing.job(at, rollout={"max_env_worker": 6}), workflow=talk, judge=growing.even)
"""


@pytest.mark.slow
@pytest.mark.long
def test_a_trial_whose_result_is_known_is_in_the_trace_after_a_kill(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path / "one")],
        env=env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 9, done.stderr
    config = job(tmp_path / "one", rollout={"max_env_worker": 6})
    train(config, workflow=talk, judge=even, resume=True)
    measured = measurements(config.directory, "step_000002-*")
    tried = {row["task_id"]: row["trials"] for row in query(config, TRIALS) if row["step"] == 2}
    assert len(tried) == len(measured) > 2 and min(tried.values()) == 6
    assert CliRunner().invoke(app, ["trace", "check", str(config.directory)]).exit_code == 0


def test_tasks_grow_on_the_local_backbone_only(tmp_path: Path) -> None:
    config = job(tmp_path / "one").model_copy(update={"backbone": "verl"})
    with pytest.raises(ConfigError, match=r"growing .* is for backbone: local"):
        train(config, workflow=talk, judge=even)
