"""`ajet trace export`: what people said of an agent in service, as data to learn from."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner, Result

from ajet_sdk.config.config import load_config
from ajet_sdk.engines.scripted import ByteTokenizer
from ajet_sdk.tasks.load import load_tasks
from ajet_sdk.trace.feedback import give
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Call, Episode, Feedback, Reward, Run, Task
from ajet_tools.cli.app import app
from ajet_tools.dataset.generate.seeds import read_seeds
from tests.waiting import until

START = datetime(2026, 1, 1, 12, tzinfo=timezone.utc)
Message = dict[str, Any]


def call(name: str, index: int, messages: Sequence[Message], reply: Message, **more: Any) -> Call:
    return Call(
        call_id=f"{name}-{index}",
        episode_id=name,
        index=index,
        request={"messages": list(messages)},
        response={"choices": [{"index": 0, "message": {"role": "assistant", **reply}}]},
        started_at=START + timedelta(seconds=index),
        ended_at=START + timedelta(seconds=index + 1),
        **more,
    )


def asking(question: str) -> list[Message]:
    return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": question}]


def episode(name: str, question: str, output: str, at: int = 0, **more: Any) -> Episode:
    """One question to an agent in service, answered in one call."""
    fields: dict[str, Any] = {
        "episode_id": name, "run_id": "run", "group_id": name, "output": output,
        "task": Task(main_query=question, env_type="solve", metadata={"question": question}),
        "calls": (call(name, 0, asking(question), {"content": output}),),
        "started_at": START + timedelta(minutes=at), "ended_at": START + timedelta(minutes=at, seconds=5),
    }  # fmt: skip
    return Episode(**{**fields, **more})


def trace(path: Path, *found: Episode, feedback: Sequence[Feedback] = (), run: str = "run") -> Path:
    with TraceWriter(path) as writer:
        writer.put(Run(run_id=run, name="in service", status="finished", started_at=START))
        for one in found:
            writer.put(*one.calls, one)
    give(path, *feedback)
    return path


def said(
    name: str, score: float | None = None, correction: str | None = None, at: int = 0, **more: Any
) -> Feedback:
    return Feedback(
        episode_id=name, score=score, correction=correction, at=START + timedelta(hours=at), **more
    )


def made(*arguments: Any, code: int = 0, stdin: str | None = None) -> Result:
    given = list(map(str, arguments))
    if "--format" not in given:
        given += ["--format", "tasks"]
    result = CliRunner().invoke(app, ["trace", "export", *given], input=stdin)
    assert result.exit_code == code, result.output
    return result


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(autouse=True)
def _apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("OPENAI_BASE_URL", "OPENAI_MODEL", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four questions: one liked, one corrected (asked twice), one disliked, one that nobody spoke
    of."""
    return trace(
        tmp_path_factory.mktemp("served") / "trace.duckdb",
        episode("liked", "What is 1+1?", "2"),
        episode("wrong", "What is 2+2?", "5", 1),
        episode("again", "What is 2+2?", "4", 2),
        episode("bad", "What is 3+3?", "no idea", 3),
        episode("silent", "What is 4+4?", "8", 4),
        feedback=[said("liked", 1.0), said("wrong", 0.0, "4"), said("bad", 0.0, comment="gave up")],
    )


@pytest.fixture
def service(served: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(served, tmp_path))


# Tasks


def test_a_correction_is_the_answer_and_the_same_task_is_one_row(service: Path) -> None:
    result = made(service, "-o", "tasks.jsonl")
    found = {row["main_query"]: row for row in rows(Path("tasks.jsonl"))}
    assert list(found) == ["What is 1+1?", "What is 2+2?", "What is 3+3?", "What is 4+4?"]
    row = found["What is 2+2?"]
    assert row["metadata"] == {"question": "What is 2+2?", "answer": "4"}
    assert row["init_messages"] == asking("What is 2+2?")
    of = row["provenance"]
    assert (of["source"], of["episodes"], of["attempts"], of["answer_from"]) == (
        "trace",
        ["wrong", "again"],
        2,
        "correction",
    )
    assert of["seeds"] == [row["task_id"]]
    assert all("answer" not in found[q]["metadata"] for q in found if q != "What is 2+2?")
    assert "4 tasks into tasks.jsonl, from 5 of 5 episodes" in result.stderr
    assert "answers: 3 without one, 1 corrected by people" in result.stderr


def test_an_output_that_people_liked_is_an_answer_where_that_is_asked_for(service: Path) -> None:
    made(service, "--accept-outputs", "--need-answer", "-o", "tasks.jsonl")
    answers = {row["main_query"]: row["metadata"]["answer"] for row in rows(Path("tasks.jsonl"))}
    assert answers == {"What is 1+1?": "2", "What is 2+2?": "4"}
    apart = rows(Path("tasks.rejected.jsonl"))
    assert {(row["main_query"], row["reason"]) for row in apart} == {
        ("What is 3+3?", "no answer is known"), ("What is 4+4?", "no answer is known"),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("output", "answer"),
    [
        ("So the answer is **42**.", "42"),
        (r"Half of 84: \boxed{42}", "42"),
        ("We add.\nANSWER: Paris", "Paris"),
        ("1,234.0", "1,234.0"),
        ("The answer is Paris.", "Paris"),
        ("It is 42 apples.", "It is 42 apples."),
        ("My answer: roses are red", "My answer: roses are red"),
    ],
)
def test_the_value_of_an_output_that_people_liked_is_the_answer_where_a_judge_can_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str, answer: str
) -> None:
    monkeypatch.chdir(tmp_path)
    trace(
        tmp_path / "trace.duckdb",
        episode("liked", "What is it?", output),
        feedback=[said("liked", 1.0)],
    )
    made("trace.duckdb", "--accept-outputs", "-o", "tasks.jsonl")
    assert [row["metadata"]["answer"] for row in rows(Path("tasks.jsonl"))] == [answer]


def test_training_reads_what_was_made(service: Path) -> None:
    made(service, "--feedback", "corrected", "-o", "tasks.jsonl")
    where = {
        "task_reader": {
            "type": "jsonl_dataset_file",
            "jsonl_dataset_file": {"training": {"file_path": "tasks.jsonl"}},
        }
    }
    [task] = load_tasks(load_config(None, [], where)).train
    assert (task.main_query, task.metadata["answer"], len(task.init_messages)) == (
        "What is 2+2?",
        "4",
        2,
    )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--feedback", "up"], {"What is 1+1?"}),
        (["--feedback", "down"], {"What is 2+2?", "What is 3+3?"}),
        (["--feedback", "up", "--feedback", "corrected"], {"What is 1+1?", "What is 2+2?"}),
        (["--filter", "no idea"], {"What is 3+3?"}),
        (["--filter", "feedback is not null", "--feedback", "up"], {"What is 1+1?"}),
    ],
)
def test_only_what_fits_becomes_a_row(
    service: Path, arguments: list[str], expected: set[str]
) -> None:
    made(service, *arguments, "-o", "tasks.jsonl")
    assert {row["main_query"] for row in rows(Path("tasks.jsonl"))} == expected


@pytest.mark.slow
def test_who_speaks_twice_is_heard_once_and_the_last_time(tmp_path: Path) -> None:
    file = trace(
        tmp_path / "t.duckdb",
        episode("one", "A?", "a"),
        episode("two", "B?", "b"),
        feedback=[
            said("one", 0.0, author="Ann"),
            said("one", 1.0, author="Ann", at=1),
            said("two", 1.0, author="Ann"),
            said("two", 0.0, author="Bob"),
        ],
    )
    made(file, "--feedback", "up", "-o", "up.jsonl")
    assert [row["main_query"] for row in rows(Path("up.jsonl"))] == ["A?"]
    assert "none of 2 episodes matches" in made(file, "--feedback", "down", code=2).stderr


def test_corrections_that_contradict_each_other_are_kept_apart(tmp_path: Path) -> None:
    file = trace(
        tmp_path / "t.duckdb",
        *(episode(name, "Capital?", "?", i) for i, name in enumerate(("a", "b", "c"))),
        *(episode(name, "River?", "?", 5 + i) for i, name in enumerate(("d", "e"))),
        feedback=[
            said("a", 0.0, "Bern"),
            said("b", 0.0, "Zurich"),
            said("c", 0.0, " bern "),
            said("d", 0.0, "Aare"),
            said("e", 0.0, "Rhine"),
        ],
    )
    made(file, "-o", "tasks.jsonl")
    assert [row["metadata"]["answer"] for row in rows(Path("tasks.jsonl"))] == ["Bern"]
    [apart] = rows(Path("tasks.rejected.jsonl"))
    assert apart["main_query"] == "River?" and "different corrections" in apart["reason"]


def taught(file: Path, kind: str, *options: str) -> list[str]:
    """What is to be learnt of a trace: answers, the last reply of conversations, what was chosen of
    pairs."""
    out = Path(f"{kind}.jsonl")
    made(file, "--format", kind, "-o", out, *options)
    learnt = {
        "tasks": lambda row: row["metadata"].get("answer"),
        "messages": lambda row: row["messages"][-1]["content"],
        "preferences": lambda row: row["chosen"][-1]["content"],
    }[kind]
    return [learnt(row) for row in rows(out)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tasks", "messages", "preferences"])
def test_a_correction_has_one_verdict_in_every_kind_of_rows(tmp_path: Path, kind: str) -> None:
    asked = [
        ("a", "Capital?"),
        ("b", "Capital?"),
        ("c", "Capital?"),
        ("d", "Is it a river?"),
        ("e", "Is it a river?"),
    ]
    file = trace(
        tmp_path / "t.duckdb",
        *(episode(name, question, "?", i) for i, (name, question) in enumerate(asked)),
        episode("f", "Whose key?", "?", 7),
        episode("g", "Sea?", "?", 8),
        episode("h", "Lake?", "?", 9),
        feedback=[
            said("a", None, "Bern"),
            said("b", None, "Zurich"),
            said("c", None, "bern."),
            said("d", None, "yes"),
            said("e", None, "no!"),
            said("f", None, "that of bob@example.org"),
            said("g", None, "North", author="Ann"),
            said("g", None, "Baltic", author="Ann", at=1),
            said("h", None, "Como", author="Ann"),
            said("h", None, "Garda", author="Bob", at=1),
        ],
    )
    learnt = taught(file, kind)
    assert {text.strip(".").casefold() for text in learnt} == {"bern", "baltic"}
    if kind != "tasks":
        told = made(file, "--format", kind, "-o", "again.jsonl").stderr
        assert (
            "contradict each other" in told
            and "most people contradict" in told
            and "now redacted" in told
        )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["messages", "preferences"])
def test_a_reply_that_was_redacted_is_not_learnt(tmp_path: Path, kind: str) -> None:
    answers = [
        ("a", "Write to bob@example.org."),
        ("b", "No idea."),
        ("c", "Ask Bob."),
        ("d", "Ask Al."),
    ]
    file = trace(
        tmp_path / "t.duckdb",
        *(
            episode(name, f"Whom do I ask about {'ab' if name in 'ab' else 'cd'}?", text, i)
            for i, (name, text) in enumerate(answers)
        ),
        feedback=[said("a", 1.0), said("b", 0.0), said("c", 1.0), said("d", 0.0)],
    )
    assert taught(file, kind) == ["Ask Bob."]
    assert len(taught(file, kind, "--no-redact")) == 2


def test_a_correction_takes_the_place_of_the_stored_answer_and_says_so(tmp_path: Path) -> None:
    task = Task(main_query="2+2?", metadata={"answer": 5})
    right = Task(main_query="3+3?", metadata={"answer": 6})
    file = trace(
        tmp_path / "t.duckdb",
        episode("a", "2+2?", "5", task=task),
        episode("b", "3+3?", "6", 1, task=right),
        feedback=[said("a", None, "4"), said("b", None, "6")],
    )
    made(file, "-o", "tasks.jsonl")
    wrong, same = rows(Path("tasks.jsonl"))
    assert wrong["metadata"]["answer"] == "4" and wrong["provenance"]["instead_of"] == 5
    assert same["metadata"]["answer"] == 6 and "instead_of" not in same["provenance"]


def _chat(name: str) -> Episode:
    """Two questions in one conversation, the second with a tool."""
    first = asking("Hello, who are you?")
    second = [
        *first,
        {"role": "assistant", "content": "A bot."},
        {"role": "user", "content": "What is 9*9?"},
    ]
    tool = {"id": "t", "type": "function", "function": {"name": "calc", "arguments": "{}"}}
    third = [*second, {"role": "assistant", "content": None, "tool_calls": [tool]},
             {"role": "tool", "tool_call_id": "t", "content": "82"}]  # fmt: skip
    calls = (
        call(name, 0, first, {"content": "A bot."}),
        call(name, 1, second, {"content": None, "tool_calls": [tool]}),
        call(name, 2, third, {"content": "82"}),
    )
    return episode(name, "Hello, who are you?", "82", calls=calls)


def test_a_correction_further_on_makes_a_task_with_the_history_before_it(tmp_path: Path) -> None:
    file = trace(
        tmp_path / "t.duckdb", _chat("chat"), feedback=[said("chat", 0.0, "81", call_id="chat-2")]
    )
    made(file, "-o", "tasks.jsonl")
    [row] = rows(Path("tasks.jsonl"))
    assert row["main_query"] == "What is 9*9?" and row["metadata"]["answer"] == "81"
    assert [m["role"] for m in row["init_messages"]] == ["system", "user", "assistant", "user"]
    assert row["metadata"]["question"] == "What is 9*9?"


def test_a_corrected_tool_call_is_no_answer(tmp_path: Path) -> None:
    file = trace(
        tmp_path / "t.duckdb",
        _chat("chat"),
        feedback=[said("chat", None, "calc(9*9)", call_id="chat-1")],
    )
    made(file, "-o", "tasks.jsonl")
    [row] = rows(Path("tasks.jsonl"))
    assert row["main_query"] == "What is 9*9?" and "answer" not in row["metadata"]


def test_an_agent_without_a_workflow_gives_a_task_for_each_conversation(tmp_path: Path) -> None:
    calls = (
        call("all", 0, asking("One?"), {"content": "1"}),
        call("all", 1, asking("Two?"), {"content": "3"}),
    )
    one = episode("all", "", "", calls=calls, task=Task(env_type="process"))
    file = trace(tmp_path / "t.duckdb", one, feedback=[said("all", 0.0, "2", call_id="all-1")])
    made(file, "-o", "tasks.jsonl")
    found = {row["main_query"]: row["metadata"].get("answer") for row in rows(Path("tasks.jsonl"))}
    assert found == {"One?": None, "Two?": "2"}


# Failures


@pytest.mark.slow
def test_failures_are_seeds_for_expand_the_most_often_failed_first(tmp_path: Path) -> None:
    machine = {"status": "failed", "cause": "EngineUnavailable", "infrastructure": True}
    crashed = {"status": "failed", "cause": "ValueError", "error": "ValueError: x"}
    file = trace(
        tmp_path / "t.duckdb",
        episode("s1", "Sometimes?", "x", 0, rewards=(Reward(value=0.2),)),
        episode("s2", "Sometimes?", "y", 1, rewards=(Reward(value=0.9),)),
        episode("a1", "Always?", "x", 2, **crashed),
        episode("a2", "Always?", "x", 3, rewards=(Reward(value=1.0),)),
        episode("m1", "Machine?", "x", 4, **machine),
        episode("g1", "Good?", "x", 5, rewards=(Reward(value=0.0),)),
        feedback=[said("a2", 0.0, "yes"), said("g1", 1.0)],
    )
    result = made(file, "--failed", "-o", "seeds.jsonl")
    always, sometimes = rows(Path("seeds.jsonl"))
    assert (always["main_query"], always["metadata"]["answer"]) == ("Always?", "yes")
    assert "init_messages" not in always and set(always["metadata"]) == {
        "answer"
    }  # expand would repeat the question
    assert len(read_seeds("seeds.jsonl")) == 2
    assert always["provenance"]["failures"] == {
        "failed: ValueError": 1,
        "a person corrected the answer": 1,
    }
    assert (sometimes["provenance"]["attempts"], sometimes["provenance"]["failed"]) == (2, 1)
    assert "ajet dataset expand seeds.jsonl --count 500 --out data/" in result.stderr


# Messages, preferences, tokens


def test_messages_show_the_corrected_reply_and_not_what_was_disliked(service: Path) -> None:
    result = made(service, "--format", "messages", "-o", "sft.jsonl")
    found = {row["messages"][1]["content"]: row for row in reversed(rows(Path("sft.jsonl")))}
    assert set(found) == {"What is 1+1?", "What is 2+2?", "What is 4+4?"}
    row = found["What is 2+2?"]
    assert (
        row["messages"][-1] == {"role": "assistant", "content": "4"}
        and row["provenance"]["corrected"] is True
    )
    assert "corrected" not in found["What is 1+1?"]["provenance"]
    assert "1 episodes that people gave a thumb down" in result.stderr
    assert len(rows(Path("sft.jsonl"))) == 4


def test_nothing_follows_a_corrected_reply(tmp_path: Path) -> None:
    file = trace(
        tmp_path / "t.duckdb",
        _chat("chat"),
        feedback=[said("chat", 0.0, "I am Bo.", call_id="chat-0")],
    )
    made(file, "--format", "messages", "-o", "sft.jsonl")
    [row] = rows(Path("sft.jsonl"))
    assert [m["content"] for m in row["messages"]] == [
        "Be brief.",
        "Hello, who are you?",
        "I am Bo.",
    ]


@pytest.mark.slow
def test_pairs_are_of_one_task_whoever_ran_it_and_of_corrections(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    first = trace(
        tmp_path / "a" / "t.duckdb",
        episode("up", "Why?", "Because of the wind."),
        episode("wrong", "How many?", "five", 1),
        feedback=[said("up", 1.0), said("wrong", None, "six")],
    )
    other = episode("down", "Why?", "No.", run_id="other")
    second = trace(tmp_path / "b.duckdb", other, feedback=[said("down", 0.0)], run="other")
    made(first, second, "--format", "preferences", "-o", "pairs.jsonl")
    pairs = {row["prompt"][-1]["content"]: row for row in rows(Path("pairs.jsonl"))}
    why, many = pairs["Why?"], pairs["How many?"]
    assert (why["chosen"][0]["content"], why["rejected"][0]["content"]) == (
        "Because of the wind.",
        "No.",
    )
    assert why["provenance"]["episodes"] == ["up", "down"]
    assert (many["chosen"][0]["content"], many["rejected"][0]["content"]) == ("six", "five")
    assert set(pairs) == {"Why?", "How many?"}


def test_the_same_pair_is_there_once(tmp_path: Path) -> None:
    file = trace(
        tmp_path / "t.duckdb",
        *(episode(name, "How many?", "five", i) for i, name in enumerate("ab")),
        feedback=[said(name, None, "six") for name in "ab"],
    )
    result = made(file, "--format", "preferences", "-o", "pairs.jsonl")
    assert len(rows(Path("pairs.jsonl"))) == 1 and "duplicates: 1" in result.stderr


@pytest.mark.slow
def test_tokens_are_those_of_the_export_and_only_of_what_was_chosen(tmp_path: Path) -> None:
    encode = ByteTokenizer().encode
    ids = {"prompt_ids": encode("<Why?>"), "output_ids": encode("So."), "logprobs": [-0.5] * 3}
    found = [
        episode(name, "Why?", "So.", i, rewards=(Reward(value=float(i)),),
                calls=(call(name, 0, asking("Why?"), {"content": "So."}, **ids),))
        for i, name in enumerate(("no", "yes"))
    ]  # fmt: skip
    file = trace(tmp_path / "t.duckdb", *found)
    made(file, "--format", "tokens", "--filter", "reward>0.5", "-o", "tokens.parquet")
    CliRunner().invoke(
        app,
        [
            "trace",
            "export",
            str(file),
            "--format",
            "tokens",
            "--filter",
            "reward>0.5",
            "-o",
            "e.parquet",
        ],
    )
    mine, theirs = pq.read_table("tokens.parquet"), pq.read_table("e.parquet")
    assert mine.num_rows == 1 and mine.schema == theirs.schema
    assert (
        mine["token_ids"].to_pylist()
        == theirs["token_ids"].to_pylist()
        == [[*ids["prompt_ids"], *ids["output_ids"]]]
    )
    assert ".parquet" in made(file, "--format", "tokens", "-o", "tokens.jsonl", code=2).stderr


def test_a_parquet_file_of_tasks_comes_back_as_it_was(service: Path) -> None:
    made(service, "-o", "tasks.jsonl")
    made(service, "-o", "tasks.parquet")
    from ajet_tools.dataset.files.rows import read

    assert [row.values for row in read("tasks.parquet")] == rows(Path("tasks.jsonl"))


# Redaction


@pytest.fixture
def private(tmp_path: Path) -> Path:
    return trace(
        tmp_path / "t.duckdb",
        episode("a", "Mail bob@example.org, key sk-abcdefghijklmnopqrstuvwx1", "done"),
        episode("b", "What is Bob's address?", "I do not know.", 1),
        feedback=[said("b", 0.0, "It is bob@example.org")],
    )


def test_personal_data_and_secrets_are_replaced_and_counted(private: Path) -> None:
    result = made(private, "-o", "tasks.jsonl")
    [row] = rows(Path("tasks.jsonl"))
    assert row["main_query"] == "Mail [email 1], key [api key 1]"
    assert "bob@" not in Path("tasks.jsonl").read_text() + Path("tasks.rejected.jsonl").read_text()
    assert "redacted: 2 email, 1 api key" in result.stderr


@pytest.mark.slow
def test_a_placeholder_is_never_an_answer(private: Path) -> None:
    made(private, "-o", "tasks.jsonl")
    [apart] = rows(Path("tasks.rejected.jsonl"))
    assert apart["main_query"] == "What is Bob's address?" and "redacted" in apart["reason"]
    result = made(private, "--no-redact", "-o", "open.jsonl")
    answers = [row["metadata"].get("answer") for row in rows(Path("open.jsonl"))]
    assert answers == [None, "It is bob@example.org"] and "not redacted" in result.stderr


# Sources


def _openai(*questions: str) -> str:
    found = [
        {"messages": [*asking(q), {"role": "assistant", "content": "yes"}], "user": i}
        for i, q in enumerate(questions)
    ]
    return "".join(json.dumps(row) + "\n" for row in found)


def _studio(path: Path, question: str) -> Path:
    attributes = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "m",
        "gen_ai.input.messages": [
            {"role": "user", "parts": [{"type": "text", "content": question}]}
        ],
        "gen_ai.output.messages": [
            {"role": "assistant", "parts": [{"type": "text", "content": "yes"}]}
        ],
    }
    file = sqlite3.connect(path)
    file.execute(
        "CREATE TABLE run_table (id TEXT, project TEXT, name TEXT, timestamp TEXT, status TEXT)"
    )
    file.execute(
        "INSERT INTO run_table VALUES ('r1', 'demo', 'first', '2026-01-01 12:00:00.000', 'done')"
    )
    names = (
        "id, traceId, spanId, parentSpanId, name, startTimeUnixNano, endTimeUnixNano, attributes,"
        " events, status, runId"
    )
    file.execute(f"CREATE TABLE span_table ({names})")
    began, ended = "1767268800000000000", "1767268801000000000"
    said = json.dumps(attributes)
    row = ("s", "a" * 32, "b" * 16, None, "chat", began, ended, said, "[]", '{"code": 1}', "r1")
    file.execute(f"INSERT INTO span_table VALUES ({', '.join('?' * len(row))})", row)
    file.commit()
    file.close()
    return path


def _otlp(path: Path, question: str) -> Path:
    said = {"gen_ai.input.messages": [{"role": "user", "parts": [{"type": "text", "content": question}]}],
            "gen_ai.output.messages": [{"role": "assistant", "parts": [{"type": "text", "content": "yes"}]}],
            "gen_ai.operation.name": "chat"}  # fmt: skip
    pairs = [
        {"key": k, "value": {"stringValue": v if isinstance(v, str) else json.dumps(v)}}
        for k, v in said.items()
    ]
    span = {"traceId": "c" * 32, "spanId": "d" * 16, "name": "chat", "startTimeUnixNano": "1", "endTimeUnixNano": "2",
            "attributes": pairs}  # fmt: skip
    path.write_text(json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}))
    return path


def test_other_tools_traces_are_read_beside_ours_and_a_task_of_two_logs_is_one(
    service: Path, tmp_path: Path
) -> None:
    logs = tmp_path / "logs.jsonl"
    logs.write_text(_openai("Is it  HOT?", "Is it cold?"))
    studio, spans = tmp_path / "studio", _otlp(tmp_path / "spans.json", "From OTLP?")
    studio.mkdir()
    _studio(studio / "database.sqlite", "From Studio?")
    result = made(
        service,
        logs,
        studio,
        spans,
        "-",
        "-o",
        "tasks.jsonl",
        "--json",
        stdin=_openai("is it hot?"),
    )
    found = rows(Path("tasks.jsonl"))
    assert {"What is 1+1?", "Is it cold?", "From Studio?", "From OTLP?"} <= {
        row["main_query"] for row in found
    }
    assert sum("hot" in row["main_query"].lower() for row in found) == 1
    summary = json.loads(result.stdout)
    assert sorted(summary["imported"].values()) == ["openai", "openai", "otlp", "studio"]
    assert (summary["rows"], summary["of"]) == (8, 10)


def test_a_history_in_a_log_comes_before_the_last_question(tmp_path: Path) -> None:
    messages = [*asking("Hi"), {"role": "assistant", "content": "Hello."}, {"role": "user", "content": "And 2+2?"},
                {"role": "assistant", "content": "4"}]  # fmt: skip
    (tmp_path / "logs.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    made("logs.jsonl", "-o", "tasks.jsonl")
    [row] = rows(Path("tasks.jsonl"))
    assert row["main_query"] == "And 2+2?" and row["init_messages"] == messages[:-1]


def test_a_copy_of_a_trace_beside_it_is_refused(service: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.duckdb"
    shutil.copy(service, copy)
    assert "is in two of the sources" in made(service, copy, "-o", "x.jsonl", code=2).stderr
    made(service, service, "-o", "tasks.jsonl")
    assert len(rows(Path("tasks.jsonl"))) == 4


@pytest.mark.slow
def test_a_trace_is_read_while_its_agent_is_in_service(service: Path) -> None:
    with TraceWriter(service) as writer:
        from ajet_sdk.gateway.gateway import Gateway

        with Gateway(writer):
            fresh = episode("fresh", "And now?", "yes", 9)
            writer.put(*fresh.calls, fresh)
            writer.flush()
            made(service, "-o", "tasks.jsonl")
    assert "And now?" in {row["main_query"] for row in rows(Path("tasks.jsonl"))}


# A rubric


def _grades(text: str) -> Callable[[dict[str, Any], int], str]:
    def say(body: dict[str, Any], number: int) -> str:
        asked = body["messages"][-1]["content"]
        score, reason = (9, "It answers.") if text in asked else (1, "It gives no number.")
        return f"```json\n{json.dumps({'reason': reason, 'score': score})}\n```"

    return say


def _rubric(server: Any, *more: Any, settings: str = "") -> list[Any]:
    return ["--rubric", "A number is given.", "--model", f"judge@{server.url}{settings}", *more]


def test_a_rubric_keeps_what_is_good_and_every_reason(service: Path, model_server: Any) -> None:
    server = model_server(_grades("[assistant] 2"))
    result = made(service, *_rubric(server), "-o", "tasks.jsonl")
    [row] = rows(Path("tasks.jsonl"))
    verdict = row["provenance"]["verdict"]
    assert (
        row["main_query"] == "What is 1+1?" and verdict["ok"] and verdict["reason"] == "It answers."
    )
    assert verdict["details"]["score"] == 0.9 and row["provenance"]["model"] == "judge"
    assert row["provenance"]["prompt"] == "from-traces/grade version 2"
    apart = rows(Path("tasks.rejected.jsonl"))
    assert len(apart) == 4 and {row["reason"] for row in apart} == {"It gives no number."}
    asked = server.requests[0]["messages"][-1]["content"]
    assert "A number is given." in asked and "[system] Be brief." in asked
    assert "graded by the rubric: 5 episodes" in result.stderr


def test_messages_that_a_rubric_refuses_are_kept_apart_with_the_reason(
    service: Path, model_server: Any
) -> None:
    server = model_server(_grades("[assistant] 2"))
    made(service, *_rubric(server), "--format", "messages", "-o", "sft.jsonl")
    [row] = rows(Path("sft.jsonl"))
    assert (
        row["messages"][1]["content"] == "What is 1+1?"
        and row["provenance"]["verdict"]["reason"] == "It answers."
    )
    assert {row["reason"] for row in rows(Path("sft.rejected.jsonl"))} == {"It gives no number."}


@pytest.mark.slow
def test_no_grade_is_paid_for_twice_and_other_words_are_another_question(
    service: Path, model_server: Any
) -> None:
    server = model_server(_grades("[assistant] 2"))
    made(service, *_rubric(server), "-o", "tasks.jsonl")
    first, before = Path("tasks.jsonl").read_bytes(), len(server.requests)
    made(service, *_rubric(server), "-o", "tasks.jsonl")
    assert len(server.requests) == before and Path("tasks.jsonl").read_bytes() == first
    made(
        service,
        "--rubric",
        "It is polite.",
        "--model",
        f"judge@{server.url}",
        "-o",
        "tasks.jsonl",
    )
    assert len(server.requests) == 2 * before


def test_personal_data_does_not_reach_the_grader(private: Path, model_server: Any) -> None:
    server = model_server(_grades("Mail"))
    made(private, *_rubric(server), "-o", "tasks.jsonl")
    sent = json.dumps(server.requests)
    assert "[email 1]" in sent and "bob@example.org" not in sent and "sk-abcdef" not in sent


@pytest.mark.slow
def test_prose_for_a_grade_is_asked_again_and_then_refused(
    service: Path, model_server: Any
) -> None:
    def say(body: dict[str, Any], number: int) -> str:
        _system, first, *said = body["messages"]
        if "1+1" in first["content"]:
            return "It is a fine answer." if not said else '{"score": 10, "reason": "Fine."}'
        return "I would rather not say."

    server = model_server(say)
    made(service, *_rubric(server), "-o", "tasks.jsonl")
    assert [row["main_query"] for row in rows(Path("tasks.jsonl"))] == ["What is 1+1?"]
    apart = rows(Path("tasks.rejected.jsonl"))
    assert {row["reason"] for row in apart} == {"the grader's reply cannot be read"}
    assert all(row["verdict"]["failed"] for row in apart) and len(server.requests) == 10


@pytest.mark.parametrize(("status", "code"), [(401, 2), (404, 2)])
def test_an_endpoint_that_refuses_is_one_message_and_no_file(
    service: Path, model_server: Any, status: int, code: int
) -> None:
    server = model_server(lambda body, number: model_server.refusal(status, "no such key"))
    result = made(service, *_rubric(server), "-o", "tasks.jsonl", code=code)
    assert "no such key" in result.stderr and not Path("tasks.jsonl").exists()


def test_what_was_graded_before_an_endpoint_failed_is_not_asked_again(
    service: Path, model_server: Any
) -> None:
    broken = [True]

    def say(body: dict[str, Any], number: int) -> Any:
        if broken[0] and number >= 3:
            return model_server.refusal(403, "the quota is used up")
        return _grades("[assistant] 2")(body, number)

    server = model_server(say)
    made(service, *_rubric(server, settings=",concurrency=1"), "-o", "tasks.jsonl", code=2)
    broken[0] = False
    asked = len(server.requests)
    made(service, *_rubric(server), "-o", "tasks.jsonl")
    assert len(server.requests) - asked == 2 and len(rows(Path("tasks.jsonl"))) == 1


def test_a_budget_stops_grading_and_what_was_graded_is_written(
    service: Path, model_server: Any
) -> None:
    server = model_server(lambda body, number: '{"score": 8, "reason": "Good."}')
    result = made(service, *_rubric(server, "--budget", "calls=2"), "-o", "tasks.jsonl", code=1)
    assert len(server.requests) == 2 and 1 <= len(rows(Path("tasks.jsonl"))) <= 2
    assert "stopped asking: the budget of 2 calls is spent" in result.stderr
    assert "3 episodes that were not graded" in result.stderr


@pytest.mark.slow
def test_ctrl_c_leaves_no_file_and_no_grade_is_asked_for_again(
    service: Path, model_server: Any
) -> None:
    server = model_server(lambda body, number: (0.5, '{"score": 8, "reason": "Good."}'))
    rubric = [str(one) for one in _rubric(server, "-o", "tasks.jsonl", settings=",concurrency=1")]
    command = [
        sys.executable,
        "-m",
        "ajet",
        "trace",
        "export",
        str(service),
        "--format",
        "tasks",
        *rubric,
    ]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    process = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True)
    until(lambda: len(server.requests) >= 3)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=300)
    assert process.returncode == 130 and "Interrupted" in told and "Traceback" not in told
    assert not Path("tasks.jsonl").exists()
    before = len(server.requests)
    made(service, *rubric)
    assert len(server.requests) - before == 3 and len(rows(Path("tasks.jsonl"))) == 4


def test_grades_make_pairs_where_nobody_gave_a_reward(tmp_path: Path, model_server: Any) -> None:
    file = trace(
        tmp_path / "t.duckdb", episode("a", "Why?", "Well, 2."), episode("b", "Why?", "Dunno.", 1)
    )
    server = model_server(_grades("[assistant] Well"))
    made(file, "--format", "preferences", *_rubric(server), "-o", "pairs.jsonl")
    [pair] = rows(Path("pairs.jsonl"))
    assert (pair["chosen"][0]["content"], pair["rejected"][0]["content"]) == ("Well, 2.", "Dunno.")
    assert (pair["chosen_reward"], pair["rejected_reward"]) == (0.9, 0.1)


def test_a_scripted_grader_needs_no_endpoint(service: Path, tmp_path: Path) -> None:
    (tmp_path / "grader.py").write_text(
        "def grade(ask):\n"
        "    good = '[assistant] 8' in ask.body['messages'][-1]['content']\n"
        '    return \'{"reason": "as it is", "score": %d}\' % (10 * good)\n'
    )
    made(service, "--rubric", "Eight.", "--model", "grader.py:grade", "-o", "tasks.jsonl")
    assert [row["main_query"] for row in rows(Path("tasks.jsonl"))] == ["What is 4+4?"]


# What is refused


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.duckdb"], "there is no trace at missing.duckdb"),
        (["missing.jsonl"], "there is no file or directory missing.jsonl"),
        (["trace.duckdb", "--filter", "rewrd<1"], "did you mean reward"),
        (
            ["trace.duckdb", "--feedback", "sideways"],
            "--feedback must be one of up, down, corrected",
        ),
        (["trace.duckdb", "--format", "songs"], "'songs'"),
        (["trace.duckdb", "--filter", "reward>3"], "none of 5 episodes matches"),
        (["trace.duckdb", "--format", "tokens", "-o", "t.parquet"], "episodes without token ids"),
        (
            ["trace.duckdb", "--format", "preferences", "--filter", "has('4+4')"],
            "no two attempts at a task differ",
        ),
        (["trace.duckdb", "--rubric", "Good."], "--model NAME@URL"),
        (["trace.duckdb", "--rubric", "rubric.md"], "there is no file rubric.md"),
        (["bad.jsonl"], "bad.jsonl line 2"),
    ],
)
def test_a_mistake_is_one_message_and_leaves_no_file(
    service: Path, arguments: list[str], message: str
) -> None:
    Path("bad.jsonl").write_text(_openai("Fine?") + '{"messages": 3}\n')
    out = [] if "-o" in arguments else ["-o", "out.jsonl"]
    result = CliRunner().invoke(
        app,
        [
            "trace",
            "export",
            *arguments,
            *out,
            *([] if "--format" in arguments else ["--format", "tasks"]),
        ],
    )
    assert result.exit_code in (1, 2) and message in " ".join(result.stderr.split())
    assert not Path("out.jsonl").exists() and not Path("t.parquet").exists()


def test_rows_go_to_stdout_and_nothing_else_does(service: Path) -> None:
    result = made(service)
    assert json.loads(result.stdout.splitlines()[0])["main_query"] == "What is 1+1?"
    assert "4 tasks, from 5 of 5 episodes" in result.stderr


@pytest.mark.slow
def test_the_same_trace_gives_the_same_bytes(service: Path) -> None:
    for kind in ("tasks", "messages", "preferences"):
        made(service, "--format", kind, "-o", "one.jsonl")
        made(service, "--format", kind, "-o", "two.jsonl")
        assert Path("one.jsonl").read_bytes() == Path("two.jsonl").read_bytes()
