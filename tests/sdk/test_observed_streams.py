"""Streams of other servers, joined as the vendors' own clients read them, however the server spells
them."""

from __future__ import annotations

import itertools
import json
from typing import Any

import httpx2
import pytest
from anthropic import Anthropic
from hypothesis import given
from hypothesis import strategies as st

from ajet_sdk.dialects.observed import CUT, join_events

Json = dict[str, Any]


def stream(*events: Any, done: bool = True, end: str = "\n") -> str:
    lines = [f"data: {json.dumps(event, ensure_ascii=False)}{end}{end}" for event in events]
    return "".join([*lines, *([f"data: [DONE]{end}{end}"] if done else [])])


def chunk(delta: Json | None = None, finish: str | None = None, **choice: Any) -> Json:
    part = {"index": 0, "delta": delta or {}, "finish_reason": finish, **choice}
    return {"id": "chatcmpl-1", "object": "chat.completion.chunk", "model": "m", "choices": [part]}


def message_of(*deltas: Json) -> Json:
    """The message of a stream of these deltas, which has to be without a fault."""
    response = join_events(stream(*map(chunk, deltas), chunk(finish="stop")))
    assert "stream_error" not in response
    message: Json = response["choices"][0]["message"]
    return message


def call(name: str, arguments: str, index: Any = ..., call_id: Any = ...) -> Json:
    piece: Json = {"function": {"name": name, "arguments": arguments}, "type": "function"}
    if index is not ...:
        piece["index"] = index
    if call_id is not ...:
        piece["id"] = call_id
    return piece


def calls_of(*chunks: list[Json]) -> list[tuple[str, str]]:
    message = message_of(*({"tool_calls": pieces} for pieces in chunks))
    return [
        (each["function"]["name"], each["function"]["arguments"]) for each in message["tool_calls"]
    ]


WEATHER, CLOCK = ("weather", '{"city": "Paris"}'), ("clock", '{"tz": "JST"}')


@pytest.mark.parametrize("index", [0, None, ..., "0"])
@pytest.mark.parametrize("ids", [("a", "b"), (None, None), ("", ""), (..., ...)])
@pytest.mark.parametrize("together", [False, True])
def test_parallel_calls_that_a_server_numbers_alike_or_not_at_all(
    index: Any, ids: Any, together: bool
) -> None:
    pieces = [call(*WEATHER, index, ids[0]), call(*CLOCK, index, ids[1])]
    assert calls_of(*([pieces] if together else [[piece] for piece in pieces])) == [WEATHER, CLOCK]


@pytest.mark.parametrize("index", [0, None, ...])
def test_two_calls_of_one_tool_stay_two(index: Any) -> None:
    other = ("weather", '{"city": "Oslo"}')
    assert calls_of([call(*WEATHER, index, "a")], [call(*other, index, "b")]) == [WEATHER, other]
    assert calls_of([call(*WEATHER, index)], [call(*other, index)]) == [WEATHER, other]


def test_calls_without_arguments_stay_two() -> None:
    assert calls_of([call("up", "", 0, "a"), call("down", "", 0, "b")]) == [
        ("up", ""),
        ("down", ""),
    ]


@pytest.mark.parametrize("repeats", [False, True])
def test_a_call_in_pieces_is_one_also_if_each_piece_repeats_its_name_and_id(repeats: bool) -> None:
    first = call("weather", "", 0, "a")
    pieces = [
        {"index": 0, "function": {"arguments": text}, **({"id": "a"} if repeats else {})}
        for text in ('{"ci', 'ty": 1}')
    ]
    if repeats:
        for piece in pieces:
            piece["function"] = {"name": "weather", **dict(piece["function"])}  # type: ignore[call-overload]
    assert calls_of([first], *([piece] for piece in pieces)) == [("weather", '{"city": 1}')]


def test_interleaved_calls_go_by_their_index() -> None:
    first, second = call("a", "", 0, "x"), call("b", "", 1, "y")
    pieces = [
        [{"index": n, "function": {"arguments": text}}] for text in ('{"k"', ": 1}") for n in (1, 0)
    ]
    assert calls_of([second], [first], *pieces) == [("a", '{"k": 1}'), ("b", '{"k": 1}')]


def test_custom_tools_are_joined() -> None:
    begun = {"index": 0, "id": "a", "type": "custom", "custom": {"name": "sql", "input": "select"}}
    message = message_of(
        {"tool_calls": [begun]}, {"tool_calls": [{"index": 0, "custom": {"input": " 1"}}]}
    )
    assert message["tool_calls"] == [
        {"id": "a", "type": "custom", "custom": {"name": "sql", "input": "select 1"}}
    ]


@given(st.data())
def test_pieces_of_calls_are_joined_to_the_calls(data: st.DataObject) -> None:
    """Any calls, cut anywhere, with any usual numbering."""
    arguments = st.dictionaries(st.sampled_from("abc"), st.text(max_size=4), min_size=1).map(
        json.dumps
    )
    wanted = data.draw(
        st.lists(st.tuples(st.sampled_from(["up", "down"]), arguments), min_size=1, max_size=4)
    )
    numbering = data.draw(st.sampled_from(["own", "zero", "none"]))
    chunks = list[list[Json]]()
    for number, (name, text) in enumerate(wanted):
        index = {"own": number, "zero": 0, "none": None}[numbering]
        cuts = sorted(data.draw(st.sets(st.integers(1, len(text)), max_size=3)) | {0, len(text)})
        chunks.append([call(name, "", index, f"id{number}")])
        for start, end in itertools.pairwise(cuts):
            chunks.append([{"index": index, "function": {"arguments": text[start:end]}}])
    assert calls_of(*chunks) == wanted


@pytest.mark.parametrize("index", [None, 0, "0"])
def test_a_choice_without_a_number_is_the_first(index: Any) -> None:
    events = [chunk({"content": "hello"}, index=index), chunk(finish="stop")]
    response = join_events(stream(*events))
    assert [choice["message"]["content"] for choice in response["choices"]] == ["hello"]


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\x1e"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_only_the_line_ends_of_events_are_line_ends(separator: str, end: str) -> None:
    text = f"a{separator}b"
    response = join_events(stream(chunk({"content": text}), chunk(finish="stop"), end=end))
    assert response["choices"][0]["message"]["content"] == text and "stream_error" not in response


def test_what_is_not_text_is_kept() -> None:
    begun = {
        "content": [{"type": "thinking", "thinking": [{"type": "text", "text": "so"}]}],
        "function_call": {"name": "pay", "arguments": '{"a'},
        "audio": {"id": "audio-1", "data": "AAA", "transcript": "hel"},
        "reasoning_details": [
            {"type": "reasoning.text", "index": 0, "format": "f", "text": "think"}
        ],
        "annotations": [{"type": "url_citation", "url": "u"}],
        "refusal": "no",
        "extra": {"signature": "x"},
    }
    ended = {
        "content": [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}],
        "function_call": {"arguments": '": 1}'},
        "audio": {"id": "audio-1", "data": "BBB", "transcript": "lo", "expires_at": 7},
        "reasoning_details": [
            {"type": "reasoning.text", "index": 0, "format": "f", "text": "ing"},
            {"type": "reasoning.encrypted", "index": 1, "data": "e"},
        ],
        "annotations": [{"type": "url_citation", "url": "v"}],
        "refusal": " way",
    }
    assert message_of(begun, ended) == {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": [{"type": "text", "text": "so"}]},
            {"type": "text", "text": "hello"},
        ],
        "function_call": {"name": "pay", "arguments": '{"a": 1}'},
        "audio": {"id": "audio-1", "data": "AAABBB", "transcript": "hello", "expires_at": 7},
        "reasoning_details": [
            {"type": "reasoning.text", "index": 0, "format": "f", "text": "thinking"},
            {"type": "reasoning.encrypted", "index": 1, "data": "e"},
        ],
        "annotations": [{"type": "url_citation", "url": "u"}, {"type": "url_citation", "url": "v"}],
        "refusal": "no way",
        "extra": {"signature": "x"},
    }


def test_text_and_then_parts_are_both_kept() -> None:
    assert message_of({"content": "a"}, {"content": [{"type": "image", "url": "u"}]})[
        "content"
    ] == [
        {"type": "text", "text": "a"},
        {"type": "image", "url": "u"},
    ]


def test_what_a_choice_has_beside_its_message_is_kept() -> None:
    logprobs = [{"content": [{"token": token, "logprob": -0.5}]} for token in "ab"]
    filtered = {"hate": {"severity": "safe"}}
    events = [
        chunk({"content": t}, logprobs=v, content_filter_results=filtered)
        for t, v in zip("ab", logprobs, strict=True)
    ]
    response = join_events(
        stream(*events, chunk(finish="stop"), {"choices": [], "usage": {"total_tokens": 2}})
    )
    choice = response["choices"][0]
    assert choice["logprobs"] == {"content": [logprobs[0]["content"][0], logprobs[1]["content"][0]]}
    assert choice["content_filter_results"] == filtered and response["usage"] == {"total_tokens": 2}


def test_the_end_mark_in_a_text_is_none() -> None:
    response = join_events(stream(chunk({"content": "write data: [DONE] at the end"}), done=False))
    assert response["stream_error"] == CUT


# Anthropic's messages, against its own client


def message_events() -> list[Json]:
    start: Json = {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "m",
        "content": [],
        "stop_reason": None,
    }
    usage = {"input_tokens": 3, "output_tokens": 0}
    citation: Json = {
        "type": "char_location",
        "cited_text": "x",
        "document_index": 0,
        "document_title": None,
    }
    citation |= {"start_char_index": 0, "end_char_index": 1}
    tool_use = {"type": "tool_use", "id": "t", "name": "n", "input": {}}
    end = {"stop_reason": "tool_use", "stop_sequence": None}
    return [
        {"type": "message_start", "message": {**start, "stop_sequence": None, "usage": usage}},
        {"type": "ping"},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "hello\u2028"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "citations_delta", "citation": citation}},
        {"type": "content_block_stop", "index": 0},
        {"type": "content_block_start", "index": 1, "content_block": tool_use},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "input_json_delta", "partial_json": '{"a": '}},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "input_json_delta", "partial_json": "1}"}},
        {"type": "content_block_stop", "index": 1},
        {"type": "message_delta", "delta": end, "usage": {"output_tokens": 5}},
        {"type": "message_stop"},
    ]  # fmt: skip


def by_anthropic(events: list[Json]) -> Json:
    text = "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events)
    headers = {"content-type": "text/event-stream"}
    transport = httpx2.MockTransport(
        lambda request: httpx2.Response(200, content=text.encode(), headers=headers)
    )
    client = Anthropic(
        api_key="k", base_url="http://model.invalid", http_client=httpx2.Client(transport=transport)
    )
    request: Any = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}
    with client.messages.stream(**request) as streamed:
        return json.loads(streamed.get_final_message().model_dump_json(exclude_unset=True))  # type: ignore[no-any-return]


def test_a_message_is_joined_as_by_anthropics_client() -> None:
    events, theirs = message_events(), by_anthropic(message_events())
    ours = join_events(stream(*events, done=False))
    assert ours["content"][0]["citations"][0]["cited_text"] == "x"
    for name in ("stop_reason", "role", "model", "id"):
        assert ours[name] == theirs[name]
    for our_block, their_block in zip(ours["content"], theirs["content"], strict=True):
        assert our_block == {name: their_block[name] for name in our_block}
    assert ours["usage"] == {"input_tokens": 3, "output_tokens": 5}


def test_a_delta_of_an_unknown_kind_is_kept_as_it_came() -> None:
    events = message_events()
    unknown = {"type": "content_block_delta", "index": 0, "delta": {"type": "new_delta", "news": 1}}
    response = join_events(stream(*events[:4], unknown, {"type": "news"}, *events[4:], done=False))
    assert response["events"] == [unknown, {"type": "news"}] and "stream_error" not in response


def test_geminis_blocked_prompt_is_whole() -> None:
    event = {"promptFeedback": {"blockReason": "SAFETY"}, "modelVersion": "m"}
    assert join_events(stream(event, done=False)) == {**event, "candidates": []}
