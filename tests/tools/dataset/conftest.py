"""A language model's endpoint over real HTTP, which says what a test tells it to say."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ajet_sdk.gateway.gateway import listening_socket
from ajet_sdk.sandbox.fence import Fence, NoFence, fence
from tests.tools.dataset.written import AGENT, write_rows
from tests.waiting import FOREVER


@dataclass(frozen=True)
class Held:
    """A text that is not said before an event."""

    until: threading.Event
    text: str


Said = str | list[str] | Response | tuple[float, str] | Held


class ModelServer:
    """`say` gets the request's JSON and its number (from 0): text, a list of texts, seconds and
    text, or a response."""

    def __init__(self, say: Callable[[dict[str, Any], int], Said]) -> None:
        self.say = say
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.most_at_once = 0
        self._now = 0
        self.url, self.close = _served("/v1/chat/completions", self._answer)

    async def _answer(self, request: Request) -> Response:
        body = json.loads(await request.body())
        number = len(self.requests)
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        self._now += 1
        self.most_at_once = max(self.most_at_once, self._now)
        try:
            said = self.say(body, number)
            if isinstance(said, tuple):
                await asyncio.sleep(said[0])
                said = said[1]
            if isinstance(said, Held):
                await asyncio.to_thread(said.until.wait, FOREVER)
                said = said.text
        finally:
            self._now -= 1
        if isinstance(said, Response):
            return said
        texts = [said] if isinstance(said, str) else said
        choices = [
            {"index": i, "message": {"role": "assistant", "content": text}}
            for i, text in enumerate(texts)
        ]
        usage = {"prompt_tokens": 100, "completion_tokens": 50 * len(texts)}
        return JSONResponse({"model": body["model"], "choices": choices, "usage": usage})


class Embedder:
    """A model of embeddings: texts that `means` says the same of get one vector. It answers
    `failures` first."""

    def __init__(self, means: Callable[[str], str]) -> None:
        self.means = means
        self.failures: list[Response] = []
        self.batches: list[list[str]] = []
        self.url, self.close = _served("/v1/embeddings", self._answer)

    async def _answer(self, request: Request) -> Response:
        body = await request.json()
        if self.failures:
            return self.failures.pop(0)
        self.batches.append(body["input"])
        data = [
            {
                "index": index,
                "embedding": [
                    2 * random.Random(self.means(text) + str(n)).gauss(0, 1) for n in range(64)
                ],
            }
            for index, text in enumerate(body["input"])
        ]
        usage = {"prompt_tokens": 10 * len(data), "total_tokens": 10 * len(data)}
        return JSONResponse({"data": list(reversed(data)), "model": body["model"], "usage": usage})


def _served(
    path: str, answer: Callable[[Request], Awaitable[Response]]
) -> tuple[str, Callable[[], None]]:
    """The URL of a server with one route, and what ends it."""
    listener = listening_socket("127.0.0.1", 0)
    app = Starlette(routes=[Route(path, answer, methods=["POST"])])
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None, access_log=False))
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()

    def close() -> None:
        server.should_exit = True
        thread.join()

    return f"http://127.0.0.1:{listener.getsockname()[1]}/v1", close


def refusal(status: int, message: str, **more: Any) -> Response:
    """An error as OpenAI's API words it; `headers` go out with it."""
    headers = more.pop("headers", None)
    return JSONResponse(
        {"error": {"message": message, **more}}, status_code=status, headers=headers
    )


@pytest.fixture
def model_server() -> Iterator[Callable[[Callable[[dict[str, Any], int], Said]], ModelServer]]:
    """Makes servers that are gone after the test; `model_server.refusal` makes an error
    response."""
    made: list[ModelServer] = []

    def make(say: Callable[[dict[str, Any], int], Said]) -> ModelServer:
        made.append(ModelServer(say))
        return made[-1]

    make.refusal = refusal  # type: ignore[attr-defined]
    yield make
    for server in made:
        server.close()


@pytest.fixture
def embedder() -> Iterator[Callable[[Callable[[str], str]], Embedder]]:
    """Makes models of embeddings, from what says which texts mean the same."""
    made: list[Embedder] = []

    def make(means: Callable[[str], str]) -> Embedder:
        made.append(Embedder(means))
        return made[-1]

    yield make
    for server in made:
        server.close()


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Makes the working directory of a job: its modules by name (`agent` is `AGENT`), and
    `NAME.jsonl` of rows."""

    def make(modules: Mapping[str, str], **files: list[dict[str, Any]]) -> Path:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("OPENAI_API_KEY", "k")
        monkeypatch.setattr(sys, "path", list(sys.path))
        for name, text in {"agent": AGENT, **modules}.items():
            monkeypatch.delitem(sys.modules, name, raising=False)
            Path(f"{name}.py").write_text(text)
        for name, rows in files.items():
            write_rows(f"{name}.jsonl", rows)
        return tmp_path

    return make


@pytest.fixture
def fenced() -> Fence:
    """The fence of this machine. Without one a test is skipped, but in CI, where there must be one,
    it fails."""
    try:
        return fence()
    except NoFence as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))
