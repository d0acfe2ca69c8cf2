"""What open episodes hold in memory: 64 conversations of 39 turns over HTTP, each turn some 2,000
tokens more.

`distinct` is what there is to hold: each id once in four bytes, each message once as text. Held per
call, whole prompts and histories would be twenty times as much at turn 39, and more with each turn.
"""

from __future__ import annotations

import asyncio
import gc
import tracemalloc

import httpx

from ajet_sdk.engines.scripted import ScriptedEngine
from ajet_sdk.gateway.episode import EpisodeSpec, OpenEpisode
from ajet_sdk.gateway.gateway import Gateway
from tests.bench import Figure

EPISODES = 64
TURNS = 39
CHARACTERS = 1000
"""Of a question, and of a reply."""


def main() -> list[Figure]:
    held, distinct, whole = held_bytes(EPISODES, TURNS)
    ratio = held / distinct
    return [
        Figure(f"held by {EPISODES} open episodes of {TURNS} turns", held / 2**20, "MiB"),
        Figure("each id and each message once", distinct / 2**20, "MiB"),
        Figure("the prompts of all calls, whole", whole / 2**20, "MiB"),
        Figure("held over distinct", ratio, "x", "<= 3", ratio <= 3),
    ]


def held_bytes(episodes: int, turns: int) -> tuple[int, int, int]:
    """Bytes that open episodes hold after so many turns, what is distinct of them, and all prompts
    taken whole."""
    engine = ScriptedEngine(
        lambda ask: _text(f"reply {len(ask.body['messages'])} in {ask.episode_id}")
    )
    with Gateway() as gateway:
        warm = gateway.open(EpisodeSpec("warm", engine))
        asyncio.run(_play([warm], 3))
        asyncio.run(warm.finish())
        opened = [gateway.open(EpisodeSpec(f"episode {n}", engine)) for n in range(episodes)]
        gc.collect()
        tracemalloc.start()
        try:
            asyncio.run(_play(opened, turns))
            gc.collect()
            held, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        calls = [call for episode in opened for call in episode.calls]
        prompts = sum(4 * len(call.prompt_ids) for call in calls if call.prompt_ids is not None)
        last = [episode.calls[-1] for episode in opened]
        ids = sum(
            4 * (len(c.prompt_ids) + len(c.output_ids)) for c in last if c.prompt_ids is not None
        )
        text = sum(len(message["content"]) for c in last for message in c.request["messages"])
        for episode in opened:
            asyncio.run(episode.finish())
    return held, ids + text, prompts


def _text(seed: str) -> str:
    return (f"{seed}, and so on. " * CHARACTERS)[:CHARACTERS]


async def _play(episodes: list[OpenEpisode], turns: int) -> None:
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        for episode in episodes:
            headers, messages = (
                {"authorization": f"Bearer {episode.handle_key}"},
                list[dict[str, str]](),
            )
            for turn in range(turns):
                messages.append(
                    {"role": "user", "content": _text(f"question {turn} in {episode.episode_id}")}
                )
                url = f"{episode.model().base_url}/chat/completions"
                reply = (
                    await client.post(url, json={"messages": messages}, headers=headers)
                ).json()
                messages.append(reply["choices"][0]["message"])
