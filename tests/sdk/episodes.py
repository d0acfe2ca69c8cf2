"""One episode of an agent under the hooks, as a run makes it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import httpx

import ajet
from ajet_sdk.config.config import Config
from ajet_sdk.engines.scripted import ScriptedEngine
from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.rollout.attempts import Attempt
from ajet_sdk.rollout.episode import run_episode
from ajet_sdk.types import Episode, Task


def episode_of(act: Callable[..., Any], *, must_call: bool = False, **rollout: Any) -> Episode:
    """The episode of `act`, a function or coroutine function, rewarded with 1; `rollout` are keys
    of the config."""

    @ajet.workflow
    def agent() -> ajet.Reward:
        result = act()
        if asyncio.iscoroutine(result):
            asyncio.run(result)
        return ajet.Reward(value=1.0)

    return episode_of_workflow(agent, must_call=must_call, **rollout)


def episode_of_workflow(workflow: Any, *, must_call: bool = False, **rollout: Any) -> Episode:
    """The episode of a workflow without a judge."""
    config = Config.model_validate({"rollout": {"max_retries": 0, **rollout}})

    async def run() -> Episode:
        with Gateway() as gateway:
            engine = ScriptedEngine(lambda ask: "ok")
            attempt = Attempt(Task(), must_call=must_call)
            return await run_episode(
                workflow, None, attempt, engine=engine, gateway=gateway, config=config
            )

    return asyncio.run(run())


def swallow_refusal() -> str:
    """An agent's code in another process, whose framework catches every error."""
    with contextlib.suppress(Exception):
        httpx.post("https://api.cohere.com/v1/chat", json={"model": "m", "messages": []})
    return "no answer"
