"""Servers on loopback answer programs, and no web page that a browser on this machine has open."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import httpx
import pytest

from ajet_sdk.engines.scripted import ScriptedEngine
from ajet_sdk.errors import ConfigError
from ajet_sdk.gateway.episode import EpisodeSpec
from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.gateway.http_server import foreign, is_loopback
from ajet_sdk.serve import serve_engine
from ajet_sdk.trace.owner import ROWS_PATH
from ajet_sdk.trace.writer import TraceWriter

FOREIGN = [
    ({"host": "evil.example"}, 403),
    ({"host": "evil.example:80", "origin": "http://evil.example:80"}, 403),
    ({"host": "127.0.0.1.evil.example"}, 403),
    ({"host": "[::1"}, 403),
    ({"origin": "http://evil.example"}, 403),
    ({"origin": "null"}, 403),
    ({"origin": "http://localhost:3000"}, 403),
    ({"content-type": "text/plain"}, 415),
    ({"content-type": "Text/Plain; charset=utf-8"}, 415),
    ({"content-type": "application/x-www-form-urlencoded"}, 415),
]


def test_no_route_of_a_gateway_answers_a_foreign_page(tmp_path: Path) -> None:
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]})
    with (
        TraceWriter(tmp_path / "trace.duckdb") as writer,
        Gateway(writer) as gateway,
        httpx.Client() as client,
    ):
        opened = gateway.open(EpisodeSpec(episode_id="e", engine=ScriptedEngine(["42"])))

        def post(path: str, key: str, content: str, headers: dict[str, str]) -> httpx.Response:
            sent = {"authorization": f"Bearer {key}", "content-type": "application/json", **headers}
            return client.post(gateway.url + path, headers=sent, content=content)

        calls = [
            ("/episodes/e/default/v1/chat/completions", opened.handle_key, body),
            (ROWS_PATH, gateway.token, '{"table": "runs", "columns": ["run_id"]}'),
        ]
        for headers, status in FOREIGN:
            for call in calls:
                answer = post(*call, headers)
                assert (answer.status_code, answer.json()["error"]["code"]) == (
                    status,
                    "foreign_request",
                ), headers
        assert not opened.calls
        for call in calls:
            assert (
                post(*call, {"host": "localhost", "origin": "http://localhost"}).status_code == 200
            )


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1:8000", "localhost", "LOCALHOST:1", "[::1]:80", "10.0.0.7", socket.gethostname()],
)
def test_a_program_names_a_server_by_its_address_or_as_this_machine(host: str) -> None:
    assert foreign(host, None, "application/json") is None
    assert foreign(host, f"http://{host}", None) is None
    assert foreign("node-7.cluster:8000", None, None, own_name="node-7.cluster") is None


@pytest.mark.parametrize("host", ["0.0.0.0", "0", "0x0", "", "00.0.0.0"])
def test_without_a_key_nothing_is_served_to_other_machines(host: str) -> None:
    with pytest.raises(ConfigError, match="give a key"):
        serve_engine(ScriptedEngine(["hi"]), host, 0)


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.8.9.1", True), ("localhost", True), ("0", False)],
)
def test_loopback_is_what_was_bound(host: str, loopback: bool) -> None:
    with socket.socket() as listener:
        listener.bind((host, 0))
        assert is_loopback(listener) == loopback
