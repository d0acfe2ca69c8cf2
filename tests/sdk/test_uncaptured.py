"""LLM traffic that no hook sees ends the episode before it is sent: real sockets, to a name that
the table is given."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import requests

from ajet_sdk.agent.context import HostGuard
from ajet_sdk.capture.hooks import installed
from ajet_sdk.capture.uncaptured import LLM_HOSTS, watches
from ajet_sdk.errors import UncapturedTraffic
from ajet_sdk.samples.build import build
from ajet_sdk.types import Episode
from tests.sdk.episodes import episode_of as any_episode_of
from tests.waiting import FOREVER


@pytest.fixture
def port() -> Iterator[int]:
    """Of a server that answers whatever it is sent."""
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        open_ = True

        def serve() -> None:
            while open_:
                connection, _ = server.accept()
                with connection, contextlib.suppress(OSError):
                    connection.recv(65536)
                    connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")

        pool.submit(serve)
        yield server.getsockname()[1]
        open_ = False
        socket.create_connection(server.getsockname()).close()


def episode_of(act: Callable[[], Any], **rollout: Any) -> Episode:
    return any_episode_of(act, llm_hosts=["localhost"], **rollout)


def by_socket(port: int) -> None:
    socket.create_connection(("localhost", port)).close()


def by_connect(port: int) -> None:
    with socket.socket() as one:
        one.connect(("localhost", port))


async def by_asyncio(port: int) -> None:
    _, writer = await asyncio.open_connection("localhost", port)
    writer.close()


def swallowed(port: int) -> None:
    with contextlib.suppress(Exception):
        by_socket(port)


def in_a_thread(port: int) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(by_socket, port).result()


CONNECT = [by_socket, by_connect, by_asyncio, swallowed, in_a_thread]


@pytest.mark.parametrize("connect", CONNECT)
def test_an_uncaptured_connection_ends_the_episode_and_says_what_to_set(
    port: int, connect: Callable[..., Any]
) -> None:
    episode = episode_of(lambda: connect(port))
    assert (episode.status, episode.cause, episode.rewards) == ("failed", "UncapturedTraffic", ())
    assert "localhost" in str(episode.error) and "rollout.on_uncaptured: warn" in str(episode.error)
    assert build([episode], failure_reward=0.0).samples == (), "never a reward"


@pytest.mark.parametrize("connect", CONNECT)
def test_with_warn_it_is_a_line_in_the_log(
    port: int, connect: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "ajet"):
        episode = episode_of(lambda: connect(port), on_uncaptured="warn")
    assert episode.status == "succeeded", episode.error
    assert any("localhost" in record.message for record in caplog.records)


def test_an_episode_without_a_call_says_what_was_seen_instead(port: int) -> None:
    def act() -> None:
        secret = f"http://me:secret@127.0.0.1:{port}/search?key=secret"
        requests.get(secret, timeout=FOREVER)
        httpx.get(secret)
        by_socket(port)

    episode = any_episode_of(act, must_call=True)
    assert episode.cause == "NoCalls"
    error = str(episode.error)
    assert f"GET http://127.0.0.1:{port}/search" in error and "a connection to localhost" in error
    assert "secret" not in error
    silent = any_episode_of(lambda: None, must_call=True)
    assert "no request" in str(silent.error)


def test_what_a_hooked_client_sends_there_is_its_own_affair(port: int) -> None:
    """Embeddings and lists of models: not a conversation, and not the policy's."""

    def act() -> None:
        httpx.post(
            f"http://localhost:{port}/v1/embeddings", json={"model": "m", "input": "x"}
        ).raise_for_status()
        requests.get(f"http://localhost:{port}/v1/models", timeout=FOREVER).raise_for_status()

    assert episode_of(act).status == "succeeded"


def test_outside_of_a_rollout_connections_are_free(port: int) -> None:
    with installed():
        by_socket(port)
        by_connect(port)
    assert "connect" not in vars(socket.socket)


def test_hosts() -> None:
    guard = HostGuard(hosts=("models.example.com",))
    for host in (
        *LLM_HOSTS, "mine.openai.azure.com", "us-central1-aiplatform.googleapis.com", "API.OpenAI.com.",
        "bedrock-runtime.us-east-1.amazonaws.com", "bedrock-agent-runtime.cn-north-1.amazonaws.com.cn",
        "bedrock-runtime-fips.us-east-1.amazonaws.com", "vpce-1.bedrock-runtime.us-east-1.vpce.amazonaws.com",
        "bedrock-mantle.us-east-1.api.aws", "runtime.sagemaker.us-east-1.amazonaws.com", "models.example.com",
    ):  # fmt: skip
        assert watches(guard, host), host
    for host in (
        "openai.com",
        "myapi.openai.com.example.org",
        "127.0.0.1",
        "s3.amazonaws.com",
        "example.com",
        "",
    ):
        assert not watches(guard, host), host
    assert pickle.loads(pickle.dumps(guard)) == guard
    assert isinstance(pickle.loads(pickle.dumps(UncapturedTraffic("asked"))), UncapturedTraffic)
