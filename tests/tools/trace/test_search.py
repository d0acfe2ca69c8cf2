"""Text search: where something was said, in spans of calls, with progress, and called off between
two."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from ajet_sdk.errors import QueryError
from ajet_sdk.protocols import TraceReader
from ajet_sdk.trace.reader import open_trace
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Call, Episode, Run, Task
from ajet_tools.trace.queries import search as module
from ajet_tools.trace.queries.search import Hit, search

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


def places(hits: Iterator[Hit]) -> list[str]:
    return [f"{hit.episode_id} {hit.call_id or '-'} {hit.where}" for hit in hits]


@pytest.mark.parametrize(
    ("needle", "expected"),
    [
        ("pear", ["two - error", "one c0 system", "one c0 user", "live c3 user"]),
        ("17+4", ["one c0 assistant"]),
        ("APPLES", ["one c0 assistant", "one c1 tool"]),
        ("twenty-one", ["one - output", "one c1 tool"]),
        ("17 and", ["one - task"]),
        ("upon", ["two c2 user"]),
        ("a time", ["two c2 assistant"]),
        ("undelivered", ["one c1 error"]),
        ('"quoted\npear"', ["one c0 user"]),
        ("tool_calls", []),
        (".*", []),
    ],
)
def test_where_a_text_stands(reader: TraceReader, needle: str, expected: list[str]) -> None:
    assert places(search(reader, needle)) == expected


def test_a_run_has_its_own_episodes_and_those_that_have_not_ended(reader: TraceReader) -> None:
    assert places(search(reader, "pear", "run")) == ["one c0 system", "one c0 user", "live c3 user"]
    assert places(search(reader, "pear", within=["one"])) == ["one c0 system", "one c0 user"]


def test_a_snippet_is_one_safe_line_around_the_match(reader: TraceReader) -> None:
    for hit in search(reader, "pear"):
        assert hit.snippet[hit.start : hit.end].lower() == "pear" and len(hit.snippet) < 200
        assert hit.snippet.isprintable()
    quoted = next(hit for hit in search(reader, "quoted\npear"))
    assert (
        quoted.snippet.startswith("…xxx")
        and quoted.snippet.endswith("yyy…")
        and '"Quoted Pear"' in quoted.snippet
    )


def test_progress_and_calling_off(reader: TraceReader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SPAN", 1)
    told: list[tuple[int, int]] = []
    hits = search(
        reader,
        "apples",
        progress=lambda done, of: told.append((done, of)),
        cancelled=lambda: len(told) > 1,
    )
    assert places(hits) == ["one c0 assistant"] and told == [
        (1, 4),
        (2, 4),
    ], "the later calls are not looked at"
    told.clear()
    list(search(reader, "apples", progress=lambda done, of: told.append((done, of))))
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]


@pytest.mark.parametrize("needle", ["", "  \n", "x" * 2000])
def test_nothing_to_look_for(reader: TraceReader, needle: str) -> None:
    with pytest.raises(QueryError, match="characters"):
        list(search(reader, needle))


def test_a_text_that_utf8_cannot_hold(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "trace.duckdb") as writer:
        writer.put(
            Call(
                episode_id="e", request={"messages": [{"role": "user", "content": "needle \ud800"}]}
            )
        )
    with open_trace(tmp_path) as reader:
        assert places(search(reader, "NEEDLE \udfff"))[0].startswith("e "), (
            "both were written as a question mark"
        )


def test_what_is_found_in_items_of_openais_responses_is_what_a_person_reads(tmp_path: Path) -> None:
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
        for needle, place in (
            ('"plum"', "e c assistant"),
            ('"fig"', "e c tool"),
            ("be brief", "e c system"),
        ):
            assert places(search(trace, needle)) == [place]
