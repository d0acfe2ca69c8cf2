"""Rows in the forms of training libraries."""

from __future__ import annotations

from typing import Any

import pytest

from ajet_tools.dataset.curation.formats import Unfit, converter

USER = {"role": "user", "content": "q"}
REPLY = {"role": "assistant", "content": "a"}
SYSTEM = {"role": "system", "content": "s"}


def made(format: str, row: dict[str, Any]) -> dict[str, Any]:
    found = converter(format)(row)
    assert found.pop("task_id", "none")
    return found


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"main_query": "q", "metadata": {"answer": "a"}}, [USER, REPLY]),
        ({"question": "q", "answer": "a"}, [USER, REPLY]),
        ({"messages": [SYSTEM, USER, REPLY]}, [SYSTEM, USER, REPLY]),
        (
            {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
            [USER, REPLY],
        ),
        ({"init_messages": [SYSTEM], "main_query": "q", "answer": "a"}, [SYSTEM, USER, REPLY]),
        ({"init_messages": [SYSTEM, USER], "metadata": {"answer": "a"}}, [SYSTEM, USER, REPLY]),
        ({"prompt": [USER], "completion": [REPLY]}, [USER, REPLY]),
        ({"prompt": "q", "completion": "a"}, [USER, REPLY]),
        (
            {"main_query": "q", "metadata": {"answer": [1, 2]}},
            [USER, {"role": "assistant", "content": "[1, 2]"}],
        ),
        (
            {"main_query": "q", "metadata": {"answer": 0}},
            [USER, {"role": "assistant", "content": "0"}],
        ),
    ],
)
def test_messages_end_in_the_reply_or_the_answer(
    row: dict[str, Any], messages: list[dict[str, str]]
) -> None:
    assert made("messages", row)["messages"] == messages


def test_columns_beside_the_form_are_kept() -> None:
    row = {
        "task_id": "7",
        "main_query": "q",
        "metadata": {"answer": "a", "level": 2},
        "provenance": {"source": "x"},
    }
    kept = {"task_id": "7", "provenance": {"source": "x"}}
    assert converter("messages")(row) == {
        "messages": [USER, REPLY],
        "metadata": row["metadata"],
        **kept,
    }
    assert converter("trl-prompt")(row) == {"prompt": [USER], "answer": "a", "level": 2, **kept}
    assert converter("tasks")(row) == row


def test_sharegpt_spells_roles_and_tool_calls_as_that_form_has_them() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    row = {
        "messages": [
            SYSTEM,
            USER,
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "content": "2"},
            REPLY,
        ],
        "tools": [{"type": "function", "function": {"name": "add"}}],
    }
    found = made("sharegpt", row)
    assert [part["from"] for part in found["conversations"]] == [
        "system",
        "human",
        "function_call",
        "observation",
        "gpt",
    ]
    assert found["conversations"][2]["value"] == '{"name": "add", "arguments": {"a": 1}}'
    assert found["tools"] == '[{"name": "add"}]'


WORSE = {"role": "assistant", "content": "b"}


@pytest.mark.parametrize(
    "row",
    [
        {"main_query": "q", "chosen": "a", "rejected": "b"},
        {"prompt": [USER], "chosen": [REPLY], "rejected": [WORSE]},
        {"prompt": "q", "chosen": [USER, REPLY], "rejected": [USER, WORSE]},
        {"chosen": [USER, REPLY], "rejected": [USER, WORSE]},
    ],
)
def test_preferences_are_a_prompt_and_two_replies(row: dict[str, Any]) -> None:
    assert made("trl-preference", row) == {"prompt": [USER], "chosen": [REPLY], "rejected": [WORSE]}


@pytest.mark.parametrize(
    ("format", "row", "reason"),
    [
        ("messages", {"main_query": "q"}, "without a reply or an answer"),
        ("messages", {"messages": [USER]}, "whose last message is not the assistant's"),
        ("sharegpt", {"text": "x"}, "that ask nothing"),
        ("trl-prompt", {"answer": "x"}, "that ask nothing"),
        (
            "trl-preference",
            {"main_query": "q", "chosen": "a"},
            "without a chosen and a rejected reply",
        ),
        ("trl-preference", {"main_query": "q", "chosen": "a", "rejected": "a"}, "are the same"),
    ],
)
def test_a_row_that_lacks_what_a_form_needs_is_refused_with_the_reason(
    format: str, row: dict[str, Any], reason: str
) -> None:
    with pytest.raises(Unfit, match=reason):
        converter(format)(row)
