"""Text search: in what was said and not in the JSON around it, in spans of calls, with progress, and
called off between two."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from ajet_sdk.protocols import TraceReader
from ajet_sdk.trace.reader import open_trace
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Call, Episode, Run, Task
from ajet_tools.trace.queries import search as module
from ajet_tools.trace.queries.search import Cancelled, episodes_with

BEGAN = datetime(2026, 5, 1, tzinfo=timezone.utc)


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TraceReader]:
    path = tmp_path_factory.mktemp("search") / "trace.duckdb"
    first: list[dict[str, Any]] = [
        {"role": "system", "content": "You calculate. A\x1b[31mPEAR\u202e is a fruit"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "x" * 500 + ' the "Quoted\nPear" ' + "y" * 500}],
        },
    ]
    tool = {"function": {"name": "calculator", "arguments": '{"sum": "17+4"}'}}
    reply = {
        "role": "assistant",
        "content": None,
        "reasoning_content": "Hm, apples",
        "tool_calls": [tool],
    }
    again = [*first, reply, {"role": "tool", "content": "twenty-one apples"}]
    with TraceWriter(path) as writer:
        writer.put(Run(run_id="run"), Run(run_id="other"))
        writer.put(
            *(
                Call(
                    call_id=f"c{i}",
                    episode_id="one",
                    index=i,
                    request={"messages": said},
                    response={"choices": [{"message": answer}]},
                    started_at=BEGAN + timedelta(seconds=i),
                    error="undelivered" if i else None,
                )
                for i, (said, answer) in enumerate(
                    ((first, reply), (again, {"role": "assistant", "content": "21"}))
                )
            ),
            Call(
                call_id="c2",
                episode_id="two",
                request={"prompt": "once upon"},
                response={"output": "a time"},
            ),
            Call(
                call_id="c3",
                episode_id="live",
                request={"messages": [{"role": "user", "content": "pear?"}]},
            ),
        )
        writer.put(
            Episode(
                episode_id="one",
                run_id="run",
                output="Twenty-One",
                task=Task(main_query="17 and 4"),
            )
        )
        writer.put(Episode(episode_id="two", run_id="other", status="failed", error="No pear left"))
    with open_trace(path) as found:
        yield found


@pytest.mark.parametrize(
    ("needle", "expected"),
    [
        ("pear", {"one", "two", "live"}),
        ("17+4", {"one"}),
        ("APPLES", {"one"}),
        ("twenty-one", {"one"}),
        ("17 and", {"one"}),
        ("upon", {"two"}),
        ("a time", {"two"}),
        ("undelivered", {"one"}),
        ('"quoted\npear"', {"one"}),
        ("tool_calls", set()),
        (".*", set()),
    ],
)
def test_which_episodes_hold_a_text(reader: TraceReader, needle: str, expected: set[str]) -> None:
    assert episodes_with(reader, needle) == expected


@pytest.mark.parametrize("needle", ["type", "text", "tool_use", "city", "image_url", "arguments"])
def test_names_of_parts_are_not_searched(tmp_path: Path, needle: str) -> None:
    parts = [
        {"type": "text", "text": "a hello"},
        {"type": "image_url", "image_url": {"url": "data:,"}},
    ]
    use = {"type": "tool_use", "name": "weather", "input": {"city": "Paris"}}
    call = {"type": "function_call", "name": "add", "arguments": "{}"}
    with TraceWriter(tmp_path / "trace.duckdb") as writer:
        writer.put(
            Call(
                episode_id="chat",
                request={"messages": [{"role": "user", "content": parts}]},
                response={"content": [{"type": "text", "text": "hello"}, use]},
            ),
            Call(
                episode_id="items",
                request={"input": [{"role": "user", "content": parts}, call]},
                response={"output": [{"type": "message", "content": parts}, call]},
            ),
        )
    with open_trace(tmp_path) as trace:
        assert episodes_with(trace, needle) == set()
        assert episodes_with(trace, "hello") == {"chat", "items"}
        assert episodes_with(trace, "paris") == episodes_with(trace, "weather") == {"chat"}
        assert episodes_with(trace, "add") == {"items"}


def test_calls_before_a_time_are_left_out(reader: TraceReader) -> None:
    later = BEGAN + timedelta(seconds=2)
    assert episodes_with(reader, "17+4", BEGAN) == {"one"}
    assert episodes_with(reader, "17+4", later) == set()
    assert episodes_with(reader, "upon", later) == {"two"}


def test_progress_and_calling_off(reader: TraceReader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SPAN", 1)
    told: list[tuple[int, int]] = []

    def progress(done: int, total: int) -> None:
        told.append((done, total))

    with pytest.raises(Cancelled):
        episodes_with(reader, "apples", progress=progress, cancelled=lambda: len(told) > 1)
    assert told == [(1, 4), (2, 4)], "the later calls are not looked at"
    told.clear()
    assert episodes_with(reader, "apples", progress=progress) == {"one"}
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_a_text_that_utf8_cannot_hold(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "trace.duckdb") as writer:
        message = {"role": "user", "content": "needle \ud800"}
        writer.put(Call(episode_id="e", request={"messages": [message]}))
    with open_trace(tmp_path) as reader:
        found = episodes_with(reader, "NEEDLE \udfff")
    assert found == {"e"}, "both were written as a question mark"


def test_items_of_openais_responses_are_searched(tmp_path: Path) -> None:
    shown = {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "output_text", "text": 'say "plum"'}],
    }
    result = {"type": "function_call_output", "call_id": "f", "output": 'a "fig"'}
    request = {"instructions": "Be brief.", "input": [{"role": "user", "content": "hi"}, result]}
    with TraceWriter(tmp_path / "trace.duckdb") as writer:
        writer.put(Call(call_id="c", episode_id="e", request=request, response={"output": [shown]}))
    with open_trace(tmp_path / "trace.duckdb") as trace:
        for needle in ('"plum"', '"fig"', "be brief"):
            assert episodes_with(trace, needle) == {"e"}
