"""Rewards for one agent or one call: a name that the episode does not have is refused, with those
that it has."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

import pytest

import ajet
from ajet_sdk.agent.context import current_episode
from ajet_sdk.capture.processes import for_other_process
from ajet_sdk.config.config import load_config
from ajet_sdk.engines.scripted import ScriptedEngine
from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.rollout.attempts import Attempt
from ajet_sdk.rollout.episode import run_batch
from ajet_sdk.types import Episode, Reward, Task

Rewards = Callable[[Episode], list[Reward]]


def run(workflow: Any, judge: Any) -> Episode:
    async def main() -> list[Episode]:
        with Gateway() as gateway:
            engine = ScriptedEngine(lambda ask: "said")
            attempts = [Attempt(Task(main_query="Talk."))]
            return await run_batch(
                workflow, judge, attempts, engine=engine, gateway=gateway, config=load_config()
            )

    [episode] = asyncio.run(main())
    return episode


def judged(rewards: Rewards, *, apart: bool = False) -> Episode:
    """An episode of two agents that speak and one that never does; `apart`: its workflow is another
    process's."""

    @ajet.workflow
    async def talk(model: ajet.Model) -> str:
        if apart:
            active = current_episode.get()
            assert active is not None
            current_episode.set(for_other_process(active))
        silent = await asyncio.to_thread(model.agent, "silent")
        assert silent is not None
        for name in ("writer", "critic"):
            speaker = await asyncio.to_thread(model.agent, name)
            await speaker.chat([{"role": "user", "content": name}])
        return "done"

    @ajet.judge
    def judge(output: str, episode: Episode) -> list[Reward]:
        return rewards(episode)

    return run(talk, judge)


def call_of(episode: Episode, agent: str) -> str:
    return next(call.call_id for call in episode.calls if call.agent == agent)


SOUND: list[Rewards] = [
    lambda e: [Reward(value=1.0)],
    lambda e: [Reward(value=1.0, agent="writer"), Reward(value=0.5, agent="silent")],
    lambda e: [Reward(value=1.0, call_id=e.calls[0].call_id), Reward(value=0.5, agent="critic")],
    lambda e: [Reward(value=1.0, call_id=call_of(e, "critic"), agent="critic")],
]

REFUSED: list[tuple[Rewards, str]] = [
    (
        lambda e: [Reward(value=1.0, agent="write")],
        "agent 'write', .* its agents: critic, silent, writer",
    ),
    (lambda e: [Reward(value=1.0), Reward(value=1.0, agent="")], "agent '', .*its agents"),
    (
        lambda e: [Reward(name="plan", value=1.0, call_id="c1")],
        "'plan' is for call 'c1', .*its calls: ",
    ),
    (lambda e: [Reward(value=1.0, call_id=call_of(e, "critic"), agent="writer")], "is critic's"),
]


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("rewards", SOUND)
def test_rewards_for_what_the_episode_has(rewards: Rewards, apart: bool) -> None:
    episode = judged(rewards, apart=apart)
    assert episode.status == "succeeded" and episode.reward, episode.error


@pytest.mark.parametrize(("rewards", "message"), REFUSED)
def test_rewards_for_what_it_does_not_have_are_refused(rewards: Rewards, message: str) -> None:
    episode = judged(rewards)
    assert (episode.status, episode.cause, episode.infrastructure, episode.rewards) == (
        "failed",
        "NoReward",
        False,
        (),
    )
    assert episode.error is not None and re.search(message, episode.error), episode.error


def test_the_workflows_own_rewards_too() -> None:
    @ajet.workflow
    async def alone(model: ajet.Model) -> Any:
        await model.chat([{"role": "user", "content": "Hello"}])
        return [Reward(value=1.0, agent="nobody")]

    episode = run(alone, None)
    assert episode.cause == "NoReward" and "its agents: default" in (episode.error or "")
