"""An agent's tool calls over the real `mcp` package (1.x and 2.x), by stdio and HTTP, are events of
its episode.

Needs `pip install mcp`, and for what is said of spans `opentelemetry-sdk`.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.metadata
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import ajet
from ajet_sdk.agent.context import current_episode
from ajet_sdk.capture.hooks import installed
from ajet_sdk.capture.processes import for_other_process
from ajet_sdk.config.config import load_config
from ajet_sdk.dialects.message_parts import pictures_in
from ajet_sdk.engines.scripted import ScriptedEngine
from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.rollout.attempts import Attempt
from ajet_sdk.rollout.episode import run_episode
from ajet_sdk.trace.reader import episodes, open_trace
from ajet_sdk.trace.writer import TraceWriter

if find_spec("mcp") is None:
    pytest.skip("needs mcp", allow_module_level=True)


def mcp() -> Any:
    """The package, imported where a test uses it: each worker of pytest-xdist imports every module
    of tests."""
    return importlib.import_module("mcp")


pytestmark = pytest.mark.slow

TWO = int(importlib.metadata.version("mcp").partition(".")[0]) >= 2
LISTEN = """
if sys.argv[1:]:
    server.run("streamable-http", port=int(sys.argv[1]))
server.run("stdio")
"""
LISTEN_1 = """
if sys.argv[1:]:
    server.settings.port = int(sys.argv[1])
server.run("streamable-http" if sys.argv[1:] else "stdio")
"""
SERVER = f"""
import io
import random
import sys
from typing import Any
import PIL.Image
from mcp.server{".mcpserver" if TWO else ".fastmcp"} import Image, {"MCPServer" if TWO else "FastMCP"} as Server
server = Server("sums")

@server.tool()
def add(a: int, b: int) -> str:
    return str(a + b)

@server.tool()
def draw(size: int) -> {"Any" if TWO else "Image"}:
    pixels = random.Random(1).randbytes(3 * size * size)
    file = io.BytesIO()
    PIL.Image.frombytes("RGB", (size, size), pixels).save(file, "PNG")
    return Image(data=file.getvalue(), format="png")

@server.tool()
def fail(why: str) -> str:
    raise ValueError(why)

{LISTEN if TWO else LISTEN_1}
"""


@pytest.fixture
def server(tmp_path: Path) -> Path:
    file = tmp_path / "server.py"
    file.write_text(SERVER)
    return file


@pytest.fixture
def url(server: Path) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with subprocess.Popen(
        [sys.executable, str(server), str(port)], stderr=subprocess.DEVNULL
    ) as process:
        while process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}/mcp"
        process.kill()


@contextlib.asynccontextmanager
async def session(streams: Any) -> AsyncIterator[Any]:
    async with streams as (read, write, *_), mcp().ClientSession(read, write) as opened:
        await opened.initialize()
        yield opened


def by_stdio(server: Path) -> Any:
    return mcp().stdio_client(
        mcp().StdioServerParameters(command=sys.executable, args=[str(server)])
    )


def by_http(url: str) -> Any:
    from mcp.client import streamable_http

    name = (
        "streamable_http_client"
        if hasattr(streamable_http, "streamable_http_client")
        else "streamablehttp_client"
    )
    return getattr(streamable_http, name)(url)


@ajet.judge
def enough(episode: ajet.Episode) -> float:
    return float(len(episode.events))


def run(workflow: Any, writer: TraceWriter | None = None) -> ajet.Episode:
    async def main() -> ajet.Episode:
        with Gateway(writer) as gateway:
            return await run_episode(
                workflow,
                enough,
                Attempt(ajet.Task(task_id="one", main_query="2 + 3")),
                engine=ScriptedEngine(["5"]),
                gateway=gateway,
                config=load_config(values={"ajet": {}}),
                writer=writer,
            )

    return asyncio.run(main())


def check(episode: ajet.Episode) -> None:
    assert episode.status == "succeeded", episode.error
    added, failed = episode.events
    assert (added.name, added.arguments, added.error) == ("add", {"a": 2, "b": 3}, None)
    assert added.result["content"][0]["text"] == "5" and added.ended_at >= added.started_at
    assert failed.name == "fail" and "fail" in str(failed.error) and failed.result["isError"]
    assert episode.reward == 2.0 and len(episode.calls) == 1


async def use(opened: Any, model: ajet.Model) -> str:
    await opened.call_tool("add", {"a": 2, "b": 3})
    await opened.call_tool("fail", arguments={"why": "no reason"})
    return str((await model.chat([{"role": "user", "content": "so?"}]))["content"])


def test_by_stdio_and_in_the_trace(server: Path, tmp_path: Path) -> None:
    @ajet.workflow
    async def agent(question: str, model: ajet.Model) -> str:
        async with session(by_stdio(server)) as opened:
            return await use(opened, model)

    with TraceWriter(tmp_path / "trace.duckdb") as writer:
        finished = run(agent, writer)
    check(finished)
    with open_trace(tmp_path / "trace.duckdb") as reader:
        [stored] = episodes(reader)
    assert stored.events == finished.events
    shown = subprocess.run(
        [sys.executable, "-m", "ajet", "trace", "show", stored.episode_id, str(tmp_path)],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert "→ add " in shown and '"b": 3' in shown and "error: " in shown


def test_a_large_picture_of_a_tool_is_kept_whole(server: Path, tmp_path: Path) -> None:
    @ajet.workflow
    async def agent(question: str, model: ajet.Model) -> str:
        async with session(by_stdio(server)) as opened:
            await opened.call_tool("draw", {"size": 200})
        return str((await model.chat([{"role": "user", "content": "so?"}]))["content"])

    with TraceWriter(tmp_path / "trace.duckdb") as writer:
        run(agent, writer)
    with open_trace(tmp_path / "trace.duckdb") as reader:
        [stored] = episodes(reader)
        assert len(reader.query("SELECT digest FROM pictures")) == 1
    [event] = stored.events
    [picture] = pictures_in(event.result)
    assert (picture.width, picture.height) == (200, 200)
    assert len(picture.data) > 100_000


def test_by_http(url: str) -> None:
    @ajet.workflow
    async def agent(question: str, model: ajet.Model) -> str:
        async with session(by_http(url)) as opened:
            return await use(opened, model)

    check(run(agent))


def test_in_another_process_than_the_gateway(server: Path) -> None:
    """What a worker process reports over HTTP."""

    @ajet.workflow
    async def agent(question: str, model: ajet.Model) -> str:
        active = current_episode.get()
        assert active is not None
        current_episode.set(for_other_process(active))
        async with session(by_stdio(server)) as opened:
            return await use(opened, model)

    check(run(agent))


def test_a_call_that_is_cancelled_is_an_event(server: Path) -> None:
    @ajet.workflow
    async def starts_and_is_cancelled(question: str, model: ajet.Model) -> str:
        async with session(by_stdio(server)) as opened:
            call = asyncio.ensure_future(opened.call_tool("add", {"a": 1, "b": 1}))
            await asyncio.sleep(0)
            call.cancel()
            await asyncio.wait([call])
        return ""

    [event] = run(starts_and_is_cancelled).events
    assert str(event.error).startswith("CancelledError") and event.result is None


def test_outside_of_an_episode_nothing_changes(server: Path) -> None:
    async def main() -> Any:
        async with session(by_stdio(server)) as opened:
            return await opened.call_tool("add", {"a": 2, "b": 3})

    plain = asyncio.run(main())
    original = mcp().ClientSession.call_tool
    with installed():
        assert asyncio.run(main()) == plain and mcp().ClientSession.call_tool is not original
    assert mcp().ClientSession.call_tool is original


def test_spans_of_the_agent_survive_and_are_named(server: Path) -> None:
    """The agent's own tracer provider stays, its spans nest as before, and an event names the span
    around it."""
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    if not isinstance(trace.get_tracer_provider(), TracerProvider):  # a process takes one only
        trace.set_tracer_provider(TracerProvider())
    provider, kept = trace.get_tracer_provider(), InMemorySpanExporter()
    assert isinstance(provider, TracerProvider)
    provider.add_span_processor(SimpleSpanProcessor(kept))
    tracer = trace.get_tracer("agent")
    threads: list[str] = []

    @ajet.workflow
    async def agent(question: str, model: ajet.Model) -> str:
        with tracer.start_as_current_span("outer"):
            async with session(by_stdio(server)) as opened:
                with tracer.start_as_current_span("tools"):
                    answer = await use(opened, model)
            thread = threading.Thread(target=lambda: threads.append(answer))
            thread.start()
            thread.join()
            return answer

    finished = run(agent)
    check(finished)
    assert trace.get_tracer_provider() is provider and threads == ["5"]
    spans = {span.name: span for span in kept.get_finished_spans()}
    tools, outer = spans["tools"], spans["outer"]
    assert (
        tools.parent is not None
        and tools.parent.span_id == outer.context.span_id
        and outer.parent is None
    )
    named = {(event.trace_id, event.span_id) for event in finished.events}
    assert named == {(f"{tools.context.trace_id:032x}", f"{tools.context.span_id:016x}")}
