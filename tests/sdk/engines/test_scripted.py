"""The scripted engine and its tokenizer."""

from __future__ import annotations

import asyncio
import re
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajet_sdk.dialects.openai_chat import CHAT
from ajet_sdk.engines.scripted import SPECIALS, ByteTokenizer, ScriptedEngine
from ajet_sdk.errors import EngineError
from ajet_sdk.protocols import Answer, Ask

USER = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "calc", "parameters": {}}}]


def ask(
    engine: ScriptedEngine, *, episode_id: str = "e", agent: str = "a", n: int = 1, **more: Any
) -> Answer:
    body = {"messages": USER, "n": n, **more}
    return asyncio.run(engine.answer(CHAT.ask(body, episode_id, agent)))


@given(st.text(), st.lists(st.sampled_from(SPECIALS)))
def test_bytes_survive_encoding(text: str, specials: list[str]) -> None:
    tokenizer = ByteTokenizer()
    whole = text + "".join(special + text for special in specials)
    ids = tokenizer.encode(whole)
    assert b"".join(tokenizer.token_bytes(i) for i in ids) == whole.encode("utf-8", "surrogatepass")
    assert (
        sum(map(tokenizer.is_special, ids)) >= len(specials)
        and max(ids, default=0) < tokenizer.vocab_size
    )


def test_a_sequence_starts_anew_for_each_agent_and_ends() -> None:
    engine = ScriptedEngine(["one", "two"])
    said = [ask(engine, agent=agent).choices[0].message for agent in ("a", "a", "b")]
    assert [message and message["content"] for message in said] == ["one", "two", "one"]
    assert [*ask(engine, episode_id="other").choices[0].output_ids] == [*b"one", 257]
    with pytest.raises(EngineError, match="2 replies"):
        ask(engine)
    engine.forget("e")
    assert [*ask(engine).choices[0].output_ids] == [*b"one", 257]


def test_replies_may_be_messages_lists_and_coroutines() -> None:
    async def reply(ask: Ask) -> list[Any]:
        call = {"function": {"name": "calc", "arguments": {"a": [1, "é"]}}}
        return [
            "plain",
            {"content": "so", "tool_calls": [call]},
            {"reasoning_content": "hm", "content": "yes"},
        ]

    plain, called, thought = ask(ScriptedEngine(reply), n=3, tools=TOOLS).choices
    assert (
        plain.message == {"role": "assistant", "content": "plain"} and plain.finish_reason == "stop"
    )
    assert called.message is not None and called.finish_reason == "tool_calls"
    assert called.message["tool_calls"][0]["function"] == {
        "name": "calc",
        "arguments": '{"a": [1, "é"]}',
    }
    assert called.message["content"] == "so"
    assert thought.message == {"role": "assistant", "content": "yes", "reasoning_content": "hm"}
    with pytest.raises(EngineError, match="must be a string"):
        ask(ScriptedEngine(lambda ask: 42))


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"tool_calls": [{"name": "search", "arguments": "{}"}]}, "got {'name': 'search'"),
        ({"tool_calls": {"function": {"name": "search", "arguments": "{}"}}}, "expected a list of"),
        ({"tool_calls": [{"function": {"arguments": "{}"}}]}, "got {'function': {'arguments'"),
        ({"tool_calls": [{"function": "search"}]}, "got {'function': 'search'}"),
        ({"tool_calls": [{"function": {"name": "search", "arguments": 3}}]}, '"arguments": "{'),
        ({"tool_call": {"name": "search"}}, "'tool_call' is no key of a message"),
        ({"content": {"text": "hello"}}, "content must be text"),
    ],
)
def test_a_message_of_another_shape_is_refused_with_the_expected_one(
    message: dict[str, Any], says: str
) -> None:
    """A template would write `null` for the name, or leave the call out."""
    with pytest.raises(EngineError, match=re.escape(says)):
        ask(ScriptedEngine([message]))
    function = {"name": "search", "arguments": {"q": 1}}
    sound = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "tool_calls": [{"function": function}],
    }
    tools = [{"type": "function", "function": {"name": "search"}}]
    (choice,) = ask(ScriptedEngine([sound]), tools=tools).choices
    assert (
        choice.message is not None
        and choice.message["tool_calls"][0]["function"]["name"] == "search"
    )


def test_length_and_stop_strings_cut() -> None:
    engine = ScriptedEngine(lambda ask: "one two three")
    (cut,) = ask(engine, max_tokens=5).choices
    assert (cut.message, cut.finish_reason) == ({"role": "assistant", "content": "one t"}, "length")
    assert [*cut.output_ids] == [*b"one t"]
    (stopped,) = ask(engine, stop=["tw", "thr"]).choices
    assert (stopped.message, stopped.finish_reason) == (
        {"role": "assistant", "content": "one "},
        "stop",
    )
    assert [*stopped.output_ids] == [*b"one tw"]


def test_logprobs_are_as_told() -> None:
    engine = ScriptedEngine(
        lambda ask: "ab", logprob=lambda ids: [-0.5 * n for n in range(len(ids))]
    )
    (choice,) = ask(engine, logprobs=True).choices
    assert choice.logprobs == [0.0, -0.5, -1.0] and choice.tokens == [b"a", b"b", b"<|im_end|>"]


def test_a_reply_that_blocks_holds_up_no_other() -> None:
    """A function that sleeps, or waits for a person, is not run on the loop that serves
    everyone."""
    released = threading.Event()

    def reply(ask: Ask) -> str:
        if ask.agent == "slow":
            released.wait()  # for ever where the other request is not answered meanwhile
        released.set()
        return ask.agent

    async def both(engine: ScriptedEngine) -> list[Any]:
        asks = [CHAT.ask({"messages": USER}, "e", agent) for agent in ("slow", "quick")]
        return [
            a.choices[0].message["content"] for a in await asyncio.gather(*map(engine.answer, asks))
        ]  # type: ignore[index]

    assert asyncio.run(both(ScriptedEngine(reply))) == ["slow", "quick"]


def test_an_iterator_at_its_end_is_an_error_and_no_hang() -> None:
    replies = iter(["one"])
    engine = ScriptedEngine(lambda ask: next(replies))
    assert [*ask(engine).choices[0].output_ids] == [*b"one", 257]
    with pytest.raises(EngineError, match="has ended"):
        ask(engine)


def test_calls_stay_text_without_a_parser() -> None:
    said = '<tool_call>{"name": "calc", "arguments": {}}</tool_call>'
    [choice] = ask(ScriptedEngine([said], tool_call_parser="none"), tools=TOOLS).choices
    assert (
        choice.message == {"role": "assistant", "content": said} and choice.finish_reason == "stop"
    )
