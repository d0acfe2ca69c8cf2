"""Every export format on a trace with tools, agents, forks, failures and hostile text; and back
where it has a way."""

from __future__ import annotations

import html.parser
import io
import json
import re
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from ajet_sdk.config.config import load_config
from ajet_sdk.engines.scripted import ByteTokenizer
from ajet_sdk.errors import ConfigError
from ajet_sdk.protocols import TraceReader
from ajet_sdk.samples.prefixes import place_all
from ajet_sdk.tasks.load import load_tasks
from ajet_sdk.trace.reader import episodes, open_trace
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Call, Episode, Event, Feedback, Reward, Run, Task, Trained
from ajet_tools.dataset.from_traces.choice import Choice
from ajet_tools.dataset.from_traces.export import export as export_trace
from ajet_tools.dataset.from_traces.sources import Sources
from ajet_tools.trace.export import FORMATS, Exported, export
from ajet_tools.trace.export.conversations import conversations
from ajet_tools.trace.imports import import_files
from ajet_tools.trace.queries.episodes import exported_ids

EVIL = "</pre><script>alert(1)</script><img src=x onerror=alert(1)> \x1b[31m \u202e 漢字 🙂 \ud800"
START = datetime(2026, 1, 1, 12, 0, 0, 123456, tzinfo=timezone.utc)
TOOLS = [
    {
        "type": "function",
        "function": {"name": "calc", "parameters": {"type": "object", "properties": {}}},
    }
]


def _ids(text: str) -> list[int]:
    return ByteTokenizer().encode(text)


class _Conversation:
    """Calls of one agent, each with the ids of all that was said before."""

    def __init__(self, episode: str, agent: str = "solver", tools: list[Any] | None = None) -> None:
        self.episode, self.agent, self.tools = episode, agent, tools
        self.messages: list[dict[str, Any]] = []
        self.text = ""
        self.calls: list[Call] = []

    def say(self, role: str, content: Any, **more: Any) -> None:
        self.messages.append({"role": role, "content": content, **more})
        self.text += f"<{role}>{content}"

    def reply(self, content: str | None, index: int, **more: Any) -> Call:
        message = {"role": "assistant", "content": content, **more}
        prompt, output = _ids(self.text), _ids(content or "{}")
        call = Call(
            call_id=f"{self.episode}-{index}",
            episode_id=self.episode,
            index=index,
            agent=self.agent,
            model="m",
            policy_version=3,
            request={
                "model": "m",
                "messages": list(self.messages),
                **({"tools": self.tools} if self.tools else {}),
            },
            response={
                "id": "x",
                "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            },
            prompt_ids=prompt,
            output_ids=output,
            logprobs=[-0.5] * len(output),
            finish_reason="stop",
            started_at=START + timedelta(seconds=index),
            ended_at=START + timedelta(seconds=index + 1),
            sampling={"temperature": 1.0, "seed": 7},
        )
        self.messages.append(message)
        self.text += content or "{}"
        self.calls.append(call)
        return call


EVENT = Event(
    name="calc",
    arguments={"expression": "2+2"},
    result={"content": [{"type": "text", "text": "4"}]},
    started_at=START,
    ended_at=START + timedelta(seconds=1),
    trace_id="a" * 32,
    span_id="b" * 16,
)


def _attempt(number: int, answer: str, reward: float, **changes: Any) -> Episode:
    """A solver with a tool, a critic, and a second sample from the solver's first prompt."""
    name = f"ep{number}"
    solver, critic = _Conversation(name, tools=TOOLS), _Conversation(name, "critic")
    solver.say("system", "Calculate.")
    solver.say("user", f"What is 2+2? {EVIL}")
    fork = _Conversation(name, tools=TOOLS)
    fork.messages, fork.text = list(solver.messages), solver.text
    arguments = '{"expression": "2+2"}'
    call = {"id": "t1", "type": "function", "function": {"name": "calc", "arguments": arguments}}
    solver.reply(None, 0, tool_calls=[call])
    solver.say("tool", "4", tool_call_id="t1")
    solver.reply(answer, 1)
    critic.say("user", f"Is {answer} right?")
    critic.reply("It is.", 2)
    fork.reply("Let me think.", 3)
    task = Task(task_id="sum", main_query="What is 2+2?", metadata={"answer": "4", "note": EVIL})
    fields: dict[str, Any] = {
        "episode_id": name, "run_id": "run", "group_id": "g", "attempt": number, "step": 4, "task": task,
        "output": answer, "calls": (*solver.calls, *critic.calls, *fork.calls), "metrics": {"x": 0.5},
        "events": (EVENT,),
        "rewards": (Reward(name="right", value=reward, reason=EVIL), Reward(name="clear", value=0.25, agent="critic")),
        "started_at": START + timedelta(minutes=number), "ended_at": START + timedelta(minutes=number, seconds=9),
    }  # fmt: skip
    return Episode(**{**fields, **changes})


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    config = {"ajet": {"model": {"scripted": "replies.jsonl"}, "backbone": "debug"}}
    failed = {
        "status": "failed",
        "error": f"Traceback: {EVIL}",
        "cause": "RuntimeError",
        "rewards": (),
    }
    made = [
        _attempt(0, "4", 1.0),
        _attempt(1, "5", 0.0),
        _attempt(2, "four", 0.5),
        _attempt(3, "22", 0.5),
        _attempt(4, "?", 0.0, **failed),
        Episode(
            episode_id="empty",
            run_id="run",
            group_id="h",
            task=Task(task_id="other", main_query="Nothing?"),
        ),
    ]
    with TraceWriter(tmp_path / "trace.duckdb") as writer:
        writer.put(Run(run_id="run", config=config, status="finished", started_at=START))
        for episode in made:
            writer.put(*episode.calls, episode)
        writer.put(Feedback(episode_id="ep1", correction="4, of course", author="ann"))
        writer.put(Feedback(episode_id="ep0", correction="4", author="bob", call_id="ep0-1"))
        size = len(made[0].calls[1].output_ids or ())
        values = [0.75] * size
        writer.put(
            Trained(
                run_id="run",
                step=4,
                episode_id="ep0",
                call_id="ep0-1",
                advantages=values,
                logprobs=values,
                entropy=values,
            )
        )
    return tmp_path / "trace.duckdb"


@pytest.fixture
def reader(trace: Path) -> Iterator[TraceReader]:
    with open_trace(trace) as opened:
        yield opened


def _export(
    reader: TraceReader, format: Any, target: Path, **options: Any
) -> tuple[Exported, list[dict[str, Any]]]:
    done = export(reader, exported_ids(reader), format, target, **options)
    return done, (
        [json.loads(line) for line in target.read_text().splitlines()]
        if target.suffix == ".jsonl"
        else []
    )


def test_tasks_are_read_back_by_the_task_reader(reader: TraceReader, tmp_path: Path) -> None:
    undisputed = Choice(episodes=("ep2", "ep3", "empty"))
    out = tmp_path / "tasks.jsonl"
    done = export_trace(Sources(reader, ("trace",)), "tasks", out, undisputed)
    assert (done.rows, done.episodes) == (2, 3)
    section = {
        "type": "jsonl_dataset_file",
        "jsonl_dataset_file": {"training": {"file_path": str(tmp_path / "tasks.jsonl")}},
    }
    config = load_config(values={"ajet": {"task_reader": section}})
    tasks = {episode.task.task_id: episode.task for episode in episodes(reader)}
    loaded = {task.task_id: task for task in load_tasks(config).train}
    assert loaded.keys() == tasks.keys()
    for task_id, task in loaded.items():
        assert task.main_query == tasks[task_id].main_query
        assert task.metadata.items() >= tasks[task_id].metadata.items()


def test_messages_hold_every_reply_once_with_its_call(reader: TraceReader, tmp_path: Path) -> None:
    done, rows = _export(reader, "messages", tmp_path / "chats.jsonl")
    assert done.left_out == {"episodes without a chat reply": 1} and done.episodes == 5
    mine = [row for row in rows if row["episode_id"] == "ep0"]
    assert [(row["agent"], len(row["messages"]), row["reward"]) for row in mine] == [
        ("solver", 5, 1.0), ("critic", 2, 1.25), ("solver", 3, 1.0),
    ]  # fmt: skip
    assert mine[0]["tools"] == TOOLS and mine[1]["tools"] is None
    assert [c["call_id"] for row in mine for c in row["calls"]] == [
        "ep0-0",
        "ep0-1",
        "ep0-2",
        "ep0-3",
    ]
    for row in rows:
        assert all(row["messages"][call["message"]]["role"] == "assistant" for call in row["calls"])


def test_agents_that_say_the_same_do_not_share_a_conversation(tmp_path: Path) -> None:
    calls = []
    for index, agent in enumerate(("one", "two")):
        talk = _Conversation("e", agent)
        talk.say("user", "Hello?")
        talk.reply("Hello.", 2 * index)
        talk.say("user", "And now?")
        talk.reply("Bye.", 2 * index + 1)
        calls += talk.calls
    found = conversations(Episode(episode_id="e", calls=tuple(calls[i] for i in (0, 2, 3, 1))))
    assert [(c.agent, [place for _, place in c.turns]) for c in found] == [
        ("one", [1, 3]),
        ("two", [1, 3]),
    ]
    assert [call_id for call_id, _ in found[1].turns] == ["e-2", "e-3"]


@pytest.mark.parametrize("format", ["messages", "otlp"])
def test_import_of_an_export_gives_equal_episodes_for_what_the_format_holds(
    reader: TraceReader, tmp_path: Path, format: str
) -> None:
    first = tmp_path / "first.jsonl"
    _export(reader, format, first)
    import_files([first], tmp_path / "back.duckdb")
    with open_trace(tmp_path / "back.duckdb") as back:
        found = {episode.episode_id: episode for episode in episodes(back)}
        again, _ = _export(back, format, tmp_path / "second.jsonl")
    if format == "messages":
        assert sorted((tmp_path / "second.jsonl").read_text().splitlines()) == sorted(
            first.read_text().splitlines()
        )
    assert again.rows > 0
    for before in episodes(reader):
        if format == "messages" and not before.calls:
            continue
        after = found[before.episode_id]
        if format == "otlp":
            without = {"prompt_ids": None, "output_ids": None, "logprobs": None}
            calls = tuple(place_all(call.model_copy(update=without) for call in before.calls))
            assert after == before.model_copy(update={"calls": calls})
            continue
        assert [c.call_id for c in after.calls] == [c.call_id for c in before.calls]
        for one, other in zip(after.calls, before.calls, strict=True):
            assert one.request["messages"] == other.request["messages"] and one.agent == other.agent
            assert one.request.get("tools") == other.request.get("tools")
            assert one.response["choices"][0]["message"] == other.response["choices"][0]["message"]
            assert after.value(one.agent) == before.value(one.agent)
        same = ("run_id", "group_id", "attempt", "step", "split", "status")
        assert [getattr(after, name) for name in same] == [getattr(before, name) for name in same]
        assert after.task.task_id == before.task.task_id


def test_sharegpt(reader: TraceReader, tmp_path: Path) -> None:
    _, rows = _export(reader, "sharegpt", tmp_path / "s.jsonl")
    said = rows[0]["conversations"]
    assert [part["from"] for part in said] == [
        "system",
        "human",
        "function_call",
        "observation",
        "gpt",
    ]
    assert json.loads(said[2]["value"]) == {"name": "calc", "arguments": {"expression": "2+2"}}
    assert json.loads(rows[0]["tools"])[0]["name"] == "calc" and rows[1]["tools"] == ""


def test_trl_prompts_have_one_reply_each(reader: TraceReader, tmp_path: Path) -> None:
    _, rows = _export(reader, "trl-prompt", tmp_path / "p.jsonl")
    assert [row["call_id"] for row in rows if row["episode_id"] == "ep0"] == [
        "ep0-0",
        "ep0-1",
        "ep0-2",
        "ep0-3",
    ]
    assert all(
        len(row["completion"]) == 1 and row["completion"][0]["role"] == "assistant" for row in rows
    )


def test_trl_preferences_pair_better_with_worse_and_ties_give_none(
    reader: TraceReader, tmp_path: Path
) -> None:
    done, rows = _export(reader, "preferences", tmp_path / "p.jsonl")
    pairs = [
        (r["chosen_episode_id"], r["rejected_episode_id"], r["agent"])
        for r in rows
        if r["source"] == "reward"
    ]
    assert ("ep0", "ep1", "solver") in pairs and not any(
        {"ep2", "ep3"} == {a, b} for a, b, _ in pairs
    )
    row = next(r for r in rows if r["agent"] == "solver" and r["source"] == "reward")
    assert [m["role"] for m in row["prompt"]] == ["system", "user", "assistant", "tool"]
    assert (row["chosen"][0]["content"], row["rejected"][0]["content"]) == ("4", "5")
    assert done.left_out["attempts without success"] == 1
    corrected = [r for r in rows if r["source"] == "feedback"]
    assert [(r["chosen"][0]["content"], r["rejected"][0]["content"]) for r in corrected] == [
        ("4, of course", "Let me think.")
    ]
    assert done.left_out["corrections identical to the reply"] == 1
    tied = "groups in which no two rewards differ by more than the margin"
    wide = _export(reader, "preferences", tmp_path / "w.jsonl", margin=1.0)
    assert wide[0].left_out[tied] > done.left_out.get(tied, 0)
    assert not [r for r in wide[1] if r["source"] == "reward"], (
        "a difference of the margin is not more than it"
    )


def test_what_is_made_for_trl_is_loaded_by_datasets_and_trl(
    reader: TraceReader, tmp_path: Path
) -> None:
    datasets = pytest.importorskip("datasets")
    data_utils = pytest.importorskip("trl.data_utils")
    datasets.disable_progress_bars()
    for format in ("trl-prompt", "preferences"):
        path = tmp_path / f"{format}.jsonl"
        _, rows = _export(reader, format, path)
        loaded = datasets.load_dataset(
            "json", data_files=str(path), split="train", cache_dir=str(tmp_path / "cache")
        )
        assert len(loaded) == len(rows)
        for example, row in zip(loaded, rows, strict=True):
            assert data_utils.is_conversational(example)
            columns = (
                ("prompt", "completion")
                if format == "trl-prompt"
                else ("prompt", "chosen", "rejected")
            )
            for column in columns:
                assert [m["content"] for m in example[column]] == [
                    m["content"] for m in row[column]
                ]


def test_tokens_agree_with_the_calls_and_say_where_advantages_are_from(
    reader: TraceReader, tmp_path: Path
) -> None:
    done = export(reader, exported_ids(reader), "tokens", tmp_path / "t.parquet")
    table = pq.read_table(tmp_path / "t.parquet").to_pylist()
    assert done.left_out == {"episodes without token ids": 1} and done.rows == len(table)
    calls = {call.call_id: call for episode in episodes(reader) for call in episode.calls}
    trained: list[str] = []
    for row in table:
        ids, mask = np.array(row["token_ids"]), np.array(row["loss_mask"])
        covered = np.zeros(len(ids), bool)
        for span in row["spans"]:
            call = calls[span["call_id"]]
            assert call.output_ids is not None and call.prompt_ids is not None
            assert ids[span["start"] : span["end"]].tolist() == call.output_ids.tolist()
            assert ids[: span["start"]].tolist() == call.prompt_ids.tolist()
            covered[span["start"] : span["end"]] = True
            trained.append(span["call_id"])
        assert (covered == mask).all() and not np.array(row["advantages"])[~mask].any()
    assert sorted(trained) == sorted(calls), "each sampled reply is masked in exactly once"
    first = next(row for row in table if row["spans"][0]["call_id"] == "ep0-0")
    start, end = first["spans"][1]["start"], first["spans"][1]["end"]
    assert (
        first["advantages"][start:end] == [0.75] * (end - start)
        and first["advantage_source"] == "computed+trained"
    )
    values = [1.0, 0.0, 0.5, 0.5]
    expected = (1.0 - np.mean(values)) / (np.std(values, ddof=1) + 1e-6)
    start = first["spans"][0]["start"]
    assert first["advantages"][start] == pytest.approx(expected, rel=1e-3)
    failed = [row for row in table if row["episode_id"] == "ep4"]
    assert failed and all(
        np.isnan(np.array(row["advantages"])[np.array(row["loss_mask"])]).all() for row in failed
    )


def test_a_part_of_a_group_has_the_advantages_of_the_whole(
    reader: TraceReader, tmp_path: Path
) -> None:
    export(reader, exported_ids(reader), "tokens", tmp_path / "all.parquet")
    export(reader, ["ep1"], "tokens", tmp_path / "one.parquet")
    whole = [
        row
        for row in pq.read_table(tmp_path / "all.parquet").to_pylist()
        if row["episode_id"] == "ep1"
    ]
    assert pq.read_table(tmp_path / "one.parquet").to_pylist() == whole


def test_episodes_with_text_to_redact_have_no_tokens(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "t.duckdb") as writer:
        for name, text in (("a", "mail bob@example.com"), ("b", "fine")):
            call = Call(call_id=name, episode_id=name, request={"messages": [{"role": "user", "content": text}]},
                        response={"choices": [{"message": {"role": "assistant", "content": "ok"}}]},
                        prompt_ids=[1], output_ids=[2], logprobs=[0.0])  # fmt: skip
            writer.put(call, Episode(episode_id=name, run_id="r", rewards=(Reward(value=1),)))
    with open_trace(tmp_path / "t.duckdb") as opened:
        done = export(opened, ["a", "b"], "tokens", tmp_path / "t.parquet")
        assert done.episodes == 1 and done.redacted == {"email": 1}
        assert done.left_out["episodes with text to redact (use --no-redact to include them)"] == 1
        assert (
            export(opened, ["a", "b"], "tokens", tmp_path / "t.parquet", redact=False).episodes == 2
        )
        _, rows = _export(opened, "messages", tmp_path / "m.jsonl")
        assert rows[0]["messages"][0]["content"] == "mail [email 1]"


class _Page(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_page_shows_everything_and_runs_and_fetches_nothing(
    reader: TraceReader, tmp_path: Path
) -> None:
    export(reader, exported_ids(reader), "html", tmp_path / "page.html")
    source = (tmp_path / "page.html").read_text()
    page = _Page()
    page.feed(source)
    assert not page.tags & {"script", "img", "link", "iframe", "object", "base", "svg"}
    assert not page.attributes & {"onerror", "src", "href", "action"}
    assert (
        "http:" not in source
        and "https:" not in source
        and "url(" not in source
        and "@import" not in source
    )
    assert "default-src 'none'" in source and "prefers-color-scheme: dark" in source
    assert "<script>alert(1)</script>" in page.text, "hostile text is shown as text"
    assert "\x1b" not in source and "\u202e" not in source and "漢字 🙂" in page.text
    for part in (
        "ep0",
        "ep4",
        "failed",
        "Calculate.",
        "Traceback:",
        "right",
        "ann",
        "4, of course",
        "critic",
    ):
        assert part in page.text, part
    assert 'title="id ' in source and "log-probability -0.5000, advantage 0.75" in source


def stop(done: int, total: int) -> None:
    raise RuntimeError("stopped")


@pytest.mark.parametrize("format", FORMATS)
def test_a_file_appears_whole_or_not_at_all(
    reader: TraceReader, tmp_path: Path, format: Any
) -> None:
    target = tmp_path / "out" / "file"
    with pytest.raises(RuntimeError, match="stopped"):
        export(reader, exported_ids(reader), format, target, progress=stop)
    assert list(target.parent.iterdir()) == []
    seen: list[tuple[int, int]] = []
    export(
        reader,
        exported_ids(reader),
        format,
        target,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert list(target.parent.iterdir()) == [target] and seen[-1] == (6, 6)
    stream = io.BytesIO()
    export(reader, exported_ids(reader), format, stream)
    assert stream.getvalue() == target.read_bytes(), "the same on a stream"


def test_an_export_never_takes_the_place_of_a_trace(reader: TraceReader, trace: Path) -> None:
    with pytest.raises(ConfigError, match="is a trace"):
        export(reader, ["ep0"], "messages", trace)
    with pytest.raises(ConfigError, match="no export format 'csv'; formats: messages"):
        export(reader, ["ep0"], "csv", trace)  # type: ignore[arg-type]


def test_otlp_is_what_its_schema_says(reader: TraceReader, tmp_path: Path) -> None:
    _, rows = _export(reader, "otlp", tmp_path / "o.jsonl")
    ids: set[str] = set()
    for row in rows:
        spans = row["resourceSpans"][0]["scopeSpans"][0]["spans"]
        root, *below = spans
        assert len({span["traceId"] for span in spans}) == 1 and "parentSpanId" not in root
        for span in spans:
            assert re.fullmatch("[0-9a-f]{32}", span["traceId"]) and re.fullmatch(
                "[0-9a-f]{16}", span["spanId"]
            )
            assert span["spanId"] not in ids
            ids.add(span["spanId"])
            assert int(span["startTimeUnixNano"]) <= int(span["endTimeUnixNano"])
        assert all(span["parentSpanId"] == root["spanId"] for span in below)
    attributes = {
        a["key"]: a["value"]
        for a in rows[0]["resourceSpans"][0]["scopeSpans"][0]["spans"][1]["attributes"]
    }
    asked = json.loads(attributes["gen_ai.input.messages"]["stringValue"])
    assert asked[0] == {"role": "system", "parts": [{"type": "text", "content": "Calculate."}]}
    said = json.loads(attributes["gen_ai.output.messages"]["stringValue"])
    expected = {"type": "tool_call", "id": "t1", "name": "calc", "arguments": {"expression": "2+2"}}
    assert said[0]["parts"] == [expected] and said[0]["finish_reason"] == "stop"
    assert attributes["gen_ai.operation.name"] == {"stringValue": "chat"}
    assert attributes["gen_ai.usage.input_tokens"]["intValue"].isdigit()
    assert attributes["gen_ai.request.seed"] == {"intValue": "7"}
    tool = rows[0]["resourceSpans"][0]["scopeSpans"][0]["spans"][-1]
    of = {a["key"]: a["value"].get("stringValue") for a in tool["attributes"]}
    assert tool["name"] == "execute_tool calc" and of["gen_ai.operation.name"] == "execute_tool"
    assert json.loads(of["gen_ai.tool.call.arguments"]) == EVENT.arguments
    assert tool["links"] == [{"traceId": EVENT.trace_id, "spanId": EVENT.span_id}]
    protobuf = pytest.importorskip("google.protobuf.json_format")
    service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    for row in rows:
        protobuf.ParseDict(row, service.ExportTraceServiceRequest())
