"""Other tools' traces: each convention, written as its tool writes it, comes in with all that it
says and no more."""

from __future__ import annotations

import json
import re
import sqlite3
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from ajet_sdk.dialects.message_parts import request_messages
from ajet_sdk.errors import ConfigError, TaskError, TraceError
from ajet_sdk.samples.prefixes import place_all
from ajet_sdk.trace.reader import episodes, open_trace
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Call, Episode, Run
from ajet_tools.cli.app import app
from ajet_tools.cli.trace.options import FROM_HELP
from ajet_tools.trace.export import export
from ajet_tools.trace.files.check import check
from ajet_tools.trace.imports import SOURCES, SourceFormat, format_of, import_files, recognised
from ajet_tools.trace.imports.sink import UNKNOWN_TIME

ASKED = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Was ist 2+2? 漢字"},
]
CALLED = {"id": "t1", "type": "function", "function": {"name": "calc", "arguments": '{"e": "2+2"}'}}
NANOS = 1767268800_000000000
TRACE, ROOT, SPAN = "0af7651916cd43dd8448eb211c80319c", "00f067aa0ba902b7", "b7ad6b7169203331"


def _import(
    tmp_path: Path, source: Path, format: SourceFormat | None = None, **options: Any
) -> list[Episode]:
    import_files([source], tmp_path / "out.duckdb", format, **options)
    assert check(tmp_path / "out.duckdb") == [], "what an import writes is sound"
    with open_trace(tmp_path / "out.duckdb") as reader:
        return episodes(reader)


def _lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


def _value(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        return {"stringValue": value}
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    return {"arrayValue": {"values": [_value(item) for item in value]}}


def _pairs(attributes: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in attributes.items()]


def _otlp(
    attributes: dict[str, Any], events: tuple[tuple[str, dict[str, Any]], ...] = ()
) -> dict[str, Any]:
    """A model call below an agent's span, as a collector's file exporter writes them."""
    times = {"startTimeUnixNano": str(NANOS), "endTimeUnixNano": str(NANOS + 2_000_000_000)}
    agent = {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "helper"}
    root = {
        "traceId": TRACE,
        "spanId": ROOT,
        "name": "invoke_agent helper",
        **times,
        "attributes": _pairs(agent),
    }
    call = {
        "traceId": TRACE,
        "spanId": SPAN,
        "parentSpanId": ROOT,
        "name": "chat",
        **times,
        "attributes": _pairs(attributes),
        "events": [
            {"name": name, "timeUnixNano": str(NANOS), "attributes": _pairs(of)}
            for name, of in events
        ],
    }
    return {
        "resourceSpans": [
            {"resource": {"attributes": []}, "scopeSpans": [{"scope": {}, "spans": [call, root]}]}
        ]
    }


_TEXT_PARTS = [
    {"role": m["role"], "parts": [{"type": "text", "content": m["content"]}]} for m in ASKED
]
_CALL_PART = {"type": "tool_call", "id": "t1", "name": "calc", "arguments": {"e": "2+2"}}
_COMMON = {
    "gen_ai.request.model": "gpt-4o",
    "gen_ai.response.model": "gpt-4o-2024",
    "gen_ai.request.temperature": 0.5,
    "gen_ai.response.finish_reasons": ["tool_calls"],
}
CONVENTIONS: dict[str, tuple[dict[str, Any], list[tuple[str, dict[str, Any]]]]] = {
    "1.38": (
        {
            "gen_ai.operation.name": "chat",
            "gen_ai.input.messages": json.dumps(_TEXT_PARTS),
            "gen_ai.output.messages": json.dumps(
                [{"role": "assistant", "parts": [_CALL_PART], "finish_reason": "x"}]
            ),
        },
        [],
    ),
    "1.38, system apart": (
        {
            "gen_ai.operation.name": "chat",
            "gen_ai.system_instructions": json.dumps(_TEXT_PARTS[0]["parts"]),
            "gen_ai.input.messages": json.dumps(_TEXT_PARTS[1:]),
            "gen_ai.output.messages": json.dumps([{"role": "assistant", "parts": [_CALL_PART]}]),
        },
        [],
    ),
    "OpenInference": (
        {
            "openinference.span.kind": "LLM",
            "llm.input_messages.0.message.role": "system",
            "llm.input_messages.0.message.content": ASKED[0]["content"],
            "llm.input_messages.1.message.role": "user",
            "llm.input_messages.1.message.content": ASKED[1]["content"],
            "llm.output_messages.0.message.role": "assistant",
            "llm.output_messages.0.message.tool_calls.0.tool_call.id": "t1",
            "llm.output_messages.0.message.tool_calls.0.tool_call.function.name": "calc",
            "llm.output_messages.0.message.tool_calls.0.tool_call.function.arguments": (
                '{"e": "2+2"}'
            ),
        },
        [],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("convention", CONVENTIONS)
def test_each_convention_of_a_model_call_comes_in_as_the_same_call(
    tmp_path: Path, convention: str
) -> None:
    attributes, events = CONVENTIONS[convention]
    source = _lines(tmp_path / "spans.jsonl", _otlp({**_COMMON, **attributes}, events))
    (episode,) = _import(tmp_path, source)
    (call,) = episode.calls
    assert call.request["messages"] == ASKED
    reply = json.loads(json.dumps(call.response["choices"][0]["message"]))
    arguments = reply["tool_calls"][0]["function"]
    arguments["arguments"] = json.loads(arguments["arguments"])
    assert reply == {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "t1",
                "type": "function",
                "function": {"name": "calc", "arguments": {"e": "2+2"}},
            }
        ],
    }
    assert (call.agent, call.model, call.sampling) == (
        "helper",
        "gpt-4o-2024",
        {"temperature": 0.5},
    )
    assert episode.episode_id == TRACE and episode.started_at == datetime(
        2026, 1, 1, 12, tzinfo=timezone.utc
    )
    assert (call.ended_at - call.started_at).total_seconds() == 2
    assert call.prompt_ids is None and call.output_ids is None and call.policy_version is None
    assert episode.rewards == () and episode.output is None and not call.trainable


@pytest.mark.slow
def test_one_pretty_printed_document_and_snake_case_and_base64_ids(tmp_path: Path) -> None:
    attributes, events = CONVENTIONS["1.38"]
    source = tmp_path / "one.json"
    text = json.dumps(_otlp({**_COMMON, **attributes}, events), indent=2)
    for camel, snake in (("resourceSpans", "resource_spans"), ("scopeSpans", "scope_spans"), ("spanId", "span_id"),
                         ("traceId", "trace_id"), ("stringValue", "string_value")):  # fmt: skip
        text = text.replace(camel, snake)
    source.write_text(text.replace(TRACE, "CvdlGRbNQ92ESOshHIAxnA=="))
    (episode,) = _import(tmp_path, source)
    assert episode.episode_id == TRACE and episode.calls[0].request["messages"] == ASKED


@pytest.mark.slow
def test_spans_of_a_trace_may_stand_anywhere(tmp_path: Path) -> None:
    attributes, events = CONVENTIONS["1.38"]
    whole = _otlp({**_COMMON, **attributes}, events)
    spans = whole["resourceSpans"][0]["scopeSpans"][0]["spans"]
    parts = [{"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]} for span in spans]
    other = json.loads(json.dumps(whole).replace(TRACE, "f" * 32))
    found = _import(tmp_path, _lines(tmp_path / "s.jsonl", parts[0], other, parts[1]))
    assert sorted(e.episode_id for e in found) == sorted([TRACE, "f" * 32])
    assert all(e.calls[0].agent == "helper" for e in found)


def test_evaluations_are_rewards_and_a_failed_root_is_a_failed_episode(tmp_path: Path) -> None:
    attributes, events = CONVENTIONS["1.38"]
    scored = (
        "gen_ai.evaluation.result",
        {"gen_ai.evaluation.name": "q", "gen_ai.evaluation.score.value": 0.5},
    )
    whole = _otlp({**_COMMON, **attributes}, [*events, scored])
    whole["resourceSpans"][0]["scopeSpans"][0]["spans"][1]["status"] = {
        "code": 2,
        "message": "boom",
    }
    (episode,) = _import(tmp_path, _lines(tmp_path / "s.jsonl", whole))
    assert [(r.name, r.value) for r in episode.rewards] == [("q", 0.5)]
    assert (episode.status, episode.error) == ("failed", "boom")


@pytest.mark.slow
def test_openinference_as_phoenix_writes_it(tmp_path: Path) -> None:
    """`span.to_json()`: nested attributes, ISO times; the chain around the call has the task and
    the output."""
    call = {
        "name": "ChatCompletion",
        "context": {"trace_id": f"0x{TRACE}", "span_id": f"0x{SPAN}"},
        "parent_id": f"0x{ROOT}",
        "start_time": "2026-01-01T12:00:00.000000Z",
        "end_time": "2026-01-01T12:00:02.000000Z",
        "status": {"status_code": "OK"},
        "attributes": {
            "openinference": {"span": {"kind": "LLM"}},
            "llm": {
                "model_name": "m",
                "invocation_parameters": '{"temperature": 0.1}',
                "token_count": {"prompt": 10, "completion": 2},
                "input_messages": [{"message": message} for message in ASKED],
                "output_messages": [{"message": {"role": "assistant", "content": "4"}}],
            },
        },
    }
    chain = {
        **call,
        "context": {"trace_id": f"0x{TRACE}", "span_id": f"0x{ROOT}"},
        "parent_id": None,
    }
    chain["attributes"] = {
        "openinference.span.kind": "CHAIN",
        "input.value": "2+2?",
        "output.value": "4",
    }
    (episode,) = _import(tmp_path, _lines(tmp_path / "phoenix.jsonl", call, chain))
    assert episode.task.main_query == "2+2?" and episode.output == "4"
    assert episode.calls[0].request["messages"] == ASKED and episode.calls[0].sampling == {
        "temperature": 0.1
    }
    assert episode.calls[0].response["usage"] == {"prompt_tokens": 10, "completion_tokens": 2}


@pytest.mark.slow
def test_openai_messages_logs_and_batch_output(tmp_path: Path) -> None:
    answer = {"id": "chatcmpl-1", "created": 1767268800, "model": "gpt-4o",
              "choices": [{"index": 0, "message": {"role": "assistant", "content": "4"}}]}  # fmt: skip
    chat = {"messages": [*ASKED, {"role": "assistant", "content": "4"}], "source": "book"}
    log = {"request": {"model": "gpt-4o", "messages": ASKED}, "response": answer, "user": "u"}
    batch = {
        "id": "b1",
        "custom_id": "row-1",
        "response": {"status_code": 200, "body": answer},
        "error": None,
    }
    refused = {
        "id": "b2",
        "custom_id": "row-2",
        "response": {"status_code": 429, "body": {"error": {"message": "slow"}}},
    }
    found = {}
    for name, row in (("chat", chat), ("log", log), ("batch", batch), ("refused", refused)):
        (tmp_path / name).mkdir()
        (found[name],) = _import(tmp_path / name, _lines(tmp_path / f"{name}.jsonl", row))
    assert found["chat"].calls[0].request == {"messages": ASKED} and found[
        "chat"
    ].task.metadata == {"source": "book"}
    assert found["chat"].calls[0].response["choices"][0]["message"]["content"] == "4"
    assert (
        found["chat"].started_at == UNKNOWN_TIME
        and found["chat"].rewards == ()
        and found["chat"].calls[0].model == ""
    )
    assert (
        found["log"].calls[0].request == log["request"] and found["log"].calls[0].response == answer
    )
    assert found["log"].started_at == datetime(2026, 1, 1, 12, tzinfo=timezone.utc)
    assert found["batch"].calls[0].request_id == "row-1" and found["batch"].calls[0].request == {}
    assert (found["refused"].status, found["refused"].error) == ("failed", "slow")


@pytest.mark.slow
def test_equal_rows_are_two_episodes_and_the_file_again_none(tmp_path: Path) -> None:
    row = {"messages": [*ASKED, {"role": "assistant", "content": "4"}]}
    source = _lines(tmp_path / "a.jsonl", row, row)
    assert len(_import(tmp_path, source)) == 2
    again = import_files([source], tmp_path / "out.duckdb")
    assert (again.episodes, again.already) == (0, 2)


def _studio(path: Path, columns: str, rows: list[tuple[Any, ...]]) -> Path:
    file = sqlite3.connect(path)
    file.execute(
        "CREATE TABLE run_table (id TEXT, project TEXT, name TEXT, timestamp TEXT, status TEXT)"
    )
    file.execute(
        "INSERT INTO run_table VALUES ('r1', 'demo', 'first', '2026-01-01 12:00:00.000', 'done')"
    )
    file.execute(f"CREATE TABLE span_table ({columns})")
    file.executemany(f"INSERT INTO span_table VALUES ({', '.join('?' * len(rows[0]))})", rows)
    file.commit()
    file.close()
    return path


def test_agentscope_studio(tmp_path: Path) -> None:
    columns = (
        "id, traceId, spanId, parentSpanId, name, startTimeUnixNano, endTimeUnixNano, attributes,"
        " events, status, runId"
    )
    answer = {"type": "tool_call_response", "id": "t1", "response": "4"}
    said = [
        *_TEXT_PARTS,
        {"role": "assistant", "name": "Friday", "parts": [_CALL_PART, answer]},
    ]
    attributes = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "qwen-max",
        "gen_ai.input.messages": said,
        "gen_ai.output.messages": [
            {"role": "assistant", "parts": [{"type": "text", "content": "4"}]}
        ],
    }
    end = str(NANOS + 10**9)
    row = (
        "s",
        TRACE,
        SPAN,
        None,
        "chat",
        str(NANOS),
        end,
        json.dumps(attributes),
        "[]",
        '{"code": 1}',
        "r1",
    )
    source = _studio(tmp_path / "database.sqlite", columns, [row])
    (episode,) = _import(tmp_path, source)
    assert episode.run_id == "r1" and episode.calls[0].model == "qwen-max"
    messages = episode.calls[0].request["messages"]
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "tool"]
    assert messages[3] == {"role": "tool", "content": "4", "tool_call_id": "t1"}
    with open_trace(tmp_path / "out.duckdb") as reader:
        runs = [
            Run(**{**r, "config": json.loads(r["config"])})
            for r in reader.query("FROM runs").to_pylist()
        ]
    assert [(run.run_id, run.name, run.status) for run in runs] == [
        ("r1", "demo/first", "finished")
    ]


def test_a_database_that_is_not_studios(tmp_path: Path) -> None:
    file = sqlite3.connect(tmp_path / "x.sqlite")
    file.execute("CREATE TABLE t (a)")
    file.commit()
    file.close()
    with pytest.raises(TraceError, match="no span_table"):
        import_files([tmp_path / "x.sqlite"], tmp_path / "out.duckdb")


@pytest.mark.parametrize(
    "format", ["openai", "otlp", "verifiers", "agent-lightning", "tokens", "native"]
)
def test_a_row_of_something_else_is_told_or_skipped(tmp_path: Path, format: SourceFormat) -> None:
    source = tmp_path / "odd.jsonl"
    odd = ("3", '"x"', "null", "{}", '{"messages": 3}', '{"resourceSpans": [3]}', "{")
    source.write_text("\n".join(("[]", *odd)) + "\n")
    done = import_files([source], tmp_path / "out.duckdb", format, skip_bad_rows=True)
    assert done.episodes == 0 and done.bad_rows in (len(odd), len(odd) + 1)
    for line in odd:
        source.write_text(line + "\n")
        with pytest.raises(TaskError, match=r"odd\.jsonl"):
            import_files([source], tmp_path / "out.duckdb", format)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("format", "row", "message"),
    [
        ("otlp", {"resourceSpans": [3]}, "resourceSpans is not an object (got int)"),
        (
            "otlp",
            {"resourceSpans": [{"scopeSpans": {"spans": 3}}]},
            "scopeSpans is not a list (got dict)",
        ),
        (
            "otlp",
            {"resourceSpans": [{"scopeSpans": [{"spans": [{"status": "OK"}]}]}]},
            "status is not an",
        ),
        (
            "openai",
            {"messages": [{"role": "user"}], "calls": [{"message": "x"}]},
            "cannot be read as an episode",
        ),
    ],
)
def test_the_field_of_another_shape_is_named(
    tmp_path: Path, format: SourceFormat, row: Any, message: str
) -> None:
    source = _lines(tmp_path / "odd.jsonl", row)
    with pytest.raises(TaskError, match=re.escape(message)):
        import_files([source], tmp_path / "out.duckdb", format)


def test_a_row_of_ten_megabytes(tmp_path: Path) -> None:
    text = "x" * 10_000_000
    row = {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "ok"}]}
    (episode,) = _import(tmp_path, _lines(tmp_path / "big.jsonl", row))
    assert episode.calls[0].request["messages"][0]["content"] == text


def test_formats_are_recognised(tmp_path: Path) -> None:
    assert recognised(b'{"resourceSpans": []}', "x") == "otlp"
    assert recognised(b'\xef\xbb\xbf{"messages": []}', "x") == "openai"
    with pytest.raises(ConfigError, match="agent-lightning"):
        recognised(b"a,b\n1,2\n", "x.csv")


@pytest.mark.slow
def test_chats_of_an_openai_log_are_tasks_of_their_own(tmp_path: Path) -> None:
    chats = [
        {"messages": [ASKED[0], {"role": "user", "content": f"What is {i}+1?"}]} for i in range(5)
    ]
    logged = [
        {"request": {"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": f"Name {i}"}]}]},
         "response": {"created": 1767268800 + i, "choices": [{"message": {"role": "assistant", "content": "x"}}]}}
        for i in range(5)
    ]  # fmt: skip
    bare = [
        {"id": f"b{i}", "choices": [{"message": {"role": "assistant", "content": "x"}}]}
        for i in range(2)
    ]
    found = _import(tmp_path, _lines(tmp_path / "log.jsonl", *chats, *logged, *bare, chats[0]))
    assert len(found) == 13 and len({episode.task.task_id for episode in found}) == 12
    asked = sorted(episode.task.main_query for episode in found)
    questions = [*(f"What is {i}+1?" for i in range(5)), *(f"Name {i}" for i in range(5))]
    assert asked == sorted([*questions, "What is 0+1?", "", ""])
    assert {(episode.split, episode.step) for episode in found} == {("", 0)}
    with open_trace(tmp_path / "out.duckdb") as reader:
        assert reader.query("SELECT DISTINCT split, step FROM episodes").to_pylist() == [
            {"split": None, "step": None}
        ]


FOREIGN = Path(__file__).parent / "foreign"
"""Written by the packages themselves, in the versions of the names: spans of an agent with
LangSmith's `traceable` and OTEL mode, as the guide exports them; what Langfuse's client sent over
OTLP."""


@pytest.mark.parametrize("name", ["langsmith-0.15.1-spans.jsonl", "langfuse-5.0.4-otlp.json"])
def test_what_langsmith_and_langfuse_send_by_opentelemetry(tmp_path: Path, name: str) -> None:
    [episode] = _import(tmp_path, FOREIGN / name)
    assert episode.task.main_query == "What is 30+94?" and episode.status == "succeeded"
    assert str(episode.output) == "124" and episode.ended_at > episode.started_at
    first, last = episode.calls
    assert first.model == "gpt-4o-mini" and first.request["tools"][0]["function"]["name"] == "add"
    assert first.request["messages"] == [
        {"role": "system", "content": "Calculate."}, {"role": "user", "content": "What is 30+94?"},
    ]  # fmt: skip
    assert first.response["usage"] == {"prompt_tokens": 20, "completion_tokens": 5}
    function = {"name": "add", "arguments": '{"a": 30, "b": 94}'}
    called = {"id": "c1", "type": "function", "function": function}
    assert first.response["choices"][0]["message"]["tool_calls"] == [called]
    assert last.request["messages"][-1] == {"role": "tool", "content": "124", "tool_call_id": "c1"}
    assert last.response["choices"][0]["message"]["content"] == "124"
    events = {event.name: event for event in episode.events}
    assert (events["search"].kind, events["add"].kind) == ("retrieval", "tool")
    assert events["add"].arguments == {"a": 30, "b": 94} and "124" in str(events["add"].result)
    assert "30+94 is a sum" in str(events["search"].result)


def test_costs_that_langfuse_sends(tmp_path: Path) -> None:
    costs = iter(({"total": 0.00125}, {"input": 0.0004, "output": 0.0001}, {}))

    def with_costs(found: re.Match[str]) -> str:
        named = {"langfuse.observation.cost_details": json.dumps(next(costs))}
        return json.dumps(_pairs(named)[0]) + ", "

    text = (FOREIGN / "langfuse-5.0.4-otlp.json").read_text()
    text = re.sub(r'(?=\{"key": "langfuse.observation.usage_details")', with_costs, text)
    (tmp_path / "spans.json").write_text(text)
    [episode] = _import(tmp_path, tmp_path / "spans.json")
    assert [call.response["usage"]["cost"] for call in episode.calls] == [0.00125, 0.0005]


def _value_span(asked: object, answered: object, **more: Any) -> dict[str, Any]:
    """A model call as LangSmith's client sends it."""
    attributes = {"langsmith.span.kind": "llm", **more}
    for name, value in (("gen_ai.prompt", asked), ("gen_ai.completion", answered)):
        if value is not None:
            attributes[name] = value if isinstance(value, str) else json.dumps(value)
    return _otlp(attributes)


_HUMAN = {"lc": 1, "type": "constructor", "id": ["langchain", "schema", "messages", "HumanMessage"],
          "kwargs": {"content": "Hi"}}  # fmt: skip
_USER = {"role": "user", "content": "Hi"}
_SAID = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "so"}]}
_ITEM = {"type": "function_call", "call_id": "t", "name": "f", "arguments": '{"x": 1}'}
UNDERSTOOD: dict[str, tuple[Any, Any, list[Any]]] = {
    "text": ("Hi", "yes", [{"role": "assistant", "content": "yes"}]),
    "a function that Langfuse observes": (
        {"args": [[_USER]], "kwargs": {}},
        {"role": "assistant", "content": "yes"},
        [{"role": "assistant", "content": "yes"}],
    ),
    "two choices": (
        {"messages": [_USER]},
        {"choices": [{"message": {"role": "assistant", "content": text}} for text in "ab"]},
        [{"role": "assistant", "content": text} for text in "ab"],
    ),
    "Responses": (
        {"input": "Hi"},
        {"object": "response", "output": [_SAID, _ITEM]},
        [_SAID, _ITEM],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNDERSTOOD)
def test_input_and_output_as_values_keep_every_message_and_call(tmp_path: Path, name: str) -> None:
    asked, answered, replies = UNDERSTOOD[name]
    source = _lines(tmp_path / "spans.jsonl", _value_span(asked, answered))
    [episode] = _import(tmp_path, source)
    [call] = episode.calls
    assert request_messages(call.request) == [_USER]
    if "output" in call.response:
        assert call.response["output"] == replies
    else:
        assert [choice["message"] for choice in call.response["choices"]] == replies


NOT_UNDERSTOOD: dict[str, dict[str, Any]] = {
    "nothing": _otlp({"gen_ai.operation.name": "chat", "gen_ai.request.model": "m"}),
    "OpenLLMetry": _otlp({"llm.request.type": "chat", "gen_ai.prompt.0.content": "Hi"}),
    "Gemini": _value_span({"contents": [{"role": "user", "parts": [{"text": "Hi"}]}]}, "yes"),
    "a number": _otlp({"langsmith.span.kind": "llm", "gen_ai.prompt": 3}),
    "LangChain's own form": _value_span({"messages": [[_HUMAN]]}, "yes"),
    "LangChain's reply": _value_span("Hi", {"type": "ai", "content": "yes"}),
    "a batch": _value_span({"messages": [[_USER], [_USER]]}, "yes"),
    "JSON that was cut": _value_span('{"messages": [{"role": "us', "yes"),
    "an unknown role": _value_span([{"type": "constructor", "content": "Hi"}], "yes"),
    "a list of texts and numbers": _value_span(["Hi", 3], "yes"),
    "a cut list": _otlp({"gen_ai.operation.name": "chat", "gen_ai.input.messages": '[{"role": '}),
    "no part": _otlp({"gen_ai.operation.name": "chat", "gen_ai.input.messages": "[3]"}),
}


@pytest.mark.parametrize("name", NOT_UNDERSTOOD)
def test_a_model_call_that_is_not_understood_is_reported_and_not_counted(
    tmp_path: Path, name: str
) -> None:
    source = _lines(tmp_path / "spans.jsonl", NOT_UNDERSTOOD[name])
    done = import_files([source], tmp_path / "out.duckdb")
    assert (done.episodes, done.calls, done.understood) == (0, 0, False)
    assert any("model calls that were not understood" in reason for reason in done.left_out)
    arguments = ["trace", "import", str(source), "-o", str(tmp_path / "out.duckdb")]
    assert CliRunner().invoke(app, arguments).exit_code == 1


def test_beside_calls_that_are_understood_the_others_are_counted(tmp_path: Path) -> None:
    attributes, _ = CONVENTIONS["1.38"]
    whole = _otlp(attributes)
    spans = whole["resourceSpans"][0]["scopeSpans"][0]["spans"]
    other = _otlp({"gen_ai.operation.name": "chat"})["resourceSpans"][0]["scopeSpans"][0]["spans"]
    spans.append({**other[0], "spanId": "c" * 16})
    source = _lines(tmp_path / "spans.jsonl", whole)
    done = import_files([source], tmp_path / "out.duckdb")
    assert (done.episodes, done.calls, done.understood) == (1, 1, True)
    assert [n for reason, n in done.left_out.items() if "not understood" in reason] == [1]


_NO_LOGS = [
    {"choices": [1, 2, 3]},
    {"choices": []},
    {"choices": [{"label": "a"}], "question": "Which?"},
    {"input": {"a": 30}, "output": {"b": 1}},
    {"request": {"messages": [_USER]}, "response": {"value": 3}},
    {"request": {"model": "m"}, "response": {"choices": [{"message": _USER}]}},
    {"messages": [{"type": "human", "content": "Hi"}]},
]


@pytest.mark.parametrize("row", _NO_LOGS)
def test_a_row_that_only_looks_like_a_log_is_not_imported(tmp_path: Path, row: Any) -> None:
    source = _lines(tmp_path / "log.jsonl", row)
    done = import_files([source], tmp_path / "out.duckdb", "openai", skip_bad_rows=True)
    assert (done.episodes, done.bad_rows, done.understood) == (0, 1, False)


def test_logs_of_openais_responses(tmp_path: Path) -> None:
    said = {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": "4"}],
    }
    answer = {"id": "r", "object": "response", "created_at": 1767268800, "model": "gpt-5",
              "output": [{"type": "reasoning", "summary": []}, _ITEM, said]}  # fmt: skip
    request = {"model": "gpt-5", "instructions": "Be brief.", "input": "2+2?"}
    source = _lines(tmp_path / "log.jsonl", {"request": request, "response": answer}, answer)
    whole, bare = sorted(_import(tmp_path, source), key=lambda e: -len(e.task.main_query))
    assert whole.calls[0].request == request and whole.calls[0].response == answer
    assert whole.task.main_query == "2+2?" and bare.calls[0].response == answer


@pytest.mark.parametrize(
    "row",
    [
        {"id": "a", "trace_id": "a", "run_type": "llm", "inputs": {"messages": []}},
        {"id": "o", "traceId": "t", "startTime": "2026-01-02", "input": {"messages": [_USER]}},
        {"id": "t", "projectId": "p", "observations": []},
    ],
)
def test_exports_of_langsmith_and_langfuse_are_refused_with_the_way(
    tmp_path: Path, row: Any
) -> None:
    source = _lines(tmp_path / "export.jsonl", row)
    with pytest.raises(ConfigError, match="OTLP"):
        import_files([source], tmp_path / "out.duckdb")
    with pytest.raises(ConfigError, match="OTLP"):
        format_of("langfuse")


def test_the_help_names_every_format() -> None:
    assert set(re.findall(r"[\w-]+", FROM_HELP)) - {"auto", "or"} == set(SOURCES)


def test_the_policy_version_of_each_token_survives_an_export(tmp_path: Path) -> None:
    calls = [
        Call(call_id="c0", episode_id="e", index=0, prompt_ids=[1], output_ids=[2, 3, 4, 5],
             logprobs=[-1.0] * 4, policy_version=3, weight_updates=(1, 3, 3)),
        Call(call_id="c1", episode_id="e", index=1, prompt_ids=[1, 2, 3, 4, 5, 6], output_ids=[7, 8],
             logprobs=[-1.0] * 2, policy_version=6),
    ]  # fmt: skip
    with TraceWriter(tmp_path / "t.duckdb") as writer:
        placed = place_all(calls)
        writer.put(*placed, Episode(episode_id="e", calls=tuple(placed)))
    with open_trace(tmp_path / "t.duckdb") as trace:
        export(trace, ["e"], "tokens", tmp_path / "t.parquet")
    [row] = pq.read_table(tmp_path / "t.parquet").to_pylist()
    assert row["policy_versions"] == [-1, 3, 4, 4, 6, -1, 6, 6]
    del row["advantages"]  # unknown: there are no rewards
    lines = _lines(tmp_path / "rows.jsonl", row)
    (episode,) = _import(tmp_path, lines, "tokens")
    versions = [
        (call.policy_version, call.weight_updates, call.versions.tolist())
        for call in episode.calls
        if call.versions is not None
    ]
    assert versions == [(3, (1, 3, 3), [3, 4, 4, 6]), (6, (), [6, 6])]


def test_versions_that_fall_within_a_reply_are_refused(tmp_path: Path) -> None:
    row = {"token_ids": [1, 2, 3], "loss_mask": [0, 1, 1], "policy_versions": [-1, 2, 1]}
    with pytest.raises(TaskError, match=r"rows\.jsonl.*policy version 1"):
        _import(tmp_path, _lines(tmp_path / "rows.jsonl", row), "tokens")
