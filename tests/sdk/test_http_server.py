"""Time limits of our servers, against clients that send half a request. The limits are short ones,
given here."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import httpx
import pytest

import ajet_sdk
from ajet_sdk.engines.scripted import ScriptedEngine
from ajet_sdk.gateway import http_server
from ajet_sdk.gateway.episode import EpisodeSpec, OpenEpisode
from ajet_sdk.gateway.gateway import Gateway
from tests.waiting import FOREVER

BODY = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()


@pytest.fixture
def episode(monkeypatch: pytest.MonkeyPatch) -> Iterator[OpenEpisode]:
    monkeypatch.setattr(http_server, "HEADER_SECONDS", 0.4)
    monkeypatch.setattr(http_server, "BODY_SECONDS", 0.5)
    with Gateway() as gateway:
        yield gateway.open(EpisodeSpec("one", ScriptedEngine(lambda ask: "yes")))


def connected(episode: OpenEpisode) -> socket.socket:
    host, port = episode.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=FOREVER)


def request(episode: OpenEpisode) -> bytes:
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer"
        f" {episode.handle_key}\r\n"
    )
    return f"{head}content-length: {len(BODY)}\r\n\r\n".encode() + BODY


def until_closed(connection: socket.socket) -> bytes:
    """What comes until the server closes; the socket's own limit fails the test where it never
    does."""
    found = b""
    while part := connection.recv(65536):
        found += part
    return found


def timed_out(episode: OpenEpisode, data: bytes) -> bytes:
    """What the server says to part of a request; sent anew where the limit had passed before it was
    sent."""
    while True:
        with connected(episode) as connection, suppress(ConnectionError):
            connection.sendall(data)
            return until_closed(connection)


def answered(connection: socket.socket, data: bytes) -> bool:
    connection.sendall(data)
    found = b""
    while not found.endswith(b"}}"):
        part = connection.recv(65536)
        if not part:
            return False
        found += part
    return found.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "sent", [1, 30, 120, -len(BODY) - 1], ids=["a byte", "half a line", "a header", "all but one"]
)
def test_headers_that_do_not_end_are_408(episode: OpenEpisode, sent: int) -> None:
    found = timed_out(episode, request(episode)[:sent])
    assert found.startswith(b"HTTP/1.1 408") and b"headers did not arrive within 0.4 s" in found
    assert episode.calls == ()


def test_a_connection_that_says_nothing_is_closed(episode: OpenEpisode) -> None:
    with connected(episode) as connection:
        assert until_closed(connection) == b""


def test_a_client_that_drips_is_closed_all_the_same(episode: OpenEpisode) -> None:
    with connected(episode) as connection:
        connection.settimeout(0.01)
        found, sent = b"", 0
        while True:
            try:
                connection.sendall(request(episode)[sent : sent + 1])
                sent += 1
                part = connection.recv(65536)
            except TimeoutError:
                continue
            except ConnectionError:
                break
            if not part:
                break
            found += part
        assert sent < len(request(episode)) and (not found or found.startswith(b"HTTP/1.1 408"))


def test_a_body_that_does_not_end_is_408(episode: OpenEpisode) -> None:
    found = timed_out(episode, request(episode)[:-1])
    assert found.startswith(b"HTTP/1.1 408") and b"body did not arrive within 0.5 s" in found
    assert episode.calls == ()


def test_a_second_request_on_a_connection_has_the_same_limits(episode: OpenEpisode) -> None:
    with connected(episode) as connection:
        assert answered(connection, request(episode))
        connection.sendall(request(episode)[:40])
        assert until_closed(connection).startswith(b"HTTP/1.1 408")
    assert len(episode.calls) == 1


def test_an_idle_connection_is_kept_and_a_long_answer_is_waited_for(episode: OpenEpisode) -> None:
    """Two limits run out on a connection beside it, so that the time has passed."""
    with connected(episode) as idle:
        assert answered(idle, request(episode))
        for _ in range(2):
            timed_out(episode, request(episode)[:-1])
        assert answered(idle, request(episode))


def test_a_whole_response_is_sent_at_once(episode: OpenEpisode) -> None:
    """Its head and its body; so that they are not two sends, nor two packets."""
    with connected(episode) as connection:
        for _ in range(3):
            connection.sendall(request(episode))
            assert connection.recv(65536).endswith(b"}}")


def test_many_half_sent_requests_leave_nothing_behind(episode: OpenEpisode) -> None:
    with ThreadPoolExecutor(200) as pool:
        ends = list(
            pool.map(
                partial(timed_out, episode), [request(episode)[: 20 + n % 100] for n in range(200)]
            )
        )
    assert all(end.startswith(b"HTTP/1.1 408") for end in ends)
    with connected(episode) as connection:
        assert answered(connection, request(episode))


CHUNKED = (
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ntransfer-encoding: chunked\r\n\r\n"
)
HOSTILE = {
    "garbage": b"\x16\x03\x01\x02\x00\x01\r\n\r\n",
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "upgrade": (
        b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n"
    ),
    "chunks that are none": CHUNKED + b"zz\r\n",
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_a_flood_of_hostile_requests_is_a_few_lines_with_a_count(
    data: bytes, episode: OpenEpisode, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(120):
        with connected(episode) as connection, suppress(ConnectionError):
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            until_closed(connection)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 3 and "(100 so far)" in lines[-1]
    assert not [record for record in caplog.records if record.exc_info]


def test_garbage_behind_the_head_of_a_response_breaks_it_off(
    episode: OpenEpisode, caplog: pytest.LogCaptureFixture
) -> None:
    """A second response can't begin within the first, and the application's part of it is over."""
    with connected(episode) as connection:
        connection.sendall(
            CHUNKED.replace(b"127.0.0.1", b"example.com")
        )  # refused, before its body is read
        assert b" 403 " in connection.recv(65536)
        connection.sendall(b"zz\r\n")
        with suppress(ConnectionError):
            until_closed(connection)
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize("route", ["observed", "events"])
def test_a_report_that_is_none_is_400(
    episode: OpenEpisode, route: str, caplog: pytest.LogCaptureFixture
) -> None:
    for body in ({"a": 1}, {"route": 1, "response": []}):
        headers = {"authorization": f"Bearer {episode.captured_key}"}
        response = httpx.post(
            f"{episode.url}/v1/{route}", json=body, headers=headers, trust_env=False
        )
        assert response.status_code == 400 and route in response.json()["error"]["message"]
    assert not [record for record in caplog.records if record.exc_info]


def test_every_server_of_ours_has_the_limits() -> None:
    found = [
        path.name
        for path in Path(ajet_sdk.__file__).parents[1].glob("ajet_*/**/*.py")
        if "uvicorn.Config(" in path.read_text(encoding="utf-8")
    ]
    assert found == ["http_server.py"]
