"""`ajet.trace(mask=…)`: what is removed from the texts of a trace."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajet_sdk.agent.context import observer
from ajet_sdk.capture.observe import trace
from ajet_sdk.capture.settings import ObservationSettings
from ajet_sdk.dialects.observed import join_parts
from ajet_sdk.errors import ConfigError
from ajet_sdk.trace.encoding import REMOVED
from ajet_sdk.trace.reader import episodes, open_trace
from ajet_sdk.types import Event


def settings(mask: Any) -> ObservationSettings:
    return ObservationSettings("served", None, None, mask, 1.0, False)


PATTERNS = [
    r"(\d+)-(\d+)",
    r"(['\"]).*?\1",
    r"(?P<mark>[ab])-(?P=mark)",
    r"(?P<mark>1+)",
    r"(?i)A+",
    r"(?x) b  1",
    "a|-",
    "a*",
    r"\bab\b",
]


@given(st.lists(st.sampled_from(PATTERNS), max_size=4), st.text("aAb1-'\" ", max_size=20))
def test_a_list_of_patterns_removes_what_each_removes_alone(patterns: list[str], text: str) -> None:
    matched = {
        i
        for pattern in patterns
        for match in re.finditer(pattern, text)
        for i in range(*match.span())
    }
    masked = settings(patterns).clean(text)
    assert masked.replace(REMOVED, "") == "".join(
        text[i] for i in range(len(text)) if i not in matched
    )
    assert (REMOVED in masked) == bool(matched)


@pytest.mark.parametrize(
    ("patterns", "text", "masked"),
    [
        (
            [r"(\d+)-(\d+)", r"(['\"]).*?\1"],
            "the word 'hunter2' and id 12-34",
            f"the word {REMOVED} and id {REMOVED}",
        ),
        ([r"sk-proj-\w+", r"(?i)api_key=\S+"], "API_KEY=abc sk-proj-1", f"{REMOVED} {REMOVED}"),
        (["Ada", r"password of Ada: \S+"], "the password of Ada: hunter2", f"the {REMOVED}"),
        ([], "as it is", "as it is"),
    ],
)
def test_patterns_do_not_change_each_other(patterns: list[str], text: str, masked: str) -> None:
    assert settings(patterns).clean(text) == masked


def test_the_pattern_that_is_not_valid_is_named() -> None:
    with pytest.raises(ConfigError, match=re.escape("in 'b('")):
        settings(["a", "b("])


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": ["string", "null"], "description": "who"}},
    "required": ["name"],
}
CALLS: list[Any] = [
    {
        "model": "gpt-x",
        "messages": [
            {"role": "user", "name": "ada", "content": [{"type": "text", "text": "hello"}]},
            {
                "role": "assistant",
                "tool_calls": [
                    {
                        "id": "call_a",
                        "type": "function",
                        "function": {"name": "add", "arguments": "who"},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "call_a", "name": "add", "content": "reply"},
        ],
        "tools": [
            {
                "type": "function",
                "function": {"name": "add", "description": "who", "parameters": SCHEMA},
            }
        ],
        "tool_choice": {"type": "function", "function": {"name": "add"}},
        "metadata": {"name": "ada", "id": "ada", "role": "ada"},
        "user": "ada",
    },
    {
        "id": "chat-a",
        "object": "chat.completion",
        "choices": [
            {
                "index": 0,
                "finish_reason": "stop",
                "message": {"role": "assistant", "content": "hello"},
            }
        ],
    },
    {
        "model": "claude-x",
        "system": [{"type": "text", "text": "hello"}],
        "messages": [
            {
                "role": "assistant",
                "content": [
                    {
                        "type": "tool_use",
                        "id": "tool_a",
                        "name": "add",
                        "input": {"name": "ada", "type": "ada"},
                    }
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "tool_a", "content": "reply"}],
            },
        ],
        "tools": [{"name": "add", "input_schema": SCHEMA}],
        "tool_choice": {"type": "tool", "name": "add"},
    },
    {
        "model": "gpt-x",
        "input": [
            {"type": "function_call", "call_id": "call_a", "name": "add", "arguments": "who"}
        ],
        "output": [
            {
                "type": "message",
                "status": "completed",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "reply"}],
            }
        ],
    },
    {
        "contents": [
            {
                "role": "user",
                "parts": [
                    {"text": "hello"},
                    {"functionCall": {"name": "add", "args": {"name": "ada"}}},
                ],
            }
        ],
        "tools": [
            {"functionDeclarations": [{"name": "add", "description": "who", "parameters": SCHEMA}]}
        ],
        "candidates": [
            {"finishReason": "STOP", "content": {"role": "model", "parts": [{"text": "reply"}]}}
        ],
    },
]


@pytest.mark.parametrize("call", CALLS)
def test_a_mask_is_given_the_texts_of_a_call_and_no_value_of_its_protocol(call: Any) -> None:
    masked = json.dumps(call)
    for text in ("hello", "reply", "ada", "who"):
        masked = masked.replace(f'"{text}"', f'"{text.upper()}"')
    assert settings(str.upper).clean_call(call) == json.loads(masked)
    assert settings(lambda text: text).clean_call(call) == call


def test_what_spells_a_reply_by_tokens_is_not_stored_beside_its_masked_text() -> None:
    choice = {"message": {"role": "assistant", "content": "1234"}, "token_ids": [7, 8]}
    choice["logprobs"] = {
        "content": [{"token": "12", "bytes": [49, 50], "logprob": -0.1}, {"token": "34"}]
    }
    masked = settings([r"\d{4}"]).clean_call({"logprobs": True, "choices": [choice]})
    message = {"role": "assistant", "content": REMOVED}
    assert masked == {
        "logprobs": True,
        "choices": [{"message": message, "token_ids": None, "logprobs": None}],
    }


@given(st.text('aü\n"\\/', max_size=8), st.integers(1, 3))
def test_a_text_is_masked_however_deep_json_escapes_it(text: str, depth: int) -> None:
    secret, nested = "José 😀 Núñez", text
    for level in range(depth):
        nested = json.dumps({"owner": nested if level else secret + text})
    masked = settings([secret]).clean(nested)
    for _ in range(depth):
        masked = json.loads(masked)["owner"]
    assert masked == REMOVED + text


@pytest.mark.parametrize("escaped", [r"\u0022", r"\u000a", r"\u005c"])
def test_escapes_that_json_needs_stay(escaped: str) -> None:
    assert settings(["no"]).clean(f'{{"a": "{escaped}"}}') == f'{{"a": "{escaped}"}}'


def test_a_lone_surrogate_is_stored_as_text() -> None:
    assert settings(["no"]).clean(r"\ud83d é").encode() == "\N{REPLACEMENT CHARACTER} é".encode()


def test_pieces_of_a_stream_that_broke_off_are_left_out() -> None:
    pieces = [
        {"type": "response.output_text.delta", "delta": half} for half in ("41111111", "11111111")
    ]
    reply = join_parts([*pieces])
    assert reply["events"] == pieces
    assert settings([r"\d{16}"]).clean_call(reply) == reply | {"events": None}


def test_numbers_that_a_user_wrote_are_masked_and_those_of_the_protocol_stay() -> None:
    card, masked = 4111111111111111, settings([r"\b\d{16}\b"])
    assert masked.clean({"card": card, "cards": [card], "paid": True, "count": 12}) == {
        "card": REMOVED, "cards": [REMOVED], "paid": True, "count": 12,
    }  # fmt: skip
    tool = {"type": "tool_use", "id": "t", "name": "pay", "input": {"card": card, "count": 1}}
    call = {"content": [tool], "usage": {"input_tokens": card}, "created": card}
    assert masked.clean_call(call) == call | {
        "content": [tool | {"input": {"card": REMOVED, "count": 1}}]
    }
    paid = {"functionResponse": {"name": "pay", "response": {"card": card}}}
    assert masked.clean_call(
        {"parts": [paid, {"functionCall": {"name": "pay", "args": {"card": card}}}]}
    ) == {
        "parts": [
            {"functionResponse": {"name": "pay", "response": {"card": REMOVED}}},
            {"functionCall": {"name": "pay", "args": {"card": REMOVED}}},
        ]
    }
    assert masked.clean_call({"structuredContent": {"card": card}}) == {
        "structuredContent": {"card": REMOVED}
    }


def test_names_of_tools_of_events_stay(tmp_path: Path) -> None:
    with trace(tmp_path / "t.duckdb", mask=str.upper):
        watching = observer.get()
        assert watching is not None
        with watching.episode("pay", {}) as seen:
            content = [{"type": "text", "text": "paid"}]
            seen.happened(Event(name="pay", arguments={"name": "ada"}, result={"content": content}))
            seen.happened(Event(kind="tool", name="pay", result={"name": "ada"}, error="no"))
    with open_trace(tmp_path / "t.duckdb") as reader:
        [episode] = [episode for episode in episodes(reader) if episode.task.env_type == "pay"]
    mcp, tool = episode.events
    assert (mcp.name, mcp.arguments, mcp.result) == (
        "pay",
        {"name": "ADA"},
        {"content": [content[0] | {"text": "PAID"}]},
    )
    assert (tool.name, tool.kind, tool.result, tool.error) == ("pay", "tool", {"name": "ADA"}, "NO")
