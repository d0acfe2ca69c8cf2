"""A trace sent to a real Phoenix server is read back from its API: kinds, tool calls, tools,
documents, token counts.

Needs `arize-phoenix` (in an environment of its own, its `phoenix` on the PATH) and
`opentelemetry-proto`.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from typer.testing import CliRunner

from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Call, Episode, Event, Run, Task
from ajet_tools.cli.app import app
from tests.waiting import until

PHOENIX = shutil.which("phoenix")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(PHOENIX is None, reason="needs a `phoenix`")]
ASKED = [{"role": "user", "content": "Weather?"}]
TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
}
ANSWER = {"role": "assistant", "content": None, "tool_calls": [
    {"id": "t1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln"}'}}]}  # fmt: skip
USAGE = {"prompt_tokens": 11, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 5}}


def get(address: str) -> Any:
    """What the server answers; None while it does not."""
    try:
        with urlopen(address) as answer:
            return json.load(answer)
    except URLError:
        return None


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    with socket.socket() as http, socket.socket() as grpc:
        for taken in (http, grpc):
            taken.bind(("127.0.0.1", 0))
        ports = {
            "PHOENIX_PORT": str(http.getsockname()[1]),
            "PHOENIX_GRPC_PORT": str(grpc.getsockname()[1]),
        }
    environment = {**os.environ, **ports, "PHOENIX_HOST": "127.0.0.1", "PHOENIX_TELEMETRY_ENABLED": "false",
                   "PHOENIX_WORKING_DIR": str(tmp_path), "PYTHONPATH": ""}  # fmt: skip
    with (
        (tmp_path / "log").open("w") as log,
        subprocess.Popen(
            [str(PHOENIX), "serve"], env=environment, stdout=log, stderr=log
        ) as process,
    ):
        try:
            address = f"http://127.0.0.1:{ports['PHOENIX_PORT']}"
            until(lambda: get(f"{address}/v1/projects") or process.poll() is not None)
            assert process.poll() is None, (tmp_path / "log").read_text()
            yield address
        finally:
            process.terminate()


def test_a_trace_shows_in_phoenix(server: str, tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    file = tmp_path / "trace.duckdb"
    with TraceWriter(file) as writer:
        writer.put(Run(run_id="r", status="finished"))
        response = {
            "choices": [{"index": 0, "message": ANSWER, "finish_reason": "tool_calls"}],
            "usage": USAGE,
        }
        writer.put(Call(call_id="c", episode_id="e", model="m", request={"messages": ASKED, "tools": [TOOL]},
                        response=response))  # fmt: skip
        tool = Event(kind="tool", name="weather", arguments={"city": "Köln"}, error="it rains")
        found = Event(
            kind="retrieval",
            name="search",
            result=[{"id": "1", "content": "first", "score": 0.5}, "second"],
        )
        writer.put(Episode(episode_id="e", run_id="r", task=Task(task_id="t", main_query="Weather?"), status="failed",
                           error="it rains", events=(tool, found)))  # fmt: skip
    sent = CliRunner().invoke(
        app, ["trace", "export", str(file), "--format", "otlp", "--out", f"{server}/v1/traces"]
    )
    assert sent.exit_code == 0, sent.output
    listed = until(
        lambda: len(of := get(f"{server}/v1/projects/default/spans")["data"]) == 4 and of
    )
    spans = {span["span_kind"]: span for span in listed}
    assert {kind: span["status_code"] for kind, span in spans.items()} == {
        "CHAIN": "ERROR", "LLM": "OK", "TOOL": "ERROR", "RETRIEVER": "OK"}  # fmt: skip
    assert {spans[kind]["parent_id"] for kind in ("LLM", "TOOL", "RETRIEVER")} == {
        spans["CHAIN"]["context"]["span_id"]
    }
    assert (
        spans["TOOL"]["status_message"] == "it rains"
        and spans["TOOL"]["attributes"]["tool.name"] == "weather"
    )
    model, call = (
        spans["LLM"]["attributes"],
        "llm.output_messages.0.message.tool_calls.0.tool_call.function",
    )
    assert (model[f"{call}.name"], model[f"{call}.arguments"]) == ("weather", '{"city": "Köln"}')
    assert json.loads(model["llm.tools.0.tool.json_schema"]) == TOOL
    counts = ("prompt", "completion", "total", "prompt_details.cache_read")
    assert [model[f"llm.token_count.{count}"] for count in counts] == [11, 7, 18, 5]
    documents = spans["RETRIEVER"]["attributes"]
    assert [documents[f"retrieval.documents.{i}.document.content"] for i in (0, 1)] == [
        "first",
        "second",
    ]
    assert documents["retrieval.documents.0.document.score"] == 0.5
