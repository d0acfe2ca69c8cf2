"""Other tools' traces: each convention, written as its tool writes it, comes in with all that it
says and no more."""

from __future__ import annotations

import json
import re
import sqlite3
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from ajet_sdk.errors import ConfigError, TaskError, TraceError
from ajet_sdk.trace.reader import episodes, open_trace
from ajet_sdk.types import Episode, Run
from ajet_tools.cli.trace.options import FROM_HELP
from ajet_tools.trace.files.check import check
from ajet_tools.trace.imports import SOURCES, SourceFormat, import_files, recognised
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
    "OpenLLMetry": (
        {
            "llm.request.type": "chat",
            "gen_ai.prompt.0.role": "system",
            "gen_ai.prompt.0.content": ASKED[0]["content"],
            "gen_ai.prompt.1.role": "user",
            "gen_ai.prompt.1.content": ASKED[1]["content"],
            "gen_ai.completion.0.role": "assistant",
            "gen_ai.completion.0.tool_calls.0.id": "t1",
            "gen_ai.completion.0.tool_calls.0.name": "calc",
            "gen_ai.completion.0.tool_calls.0.arguments": '{"e": "2+2"}',
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


def test_agent_lightning_with_token_ids_and_rewards(tmp_path: Path) -> None:
    base = {"rollout_id": "ro-1", "attempt_id": "at-1", "trace_id": TRACE, "status": {"status_code": "OK"},
            "events": [], "links": [], "resource": {"attributes": {}, "schema_url": ""}}  # fmt: skip
    attributes = {
        **CONVENTIONS["OpenLLMetry"][0],
        "prompt_token_ids": [1, 2],
        "response_token_ids": [3],
    }
    call = {**base, "sequence_id": 1, "span_id": SPAN, "parent_id": None, "name": "openai.chat.completion",
            "attributes": attributes, "start_time": 1767268800.0, "end_time": 1767268801.5}  # fmt: skip
    scored = {"agentlightning.reward.0.name": "primary", "agentlightning.reward.0.value": 0.75}
    reward = {**base, "sequence_id": 2, "span_id": ROOT, "parent_id": None, "name": "agentlightning.annotation",
              "attributes": scored, "start_time": 1767268802.0, "end_time": 1767268802.0}  # fmt: skip
    (episode,) = _import(tmp_path, _lines(tmp_path / "agl.jsonl", call, reward))
    (only,) = episode.calls
    assert only.prompt_ids is not None and only.prompt_ids.tolist() == [1, 2] and only.trainable
    assert [(r.name, r.value) for r in episode.rewards] == [("primary", 0.75)]
    assert episode.task.metadata == {"rollout": "ro-1:at-1"}
    assert (episode.ended_at - episode.started_at).total_seconds() == 2


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
    "format", ["openai", "otlp", "verifiers-v1", "agent-lightning", "openinference", "native"]
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
            "agent-lightning",
            {"rollout_id": "r", "span_id": "5", "attributes": "x"},
            "attributes is not an object",
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
"""Written by the packages themselves, in the versions of the names: what LangSmith's client sent
for an agent with `traceable` and `wrap_openai`, as its `Run`s; what Langfuse's sent over OTLP, and
the same as a page of its API."""


@pytest.mark.parametrize(
    "name", ["langsmith-0.15.1.jsonl", "langfuse-5.0.4.json", "langfuse-5.0.4-otlp.json"]
)
def test_what_langsmith_and_langfuse_write_is_calls_tools_retrievals_and_errors(
    tmp_path: Path, name: str
) -> None:
    episode, *others = sorted(_import(tmp_path, FOREIGN / name), key=lambda e: e.started_at)
    assert episode.task.main_query == "What is 30+94?" and episode.status == "succeeded"
    assert str(episode.output) == "124" and episode.ended_at > episode.started_at
    first, last = episode.calls
    assert first.model == "gpt-4o-mini" and first.request["tools"][0]["function"]["name"] == "add"
    assert first.request["messages"] == [
        {"role": "system", "content": "Calculate."}, {"role": "user", "content": "What is 30+94?"},
    ]  # fmt: skip
    assert first.sampling["temperature"] == 0.5
    assert first.response["usage"] == {"prompt_tokens": 20, "completion_tokens": 5}
    called = {
        "id": "c1",
        "type": "function",
        "function": {"name": "add", "arguments": '{"a": 30, "b": 94}'},
    }
    assert first.response["choices"][0]["message"]["tool_calls"] == [called]
    assert last.request["messages"][-1] == {"role": "tool", "content": "124", "tool_call_id": "c1"}
    assert last.response["choices"][0]["message"]["content"] == "124"
    events = {event.name: event for event in episode.events}
    assert {name: event.kind for name, event in events.items()} == {
        "search": "retrieval", "add": "tool", "broken": "tool",
    }  # fmt: skip
    assert events["add"].arguments == {"a": 30, "b": 94} and str(events["add"].result) == "124"
    assert "no such number" in (events["broken"].error or "") and "30+94 is a sum" in str(
        events["search"].result
    )
    assert [(e.status, e.error, len(e.calls)) for e in others] == (
        [("failed", "RuntimeError('gave up')", 1)] if "langsmith" in name else []
    )


@pytest.mark.parametrize("name", ["langsmith-0.15.1.jsonl", "langfuse-5.0.4.json"])
def test_the_installed_packages_write_what_is_stored(tmp_path: Path, name: str) -> None:
    """Read and written again by the package that is installed, a stored file is imported as the
    same episodes."""
    text = (FOREIGN / name).read_text()
    if "langsmith" in name:
        runs = pytest.importorskip("langsmith.schemas").Run
        written = "\n".join(
            runs.model_validate_json(line).model_dump_json() for line in text.splitlines()
        )
    else:
        pages = pytest.importorskip("langfuse.api.observations.types").ObservationsV2Response
        parse = pytest.importorskip("langfuse.api.core.pydantic_utilities").parse_obj_as
        written = parse(pages, json.loads(text)).json()
    (tmp_path / name).write_text(written)
    (tmp_path / "stored").mkdir()
    stored = {
        episode.episode_id: episode for episode in _import(tmp_path / "stored", FOREIGN / name)
    }
    for episode in _import(tmp_path, tmp_path / name):
        before = stored.pop(episode.episode_id)
        assert episode.model_copy(update={"run_id": before.run_id}) == before
    assert not stored


def test_rows_of_langfuse_and_langchain_in_all_their_spellings(tmp_path: Path) -> None:
    human = {"lc": 1, "type": "constructor", "id": ["langchain", "schema", "messages", "HumanMessage"],
             "kwargs": {"content": "Hi", "type": "human"}}  # fmt: skip
    said = {"type": "ai", "content": "", "tool_calls": [{"name": "f", "args": {"x": 1}, "id": "t"}]}
    run = {"id": "a-1", "trace_id": "a-1", "name": "ChatOpenAI", "run_type": "llm", "start_time": "2026-01-01T00:00:00",
           "inputs": {"messages": [[human]]}, "outputs": {"generations": [[{"message": {"kwargs": said}}]]},
           "feedback_stats": {"right": {"n": 2, "avg": 0.5}}}  # fmt: skip
    observation = {"id": "o", "trace_id": "t", "project_id": "p", "type": "GENERATION", "name": "g", "level": "ERROR",
                   "start_time": "2026-01-02T00:00:00Z", "status_message": "429", "input": "Hi",
                   "output": "Hello"}  # fmt: skip
    traced = {"id": "t2", "timestamp": "2026-01-03T00:00:00Z", "projectId": "p", "name": "chat", "input": {"q": "Hi"},
              "output": "Hello", "scores": [{"name": "good", "value": 1, "comment": "yes"}],
              "observations": [{**observation, "level": "DEFAULT", "trace_id": "t2"}]}  # fmt: skip
    found = []
    for name, row in {"run": run, "observation": observation, "traced": traced}.items():
        (tmp_path / name).mkdir()
        found += _import(tmp_path / name, _lines(tmp_path / f"{name}.jsonl", row))
    call = {"id": "t", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    assert [e.calls[0].request["messages"] for e in found] == [
        [{"role": "user", "content": "Hi"}]
    ] * 3
    assert found[0].calls[0].response["choices"][0]["message"]["tool_calls"] == [call]
    assert (
        found[1].calls[0].error == "429"
        and found[1].calls[0].response["choices"][0]["message"]["content"] == "Hello"
    )
    assert (
        found[2].task.main_query == "Hi"
        and found[2].output == "Hello"
        and found[2].ended_at.day == 3
    )
    assert [[(r.name, r.value, r.reason) for r in e.rewards] for e in found] == [
        [("right", 0.5, None)], [], [("good", 1.0, "yes")],
    ]  # fmt: skip


@pytest.mark.parametrize(
    "name", ["langsmith-0.15.1.jsonl", "langfuse-5.0.4.json", "langfuse-5.0.4-otlp.json"]
)
def test_costs_are_those_that_langsmith_and_langfuse_computed(tmp_path: Path, name: str) -> None:
    """`Run.total_cost` (a decimal, so a string), `costDetails` and `totalCost`, and what Langfuse's
    SDK sends."""
    text = (FOREIGN / name).read_text()
    if "langsmith" in name:
        rows = [json.loads(line) for line in text.splitlines()]
        calls = [row for row in rows if row["run_type"] == "llm"]
        calls[0] |= {"total_cost": "0.00125", "prompt_cost": "0.001", "completion_cost": "0.00025"}
        calls[1]["outputs"]["usage_metadata"] |= {"total_cost": 0.0005}
        text = "\n".join(map(json.dumps, rows))
    elif "otlp" in name:
        costs = iter(({"total": 0.00125}, {"input": 0.0004, "output": 0.0001}, {}))
        text = re.sub(
            r'(?=\{"key": "langfuse.observation.usage_details")',
            lambda _: (
                json.dumps(
                    _pairs({"langfuse.observation.cost_details": json.dumps(next(costs))})[0]
                )
                + ", "
            ),
            text,
        )
    else:
        page = json.loads(text)
        first, second, *_ = (of for of in page["data"] if of["type"] == "GENERATION")
        first["costDetails"], second["totalCost"] = {"input": 0.001, "output": 0.00025}, 0.0005
        text = json.dumps(page)
    (tmp_path / name).write_text(text)
    episode, *_ = sorted(_import(tmp_path, tmp_path / name), key=lambda e: e.started_at)
    assert [call.response["usage"]["cost"] for call in episode.calls] == [0.00125, 0.0005]


@pytest.mark.parametrize("wrapped", [False, True])
def test_usage_as_openai_gives_it_in_a_run_of_langsmith(tmp_path: Path, wrapped: bool) -> None:
    reply = {"choices": [{"message": {"role": "assistant", "content": "Hello"}}],
             "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5, "cost": 0.25}}  # fmt: skip
    run = {"id": "a", "trace_id": "a", "name": "call", "run_type": "llm", "start_time": "2026-01-01T00:00:00",
           "inputs": {"messages": [{"role": "user", "content": "Hi"}]},
           "outputs": {"output": reply} if wrapped else reply}  # fmt: skip
    [episode] = _import(tmp_path, _lines(tmp_path / "run.jsonl", run))
    assert episode.calls[0].response["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "cost": 0.25,
    }


def test_the_help_names_every_format() -> None:
    assert set(re.findall(r"[\w-]+", FROM_HELP)) - {"auto", "or"} == set(SOURCES)
