"""A conversation has each message once, whatever dialect it is in and whatever a client did to the
history."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from ajet_sdk.dialects.message_parts import request_messages
from ajet_sdk.types import Call
from ajet_tools.trace.episode.messages import CUT, conversation, cut, fingerprint, gist, replies


def call(messages: Any, reply: Any = None, **more: Any) -> Call:
    request = {"messages": messages} if isinstance(messages, list) else messages
    whole = reply is None or not {"choices", "output", "type"}.isdisjoint(reply)
    response = reply or {} if whole else {"choices": [{"message": reply}]}
    return Call(
        episode_id="e", **{"request": request, "response": response, "agent": "solver", **more}
    )


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def tool(id: str, name: str, arguments: Any) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def told(*calls: Call) -> list[str]:
    return [f"{m.role}: {m.content}" for m in conversation(calls)]


def test_each_message_once_with_the_call_that_said_it() -> None:
    one = call([user("a")], said("b"))
    two = call([user("a"), said("b"), user("c")], said("d"))
    found = conversation([one, two])
    assert [(m.content, m.is_reply, m.call_id) for m in found] == [
        ("a", False, one.call_id), ("b", True, one.call_id), ("c", False, two.call_id), ("d", True, two.call_id),
    ]  # fmt: skip
    assert len({m.key for m in found}) == 4 and not any(m.note for m in found)
    assert [m.name for m in found] == ["", "solver", "", "solver"]
    assert [m.key for m in conversation([one])] == [m.key for m in found[:2]], (
        "keys stay while the episode grows"
    )


def test_a_reply_that_comes_back_in_another_form_is_the_same_message() -> None:
    reply = said(
        None, tool_calls=[tool("1", "calc", '{"a":1,   "b":[2]}')], reasoning_content="think first"
    )
    back = said("", tool_calls=[tool("1", "calc", {"a": 1, "b": [2]})])
    two = call(
        [
            user([{"type": "text", "text": "a"}]),
            back,
            {"role": "tool", "tool_call_id": "1", "content": "4"},
        ]
    )
    found = conversation([call([user("a")], reply), two])
    assert [m.role for m in found] == ["user", "assistant", "tool"]
    assert (
        found[1].reasoning == "think first"
        and found[1].tool_calls[0].arguments == '{"a": 1, "b": [2]}'
    )
    assert found[2].answers == "calc"


def test_history_that_is_left_out_or_changed_is_said_so() -> None:
    first = [user(f"m{n}") for n in range(4)]
    one = call(first, said("r"))
    assert [
        m.note for m in conversation([one, call([first[0], first[3], said("r"), user("new")])])
    ][-1].startswith("from here on, 2 earlier messages are missing")
    assert told(one, call([first[0], first[3], said("r"), user("new")]))[-1] == "user: new"
    changed = conversation([one, call([user("M0"), *first[1:], said("r")], said("s"))])
    assert [(m.content, m.note[:25]) for m in changed[5:]] == [
        ("M0", "from here on, 1 earlier m"),
        ("s", ""),
    ]
    before = conversation([one, call([user("put in"), *first, said("r")], said("s"))])
    assert [m.note for m in before[5:]] == [
        "inserted before messages that had already been sent",
        "",
    ]
    shorter = conversation([one, call(first[:1], said("again"))])
    assert shorter[-1].content == "again" and shorter[-1].note.startswith(
        "from here on, 4 earlier messages"
    )


def test_every_message_of_every_request_stands_in_the_conversation() -> None:
    rng = random.Random(7)
    for _ in range(200):
        calls, history = list[Call](), list[Any]()
        for turn in range(rng.randint(1, 6)):
            history = (
                [m for m in history if rng.random() > 0.1] if rng.random() < 0.3 else list(history)
            )
            for _ in range(rng.randint(0, 2)):
                history.insert(rng.randint(0, len(history)), user(f"m{rng.randint(0, 5)}"))
            reply = said(f"r{turn}")
            calls.append(call(list(history), reply))
            history = [*history, reply]
        shown = conversation(calls)
        marks = [fingerprint(m.raw) for m in shown]
        for one in calls:
            assert all(
                fingerprint(m) in marks for m in request_messages(one.request) + replies(one)
            )
            assert sum(m.is_reply for m in shown if m.call_id == one.call_id) == 1
        whole = calls[-1].request["messages"]
        assert all(marks.count(fingerprint(m)) >= whole.count(m) for m in whole), (
            "one that was sent twice is there twice"
        )


def test_a_conversation_that_only_grows_is_the_last_request_and_its_reply() -> None:
    history, calls = [user("q")], list[Call]()
    for turn in range(20):
        calls.append(call(list(history), said(f"r{turn}")))
        history += [said(f"r{turn}"), user("q")]
    assert [m.raw for m in conversation(calls)] == history[:-1]


LOOKS = {"type": "tool_use", "id": "t", "name": "look", "input": {"q": 1}}
ANTHROPIC = call(
    {
        "system": "Be brief.",
        "messages": [
            user("hi"),
            said([{"type": "thinking", "thinking": "hm"}, LOOKS]),
            user(
                [
                    {
                        "type": "tool_result",
                        "tool_use_id": "t",
                        "content": [{"type": "text", "text": "seen"}],
                    }
                ]
            ),
        ],
    },
    {"type": "message", "role": "assistant", "content": [{"type": "text", "text": "done"}]},
)


def test_anthropics_messages() -> None:
    system, hi, asks, result, done = conversation([ANTHROPIC])
    assert (system.role, system.content, hi.content, done.content) == (
        "system",
        "Be brief.",
        "hi",
        "done",
    )
    assert (asks.reasoning, asks.tool_calls[0].name, asks.tool_calls[0].arguments) == (
        "hm",
        "look",
        '{"q": 1}',
    )
    assert (result.role, result.content, result.answers) == ("tool", "seen", "look")


def test_openais_responses_whole_and_by_reference() -> None:
    output = [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "f", "name": "look", "arguments": '{"q":1}'},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "wait"}],
        },
    ]
    result = {"type": "function_call_output", "call_id": "f", "output": "seen"}
    one = call({"instructions": "Be brief.", "input": "hi"}, {"id": "resp_1", "output": output})
    done = {
        "output": [
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "done"}],
            }
        ]
    }
    whole = call({"instructions": "Be brief.", "input": [user("hi"), *output, result]}, done)
    by_reference = call(
        {"instructions": "Be brief.", "input": [result], "previous_response_id": "resp_1"}, done
    )
    for second in (whole, by_reference):
        found = conversation([one, second])
        assert [m.content for m in found] == ["Be brief.", "hi", "", "", "wait", "seen", "done"]
        assert (
            found[2].reasoning == "hm"
            and found[3].tool_calls[0].name == "look"
            and found[5].answers == "look"
        )
        assert not any(m.note for m in found)


def test_text_completions() -> None:
    assert told(call({"prompt": "once"}, {"choices": [{"text": "upon"}]})) == [
        "user: once",
        "assistant: upon",
    ]
    assert (
        told(call({"prompt": [1, 2, 3]}, {"choices": [{"text": "x"}]}))[0] == "user: [3 token ids]"
    )
    assert told(call({"prompt": ["a", "b"]})) == ["user: a", "user: b"]


@pytest.mark.parametrize(
    "raw",
    [
        "text",
        7,
        None,
        ["list"],
        {"no": "role"},
        {"role": 3, "content": "x"},
        {"type": "odd", "x": [1]},
    ],
)
def test_what_is_no_message_is_shown_as_its_json(raw: Any) -> None:
    (found,) = conversation([call({"messages": [raw]})])
    if isinstance(raw, str):
        assert (found.role, found.content) == ("user", raw)
    else:
        assert found.raw == raw and found.role == "?" and found.content == json.dumps(raw)


def test_odd_contents_are_kept() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 4000}}
    linked = {"type": "image_url", "image_url": {"url": "https://x.org/a.png"}}
    bare = {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/jpeg", "data": "B" * 2_000_000},
    }
    (found,) = conversation([call([user([image, linked, bare, {"type": "odd", "x": 1}, 7])])])
    assert found.content.split("\n") == [
        "[image, image/png, 3 kB, 4ac7f9]", "[image, https://x.org/a.png]", "[image, 1.5 MB, 110deb]",
        '{"type": "odd", "x": 1}', "7",
    ]  # fmt: skip
    odd = said(
        {"a": 1},
        tool_calls=[
            "x",
            {"function": None},
            tool("1", "f", "not json"),
            tool("2", "g", "[" * 100_000),
        ],
    )
    (found,) = conversation([call([odd])])
    assert found.content == '{"a": 1}' and [t.arguments[:8] for t in found.tool_calls][:3] == [
        '"x"',
        '{"functi',
        "not json",
    ]
    assert "[refusal] no" in conversation([call([said(None, refusal="no")])])[0].content
    legacy = conversation([call([said(None, function_call={"name": "old", "arguments": "{}"})])])
    assert legacy[0].tool_calls[0].name == "old"


def test_two_images_of_one_size_are_two_messages() -> None:
    def screenshot(letter: str, source: str) -> dict[str, Any]:
        return user([{"type": "image_url", "image_url": {"url": source + letter}}])

    for source in ("data:image/png;base64," + "A" * 4000, "https://x.org/" + "a" * 200):
        shots = [screenshot(letter, source) for letter in "AB"]
        found = conversation([call(shots[:1], said("first")), call(shots[1:], said("second"))])
        assert [m.content for m in found][1::2] == ["first", "second"] and found[
            0
        ].content != found[2].content


def test_a_call_without_a_reply_has_none() -> None:
    assert replies(call([user("a")])) == []
    assert replies(call([user("a")], said(None), error="undelivered")) == []
    assert replies(call([user("a")], said("half"), error="undelivered")) == [said("half")]


def test_a_long_text_is_cut_and_says_how_much_is_left() -> None:
    assert cut("short") == ("short", 0)
    for text in ("x" * 10_000_000, "line\n" * 5000):
        head, more = cut(text)
        assert len(head) <= CUT and len(head) + more == len(text) and text.startswith(head) and more


def test_the_gist_of_a_reply() -> None:
    assert gist(call([], said("hello"))) == "hello" and gist(call([])) == ""
    assert (
        gist(call([], said("x", tool_calls=[tool("1", "calc", "{}"), tool("2", "look", "{}")])))
        == "→ calc, look"
    )
