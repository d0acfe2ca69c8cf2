"""A client writes history its own way: what the template then renders, and what a call means,
decide what is reused."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajet_sdk.engines.prompts import Prompt, PromptBuilder
from tests.sdk.conftest import TEMPLATES, Message, user

TOOL = {
    "type": "function",
    "function": {"name": "calc", "parameters": {"type": "object", "properties": {}}},
}
END = "<|im_end|>"

WITH_IDS = (
    TEMPLATES["tools"]
    .replace(
        """{{- '\\n<tool_call>\\n{"name": "'""", """{{- '\\n' + c.id + '<tool_call>\\n{"name": "'"""
    )
    .replace(
        "{{- m.content }}",
        "{{- m.content }}{{- ' for ' + m.tool_call_id if m.tool_call_id else '' }}",
    )
)
"""Shows the ids of tool calls and results."""

WITH_NAMES = TEMPLATES["tools"].replace("+ m.role + '\\n'", "+ (m.name or m.role) + '\\n'")
"""Shows a message's name in place of its role."""


def said(content: str | None, *calls: tuple[str, str]) -> Message:
    """A reply as an engine gives it: each call as (id, arguments)."""
    message: Message = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [
            {
                "id": call_id,
                "type": "function",
                "function": {"name": "calc", "arguments": arguments},
            }
            for call_id, arguments in calls
        ]
    return message


arguments: st.SearchStrategy[dict[str, Any]] = st.dictionaries(
    st.sampled_from(["a", "b", "é"]),
    st.one_of(
        st.integers(-9, 9), st.sampled_from([1.5, 2.0, True, None, "x", 'a "b"', [1, {"c": 2}], {}])
    ),
    max_size=3,
)


@st.composite
def talks(draw: st.DrawFn) -> list[tuple[str, list[dict[str, Any]], bool]]:
    """Turns: what the reply says, the arguments of its calls, and whether another turn of the user
    follows at once."""
    turn = st.tuples(
        st.sampled_from(["yes", "the fox", ""]), st.lists(arguments, max_size=2), st.booleans()
    )
    return draw(st.lists(turn, min_size=1, max_size=4))


@st.composite
def habits(draw: st.DrawFn) -> Callable[[int, Message], Message]:
    """A way of writing history that keeps its meaning, fixed for a client."""
    on = {
        name: draw(st.booleans()) for name in ("null", "parts", "objects", "extras", "index", "ids")
    }
    layout = draw(st.sampled_from([None, (",", ":"), (", ", ": ")]))
    by_key = draw(st.booleans())
    ascii_only = draw(st.booleans())
    as_javascript = draw(st.booleans())

    def written(text: str) -> Any:
        value = json.loads(text)
        if on["objects"]:
            return value
        if as_javascript:
            value = {
                k: int(v) if isinstance(v, float) and v.is_integer() else v
                for k, v in value.items()
            }
        return (
            json.dumps(value, separators=layout, sort_keys=by_key, ensure_ascii=ascii_only)
            if layout
            else text
        )

    def rewrite(turn: int, message: Message) -> Message:
        out = dict(message)
        if on["null"]:
            out["content"] = out["content"] or None
        elif out["content"] is None:
            out["content"] = ""
        if on["parts"] and out["content"]:
            out["content"] = [{"type": "text", "text": out["content"]}]
        if message["role"] == "assistant":
            if on["extras"]:
                out |= {"refusal": None, "annotations": [], "audio": None, "function_call": None}
            calls = out.get("tool_calls") or []
            if calls or on["extras"]:
                out["tool_calls"] = [
                    _rewritten(turn, i, call) for i, call in enumerate(calls)
                ] or None
        elif message["role"] == "tool" and on["ids"]:
            out["tool_call_id"] = f"mine-{turn - 1 - int(message['place'])}-{message['place']}"
        out.pop("place", None)
        return out

    def _rewritten(turn: int, place: int, call: Mapping[str, Any]) -> dict[str, Any]:
        function = {**call["function"], "arguments": written(call["function"]["arguments"])}
        out = {**call, "function": function}
        if on["ids"]:
            out["id"] = f"mine-{turn}-{place}"
        return {**out, "index": place} if on["index"] else out

    return rewrite


def play(
    tok: Any,
    turns: list[tuple[str, list[dict[str, Any]], bool]],
    rewrite: Callable[[int, Message], Message],
) -> tuple[list[Prompt], list[list[int]]]:
    """The prompts of a conversation whose client writes history its own way, and what was
    sampled."""
    tokens, history = PromptBuilder(tok), [user("What is 12*34?")]
    prompts, outputs = [], []
    for number, (text, called, more) in enumerate(turns):
        prompts.append(tokens.prompt([rewrite(i, m) for i, m in enumerate(history)], [TOOL]))
        spelt = [json.dumps(a, ensure_ascii=False) for a in called]
        ids = [f"c{number}-{i}" if "c.id" in tok.chat_template else "" for i in range(len(spelt))]
        body = text + "".join(
            f'\n{call_id}<tool_call>\n{{"name": "calc", "arguments": {s}}}\n</tool_call>'
            for call_id, s in zip(ids, spelt, strict=True)
        )
        outputs.append([i for piece in (*body, END) for i in tok.encode(piece)])
        reply = said(text or None, *((f"c{number}-{i}", s) for i, s in enumerate(spelt)))
        tokens.commit(prompts[-1], outputs[-1], reply)
        history.append(reply)
        history += [
            {
                "role": "tool",
                "content": f"result {i}",
                "tool_call_id": f"c{number}-{i}",
                "place": str(i),
            }
            for i in range(len(spelt))
        ]
        if more or not spelt:
            history.append(user("and then?"))
    prompts.append(tokens.prompt([rewrite(i, m) for i, m in enumerate(history)], [TOOL]))
    return prompts, outputs


def as_given(turn: int, message: Message) -> Message:
    return {key: value for key, value in message.items() if key != "place"}


@given(turns=talks(), rewrite=habits(), template=st.sampled_from(["tools", WITH_IDS]))
def test_history_that_means_the_same_reuses_the_same_ids(
    turns: list[Any],
    rewrite: Callable[[int, Message], Message],
    template: str,
    tokenizer_of: Callable[..., Any],
) -> None:
    """Under a template that shows the ids of tool calls as well: a call and its result keep the id
    that was given."""
    tok = tokenizer_of("byte_level", template)
    plain, outputs = play(tok, turns, as_given)
    mine, _ = play(tok, turns, rewrite)
    assert [p.ids for p in mine] == [p.ids for p in plain]
    assert [(p.reused, p.cause) for p in mine] == [(p.reused, p.cause) for p in plain]
    for before, output, prompt in zip(mine, outputs, mine[1:], strict=False):
        assert prompt.reused == len(before.ids) + len(output)


@pytest.mark.slow
@given(
    turns=talks(),
    name=st.sampled_from(["Friday", "assistant"]),
    which=st.sampled_from(["assistant", "user"]),
)
def test_a_name_is_shown_where_the_template_shows_it_and_ignored_elsewhere(
    turns: list[Any], name: str, which: str, tokenizer_of: Callable[..., Any]
) -> None:
    """Agent frameworks name who spoke. No prompt is ever anything but what the template renders of
    what was sent."""

    def named(turn: int, message: Message) -> Message:
        out = as_given(turn, message)
        return {**out, "name": name} if out["role"] == which else out

    ignored = tokenizer_of("byte_level", "tools")
    plain, _ = play(ignored, turns, as_given)
    mine, _ = play(ignored, turns, named)
    assert [(p.ids, p.reused) for p in mine] == [(p.ids, p.reused) for p in plain]
    shown = tokenizer_of("byte_level", WITH_NAMES)
    for prompt in play(shown, turns, named)[0]:
        assert shown.decode(prompt.ids) == prompt.text
        heads = prompt.text.split("<|im_start|>")[1:-1]
        speakers = [head.split("\n")[0] for head in heads]
        assert which not in speakers or name == which
        assert list(prompt.ids) == shown.encode(prompt.text) or prompt.reused


def test_results_answered_in_another_order_are_not_the_same(
    tokenizer_of: Callable[..., Any],
) -> None:
    """Where the template shows which call a result is for, results of swapped calls are another
    text."""
    tok = tokenizer_of("byte_level", WITH_IDS)
    tokens = PromptBuilder(tok)
    reply = said(None, ("c1", '{"a": 1}'), ("c2", '{"a": 2}'))
    asked = [user("hi")]
    first = tokens.prompt(asked, [TOOL])
    spelt = "".join(
        f'\n{c}<tool_call>\n{{"name": "calc", "arguments": {{"a": {c[1]}}}}}\n</tool_call>'
        for c in ("c1", "c2")
    )
    output = tok.encode(spelt + END)
    tokens.commit(first, output, reply)

    def answered(*order: str) -> list[Message]:
        calls = [{**c, "id": c["id"].upper()} for c in reply["tool_calls"]]
        results = [{"role": "tool", "content": "408", "tool_call_id": i} for i in order]
        return [*asked, {**reply, "tool_calls": calls}, *results]

    for order in (("C1", "C2"), ("C2", "C1")):
        prompt = tokens.prompt(answered(*order), [TOOL])
        assert list(prompt.ids[: prompt.reused]) == [*first.ids, *output]
        shown = [
            line.split("408 for ")[1][:2] for line in prompt.text.splitlines() if "408 for " in line
        ]
        assert shown == [call_id.lower() for call_id in order]


@pytest.mark.parametrize("ids", [("one", "two"), ("same", "same")])
def test_of_replies_that_mean_the_same_the_one_that_was_echoed_is_gone_on_from(
    ids: tuple[str, str], tokenizer_of: Callable[..., Any]
) -> None:
    """Two choices call the same tool; the id that the client repeats says which it took, else the
    spelling does."""
    tok = tokenizer_of()
    tokens = PromptBuilder(tok)
    asked = [user("hi")]
    prompt = tokens.prompt(asked, [TOOL])
    spellings = ['{"a":1}', '{"a": 1}']
    outputs = []
    for call_id, spelt in zip(ids, spellings, strict=True):
        outputs.append(
            tok.encode(f'<tool_call>\n{{"name": "calc", "arguments": {spelt}}}\n</tool_call>{END}')
        )
        tokens.commit(prompt, outputs[-1], said(None, (call_id, spelt)))
    echoes = spellings if ids[0] == ids[1] else spellings[::-1]  # an id says more than a spelling
    for call_id, spelt, output in zip(ids, echoes, outputs, strict=True):
        history = [
            *asked,
            said("", (call_id, spelt)),
            {"role": "tool", "content": "1", "tool_call_id": call_id},
        ]
        for _ in range(2):
            after = tokens.prompt(history, [TOOL])
            assert list(after.ids[: after.reused]) == [*prompt.ids, *output]


@pytest.mark.parametrize("value", ["", "{}", None, {}])
def test_a_call_without_arguments_is_written_in_many_ways(
    value: Any, tokenizer_of: Callable[..., Any]
) -> None:
    tok = tokenizer_of()
    tokens = PromptBuilder(tok)
    first = tokens.prompt([user("hi")], [TOOL])
    output = tok.encode(f'<tool_call>\n{{"name": "calc", "arguments": {{}}}}\n</tool_call>{END}')
    tokens.commit(first, output, said(None, ("c1", "{}")))
    echoed = said(None, ("c1", value))
    after = tokens.prompt(
        [user("hi"), echoed, {"role": "tool", "content": "1", "tool_call_id": "c1"}], [TOOL]
    )
    assert after.reused == len(first.ids) + len(output)
