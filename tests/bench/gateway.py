"""The gateway: what it adds to a call, and whether mixed calls of four client libraries are each
recorded once.

`added` compares one client's median time for a call through the gateway (scripted engine, one turn,
calls recorded) with the same client's for an endpoint that answers a fixed response, interleaved in
one run on one machine.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import threading
import time
import timeit
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import openai
import requests
import uvicorn

from ajet_sdk.agent.context import current_episode
from ajet_sdk.capture.hooks import installed
from ajet_sdk.engines.scripted import ScriptedEngine
from ajet_sdk.gateway.access import has_pictures
from ajet_sdk.gateway.episode import EpisodeSpec, OpenEpisode
from ajet_sdk.gateway.gateway import Gateway, listening_socket
from ajet_sdk.gateway.http_door import respond
from ajet_sdk.trace.pictures import may_refer
from ajet_sdk.trace.writer import TraceWriter
from tests.bench import Figure

ROUNDS = 400
MIXED = 2000
AT_ONCE = 16
REPLY = "The answer is 42. " * 8
CONVERSATIONS = 100
TURNS = 10
ELSEWHERE = "http://model.invalid/v1"


def main() -> list[Figure]:
    direct, through = asyncio.run(_latencies())
    added = through - direct
    recorded, seconds = asyncio.run(_mixed())
    looking = asyncio.run(_share_of_looking())
    once = sum(1 for count in recorded.values() if count == 1)
    return [
        Figure("call to a fixed endpoint, median", direct * 1000, "ms"),
        Figure("call through the gateway, median", through * 1000, "ms"),
        Figure("added by the gateway at the median", added * 1000, "ms", "<= 2", added <= 0.002),
        Figure(
            f"of {MIXED} mixed calls recorded once",
            once,
            "calls",
            f"= {MIXED}",
            once == MIXED == len(recorded),
        ),
        Figure("mixed calls, 16 at once, captured", MIXED / seconds, "calls/s"),
        Figure(
            "of a call without pictures spent looking for them",
            looking * 100,
            "%",
            "<= 2",
            looking <= 0.02,
        ),
    ]


def _body(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "policy", "messages": [{"role": "user", "content": text}], **more}


class Fixed:
    """An endpoint that answers one response to everything, served as the gateway is."""

    def __init__(self, response: dict[str, Any]) -> None:
        self.response = response
        listener = listening_socket("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        config = uvicorn.Config(
            self._app, interface="asgi3", lifespan="off", log_config=None, access_log=False
        )
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, args=([listener],), daemon=True)
        self.thread.start()

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            continue
        await respond(send, 200, self.response)

    def close(self) -> None:
        self.server.should_exit = True
        self.thread.join()


async def _latencies() -> tuple[float, float]:
    engine = ScriptedEngine(lambda ask: REPLY)
    with Gateway() as gateway:
        episode = gateway.open(EpisodeSpec("bench", engine))
        handle = episode.model()
        headers = {"authorization": f"Bearer {handle.api_key}"}
        async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
            first = await client.post(
                f"{handle.base_url}/chat/completions", json=_body("0"), headers=headers
            )
            fixed = Fixed(first.json())
            times: dict[str, list[float]] = {handle.base_url: [], fixed.url: []}
            for number in range(ROUNDS):
                for url, taken in times.items():
                    started = time.perf_counter()
                    await client.post(
                        f"{url}/chat/completions", json=_body(f"question {number}"), headers=headers
                    )
                    taken.append(time.perf_counter() - started)
        fixed.close()
        await episode.finish()
    return statistics.median(times[fixed.url][20:]), statistics.median(times[handle.base_url][20:])


async def _mixed() -> tuple[Counter[str], float]:
    """How often each of the calls' texts was recorded, and the seconds that they took."""
    engine = ScriptedEngine(lambda ask: "echo " + ask.body["messages"][0]["content"])
    client = openai.AsyncOpenAI(base_url=ELSEWHERE, api_key="unused", timeout=60)
    limit = asyncio.Semaphore(AT_ONCE)
    with installed(), Gateway() as gateway:
        episodes = [gateway.open(EpisodeSpec(f"episode{n}", engine)) for n in range(AT_ONCE)]
        async with httpx.AsyncClient(timeout=60) as raw, aiohttp.ClientSession() as session:
            senders = [_openai(client), _httpx(raw), _requests, _aiohttp(session)]

            async def one(number: int) -> None:
                async with limit:
                    current_episode.set(episodes[number % AT_ONCE].active)
                    text, stream = f"call {number}", number % 2 == 0
                    said = await senders[number // 2 % 4](text, stream)
                    if said != f"echo {text}":
                        raise RuntimeError(f"call {number} was answered {said!r}")

            started = time.perf_counter()
            await asyncio.gather(*(one(number) for number in range(MIXED)))
            seconds = time.perf_counter() - started
        return await _recorded(episodes), seconds


async def _recorded(episodes: list[OpenEpisode]) -> Counter[str]:
    calls = [call for episode in episodes for call in await episode.finish() if call.error is None]
    return Counter(call.request["messages"][0]["content"] for call in calls)


async def _share_of_looking() -> float:
    """The share of a call's processor time in which gateway and trace look for pictures, in
    conversations that have none.

    Measured apart: with and without them, calls differ by less than the same ones do in two runs.
    """
    taken: list[float] = []
    with tempfile.TemporaryDirectory() as directory, installed():
        path = Path(directory) / "trace.duckdb"
        with TraceWriter(path) as writer, Gateway(writer) as gateway:
            async with httpx.AsyncClient(timeout=60) as client:
                for number in range(CONVERSATIONS):
                    engine = ScriptedEngine(lambda ask: REPLY)
                    episode = gateway.open(EpisodeSpec(f"conversation{number}", engine))
                    started = time.process_time()
                    messages = await _talk(client, episode)
                    writer.flush()
                    taken.append((time.process_time() - started) / TURNS)
                    await episode.finish()
    # the last call's messages twice, its own new ones and its reply once
    new = [json.dumps(message) for message in messages[-2:]]
    looking = timeit.repeat(lambda: (has_pictures(messages), has_pictures(messages)), number=1000)
    looking_in_texts = timeit.repeat(lambda: list(map(may_refer, new)), number=1000)
    return (min(looking) + min(looking_in_texts)) / 1000 / min(taken)


async def _talk(client: httpx.AsyncClient, episode: OpenEpisode) -> list[dict[str, Any]]:
    current_episode.set(episode.active)
    messages: list[dict[str, Any]] = []
    for number in range(TURNS):
        part = {"type": "text", "text": f"question {number} " * 20}
        messages.append({"role": "user", "content": [part]})
        body = {"model": "policy", "messages": messages}
        response = await client.post(f"{ELSEWHERE}/chat/completions", json=body)
        messages.append(response.json()["choices"][0]["message"])
    return messages


Sender = Callable[[str, bool], Awaitable[str]]


def _openai(client: openai.AsyncOpenAI) -> Sender:
    async def send(text: str, stream: bool) -> str:
        if not stream:
            return (await client.chat.completions.create(**_body(text))).choices[0].message.content
        chunks = await client.chat.completions.create(**_body(text, stream=True))
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    return send


def _httpx(client: httpx.AsyncClient) -> Sender:
    async def send(text: str, stream: bool) -> str:
        body = _body(text, stream=stream)
        async with client.stream("POST", f"{ELSEWHERE}/chat/completions", json=body) as response:
            return _text([line async for line in response.aiter_lines()], stream)

    return send


async def _requests(text: str, stream: bool) -> str:
    def send() -> str:
        url = f"{ELSEWHERE}/chat/completions"
        with requests.post(
            url, json=_body(text, stream=stream), stream=stream, timeout=60
        ) as response:
            return _text([line.decode() for line in response.iter_lines()], stream)

    return await asyncio.to_thread(send)


def _aiohttp(session: aiohttp.ClientSession) -> Sender:
    async def send(text: str, stream: bool) -> str:
        url = f"{ELSEWHERE}/chat/completions"
        async with session.post(url, json=_body(text, stream=stream)) as response:
            return _text([line.decode().strip() async for line in response.content], stream)

    return send


def _text(lines: list[str], stream: bool) -> str:
    if not stream:
        return str(json.loads("".join(lines))["choices"][0]["message"]["content"])
    events = [json.loads(line[5:]) for line in lines if line.startswith("data: {")]
    return "".join(event["choices"][0]["delta"].get("content") or "" for event in events)
