"""Stored episodes before another judge: rewards, groups, signs, failures; never a 0 that nobody
gave."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

import ajet
from ajet_sdk.config.config import Config, load_config
from ajet_sdk.config.trainer_schema import Estimator
from ajet_sdk.engines.scripted import ScriptedEngine
from ajet_sdk.errors import TraceError
from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.protocols import Ask
from ajet_sdk.rollout.attempts import Attempt
from ajet_sdk.rollout.episode import run_batch
from ajet_sdk.samples.build import build
from ajet_sdk.trace.reader import open_trace
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Episode, Run, Task
from ajet_tools.trace.rejudge import Changes, advantages, compared_over, groups_of, rejudge
from tests.waiting import FOREVER

SETTINGS: Config = load_config(values={"ajet": {"backbone": "debug"}})
TASKS = [Task(task_id=f"t{i}", main_query=f"q{i}", metadata={"answer": str(i)}) for i in range(3)]


@ajet.workflow
async def solve(task: Task, model: ajet.Model) -> str:
    reply = await model.chat([{"role": "user", "content": task.main_query}])
    if reply["content"] == "crash":
        raise RuntimeError("the agent's own")
    return str(reply["content"])


def record(
    path: Path,
    workflow: Any,
    judge: Any,
    said: dict[str, list[str]],
    steps: Sequence[int] = (1, 1, 1),
) -> list[Episode]:
    """Attempts at TASKS, each task in its step, on the scripted engine; `said` holds the replies of
    the attempts at each, by its query."""
    left = {query: list(replies) for query, replies in said.items()}

    def replies(ask: Ask) -> str:
        return left[ask.body["messages"][-1]["content"]].pop(0)

    attempts = [
        Attempt(task, "r", f"g{task.task_id}", i, step)
        for task, step in zip(TASKS, steps, strict=True)
        for i in range(len(said[task.main_query]))
    ]

    async def go() -> list[Episode]:
        with TraceWriter(path / "trace.duckdb") as writer, Gateway(writer) as gateway:
            writer.put(Run(run_id="r", backbone="local", status="finished"))
            engine = ScriptedEngine(replies, logprob=-1.0)
            return await run_batch(
                workflow,
                judge,
                attempts,
                engine=engine,
                gateway=gateway,
                config=one_at_a_time,
                writer=writer,
            )

    rollout = SETTINGS.rollout.model_copy(update={"max_env_worker": 1, "max_retries": 0})
    one_at_a_time = SETTINGS.model_copy(update={"rollout": rollout})
    return asyncio.run(go())


@ajet.judge
def right(output: str, answer: str) -> float:
    return float(output == answer)


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    said = {"q0": ["0", "0", "no"], "q1": ["1", "1", "1"], "q2": ["long no", "2", "crash"]}
    record(tmp_path, solve, right, said)
    return tmp_path


def limited(seconds: float) -> Config:
    rollout = SETTINGS.rollout.model_copy(update={"judge_timeout": seconds})
    return SETTINGS.model_copy(update={"rollout": rollout})


def judge_again(
    path: Path, judge: Any, config: Config = SETTINGS, progress: Callable[[int], None] = abs
) -> Changes:
    reader = open_trace(path)
    return asyncio.run(rejudge(groups_of(reader, "r"), judge, config, progress=progress))


def test_the_same_judge_changes_nothing(stored: Path) -> None:
    changes = judge_again(stored, right)
    assert changes.mean("before") == changes.mean("after") == 6 / 8
    assert changes.most_changed() == [] and not any(v.flipped for v in changes.verdicts)
    assert changes.groups() == {"groups": 3, "before": 2, "after": 2, "lost": 0, "gained": 0}
    assert changes.skipped == {"RuntimeError": 1} and changes.failures == {}


def test_what_another_judge_changes(stored: Path) -> None:
    @ajet.judge
    async def by_length(output: str, task: Task, episode: Episode) -> ajet.Reward:
        await asyncio.sleep(0)
        assert episode.calls and episode.task.task_id == task.task_id
        return ajet.Reward(name="length", value=len(output) / 10)

    changes = judge_again(stored, by_length)
    assert changes.mean("after") == pytest.approx((6 * 0.1 + 0.2 + 0.7) / 8)
    rows = {row["task_id"]: row for row in changes.by_task()}
    assert (rows["t2"]["episodes"], rows["t2"]["before"]) == (2, 0.5)
    assert rows["t2"]["after"] == pytest.approx(0.4) and rows["t2"]["change"] == pytest.approx(-0.1)
    assert list(rows) == ["t1", "t0", "t2"], "largest change first"
    first = changes.most_changed()[0]
    assert first.change == pytest.approx(-0.9) and len(changes.most_changed()) == 8
    assert changes.groups() == {"groups": 3, "before": 2, "after": 2, "lost": 0, "gained": 0}
    flipped = {v.task_id for v in changes.verdicts if v.flipped}
    assert flipped == {"t0", "t2"} and all(v.tokens for v in changes.verdicts)


def test_groups_that_lose_and_gain_variance(stored: Path) -> None:
    @ajet.judge
    def by_attempt(task: Task, episode: Episode) -> bool:
        return task.task_id == "t1" and episode.attempt == 0

    assert judge_again(stored, by_attempt).groups() == {
        "groups": 3,
        "before": 2,
        "after": 1,
        "lost": 2,
        "gained": 1,
    }


def test_a_judge_that_fails_gives_no_reward(stored: Path) -> None:
    @ajet.judge
    def picky(output: str) -> Any:
        if output == "no":
            raise ValueError("no is no answer")
        return float("nan") if output == "2" else None if output == "long no" else 1.0

    changes = judge_again(stored, picky)
    assert {cause: len(group) for cause, group in changes.failures.items()} == {
        "NoReward": 2,
        "ValueError": 1,
    }
    assert [v.after for v in changes.verdicts if v.cause] == [None] * 3
    assert changes.mean("after") == 1.0 and len(changes.both) == 5, "a failure is not a 0"
    assert changes.mean("before") == 1.0, "over the same episodes"
    assert changes.groups() == {
        "groups": 2,
        "before": 0,
        "after": 0,
        "lost": 0,
        "gained": 0,
    }, "nor a loss of variance"
    assert "no is no answer" in (changes.failures["ValueError"][0].error or "")


def test_a_judge_that_asks_for_what_is_not_here(stored: Path) -> None:
    @ajet.judge
    def of_model(model: ajet.Model) -> float:
        return 1.0

    changes = judge_again(stored, of_model)
    [(cause, group)] = changes.failures.items()
    assert (
        cause == "SignatureError"
        and len(group) == 8
        and "no value for parameter `model`" in (group[0].error or "")
    )


def test_a_judge_does_not_see_the_reward_that_was_given(stored: Path) -> None:
    @ajet.judge
    def copies(episode: Episode) -> float:
        return 1.0 if episode.rewards else 0.0

    changes = judge_again(stored, copies)
    assert {verdict.after for verdict in changes.verdicts} == {0.0}


@pytest.mark.slow
def test_a_judge_that_hangs(stored: Path) -> None:
    @ajet.judge
    async def slow(output: str) -> float:
        if output == "no":
            await asyncio.sleep(FOREVER)
        return 1.0

    changes = judge_again(stored, slow, limited(0.2))
    assert {cause: len(group) for cause, group in changes.failures.items()} == {"EpisodeTimeout": 1}

    @ajet.judge
    def stuck(output: str) -> float:
        time.sleep(FOREVER)
        return 1.0

    changes = judge_again(stored, stuck, limited(0.1))
    assert len(changes.failures["EpisodeTimeout"]) == 8
    record(stored / "more", solve, right, {"q0": ["0"] * 5, "q1": ["1"] * 5, "q2": ["2"] * 5})
    with pytest.raises(TraceError, match=r"\d+ calls of the judge did not finish in time"):
        judge_again(stored / "more", stuck, limited(0.1))


def test_in_parallel_with_progress(stored: Path) -> None:
    at_once, most, seen = 0, 0, list[int]()

    @ajet.judge
    async def counting(output: str) -> float:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0.02)
        at_once -= 1
        return 1.0

    changes = judge_again(stored, counting, progress=seen.append)
    assert 1 < most <= 8 and sum(seen) == len(changes.verdicts) + 1


def test_a_class_judge_gets_the_workflow_s_output_as_it_was(tmp_path: Path) -> None:
    class Agent(ajet.Workflow):
        async def execute(self, workflow_task: Any, tuner: Any) -> Any:
            return ajet.WorkflowOutput(
                metadata={"final_answer": workflow_task.task.main_query}, log_metrics={"n": 1}
            )

    class Judge(ajet.BaseJudge):
        def compute_reward(self, workflow_task: Any, workflow_output: Any) -> Any:
            assert (
                isinstance(workflow_output, ajet.WorkflowOutput)
                and workflow_task.task_thread_index == 0
            )
            return 0.25, workflow_output.metadata["final_answer"] == workflow_task.task.main_query

    said = {"q0": ["-"], "q1": ["-"], "q2": ["-"]}
    before = record(tmp_path, Agent, Judge(), said)
    assert [e.reward for e in before] == [0.25] * 3
    changes = judge_again(tmp_path, Judge())
    assert [v.after for v in changes.verdicts] == [0.25] * 3 and changes.failures == {}


def test_an_episode_whose_judge_failed_then_can_be_judged_now(tmp_path: Path) -> None:
    @ajet.judge
    def broken(output: str) -> float:
        raise ZeroDivisionError

    record(tmp_path, solve, broken, {"q0": ["0"], "q1": ["1"], "q2": ["crash"]})
    changes = judge_again(tmp_path, right)
    assert [(v.before, v.after) for v in changes.verdicts] == [(None, 1.0), (None, 1.0)]
    assert (
        changes.skipped == {"RuntimeError": 1}
        and changes.both == []
        and changes.mean("after") is None
    )


@pytest.mark.parametrize("estimator", get_args(Estimator))
def test_advantages_are_those_that_training_computes(stored: Path, estimator: Any) -> None:
    found = list(groups_of(open_trace(stored), "r"))
    group: Sequence[Episode] = [episode for chunk in found for episode in chunk]
    samples = build(group, estimator=estimator, normalize_std=True).samples
    trained = {
        s.call_id: float(sample.advantages[s.start])
        for sample in samples
        for s in sample.timeline.spans
    }
    ours = advantages(group, estimator, True)
    assert trained and ours.keys() == trained.keys()
    assert all(np.isclose(ours[call_id], value) for call_id, value in trained.items())


def test_an_attempt_that_crashed_counts_where_the_run_gives_it_a_value(tmp_path: Path) -> None:
    @ajet.judge
    def first_only(episode: Episode) -> bool:
        return episode.attempt == 0

    record(tmp_path, solve, right, {"q0": ["0", "0", "crash", "crash"], "q1": ["1"], "q2": ["2"]})
    assert not any(v.flipped for v in judge_again(tmp_path, first_only).verdicts), (
        "all that count were right"
    )
    rollout = SETTINGS.rollout.model_copy(update={"failure_reward": 0.0})
    config = SETTINGS.model_copy(update={"rollout": rollout})
    changes = asyncio.run(rejudge(groups_of(open_trace(tmp_path), "r"), first_only, config))
    assert [(v.task_id, v.attempt) for v in changes.verdicts if v.flipped] == [("t0", 1)]
    assert changes.skipped == {"RuntimeError": 2}


def test_what_is_compared_over_a_step_changes_its_sign_by_the_step(tmp_path: Path) -> None:
    @ajet.judge
    def wrong(output: str, answer: str) -> float:
        return float(output != answer)

    said = {"q0": ["0", "0"], "q1": ["1", "no"], "q2": ["no", "no no no"]}
    record(tmp_path, solve, right, said, steps=(1, 1, 2))
    values = {
        "backbone": "local",
        "trainer_common": {"algorithm": {"adv_estimator": "reinforce_plus_plus"}},
    }
    config = load_config(values={"ajet": {**values, "model": {"path": "m"}}})
    chunks = list(groups_of(open_trace(tmp_path), "r", whole=compared_over(config)))
    changes = asyncio.run(rejudge(chunks, wrong, config))
    assert {v.task_id for v in changes.verdicts if v.flipped} == {
        "t0",
        "t1",
    }, "in step 2 all are alike, twice"


def test_chunks_hold_whole_steps_where_a_step_is_compared(
    stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ajet_tools.trace.rejudge._CHUNK", 1)
    reader = open_trace(stored)
    assert [len(chunk) for chunk in groups_of(reader, "r")] == [3, 3, 3]
    assert [len(chunk) for chunk in groups_of(reader, "r", whole="step")] == [9]


def test_a_judge_of_the_group_sees_each_group_whole(stored: Path) -> None:
    seen: list[tuple[str, list[int]]] = []

    @ajet.judge(group=True)
    def ranks(episodes: list[Episode], task: Task) -> list[float]:
        seen.append((task.task_id, [episode.attempt for episode in episodes]))
        return [episode.attempt / 10 for episode in episodes]

    changes = judge_again(stored, ranks)
    assert sorted(task_id for task_id, _ in seen) == ["t0", "t1", "t2"]
    assert all(attempts == sorted(attempts) for _, attempts in seen)
    assert all(verdict.after == verdict.attempt / 10 for verdict in changes.verdicts)
