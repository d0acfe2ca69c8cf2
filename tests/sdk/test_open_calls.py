"""What an open episode holds: calls come back as they were, and memory grows with what is new in
them."""

from __future__ import annotations

import copy
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajet_sdk.gateway.open_calls import OpenCalls
from ajet_sdk.samples.prefixes import place_all
from ajet_sdk.types import Call
from tests.bench.gateway_memory import held_bytes

ids = st.lists(st.integers(0, 2), max_size=4)


@given(st.data())
def test_calls_come_back_as_they_were_added(data: Any) -> None:
    """Prompts that go on from any earlier call, from a part of one, or from none; with and without
    outputs."""
    kept, added = OpenCalls(), list[Call]()
    for index in range(data.draw(st.integers(1, 12))):
        prompt = data.draw(ids)
        if added and data.draw(st.booleans()):
            old = data.draw(st.sampled_from(added))
            known = [
                *(old.prompt_ids if old.prompt_ids is not None else []),
                *(old.output_ids if old.output_ids is not None else []),
            ]
            prompt = [*known[: data.draw(st.integers(0, len(known)))], *prompt]
        output = data.draw(st.none() | ids)
        given = (
            None if prompt == [9] else data.draw(st.sampled_from([prompt, prompt, prompt, None]))
        )
        call = Call(
            episode_id="e",
            index=index,
            request_id=str(index),
            prompt_ids=given,
            output_ids=output,
            logprobs=None if output is None else [-1.0] * len(output),
        )
        added.append(call)
        kept.add(call)
    assert kept.all() == tuple(place_all(added))
    kept.undelivered("0", "undelivered")
    assert [call.error for call in kept.all()] == ["undelivered"] + [None] * (len(added) - 1)


def test_the_prompts_of_a_conversation_are_views_of_one_array() -> None:
    kept, prompt = OpenCalls(), list(range(100))
    for index in range(20):
        kept.add(
            Call(
                episode_id="e", index=index, prompt_ids=prompt, output_ids=[7, 8], logprobs=[-1, -1]
            )
        )
        prompt += [7, 8, index]
    calls = kept.all()
    assert len({id(call.prompt_ids.base) for call in calls if call.prompt_ids is not None}) == 1
    assert all(
        call.prompt_ids is not None and not call.prompt_ids.flags.writeable for call in calls
    )
    assert np.array_equal(calls[-1].prompt_ids, prompt[:-3])  # type: ignore[arg-type]


TEXTS = ["a", "b]", "c},", '"]', "é", "🦊"]
PARTS = [{"type": "text", "text": "x]"}]
MESSAGES = st.builds(
    lambda text, number: {"role": "user", "content": text, "n": number},
    st.sampled_from([*TEXTS, PARTS]),
    st.sampled_from([1, True, 1.0, None]),
)
TAILS: list[dict[str, Any]] = [{}, {"tools": [{"a": ["]"]}]}, {"x": "]"}, {"messages": [1]}]


@given(st.data())
def test_a_request_read_from_where_it_repeats_the_latest_is_the_whole_request(data: Any) -> None:
    """Requests go on, begin anew, are cut, have other fields, are written otherwise, or are no
    JSON."""
    kept, messages, tail = OpenCalls(), [data.draw(MESSAGES)], data.draw(st.sampled_from(TAILS))
    for _ in range(8):
        change = data.draw(st.sampled_from(["add", "add", "add", "add", "new", "cut", "tail"]))
        if change == "add":
            messages = [*messages, *data.draw(st.lists(MESSAGES, max_size=2))]
        elif change == "tail":
            tail = data.draw(st.sampled_from(TAILS))
        else:
            messages = messages[:-1] if change == "cut" else [data.draw(MESSAGES)]
        ascii_only = data.draw(st.sampled_from([True, True, False]))
        text = json.dumps({"model": "m", "messages": messages}, ensure_ascii=ascii_only)
        text = text[:-1] + (f", {json.dumps(tail)[1:]}" if tail else "}")
        if data.draw(st.sampled_from([False, False, True])):
            place = data.draw(st.integers(0, len(text) - 1))
            more = data.draw(st.sampled_from(["", "]", ",", "}", '"', " "]))
            text = text[:place] + more + text[place + 1 :]
        try:
            whole = json.loads(text)
        except ValueError:
            whole = None
        body = kept.read(text.encode(), "a")
        if body is None and isinstance(whole, dict):
            body = kept.keep_read(text.encode(), whole, "a")
        if body is not None:
            assert json.dumps(body) == json.dumps(whole)  # tells 1 from True, and orders of keys


def test_only_the_messages_that_a_request_adds_are_parsed() -> None:
    kept, messages = OpenCalls(), [{"role": "user", "content": "hello"}]
    first = {"messages": messages, "model": "m"}
    before = kept.keep_read(json.dumps(first).encode(), first, "a")["messages"]
    for number in range(4):
        messages = [*messages, {"role": "user", "content": f"and {number}"}]
        assert kept.read(json.dumps(first).encode(), "b") is None
        body = kept.read(json.dumps({"messages": messages, "model": "m"}).encode(), "a")
        assert body is not None and body["messages"] == messages
        assert all(a is b for a, b in zip(before, body["messages"], strict=False))
        before = body["messages"]


def test_attempts_at_one_prompt_share_it() -> None:
    kept = OpenCalls()
    for index in range(5):
        kept.add(
            Call(
                episode_id="e", index=index, prompt_ids=range(50), output_ids=[index], logprobs=[-1]
            )
        )
    bases = [call.prompt_ids.base for call in kept.all() if call.prompt_ids is not None]
    assert len({id(base) for base in bases}) == 1 and len(bases[0]) == 50


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.sampled_from([0.0, 1.0, -0.0])
    | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3)
    ),
)


@given(
    st.lists(
        st.dictionaries(st.sampled_from(["messages", "tools", "user", "n"]), values), max_size=6
    )
)
def test_a_shared_request_says_the_same_to_the_letter(bodies: list[dict[str, Any]]) -> None:
    kept = OpenCalls()
    for body in bodies:
        assert json.dumps(kept.shared(copy.deepcopy(body))) == json.dumps(body)


def test_equal_messages_are_one_object() -> None:
    kept = OpenCalls()
    body = {"messages": [{"role": "user", "content": "x" * 200}], "tools": [{"type": "function"}]}
    one, other = kept.shared(copy.deepcopy(body)), kept.shared(copy.deepcopy(body))
    assert one["messages"][0] is other["messages"][0] and one["tools"] is other["tools"]


@pytest.mark.slow
def test_memory_is_linear_in_turns() -> None:
    """Three times the turns took eight times the memory; what is held for a distinct byte may not
    grow."""
    few, distinct_few, _ = held_bytes(4, 8)
    many, distinct_many, _ = held_bytes(4, 24)
    assert many / distinct_many <= 1.1 * few / distinct_few
