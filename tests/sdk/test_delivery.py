"""Delivered is what a client has read over its socket, to the end: not what its system has
buffered."""

from __future__ import annotations

import asyncio
import http.client
import itertools
import json
import socket
import threading
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiohttp
import httpx
import openai
import pytest
import requests

from ajet_sdk.gateway.episode import EpisodeSpec, OpenEpisode
from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.gateway.peer_socket import bytes_read_by_peer, lost_bytes
from ajet_sdk.protocols import Answer, Ask, Choice
from tests.waiting import until

WORDS = (30, 100, 300, 1000, 2000, 3000)
EPISODES = itertools.count()
T = TypeVar("T")

linux_only = pytest.mark.skipif(
    not hasattr(socket, "AF_NETLINK"), reason="asks Linux about the client's socket"
)


class Engine:
    model = "own"

    def __init__(self, words: int) -> None:
        self.text = " ".join(f"word{n}" for n in range(words))

    async def answer(self, ask: Ask) -> Answer:
        return Answer((Choice({"content": self.text}, None, "stop", [1], [-1.0]),), self.model, [5])

    def forget(self, episode_id: str) -> None: ...

    async def aclose(self) -> None: ...


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    with Gateway() as running:
        yield running


Client = Callable[[OpenEpisode, int], Any]
"""Asks, reads as many events as it is told (-1: all), and closes."""


def by_httpx(episode: OpenEpisode, events: int) -> None:
    model = episode.model()
    with (
        httpx.Client(trust_env=False, timeout=30) as client,
        client.stream(
            "POST", f"{model.base_url}/chat/completions", json=body(), headers=key(episode)
        ) as response,
    ):
        for number, line in enumerate(line for line in response.iter_lines() if line):
            if number == events or line == "data: [DONE]":
                return


def by_openai(episode: OpenEpisode, events: int) -> None:
    model = episode.model()
    with openai.OpenAI(base_url=model.base_url, api_key=model.api_key, max_retries=0) as client:
        stream = client.chat.completions.create(model="m", messages=body()["messages"], stream=True)
        for number, _ in enumerate(stream):
            if number == events:
                stream.close()
                return


def by_http_client(episode: OpenEpisode, events: int) -> None:
    """Until its connection is closed, which the server does not do."""
    model = urlsplit(episode.model().base_url)
    connection = http.client.HTTPConnection(model.netloc, timeout=30)
    connection.request("POST", f"{model.path}/chat/completions", json.dumps(body()), key(episode))
    response = connection.getresponse()
    lines = 0
    while (line := response.readline()) and lines != events and line != b"data: [DONE]\n":
        lines += line.startswith(b"data:")
    response.close()
    connection.close()


def by_curl(episode: OpenEpisode, events: int) -> None:
    """A client that says `connection: close`, reads little at a time, and stops where it has what
    it wanted."""
    with raw(episode, "connection: close\r\n") as connection:
        read_events(connection, events)


def by_async_openai(episode: OpenEpisode, events: int) -> None:
    async def ask() -> None:
        model = episode.model()
        async with openai.AsyncOpenAI(base_url=model.base_url, api_key=model.api_key) as client:
            stream = await client.chat.completions.create(
                model="m", messages=body()["messages"], stream=True
            )
            number = 0
            async for _ in stream:
                if number == events:
                    await stream.close()
                    return
                number += 1

    asyncio.run(ask())


def by_requests(episode: OpenEpisode, events: int) -> None:
    url = f"{episode.model().base_url}/chat/completions"
    with requests.post(url, json=body(), headers=key(episode), stream=True, timeout=30) as response:
        for number, line in enumerate(line for line in response.iter_lines() if line):
            if number == events or line == b"data: [DONE]":
                return


def by_urllib(episode: OpenEpisode, events: int) -> None:
    """It asks the server to close the connection, and reads 8 KiB at a time."""
    url = f"{episode.model().base_url}/chat/completions"
    asked = urllib.request.Request(url, json.dumps(body()).encode(), key(episode))
    with urllib.request.urlopen(asked, timeout=30) as response:
        for number, line in enumerate(line for line in response if line.strip()):
            if number == events or line == b"data: [DONE]\n":
                return


def by_aiohttp(episode: OpenEpisode, events: int) -> None:
    async def ask() -> None:
        url = f"{episode.model().base_url}/chat/completions"
        async with (
            aiohttp.ClientSession() as session,
            session.post(url, json=body(), headers=key(episode)) as response,
        ):
            number = 0
            async for line in response.content:
                if number == events or line == b"data: [DONE]\n":
                    return
                number += bool(line.strip())

    asyncio.run(ask())


CLIENTS: list[Client] = [
    by_httpx,
    by_openai,
    by_async_openai,
    by_requests,
    by_urllib,
    by_aiohttp,
    by_http_client,
    by_curl,
]


def body(stream: bool = True) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": stream}


def key(episode: OpenEpisode) -> dict[str, str]:
    return {
        "authorization": f"Bearer {episode.model().api_key}",
        "content-type": "application/json",
    }


def raw(episode: OpenEpisode, headers: str = "", stream: bool = True) -> socket.socket:
    """A connection on which the request is sent."""
    model = urlsplit(episode.model().base_url)
    connection = socket.create_connection((model.hostname, model.port), timeout=30)
    content = json.dumps(body(stream))
    head = (
        f"POST {model.path}/chat/completions HTTP/1.1\r\nhost: {model.netloc}\r\ncontent-length:"
        f" {len(content)}\r\n"
    )
    authorization = f"authorization: Bearer {episode.model().api_key}\r\n"
    connection.sendall(f"{head}{authorization}{headers}\r\n{content}".encode())
    return connection


def read_events(connection: socket.socket, events: int, amount: int = 512) -> bytes:
    text = b""
    while not text.endswith(b"0\r\n\r\n") and (events < 0 or text.count(b"data:") < events):
        part = connection.recv(amount)
        if not part:
            break
        text += part
    return text


def read_until(connection: socket.socket, mark: bytes) -> bytes:
    text = b""
    while mark not in text:
        part = connection.recv(16)
        assert part, text
        text += part
    return text + connection.recv(200)


def outcome(gateway: Gateway, client: Callable[[OpenEpisode], Any], words: int) -> str | None:
    """The error of the call, once the client has left and the episode is finished: None where it
    was delivered."""
    episode = gateway.open(EpisodeSpec(f"{next(EPISODES)}", Engine(words)))
    client(episode)
    (call,) = asyncio.run(finished(episode))
    assert len(call.response["choices"][0]["message"]["content"]) == len(Engine(words).text)
    return call.error


async def finished(episode: OpenEpisode) -> tuple[Any, ...]:
    return await episode.finish()


@linux_only
@pytest.mark.parametrize("words", WORDS)
@pytest.mark.parametrize("client", CLIENTS)
def test_a_stream_that_is_closed_after_a_delta_is_undelivered(
    gateway: Gateway, client: Client, words: int
) -> None:
    for events in (1, 2):
        error = outcome(gateway, lambda episode: client(episode, events), words)  # noqa: B023
        assert error is not None and error.startswith("undelivered"), events


@pytest.mark.parametrize("words", WORDS)
@pytest.mark.parametrize("client", CLIENTS)
def test_a_stream_that_is_read_to_its_end_is_delivered(
    gateway: Gateway, client: Client, words: int
) -> None:
    assert outcome(gateway, lambda episode: client(episode, -1), words) is None


@linux_only
@pytest.mark.parametrize("words", [30, 3000])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_shuts_its_sending_side_has_left(
    gateway: Gateway, words: int, stream: bool
) -> None:
    def leaving(episode: OpenEpisode) -> None:
        with raw(episode, stream=stream) as connection:
            connection.shutdown(socket.SHUT_WR)
            if stream:
                read_events(connection, 1)
        until(lambda: not episode.in_flight and episode.calls)

    assert (outcome(gateway, leaving, words) or "").startswith("undelivered")


@linux_only
@pytest.mark.parametrize("headers", ["", "connection: close\r\n"])
@pytest.mark.parametrize("words", WORDS)
def test_a_body_that_is_read_in_part_is_undelivered(
    gateway: Gateway, words: int, headers: str
) -> None:
    def cutting(episode: OpenEpisode) -> None:
        with raw(episode, headers, stream=False) as connection:
            until(lambda: episode.calls)
            connection.recv(200)

    def reading(episode: OpenEpisode) -> None:
        with raw(episode, headers, stream=False) as connection:
            text = b""
            while not text.endswith(b"}}"):
                text += connection.recv(200)

    assert (outcome(gateway, cutting, words) or "").startswith("undelivered")
    assert outcome(gateway, reading, words) is None


@linux_only
@pytest.mark.parametrize("words", [30, 3000])
def test_a_client_that_reads_byte_by_byte_is_delivered_and_one_that_stops_is_not(
    gateway: Gateway, words: int
) -> None:
    def slow(episode: OpenEpisode) -> None:
        with raw(episode) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            read_events(connection, -1, amount=7)

    def stopping(episode: OpenEpisode) -> None:
        kept.append(raw(episode))
        read_events(kept[0], 2, amount=7)

    kept: list[socket.socket] = []
    assert outcome(gateway, slow, words) is None
    assert (outcome(gateway, stopping, words) or "").startswith("undelivered"), (
        "open, and nobody reads"
    )
    kept[0].close()


@linux_only
def test_a_reply_that_nobody_reads_is_undelivered_though_its_connection_stays(
    gateway: Gateway,
) -> None:
    def asking(episode: OpenEpisode) -> None:
        kept.append(raw(episode, stream=False))
        until(lambda: episode.calls)

    kept: list[socket.socket] = []
    assert (outcome(gateway, asking, 30) or "").startswith("undelivered")
    kept[0].close()


@linux_only
def test_a_slow_client_outlives_the_keep_alive(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection is closed when nothing was asked for some time, but not under a client that
    still reads."""
    monkeypatch.setattr(gateway._server.config, "timeout_keep_alive", 0.01)
    episode = gateway.open(EpisodeSpec("keep-alive", Engine(30)))
    with raw(episode) as connection:
        text = read_until(connection, b"word29")
        until(lambda: episode.calls)
        late = threading.Event()
        assert gateway._loop is not None
        gateway._loop.call_soon_threadsafe(lambda: gateway._loop.call_later(0.05, late.set))  # type: ignore[union-attr]
        assert late.wait(10)
        text += read_events(connection, -1)
    assert b"[DONE]" in text
    (call,) = asyncio.run(finished(episode))
    assert call.error is None


@linux_only
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_system_says_what_the_other_end_has_read(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        try:
            listener.bind((host, 0))
        except OSError:
            pytest.skip(f"no {host} here")
        listener.listen()
        with socket.create_connection(listener.getsockname()[:2]) as client:
            server, _ = listener.accept()
            with server:
                assert bytes_read_by_peer(server) == 0
                server.sendall(b"x" * 100)
                assert bytes_read_by_peer(server) == 0
                client.recv(30)
                assert bytes_read_by_peer(server) == 30
                client.recv(100)
                assert bytes_read_by_peer(server) == 100
            assert bytes_read_by_peer(server) is None


@linux_only
@pytest.mark.parametrize("late", [False, True])
def test_the_system_says_whether_bytes_came_after_the_client_had_closed(late: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        server, _ = listener.accept()
        with server:
            server.sendall(b"all but the end")
            client.recv(100)
            if not late:
                server.sendall(b"the end")
                client.recv(100)
            client.close()
            if late:
                server.sendall(b"the end")
            assert server.recv(1) == b""
            assert lost_bytes(server) is late


@linux_only
def test_an_end_that_crosses_the_clients_close_is_not_read(gateway: Gateway) -> None:
    """The client closes after it has read the rest, and before the server has heard of it."""
    episode = gateway.open(EpisodeSpec(f"{next(EPISODES)}", Engine(30)))
    connection = raw(episode)
    read_events(connection, -1)
    client = connection.getsockname()
    (protocol,) = (p for p in gateway._server.server_state.connections if p.client == client)

    async def close_and_send() -> list[bool]:
        outcomes: list[bool] = []
        protocol.on_end_of_reply = outcomes.append
        connection.close()
        protocol.transport.write(b"end")
        await protocol.gone
        return outcomes

    assert gateway._loop is not None
    sent = asyncio.run_coroutine_threadsafe(close_and_send(), gateway._loop)
    assert sent.result(30) == [False]
    asyncio.run(finished(episode))


@linux_only
def test_a_call_that_is_read_just_before_its_episode_ends_is_delivered(gateway: Gateway) -> None:
    """The client's system may not have acknowledged the reply yet: it may wait 40 ms for something
    to send with it."""

    async def scenario() -> list[str | None]:
        episode = gateway.open(EpisodeSpec(f"last {next(EPISODES)}", Engine(30)))
        model = episode.model("solver")
        for _ in range(3):
            await model.chat(body()["messages"])
        return [call.error for call in await episode.finish()]

    for _ in range(5):
        assert asyncio.run(scenario()) == [None] * 3


def test_a_client_that_was_seen_leaving_is_gone_before_its_connection_is_lost(
    gateway: Gateway,
) -> None:
    """asyncio tells of a lost connection one turn later; what is written meanwhile is dropped."""
    episode = gateway.open(EpisodeSpec(f"{next(EPISODES)}", Engine(30)))

    async def seen(protocol: Any) -> tuple[bool, list[bool]]:
        outcomes: list[bool] = []
        protocol.on_end_of_reply = outcomes.append
        protocol.eof_received()
        return protocol.gone.done(), outcomes

    with raw(episode, stream=False) as connection:
        read_until(connection, b"word29")
        client = connection.getsockname()
        (protocol,) = (p for p in gateway._server.server_state.connections if p.client == client)
        assert gateway._loop is not None
        gone, outcomes = asyncio.run_coroutine_threadsafe(seen(protocol), gateway._loop).result(30)
    assert gone and outcomes == [True]
    asyncio.run(finished(episode))
