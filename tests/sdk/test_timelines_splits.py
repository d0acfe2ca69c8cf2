"""Why calls split, told from real renderings: an engine that, as most servers do, renders and
tokenises anew."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from ajet_sdk.samples.splits import HINTS
from ajet_sdk.samples.timelines import merge
from ajet_sdk.tokens.template import ChatTemplate
from ajet_sdk.types import Call, Split
from tests.sdk.conftest import Message, reply, user

BEGAN = datetime(2026, 1, 1, tzinfo=timezone.utc)
END = "<|im_end|>"
SYSTEM = {"role": "system", "content": "You are a helpful assistant that may call tools."}
TOOL = {"type": "function", "function": {"name": "calc", "parameters": {"type": "object"}}}


def called(arguments: str) -> Message:
    function = {"name": "calc", "arguments": arguments}
    return reply("", tool_calls=[{"id": "c1", "type": "function", "function": function}])


def asked(
    tok: Any,
    at: int,
    messages: Sequence[Message],
    output: Sequence[int] | str,
    said: Message,
    tools: Sequence[Mapping[str, Any]] = (TOOL,),
    lasting: int = 1,
) -> Call:
    """A call as a server records it: the prompt is the whole rendering, tokenised anew."""
    template = ChatTemplate.of(tok.chat_template, tok.variables)
    prompt = tok.encode(template.render([template.form(m) for m in messages], tools, at=BEGAN))
    output = tok.encode(output) if isinstance(output, str) else output
    return Call(
        call_id=f"c{at}",
        episode_id="e",
        request={"model": "m", "messages": list(messages), "tools": list(tools)},
        response={"choices": [{"message": said}]},
        prompt_ids=prompt,
        output_ids=output,  # type: ignore[arg-type]
        logprobs=[-1.0] * len(output),  # type: ignore[arg-type]
        started_at=BEGAN + timedelta(seconds=2 * at),
        ended_at=BEGAN + timedelta(seconds=2 * at + lasting),
    )


def the_split(tok: Any, *calls: Call, decode: bool = True) -> Split:
    merged = merge(calls, tok.decode if decode else None)
    (split,) = merged.splits
    assert split.hint == HINTS[split.cause]
    return split


TASK = [SYSTEM, user("What is 3 + 4?")]
YES = reply("The answer is 7.")


def test_text_that_comes_back_as_other_ids(tokenizer_of: Callable[..., Any]) -> None:
    tok = tokenizer_of("byte_level", "tools")
    letters = [i for piece in (*"The answer is 7.", END) for i in tok.encode(piece)]
    first = asked(tok, 0, TASK, letters, YES)
    split = the_split(tok, first, asked(tok, 1, [*TASK, YES, user("so")], "x", reply("x")))
    assert split.cause == "retokenised"
    assert split.at_token >= len(first.prompt_ids)  # type: ignore[arg-type]


def test_a_tool_call_written_otherwise_behind_a_long_reply(
    tokenizer_of: Callable[..., Any],
) -> None:
    tok = tokenizer_of("byte_level", "tools")
    said = {**called('{"expression":"12*34"}'), "content": "the quick brown fox " * 20 + "jumps"}
    sampled = (
        said["content"]
        + '\n<tool_call>\n{"arguments": {"expression": "12*34"}, "name": "calc"}\n</tool_call>'
    )
    first = asked(tok, 0, TASK, sampled + END, said)
    then = [*TASK, said, {"role": "tool", "tool_call_id": "c1", "content": "408"}]
    split = the_split(tok, first, asked(tok, 1, then, "x", reply("x")))
    assert split.cause == "tool_call_reserialised" and split.at_token > len(first.prompt_ids) + 60  # type: ignore[arg-type]


def test_a_summarised_history(tokenizer_of: Callable[..., Any]) -> None:
    tok = tokenizer_of("byte_level", "tools")
    messages, calls = list(TASK), []
    for turn in range(3):
        calls.append(asked(tok, turn, messages, "The answer is 7." + END, YES))
        messages += [YES, user("and then?")]
    short = [SYSTEM, user("So far: the answer is 7."), user("and then?")]
    split = the_split(tok, *calls, asked(tok, 3, short, "x", reply("x")))
    assert (split.cause, split.parent_call_id) == ("summarised", "c2")


def test_a_reply_that_ends_with_another_token(tokenizer_of: Callable[..., Any]) -> None:
    tok = tokenizer_of("byte_level", "tools")
    first = asked(tok, 0, TASK, "The answer is 7.<|endoftext|>", YES)
    split = the_split(tok, first, asked(tok, 1, [*TASK, YES, user("so")], "x", reply("x")))
    assert split.cause == "end_token"
    assert split.at_token == len(first.prompt_ids) + len(first.output_ids) - 1  # type: ignore[arg-type]


def test_without_text_the_cause_is_unknown(tokenizer_of: Callable[..., Any]) -> None:
    tok = tokenizer_of("byte_level", "tools")
    letters = [i for piece in (*"The answer is 7.", END) for i in tok.encode(piece)]
    calls = [
        asked(tok, 0, TASK, letters, YES),
        asked(tok, 1, [*TASK, YES, user("so")], "x", reply("x")),
    ]
    assert the_split(tok, *calls, decode=False).cause == "unknown"
    bare = [c.model_copy(update={"request": {}, "response": {}}) for c in calls]
    assert the_split(tok, *bare, decode=False).cause == "unknown"
    assert the_split(tok, *bare).cause == "retokenised"


@pytest.mark.parametrize("first", [TASK, TASK[1:]])
def test_the_call_that_was_expected_to_go_on_is_found_among_several(
    first: list[Message], tokenizer_of: Callable[..., Any]
) -> None:
    tok = tokenizer_of("byte_level", "forgetful")
    said = reply("<think>\nis that so?\n</think>\n\nyes it is")
    mine = asked(tok, 0, first, said["content"] + END, said, lasting=20)
    others = [
        asked(tok, i, [SYSTEM, user(f"task {i}")], "x", reply("x"), lasting=20) for i in range(1, 6)
    ]
    then = asked(tok, 30, [*first, said, user("so")], "y", reply("y"))
    splits = {s.call_id: s for s in merge([mine, *others, then], tok.decode).splits}
    assert (splits["c30"].parent_call_id, splits["c30"].cause) == ("c0", "think_stripped")


def test_malformed_tool_calls_break_nothing() -> None:
    """Models and clients write anything there: a name alone, text, null."""
    odd: list[Any] = [{"function": "calc"}, "calc(1)", None]
    first = {"messages": [{"role": "user", "content": "x"}]}
    reply = {"choices": [{"message": {"role": "assistant", "content": None, "tool_calls": odd}}]}
    second = {
        "messages": [
            *first["messages"],
            {"role": "assistant", "tool_calls": odd},
            {"role": "user", "content": "y"},
        ]
    }
    calls = [
        Call(
            call_id="a",
            episode_id="e",
            request=first,
            response=reply,
            prompt_ids=[1],
            output_ids=[2],
            logprobs=[-1.0],
        ),
        Call(
            call_id="b",
            episode_id="e",
            index=1,
            request=second,
            prompt_ids=[1, 3],
            output_ids=[4],
            logprobs=[-1.0],
        ),
    ]
    (split,) = merge(calls, lambda ids: "".join(chr(96 + int(i)) for i in ids)).splits
    assert split.call_id == "b"


def test_a_name_beside_each_reply_is_no_edit(tokenizer_of: Callable[..., Any]) -> None:
    """AgentScope's formatters put `name` on every message: the cause is in what the texts show, not
    in the JSON."""
    tok = tokenizer_of("byte_level", "tools")
    letters = [i for piece in (*"The answer is 7.", END) for i in tok.encode(piece)]
    first = asked(tok, 0, TASK, letters, YES)
    then = [
        *TASK,
        {
            **YES,
            "name": "Friday",
            "refusal": None,
            "content": [{"type": "text", "text": YES["content"]}],
        },
    ]
    split = the_split(tok, first, asked(tok, 1, [*then, user("so")], "x", reply("x")))
    assert (split.cause, split.parent_call_id) == ("retokenised", "c0")
