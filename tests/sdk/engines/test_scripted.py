"""The scripted engine and its tokenizer."""

from __future__ import annotations

import asyncio
import re
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajet_sdk.dialects.table import CHAT
from ajet_sdk.engines.scripted import SPECIALS, ByteTokenizer, ScriptedEngine
from ajet_sdk.errors import EngineError
from ajet_sdk.gateway.episode import EpisodeSpec
from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.protocols import Answer, Ask
from ajet_sdk.types import Call

USER = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "calc", "parameters": {}}}]


def ask(engine: ScriptedEngine, *, episode_id: str = "e", agent: str = "a", n: int = 1, **more: Any) -> Answer:
    body = {"messages": USER, "n": n, **more}
    return asyncio.run(engine.answer(CHAT.ask(body, episode_id, agent)))


@given(st.text(), st.lists(st.sampled_from(SPECIALS)))
def test_bytes_survive_encoding(text: str, specials: list[str]) -> None:
    tokenizer = ByteTokenizer()
    whole = text + "".join(special + text for special in specials)
    ids = tokenizer.encode(whole)
    assert b"".join(tokenizer.token_bytes(i) for i in ids) == whole.encode("utf-8", "surrogatepass")
    assert sum(map(tokenizer.is_special, ids)) >= len(specials) and max(ids, default=0) < tokenizer.vocab_size


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
        return ["plain", {"content": "so", "tool_calls": [call]}, {"reasoning_content": "hm", "content": "yes"}]

    plain, called, thought = ask(ScriptedEngine(reply), n=3, tools=TOOLS).choices
    assert plain.message == {"role": "assistant", "content": "plain"} and plain.finish_reason == "stop"
    assert called.message is not None and called.finish_reason == "tool_calls"
    assert called.message["tool_calls"][0]["function"] == {"name": "calc", "arguments": '{"a": [1, "é"]}'}
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
def test_a_message_of_another_shape_is_refused_with_the_expected_one(message: dict[str, Any], says: str) -> None:
    """A template would write `null` for the name, or leave the call out."""
    with pytest.raises(EngineError, match=re.escape(says)):
        ask(ScriptedEngine([message]))
    function = {"name": "search", "arguments": {"q": 1}}
    sound = {"role": "assistant", "content": None, "refusal": None, "tool_calls": [{"function": function}]}
    tools = [{"type": "function", "function": {"name": "search"}}]
    (choice,) = ask(ScriptedEngine([sound]), tools=tools).choices
    assert choice.message is not None and choice.message["tool_calls"][0]["function"]["name"] == "search"


def test_length_and_stop_strings_cut() -> None:
    engine = ScriptedEngine(lambda ask: "one two three")
    (cut,) = ask(engine, max_tokens=5).choices
    assert (cut.message, cut.finish_reason) == ({"role": "assistant", "content": "one t"}, "length")
    assert [*cut.output_ids] == [*b"one t"]
    (stopped,) = ask(engine, stop=["tw", "thr"]).choices
    assert (stopped.message, stopped.finish_reason) == ({"role": "assistant", "content": "one "}, "stop")
    assert [*stopped.output_ids] == [*b"one tw"]


def test_logprobs_are_as_told() -> None:
    engine = ScriptedEngine(lambda ask: "ab", logprob=lambda ids: [-0.5 * n for n in range(len(ids))])
    (choice,) = ask(engine, logprobs=True).choices
    assert choice.logprobs == [0.0, -0.5, -1.0] and choice.tokens == [b"a", b"b", b"<|im_end|>"]


def recorded(engine: ScriptedEngine, turns: int) -> tuple[Call, ...]:
    async def scenario() -> tuple[Call, ...]:
        with Gateway() as gateway:
            episode = gateway.open(EpisodeSpec("recorded", engine))
            model, messages = episode.model("solver"), list(USER)
            for _ in range(turns):
                messages = [*messages, await model.chat(messages, n=2), {"role": "user", "content": "go on"}]
            return await episode.finish()

    return asyncio.run(scenario())


def test_recorded_calls_replay_to_the_same_tokens() -> None:
    numbers = iter(range(100))
    engine = ScriptedEngine(lambda ask: [f"reply {next(numbers)}", "other"], logprob=-0.25)
    calls = recorded(engine, 3)
    replayed = recorded(ScriptedEngine.replaying(calls), 3)
    assert len(calls) == 6
    for one, two in zip(calls, replayed, strict=True):
        assert one.prompt_ids is not None and one.output_ids is not None and one.logprobs is not None
        assert two.prompt_ids is not None and two.output_ids is not None and two.logprobs is not None
        assert one.prompt_ids.tolist() == two.prompt_ids.tolist()
        assert one.output_ids.tolist() == two.output_ids.tolist() and one.logprobs.tolist() == two.logprobs.tolist()
        assert one.response["choices"] == two.response["choices"] and one.model == two.model


def test_what_was_not_recorded_cannot_be_replayed() -> None:
    replay = ScriptedEngine.replaying(recorded(ScriptedEngine(lambda ask: "x"), 1))
    with pytest.raises(EngineError, match="not recorded"):
        ask(replay, agent="solver", messages=[{"role": "user", "content": "something else"}])
    ask(replay, agent="solver")
    with pytest.raises(EngineError, match="have been used"):
        ask(replay, agent="solver")
    ask(replay, episode_id="another", agent="solver")


def test_a_reply_that_blocks_holds_up_no_other() -> None:
    """A function that sleeps, or waits for a person, is not run on the loop that serves everyone."""
    released = threading.Event()

    def reply(ask: Ask) -> str:
        if ask.agent == "slow":
            released.wait()  # for ever where the other request is not answered meanwhile
        released.set()
        return ask.agent

    async def both(engine: ScriptedEngine) -> list[Any]:
        asks = [CHAT.ask({"messages": USER}, "e", agent) for agent in ("slow", "quick")]
        return [a.choices[0].message["content"] for a in await asyncio.gather(*map(engine.answer, asks))]  # type: ignore[index]

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
    assert choice.message == {"role": "assistant", "content": said} and choice.finish_reason == "stop"
