"""`serve`: an engine as an OpenAI-compatible endpoint, traced if asked, until Ctrl-C."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from ajet_sdk.errors import EngineUnavailable
from ajet_sdk.serve import wait_for_server
from ajet_sdk.trace.reader import open_trace
from tests.waiting import until

PROGRAM = """
import sys, time
from pathlib import Path
from ajet_sdk.engines.scripted import ScriptedEngine
from ajet_sdk.errors import ContextOverflow
from ajet_sdk.serve import serve_engine

def reply(ask):
    said = ask.body["messages"][-1]["content"]
    if said == "too long":
        raise ContextOverflow("prompt of 9 tokens does not fit 8")
    return f"you said {said}"

key = sys.argv[1] if len(sys.argv) > 1 else None
serve_engine(ScriptedEngine(reply, model="parrot", logprob=-1.0), port=0, trace=Path("served.duckdb"), api_key=key)
print("stopped in peace")
"""


@contextmanager
def serving(home: Path, *key: str) -> Iterator[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *key],
        cwd=home,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert child.stdout is not None
    line = child.stdout.readline()
    found = re.search(r"Serving parrot at (http://127.0.0.1:\d+/v1)", line)
    assert found, (line, child.communicate(timeout=300))
    yield found[1]
    child.send_signal(signal.SIGINT)
    out, errors = child.communicate(timeout=300)
    assert (child.returncode, "stopped in peace" in out) == (0, True), errors


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    home = tmp_path_factory.mktemp("served")
    with serving(home) as url:
        yield url, home


@contextmanager
def foreign_server() -> Iterator[int]:
    """Another program's web server; its port."""
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        server.RequestHandlerClass.do_GET = lambda request: request.send_error(404)  # type: ignore[attr-defined]
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        yield server.server_port
        server.shutdown()
        serving.join()


def test_the_next_line_waits_until_the_server_answers(
    served: tuple[str, Path], free_tcp_port: int
) -> None:
    wait_for_server(port=httpx.URL(served[0]).port or 0)
    with pytest.raises(
        EngineUnavailable, match=rf"nothing answers at http://127.0.0.1:{free_tcp_port} after 0 s"
    ):
        wait_for_server(port=free_tcp_port, seconds=0)
    listener = socket.create_server(
        ("127.0.0.1", free_tcp_port)
    )  # it listens before its model is loaded
    waiting = threading.Thread(target=wait_for_server, kwargs={"port": free_tcp_port})
    waiting.start()
    listener.accept()[0].close()
    listener.accept()[0].sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
    waiting.join(30)
    assert not waiting.is_alive()
    listener.close()
    with (
        foreign_server() as port,
        pytest.raises(EngineUnavailable, match=f"127.0.0.1:{port} is not answered by `ajet serve`"),
    ):
        wait_for_server(port=port)


def test_a_foreign_page_is_not_answered(served: tuple[str, Path]) -> None:
    body = {"model": "parrot", "messages": [{"role": "user", "content": "hi"}]}
    for headers in ({"origin": "http://evil.example"}, {"host": "evil.example"}):
        assert (
            httpx.post(f"{served[0]}/chat/completions", json=body, headers=headers).status_code
            == 403
        )
    plain = {"content-type": "text/plain"}
    assert (
        httpx.post(
            f"{served[0]}/chat/completions", content=json.dumps(body), headers=plain
        ).status_code
        == 415
    )


@pytest.mark.slow
def test_with_a_key_only_who_sends_it_is_answered(tmp_path: Path) -> None:
    with serving(tmp_path, "the key") as url:
        assert [
            model.id for model in openai.OpenAI(base_url=url, api_key="the key").models.list()
        ] == ["parrot"]
        for sent in ({}, {"authorization": "Bearer another"}, {"authorization": "the key"}):
            assert httpx.get(f"{url}/models", headers=sent).status_code == 401
        keyed = {"authorization": "Bearer the key", "host": "gpu-box.lan"}
        assert httpx.get(f"{url}/models", headers=keyed).status_code == 200


def test_openai_clients_are_answered(served: tuple[str, Path]) -> None:
    client = openai.OpenAI(base_url=served[0], api_key="any")
    messages: Any = [{"role": "user", "content": "hi"}]
    reply = client.chat.completions.create(model="parrot", messages=messages, logprobs=True)
    assert (
        reply.choices[0].message.content == "you said hi" and reply.choices[0].logprobs is not None
    )
    pieces = client.chat.completions.create(model="parrot", messages=messages, stream=True)
    assert (
        "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
        == "you said hi"
    )
    assert [model.id for model in client.models.list()] == ["parrot"]


def test_many_at_once(served: tuple[str, Path]) -> None:
    def ask(number: int) -> str:
        body = {"model": "parrot", "messages": [{"role": "user", "content": str(number)}]}
        reply = client.post(f"{served[0]}/chat/completions", json=body, timeout=300)
        return str(reply.json()["choices"][0]["message"]["content"])

    with httpx.Client() as client, ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(40))) == [f"you said {number}" for number in range(40)]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "words"),
    [
        ("GET", "/../health", None, 200, "ok"),
        ("POST", "/embeddings", {"input": "x"}, 404, "embeddings"),
        ("POST", "/../other", {}, 404, "route other"),
        (
            "POST",
            "/chat/completions",
            {"model": "duck", "messages": [{"role": "user", "content": "a"}]},
            404,
            "parrot",
        ),
        (
            "POST",
            "/chat/completions",
            {"model": "", "messages": [{"role": "user", "content": "a"}]},
            200,
            "you said a",
        ),
        ("GET", "/chat/completions", None, 405, "POST"),
        ("POST", "/chat/completions", {"messages": []}, 400, "messages"),
        (
            "POST",
            "/chat/completions",
            {"messages": [{"role": "user", "content": "too long"}]},
            400,
            "does not fit",
        ),
    ],
)
def test_what_is_refused_says_why(
    served: tuple[str, Path], method: str, path: str, body: Any, status: int, words: str
) -> None:
    url = (
        served[0] + path if not path.startswith("/..") else served[0].removesuffix("/v1") + path[3:]
    )
    reply = httpx.request(method, url, json=body)
    assert reply.status_code == status and words in reply.text


def test_a_client_that_reads_late_has_its_reply(served: tuple[str, Path]) -> None:
    url, body = (
        httpx.URL(served[0]),
        json.dumps({"messages": [{"role": "user", "content": "read late"}]}),
    )
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    )
    with socket.create_connection((url.host, url.port or 0)) as client:
        client.sendall(
            f"{head}Content-Type: application/json\r\nConnection: close\r\n\r\n{body}".encode()
        )
        client.recv(1, socket.MSG_PEEK)  # the reply has arrived
        httpx.get(f"{served[0]}/models")  # what the server does at once is done
        while client.recv(65_536):
            pass
    with open_trace(served[1] / "served.duckdb") as reader:
        sql = "SELECT status FROM episodes WHERE task::VARCHAR LIKE '%read late%'"
        assert until(lambda: reader.query(sql).to_pylist()) == [{"status": "succeeded"}]


@pytest.mark.slow
def test_every_request_is_traced_while_it_serves(served: tuple[str, Path]) -> None:
    body = {"messages": [{"role": "user", "content": "trace me"}], "model": "parrot"}
    httpx.post(
        f"{served[0]}/chat/completions", json=body, headers={"authorization": "Bearer sk-secret"}
    )
    httpx.post(
        f"{served[0]}/chat/completions",
        json={"messages": [{"role": "user", "content": "too long"}]},
    )
    with open_trace(served[1] / "served.duckdb") as reader:
        sql = (
            "SELECT task, output::VARCHAR AS output, status FROM episodes WHERE task::VARCHAR LIKE"
            " '%trace me%'"
        )
        found = until(lambda: reader.query(sql).to_pylist())
        assert (
            len(found) == 1
            and found[0]["status"] == "succeeded"
            and "you said trace me" in found[0]["output"]
        )
        sql = "SELECT error FROM episodes WHERE status = 'failed'"
        assert any(
            "does not fit" in row["error"] for row in until(lambda: reader.query(sql).to_pylist())
        )
        calls = reader.query("SELECT request::VARCHAR AS request FROM calls_full").to_pylist()
        assert calls and not any("sk-secret" in row["request"] for row in calls)
