"""`rollout.carry_over` on Trinity: a step trains the groups that are done first, and each group
once, also when the run is killed in between."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trinity", reason="needs Trinity-RFT: just install-trinity")
pytest.importorskip("ray", reason="needs Ray: just install-trinity")

from ajet_sdk.backbones.shared.steps import tasks_of_step
from ajet_sdk.config.config import load_config
from ajet_sdk.types import Task

from .experiments import Experiment
from .test_trinity_failures import books_balance

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("audited")]

STEPS = 6
CONFIG = {
    "rollout": {"max_staleness": 3, "carry_over": 2},
    "trainer_common": {"total_steps": STEPS},
}


def begin(experiment: Callable[..., Experiment], nodes: Any, go: Path) -> Experiment:
    """The attempts at one task end when the file is there; no step before the third waits for
    them."""
    one = experiment([f"late {go}", "turns 1", "plain 1", "plain 2", "plain 3"], CONFIG)
    one.start("--with-ray-cluster", nodes.address)
    one.until(lambda: one.steps_saved() >= 2)
    return one


def assert_each_group_was_trained_once(one: Experiment) -> None:
    groups = one.query(
        """SELECT any_value(json_extract_string(task, '$.main_query')) AS question, step
        FROM episodes WHERE split = 'train' AND NOT coalesce(superseded, false)
        GROUP BY group_id, step"""
    )
    assert Counter(row["step"] for row in groups) == dict.fromkeys(range(1, STEPS + 1), 2)
    tasks = [Task(task_id=question, main_query=question) for question in one.questions]
    seed = load_config(values={}).trainer_common.seed
    planned = Counter(
        task.main_query
        for step in range(1, STEPS + 1)
        for task in tasks_of_step(tasks, step, 2, seed)
    )
    assert Counter(row["question"] for row in groups) == planned
    rows = one.query(
        """SELECT l.outcome, l.step, e.step AS episode_step, c.policy_version AS version
        FROM ledger l JOIN calls c USING (call_id) JOIN episodes e ON e.episode_id = c.episode_id
        WHERE e.split = 'train' AND NOT coalesce(e.superseded, false)"""
    )
    assert {row["outcome"] for row in rows} <= {"trained", "zero_advantage"}
    assert all(row["step"] == row["episode_step"] for row in rows)
    assert {row["step"] - 1 - row["version"] for row in rows} <= {0, 1, 2, 3}
    books_balance(one)


def test_a_straggler_is_trained_later_and_holds_up_no_step_before(
    experiment: Callable[..., Experiment], nodes: Any, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    one = begin(experiment, nodes, go)
    go.touch()
    assert one.wait() == 0, one.output()
    late = one.query(
        """SELECT DISTINCT step FROM episodes JOIN calls USING (episode_id)
        WHERE policy_version = 0 AND json_extract_string(task, '$.main_query') LIKE 'late%'"""
    )
    assert [row["step"] for row in late] == [3]
    rewards = one.query("SELECT step FROM metrics WHERE name = 'train/reward' ORDER BY step")
    assert [row["step"] for row in rewards] == list(range(1, STEPS + 1))
    assert_each_group_was_trained_once(one)


def test_a_killed_run_samples_again_what_was_carried_over_and_nothing_twice(
    experiment: Callable[..., Experiment], nodes: Any, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    one = begin(experiment, nodes, go)
    assert one.process is not None
    os.kill(one.process.pid, signal.SIGKILL)
    assert one.wait() != 0
    go.touch()
    one.start("--with-ray-cluster", nodes.address, "--resume")
    assert one.wait() == 0, one.output()
    assert "resuming after step 2" in one.output()
    assert_each_group_was_trained_once(one)
