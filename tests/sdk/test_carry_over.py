"""`rollout.carry_over`: a step trains the groups that are done first, and each group once."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ajet
from ajet_sdk.backbones.shared.carry_over import GroupPlace, TakenGroups, groups_of_step
from ajet_sdk.backbones.shared.steps import tasks_of_step
from ajet_sdk.config.config import Config
from ajet_sdk.errors import ConfigError
from ajet_sdk.run import train
from ajet_sdk.types import Task
from ajet_tools.trace.files.audit import audit
from tests.sdk.test_local_backbone import length, talk
from tests.sdk.test_local_overlap import assert_balanced, job, metric, rows
from tests.waiting import until_async


@given(
    size=st.integers(1, 4),
    lead=st.integers(1, 3),
    carry_over=st.integers(0, 4),
    data=st.data(),
)
def test_each_group_is_trained_once_in_time_and_no_step_waits_longer_than_it_must(
    size: int, lead: int, carry_over: int, data: st.DataObject
) -> None:
    total = 8
    in_flight: dict[GroupPlace, bool] = {}
    trained: list[GroupPlace] = []
    taken = TakenGroups(size)
    begun = 0
    for step in range(1, total + 1):
        while begun < min(total, step + lead):  # as soon as the step before has been trained
            begun += 1
            in_flight |= {GroupPlace(begun, n): False for n in range(size)}
        while (places := groups_of_step(step, size, carry_over, in_flight)) is None:
            due = [p for p, done in in_flight.items() if not done and p.batch + carry_over <= step]
            assert due or sum(in_flight.values()) < size
            waiting = [place for place, done in in_flight.items() if not done]
            in_flight[data.draw(st.sampled_from(waiting))] = True
        assert len(places) == size
        assert all(place.batch + carry_over >= step for place in places)
        for place in places:
            assert in_flight.pop(place)
        trained += places
        taken.add(places)
        left = [GroupPlace(b, n) for b in range(1, begun + 1) for n in taken.left(b)]
        assert left == sorted(in_flight)
        assert taken.whole * size + len(taken.beyond) == step * size
    assert Counter(trained) == Counter(
        GroupPlace(batch, n) for batch in range(1, total + 1) for n in range(size)
    )


def questions_trained(config: Config) -> Counter[str]:
    """The questions of the groups that steps took."""
    return Counter(
        row["question"]
        for row in rows(
            config,
            """SELECT any_value(json_extract_string(task, '$.main_query')) AS question
               FROM episodes WHERE NOT superseded GROUP BY group_id""",
        )
    )


def questions_planned(config: Config, steps: int) -> Counter[str]:
    words = ("yes", "no", "maybe", "so", "well")
    tasks = [Task(task_id=str(n), main_query=f"Say {word}.") for n, word in enumerate(words)]
    seed = config.trainer_common.seed
    size = config.data.train_batch_size
    return Counter(
        str(task.main_query)
        for step in range(1, steps + 1)
        for task in tasks_of_step(tasks, step, size, seed)
    )


@pytest.mark.slow
def test_a_straggler_is_trained_later_and_holds_up_no_step_before(
    tmp_path: Path, tiny_model: Path
) -> None:
    """One episode of the first batch ends after two steps, which would wait for it without
    `carry_over`, and it for them."""
    config = job(tmp_path, tiny_model, {"max_staleness": 3, "carry_over": 2}, total_steps=6)
    began = []
    checkpoints = config.directory / "checkpoint"

    @ajet.workflow
    async def agent(question: str, model: ajet.Model) -> str:
        began.append(question)
        is_straggler = len(began) == 1
        reply = await model.chat([{"role": "user", "content": question}])
        if is_straggler:
            await until_async(lambda: list(checkpoints.glob("*/step_000002")))
        return reply["content"] or ""

    train(config, workflow=agent, judge=length)
    steps = rows(
        config,
        """SELECT step, count(*) AS episodes, count(DISTINCT group_id) AS groups,
            min(policy_version) AS version
        FROM episodes JOIN calls USING (episode_id) GROUP BY step ORDER BY step""",
    )
    assert [(row["step"], row["episodes"], row["groups"]) for row in steps] == [
        (step, 8, 2) for step in range(1, 7)
    ]
    late = rows(
        config,
        """SELECT step FROM episodes JOIN calls USING (episode_id)
        WHERE policy_version = 0 AND step > 2""",
    )
    assert {row["step"] for row in late} == {3}, "the straggler's group is that of the third step"
    assert questions_trained(config) == questions_planned(config, 6)
    assert max(metric(config, "train/staleness_max").values()) <= 3
    ledger = rows(
        config,
        """SELECT l.outcome, l.step = e.step AS same FROM ledger l JOIN episodes e
        USING (episode_id)""",
    )
    assert {row["outcome"] for row in ledger} <= {"trained", "zero_advantage"}
    assert all(row["same"] for row in ledger)
    assert_balanced(config)
    audited = audit(config.directory / "trace.duckdb", weights=True)
    assert (audited.differs, audited.unchecked) == ((), ())


@pytest.mark.slow
def test_a_resumed_run_samples_again_what_was_carried_over_and_nothing_twice(
    tmp_path: Path, tiny_model: Path
) -> None:
    config = job(
        tmp_path,
        tiny_model,
        {"max_staleness": 3, "carry_over": 2},
        total_steps=6,
        save_freq=100,
    )
    began = []
    stopped = threading.Event()

    @ajet.workflow
    async def agent(question: str, model: ajet.Model, episode: ajet.Episode) -> str:
        began.append(question)
        is_straggler = len(began) == 1
        reply = await model.chat([{"role": "user", "content": question}])
        if is_straggler:
            await until_async(lambda: metric(config, "train/policy_version").get(2))
            stopped.set()
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(3600)
        return reply["content"] or ""

    with pytest.raises(KeyboardInterrupt):
        train(config, workflow=agent, judge=length)
    assert stopped.is_set()
    assert_balanced(config)
    train(config, workflow=agent, judge=length, resume=True)
    assert questions_trained(config) == questions_planned(config, 6)
    trained = rows(
        config,
        """SELECT step, count(DISTINCT group_id) AS groups FROM episodes
        WHERE NOT superseded GROUP BY step ORDER BY step""",
    )
    assert [(row["step"], row["groups"]) for row in trained] == [(step, 2) for step in range(1, 7)]
    assert max(metric(config, "train/staleness_max").values()) <= 3
    assert_balanced(config)
    assert audit(config.directory / "trace.duckdb").differs == ()


@pytest.mark.slow
def test_a_failing_group_of_a_later_step_ends_the_run_and_every_other_group(
    tmp_path: Path, tiny_model: Path
) -> None:
    from ajet_sdk.errors import TrainingError

    @ajet.workflow
    async def failing(question: str, model: ajet.Model, episode: ajet.Episode) -> str:
        reply = await model.chat([{"role": "user", "content": question}])
        if metric(config, "train/policy_version"):
            raise ValueError("after the first step")
        return reply["content"] or ""

    config = job(tmp_path, tiny_model, {"max_staleness": 2, "carry_over": 1}, total_steps=6)
    with pytest.raises(TrainingError, match="after the first step"):
        train(config, workflow=failing, judge=length)
    assert {row["status"] for row in rows(config, "SELECT status FROM runs")} == {"failed"}


@pytest.mark.parametrize(
    ("rollout", "trainer"),
    [
        ({"max_staleness": 0, "carry_over": 1}, {}),
        ({"max_staleness": 2, "carry_over": 2}, {}),
        ({"max_staleness": 3, "carry_over": 1}, {"mini_batch_num": 2}),
    ],
)
def test_a_carry_over_that_leaves_no_step_to_run_ahead_is_refused(
    rollout: dict[str, Any], trainer: dict[str, Any], tmp_path: Path, tiny_model: Path
) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.carry_over"):
        job(tmp_path, tiny_model, rollout, **trainer)


@pytest.mark.slow
def test_with_many_updates_a_step_the_bound_holds(tmp_path: Path, tiny_model: Path) -> None:
    config = job(
        tmp_path, tiny_model, {"max_staleness": 4, "carry_over": 1}, mini_batch_num=2, ppo_epochs=1
    )
    train(config, workflow=talk, judge=length)
    assert all(0 <= most <= 4 for most in metric(config, "train/staleness_max").values())
    assert "stale" not in {row["outcome"] for row in rows(config, "SELECT outcome FROM ledger")}
    assert_balanced(config)
