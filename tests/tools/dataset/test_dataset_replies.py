"""Rows out of a reply: as asked for, wrapped, with prose, cut off."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as some

from ajet_tools.dataset.model.replies import misread_escape, rows_in

ROWS = [
    {"main_query": "a [b] {c}", "metadata": {"answer": "1"}},
    {"main_query": 'd "e"', "metadata": {"answer": "2"}},
]
TEXT = json.dumps(ROWS)


@pytest.mark.parametrize(
    "reply",
    [
        TEXT,
        json.dumps(ROWS, indent=2),
        f"```json\n{TEXT}\n```",
        f"Here you are:\n{TEXT}\nI hope that [these] help!",
        f"Sure [as asked], {{see}} below: {TEXT}",
        "\n".join(map(json.dumps, ROWS)),
        "\n".join(map(json.dumps, ROWS)) + "\nThat is all.",
        json.dumps({"tasks": ROWS}),
        f"<think>maybe [{{}}] or [1]?</think>\n{TEXT}",
    ],
)
def test_rows_are_found_however_they_are_wrapped(reply: str) -> None:
    assert rows_in(reply) == (ROWS, None)


@pytest.mark.parametrize(
    "thought", ["", "<think>[{}], or is it [1]?</think>", '[{"main_query": "a draft"}]</think>']
)
def test_a_row_may_hold_the_end_of_a_thought(thought: str) -> None:
    rows = [
        {"main_query": "What ends a <think>?"},
        {"main_query": "and", "metadata": {"answer": "</think>"}},
    ]
    for text in (json.dumps(rows), "\n".join(map(json.dumps, rows)), json.dumps({"rows": rows})):
        assert rows_in(thought + text) == (rows, None)


def test_one_object_is_one_row() -> None:
    assert rows_in(json.dumps(ROWS[0])) == (ROWS[:1], None)


@pytest.mark.parametrize("reply", ["", "  ", "I'd rather not.", "Sure! Ask {me} [anything]."])
def test_prose_is_told(reply: str) -> None:
    rows, problem = rows_in(reply)
    assert rows == [] and problem is not None and problem.startswith("not JSON")


def test_half_a_json_keeps_what_was_whole() -> None:
    for reply in (TEXT[:-20], json.dumps({"tasks": ROWS})[:-20]):
        rows, problem = rows_in(reply)
        assert rows == ROWS[:1]
        assert problem == "incomplete JSON: the reply ends, or breaks, in row 2"


@given(some.integers(0, len(TEXT) - 1))
def test_wherever_it_is_cut_no_row_is_made_up(end: int) -> None:
    rows, problem = rows_in(TEXT[:end])
    assert rows == ROWS[: len(rows)] and problem is not None


@given(some.text())
def test_no_reply_is_an_error(reply: str) -> None:
    rows, _ = rows_in(reply)
    assert isinstance(rows, list)


@given(
    some.lists(
        some.dictionaries(some.text(), some.text() | some.integers() | some.none()), min_size=1
    )
)
def test_a_list_of_objects_comes_back_whole(rows: list[dict[str, Any]]) -> None:
    assert rows_in(json.dumps(rows, ensure_ascii=False))[0] in (
        rows,
        *(r.get(k) for r in rows[:1] for k in r),
    )


@pytest.mark.parametrize(
    ("question", "text"),
    [
        (r"\(3+4\)", r"\(3+4\)"),
        (r"\sqrt{4} \\ \"x\" \u00e9", r"\sqrt{4} \ " + '"x" \u00e9'),
        (r"\usepackage", r"\usepackage"),
        (r"a\nb\tc", "a\nb\tc"),
    ],
)
def test_a_backslash_that_is_no_escape_of_json_is_one(question: str, text: str) -> None:
    rows, problem = rows_in('[{"question": "' + question + '"}]')
    assert (rows, problem) == ([{"question": text}], None)
    assert misread_escape(text) is None


@pytest.mark.parametrize("command", ["frac{1}{2}", "beta", "times 3", "neq 4", "right)", "theta"])
def test_a_command_of_latex_that_begins_like_an_escape_is_told(command: str) -> None:
    [row], problem = rows_in('[{"question": "What is \\' + command + '?"}]')
    assert problem is None and isinstance(row, dict)
    assert misread_escape(row["question"]) is not None


def test_what_is_no_number_is_no_json() -> None:
    assert rows_in('[{"a": NaN}]')[0] == [] and rows_in('[{"a": 1}, {"a": Infinity}]')[0] == [
        {"a": 1}
    ]
