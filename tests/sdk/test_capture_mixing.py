"""Two hundred episodes at once in one process, over eight clients: each gets its own replies and no
other."""

from __future__ import annotations

import asyncio
import inspect
import json

import pytest

import ajet
from ajet_sdk.config.config import Config
from ajet_sdk.engines.scripted import ScriptedEngine
from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.rollout.attempts import Attempt
from ajet_sdk.rollout.episode import run_batch
from ajet_sdk.types import Episode, Task
from tests.sdk.test_capture import (
    NOWHERE,
    Sender,
    with_aiohttp,
    with_async_openai,
    with_httpx,
    with_httpx2,
    with_openai,
    with_requests,
    with_urllib,
    with_urllib3,
)

EPISODES = 200
CLIENTS = [with_openai, with_httpx, with_httpx2, with_requests, with_urllib, with_urllib3]
ASYNC_CLIENTS = [with_async_openai, with_aiohttp]


@ajet.judge
def judge() -> float:
    return 1.0


def turns(number: int, clients: list[Sender]) -> list[tuple[Sender, str, bool]]:
    """Each client of an episode is asked once, in an order of the episode's own; every second reply
    is a stream."""
    start = number % len(clients)
    return [
        (client, f"episode {number} turn {turn} end", (number + turn) % 2 == 0)
        for turn, client in enumerate(clients[start:] + clients[:start])
    ]


@ajet.workflow
def threaded(number: int) -> list[str]:
    return [
        str(client(NOWHERE, "key", text, stream)) for client, text, stream in turns(number, CLIENTS)
    ]


@ajet.workflow
async def on_the_loop(number: int) -> list[str]:
    said = []
    for client, text, stream in turns(number, ASYNC_CLIENTS * 3):
        answer = client(NOWHERE, "key", text, stream)
        assert inspect.isawaitable(answer)
        said.append(await answer)
    return said


@pytest.mark.slow
def test_two_hundred_episodes_over_eight_clients_mix_nothing() -> None:
    config = Config.model_validate({"rollout": {"max_env_worker": EPISODES, "max_retries": 0}})
    engine = ScriptedEngine(lambda ask: f"echo {ask.body['messages'][-1]['content']}")

    async def run() -> list[Episode]:
        with Gateway() as gateway:
            attempts = [Attempt(Task(metadata={"number": number})) for number in range(EPISODES)]
            both = [
                run_batch(
                    workflow,
                    judge,
                    attempts[half::2],
                    engine=engine,
                    gateway=gateway,
                    config=config,
                )
                for half, workflow in enumerate((threaded, on_the_loop))
            ]
            return [episode for batch in await asyncio.gather(*both) for episode in batch]

    episodes = asyncio.run(run())
    assert len(episodes) == EPISODES
    for episode in episodes:
        number = episode.task.metadata["number"]
        clients: list[Sender] = ASYNC_CLIENTS * 3 if number % 2 else CLIENTS
        asked = [text for _, text, _ in turns(number, clients)]
        assert episode.status == "succeeded", episode.error
        assert episode.output == [f"echo {text}" for text in asked]
        assert sorted(call.request["messages"][-1]["content"] for call in episode.calls) == sorted(
            asked
        )
        for call in episode.calls:
            text = call.request["messages"][-1]["content"]
            assert call.output_ids is not None and call.trainable
            assert engine.tokenizer.decode(list(call.output_ids)).startswith(f"echo {text}"), (
                json.dumps(call.request)
            )
