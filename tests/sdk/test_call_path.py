"""One LLM call from the agent's `send` to the recorded call: how many Python calls it takes, in how
many files."""

from __future__ import annotations

import json
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import FrameType
from typing import Any

import httpx
import pytest

import ajet_sdk
from ajet_sdk.agent.context import current_episode
from ajet_sdk.capture.hooks import installed
from ajet_sdk.engines.remote import RemoteEngine
from ajet_sdk.gateway.episode import EpisodeSpec
from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.trace.writer import TraceWriter

MOST_CALLS, MOST_FILES = 132, 19
ROOT = str(Path(ajet_sdk.__file__).parent) + "/"
BESIDE = ("trace/", "gateway/gateway.py")
"""What runs beside a call: the writer's thread behind the end of the path, and the server's look at
the clock."""


class Profile:
    """Counts the calls of the product's functions, in every thread that starts within it; resumed
    coroutines too."""

    def __init__(self) -> None:
        self.counts = Counter[tuple[str, str]]()
        self.on = False

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if self.on and event == "call" and code.co_filename.startswith(ROOT):
            file = code.co_filename.removeprefix(ROOT)
            if not file.startswith(BESIDE):
                self.counts[file, code.co_name] += 1


@pytest.fixture
def profile() -> Iterator[Profile]:
    before, found = sys.getprofile(), Profile()
    threading.setprofile(found)
    sys.setprofile(found)
    yield found
    sys.setprofile(before)
    threading.setprofile(before)


class Policy(BaseHTTPRequestHandler):
    """Answers as vLLM's server does, in one write; each message has 20 ids."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        end = 3 + 20 * len(request["messages"])
        said = [{"token": "t", "logprob": -0.5, "bytes": None, "top_logprobs": []}] * 20
        message, ids = {"role": "assistant", "content": "x"}, list(range(end, end + 20))
        choice = {"index": 0, "message": message, "finish_reason": "stop", "token_ids": ids}
        body = {
            "model": "policy",
            "prompt_token_ids": list(range(3, end)),
            "choices": [{**choice, "logprobs": {"content": said}}],
            "usage": {"prompt_tokens": end - 3, "completion_tokens": 20, "total_tokens": end + 17},
        }
        data = json.dumps(body).encode()
        head = (
            "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length:"
            f" {len(data)}\r\n\r\n"
        )
        self.wfile.write(head.encode() + data)


@pytest.fixture
def policy_url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Policy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()


def test_a_call_takes_at_most_some_hundred_python_calls_in_nineteen_files(
    profile: Profile, policy_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A conversation's third call and those after it: captured httpx in the gateway's process, an
    endpoint with ids.

    The least of them counts: a connection that was closed meanwhile is opened again.
    """
    put, turns = TraceWriter.put, list[Counter[tuple[str, str]]]()

    def end(self: TraceWriter, *records: Any) -> None:
        profile.on = False
        put(self, *records)

    monkeypatch.setattr(TraceWriter, "put", end)
    with (
        installed(),
        TraceWriter(tmp_path / "t.duckdb") as writer,
        Gateway(writer) as gateway,
        httpx.Client() as client,
    ):
        episode = gateway.open(EpisodeSpec("e", RemoteEngine(policy_url, "k", "policy")))
        token = current_episode.set(episode.active)
        messages = [{"role": "user", "content": "hello"}]
        for _ in range(6):
            asked = {"model": "policy", "messages": messages, "temperature": 0.5, "max_tokens": 20}
            profile.counts, profile.on = Counter(), True
            turns.append(profile.counts)
            said = client.post("http://model.invalid/v1/chat/completions", json=asked).json()
            messages = [
                *messages,
                said["choices"][0]["message"],
                {"role": "user", "content": "more"},
            ]
        current_episode.reset(token)
    assert not profile.on and len(episode.calls) == len(turns)
    least = min(turns[2:], key=Counter.total)
    files = {file for file, _ in least}
    assert MOST_CALLS / 2 < least.total() <= MOST_CALLS and len(files) <= MOST_FILES, sorted(
        least.items()
    )
