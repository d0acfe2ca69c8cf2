"""What an agent's own OpenTelemetry spans tell of its tools and retrievals is in its episode."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ajet_sdk.agent.context import current_episode
from ajet_sdk.agent.decorators import workflow
from ajet_sdk.capture.observe import trace
from ajet_sdk.trace.reader import episodes, open_trace
from ajet_sdk.types import Event
from ajet_tools.trace.export import export
from ajet_tools.trace.imports import import_files

sdk = pytest.importorskip("opentelemetry.sdk.trace")


@pytest.fixture
def tracer() -> Iterator[object]:
    provider = sdk.TracerProvider()
    yield provider.get_tracer("agent")
    provider.shutdown()


def test_tool_and_retrieval_spans_are_events_and_come_back_from_an_export(
    tmp_path: Path, tracer: sdk.Tracer
) -> None:
    @workflow
    def agent(question: str) -> str:
        with tracer.start_as_current_span("agent", attributes={"openinference.span.kind": "CHAIN"}):
            asked = {"openinference.span.kind": "RETRIEVER", "input.value": question,
                     "retrieval.documents.0.document.content": "a sum"}  # fmt: skip
            with tracer.start_as_current_span("search", attributes=asked):
                pass
            called = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "add",
                      "gen_ai.tool.call.arguments": '{"a": 30, "api_key": "sk-secret"}',
                      "gen_ai.tool.call.result": "124"}  # fmt: skip
            with tracer.start_as_current_span("execute_tool add", attributes=called) as span:
                span.end()
            failing = tracer.start_as_current_span(
                "broken", attributes={"traceloop.span.kind": "tool"}
            )
            with pytest.raises(ValueError), failing:
                raise ValueError("no such number")
            with tracer.start_as_current_span(
                "recorded", attributes={"gen_ai.operation.name": "execute_tool"}
            ) as span:
                seen = f"{span.get_span_context().span_id:016x}"
                active = current_episode.get()
                assert active is not None
                active.recorder.happened(Event(name="over_mcp", span_id=seen))
        return "124"

    with trace(tmp_path / "agent.duckdb"):
        assert agent("30+94?") == "124"
        with tracer.start_as_current_span(
            "outside", attributes={"gen_ai.operation.name": "execute_tool"}
        ):
            pass
    assert "end" in vars(sdk.Span) and not hasattr(sdk.Span.end, "__wrapped__"), (
        "restored at the end"
    )
    with open_trace(tmp_path / "agent.duckdb") as reader:
        [episode] = [e for e in episodes(reader) if e.task.env_type == "agent"]
        export(reader, [episode.episode_id], "otlp", tmp_path / "spans.jsonl")
    events = {event.name: event for event in episode.events}
    assert [(e.kind, e.name) for e in episode.events] == [
        ("retrieval", "search"), ("tool", "add"), ("tool", "broken"), ("mcp", "over_mcp"),
    ]  # fmt: skip
    assert events["search"].arguments == {"input": "30+94?"} and events["search"].result == [
        "a sum"
    ]
    assert (
        events["add"].arguments == {"a": 30, "api_key": "[removed by ajet]"}
        and events["add"].result == "124"
    )
    assert events["broken"].error == "ValueError: no such number"
    assert (
        len(events["add"].trace_id or "") == 32
        and events["add"].started_at <= events["add"].ended_at
    )
    import_files([tmp_path / "spans.jsonl"], tmp_path / "back.duckdb")
    with open_trace(tmp_path / "back.duckdb") as reader:
        assert episodes(reader)[0].events == episode.events
