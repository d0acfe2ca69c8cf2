"""A judge that sees all attempts at a task at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ajet
from ajet_sdk.config.config import load_config
from ajet_sdk.engines.scripted import ScriptedEngine
from ajet_sdk.errors import EngineUnavailable, SignatureError
from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.rollout.attempts import Attempt
from ajet_sdk.rollout.episode import run_batch
from ajet_sdk.types import Episode, Reward, Task


def run(
    gateway: Gateway,
    workflow: Any,
    judge: Any,
    groups: Sequence[int],
    *,
    at_once: int = 8,
    retries: int = 0,
) -> list[Episode]:
    """Episodes of groups of these sizes; the answer of an attempt is its number."""
    rollout = {
        "max_env_worker": at_once,
        "max_retries": retries,
        "timeout": 20,
        "judge_timeout": 20,
    }
    attempts = [
        Attempt(
            Task(main_query=f"task {place}"), run_id="run", group_id=f"g{place}", attempt=attempt
        )
        for place, size in enumerate(groups)
        for attempt in range(size)
    ]

    async def main() -> list[Episode]:
        return await run_batch(
            workflow,
            judge,
            attempts,
            engine=ScriptedEngine(lambda ask: "42"),
            gateway=gateway,
            config=load_config(values={"rollout": rollout}),
        )

    return asyncio.run(main())


@ajet.workflow
async def number(episode: Episode, model: ajet.Model) -> str:
    await model.chat([{"role": "user", "content": "how many?"}])
    return str(episode.attempt)


@ajet.judge(group=True)
def rank(episodes: list[Episode]) -> list[Reward]:
    """The place among the others, the best last."""
    assert len({episode.group_id for episode in episodes}) == 1
    assert all(
        episode.status == "succeeded" and episode.calls and not episode.rewards
        for episode in episodes
    )
    order = sorted(episodes, key=lambda episode: int(episode.output))
    return [
        Reward(name="rank", value=order.index(episode) / 10, reason="its place")
        for episode in episodes
    ]


@settings(max_examples=8, deadline=None)
@given(groups=st.lists(st.integers(1, 4), min_size=1, max_size=4), at_once=st.integers(1, 5))
def test_each_group_is_judged_once_however_few_run_at_once(groups: list[int], at_once: int) -> None:
    seen: list[str] = []

    @ajet.workflow
    def one(episode: Episode) -> str:
        return str(episode.attempt)

    @ajet.judge(group=True)
    def counted(episodes: list[Episode], task: Task) -> list[float]:
        seen.append(task.main_query)
        return [float(episode.output) for episode in episodes]

    with Gateway() as opened:
        made = run(opened, one, counted, groups, at_once=at_once)
    assert [episode.reward for episode in made] == [
        float(i) for size in groups for i in range(size)
    ]
    assert sorted(seen) == [f"task {place}" for place in range(len(groups))]


def test_a_group_is_ranked(gateway: Gateway) -> None:
    made = run(gateway, number, rank, [3, 2])
    assert [episode.reward for episode in made] == [0.0, 0.1, 0.2, 0.0, 0.1]
    assert made[0].rewards[0].name == "rank"


def test_an_attempt_that_fails_or_rewards_itself_is_not_waited_for(gateway: Gateway) -> None:
    @ajet.workflow
    def some(episode: Episode) -> Any:
        if episode.attempt == 0:
            raise ValueError("no answer")
        return Reward(value=7.0) if episode.attempt == 1 else str(episode.attempt)

    @ajet.judge(group=True)
    def rest(episodes: list[Episode]) -> list[float]:
        assert [episode.attempt for episode in episodes] == [2, 3]
        return [0.5, 1.0]

    made = run(gateway, some, rest, [4])
    assert [(episode.status, episode.reward) for episode in made] == [
        ("failed", None), ("succeeded", 7.0), ("succeeded", 0.5), ("succeeded", 1.0),
    ]  # fmt: skip


def test_a_group_waits_for_an_attempt_that_is_made_again(gateway: Gateway) -> None:
    tried: list[int] = []

    @ajet.workflow
    def shaky(episode: Episode) -> str:
        tried.append(episode.attempt)
        if episode.attempt == 1 and tried.count(1) == 1:
            raise EngineUnavailable("gone for a moment")
        return str(episode.attempt)

    made = run(
        gateway,
        shaky,
        ajet.judge(group=True)(lambda episodes: [1.0] * len(episodes)),
        [3],
        retries=1,
    )
    assert [episode.reward for episode in made] == [1.0, 1.0, 1.0]
    assert tried.count(1) == 2


def too_few(episodes: list[Episode]) -> list[float]:
    return [1.0]


def nothing(episodes: list[Episode]) -> Any:
    return None


def raising(episodes: list[Episode]) -> Any:
    raise EngineUnavailable("the judge's model is gone")


@pytest.mark.parametrize(
    ("judge", "expected"),
    [(too_few, "1 for 2 episodes"), (nothing, "None for 2"), (raising, "model is gone")],
)
def test_a_group_judge_that_fails_fails_the_group_and_gives_no_zero(
    gateway: Gateway, judge: Callable[..., Any], expected: str
) -> None:
    made = run(gateway, number, ajet.judge(group=True)(judge), [2], retries=2)
    assert [(episode.status, episode.rewards) for episode in made] == [("failed", ())] * 2
    assert all(expected in str(episode.error) for episode in made)
    assert all(episode.infrastructure == (judge is raising) for episode in made)


def test_a_group_judges_own_calls_are_traced_in_its_first_episode_and_never_trained(
    gateway: Gateway,
) -> None:
    @ajet.judge(group=True)
    async def asks(episodes: list[Episode], model: ajet.Model) -> list[float]:
        await model.chat([{"role": "user", "content": "which is best?"}])
        return [0.0] * len(episodes)

    first, second = run(gateway, number, asks, [2])
    assert [call.phase for call in first.calls] == ["rollout", "judge"]
    assert [call.phase for call in second.calls] == ["rollout"]
    trained = {sample.timeline.call_ids for sample in ajet.build([first, second]).samples}
    assert first.calls[1].call_id not in {call_id for ids in trained for call_id in ids}


def test_a_group_judge_asks_for_what_there_is() -> None:
    from ajet_sdk.agent.workflow import check_signature

    @ajet.judge(group=True)
    def odd(episodes: list[Episode], output: str) -> list[float]:
        return []

    with pytest.raises(SignatureError, match="output"):
        check_signature(number, odd, Task(main_query="q"), ajet.Config())
    check_signature(number, rank, Task(main_query="q"), ajet.Config())
