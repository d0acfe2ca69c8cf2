"""Exact ids: what was sampled is kept to the id, everything else is the template's text."""

from __future__ import annotations

import copy
import json
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models

from ajet_sdk.engines.prompts import Prompt, PromptBuilder
from ajet_sdk.errors import ConfigError, RequestRefused
from ajet_sdk.gateway.open_calls import OpenCalls
from ajet_sdk.learn.recipe import CHAT_TEMPLATE
from ajet_sdk.samples.splits import HINTS, align
from ajet_sdk.tokens.pieces import CutPoints, PieceEncoder
from tests.sdk.conftest import Message, Tok, reply, user

FAMILIES = ["byte_level", "metaspace_always", "metaspace_first", "llama2"]
TOOL = {
    "type": "function",
    "function": {"name": "calc", "parameters": {"type": "object", "properties": {}}},
}
END = "<|im_end|>"


def calls(arguments: Any, call_id: str = "c1") -> list[Message]:
    return [
        {"id": call_id, "type": "function", "function": {"name": "calc", "arguments": arguments}}
    ]


def result(text: str, call_id: str = "c1") -> Message:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def goes_on(prompt: Prompt, before: Prompt, output: Sequence[int]) -> None:
    """The law: a prompt begins with the earlier one's ids and what was sampled after them."""
    head = [*before.ids, *output]
    assert list(prompt.ids[: len(head)]) == head
    assert prompt.reused == len(head)
    assert prompt.cause is None


@pytest.mark.parametrize("family", FAMILIES)
def test_a_conversation_goes_on_from_itself(family: str, tokenizer_of: Callable[..., Any]) -> None:
    tok = tokenizer_of(family, "chatml")
    tokens = PromptBuilder(tok)
    messages = [user("What is 3 + 4?")]
    before = tokens.prompt(messages)
    assert (
        list(before.ids) == tok.encode(before.text) and before.reused == 0 and before.cause is None
    )
    for text in ("The answer is 7.", "yes it is", "so"):
        output = tok.encode(text + END)
        tokens.commit(before, output, reply(text))
        messages += [reply(text), user("and then?")]
        prompt = tokens.prompt(messages)
        goes_on(prompt, before, output)
        assert prompt.text.endswith("<|im_start|>assistant\n")
        before = prompt


def test_ids_that_are_not_the_tokenizers_own_choice_are_kept(
    tokenizer_of: Callable[..., Any],
) -> None:
    tok = tokenizer_of()
    tokens = PromptBuilder(tok)
    first = tokens.prompt([user("hi")])
    letters = [i for piece in (*"the answer", END) for i in tok.encode(piece)]
    assert letters != tok.encode("the answer" + END)
    tokens.commit(first, letters, reply("the answer"))
    goes_on(tokens.prompt([user("hi"), reply("the answer"), user("more")]), first, letters)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_truncated_reply_is_ended_by_the_template_in_tokens_that_were_not_sampled(
    family: str, tokenizer_of: Callable[..., Any]
) -> None:
    tok = tokenizer_of(family, "chatml")
    tokens = PromptBuilder(tok)
    first = tokens.prompt([user("hi")])
    output = tok.encode("the quick brown fo")
    tokens.commit(first, output, reply(tok.decode(output)))
    prompt = tokens.prompt([user("hi"), reply(tok.decode(output)), user("go on")])
    goes_on(prompt, first, output)
    tail = tok.encode(END)[-1]
    assert prompt.ids[prompt.reused] == tail
    assert prompt.ids.count(tail) == 3


@pytest.mark.parametrize("family", ["byte_level", "llama2"])
@pytest.mark.parametrize("shown", [True, False])
def test_a_reply_cut_inside_a_character_goes_on(
    family: str, shown: bool, tokenizer_of: Callable[..., Any]
) -> None:
    tok = tokenizer_of(family, "chatml")
    tokens = PromptBuilder(tok)
    first = tokens.prompt([user("hi")])
    output = tok.encode("the 🦊")[:-1]
    text = tok.decode(output)
    assert text.endswith("\ufffd")
    said = text if shown else text.rstrip("\ufffd")
    tokens.commit(first, output, reply(said))
    prompt = tokens.prompt([user("hi"), reply(said), user("go on")])
    goes_on(prompt, first, output)
    assert prompt.ids[prompt.reused] == tok.encode(END)[-1]


@pytest.mark.parametrize("family", ["metaspace_first", "metaspace_always", "llama2"])
def test_text_behind_sampled_text_is_not_tokenised_as_the_start_of_a_text(
    family: str, tokenizer_of: Callable[..., Any]
) -> None:
    """A template may put plain text, not a special token, behind a reply: no blank may come
    between."""
    tok = tokenizer_of(
        family,
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ ';' }}{% endfor %}assistant: ",
    )
    tokens = PromptBuilder(tok)
    first = tokens.prompt([user("hi")])
    output = tok.encode("yes it is")
    tokens.commit(first, output, reply("yes it is"))
    prompt = tokens.prompt([user("hi"), reply("yes it is"), user("so")])
    goes_on(prompt, first, output)
    assert tok.decode(prompt.ids) == tok.decode([*first.ids, *output]) + ";user: so;assistant: "


def test_end_tags_of_a_strict_template_are_neither_doubled_nor_lost(
    tokenizer_of: Callable[..., Any],
) -> None:
    tok = tokenizer_of("llama2", "inst")
    tokens = PromptBuilder(tok)
    first = tokens.prompt([user("hi")])
    output = [*tok.encode("yes"), tok.inner.token_to_id("</s>")]
    tokens.commit(first, output, reply("yes"))
    prompt = tokens.prompt([user("hi"), reply("yes"), user("so")])
    goes_on(prompt, first, output)
    assert prompt.ids.count(tok.inner.token_to_id("</s>")) == 1


@pytest.mark.parametrize(
    "sampled",
    [
        '{"name":"calc","arguments":{"expression":"h\\u00e9 12"}}',
        '{"name": "calc", "arguments": {"expression": "hé 12"}}',
    ],
)
def test_a_tool_call_in_the_models_own_spelling_is_kept(
    sampled: str, tokenizer_of: Callable[..., Any]
) -> None:
    tok = tokenizer_of()
    tokens = PromptBuilder(tok)
    messages = [user("hi")]
    first = tokens.prompt(messages, [TOOL])
    output = tok.encode(f"<tool_call>\n{sampled}\n</tool_call>{END}")
    said = reply("", tool_calls=calls('{"expression":"hé 12"}'))
    tokens.commit(first, output, said)
    echo = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "tool_calls": calls('{"expression": "h\\u00e9 12"}'),
    }
    goes_on(tokens.prompt([*messages, echo, result("12")], [TOOL]), first, output)


def test_what_clients_write_in_many_forms_is_one(tokenizer_of: Callable[..., Any]) -> None:
    tok = tokenizer_of()
    tokens = PromptBuilder(tok)
    first = tokens.prompt([user("hi")])
    output = tok.encode("yes" + END)
    tokens.commit(first, output, reply("yes"))
    parts = {
        "role": "assistant",
        "content": [{"type": "text", "text": "yes"}],
        "annotations": [],
        "audio": None,
    }
    asked = {
        "role": "user",
        "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}],
    }
    goes_on(tokens.prompt([asked, parts, user("more")]), first, output)


def test_reasoning_that_comes_back_is_kept_and_reasoning_that_does_not_is_a_split(
    tokenizer_of: Callable[..., Any],
) -> None:
    tok = tokenizer_of("byte_level", "chatml")
    output = tok.encode(f"<think>\nis that so?\n</think>\nyes{END}")
    for key in ("reasoning_content", "reasoning", "thinking"):
        tokens = PromptBuilder(tok)
        first = tokens.prompt([user("hi")])
        tokens.commit(first, output, reply("yes", reasoning_content="is that so?"))
        goes_on(
            tokens.prompt([user("hi"), reply("yes", **{key: "is that so?"}), user("more")]),
            first,
            output,
        )
        dropped = tokens.prompt([user("hi"), reply("yes"), user("more")])
        assert (dropped.cause, dropped.reused) == ("think_stripped", 0)
        assert list(dropped.ids) == tok.encode(dropped.text)


def _split(tok: Any, sampled: str, said: Message, then: Sequence[Message], **more: Any) -> Prompt:
    """The second call of an episode whose first said something."""
    tokens = PromptBuilder(tok)
    first = tokens.prompt([{"role": "system", "content": "Be kind."}, user("hi")], [TOOL])
    tokens.commit(first, tok.encode(sampled), said)
    return tokens.prompt(then, **{"tools": [TOOL], **more})


SYSTEM = {"role": "system", "content": "Be kind."}
YES = reply("yes")


@pytest.mark.parametrize(
    ("cause", "then", "more"),
    [
        ("tools_changed", [SYSTEM, user("hi"), YES, user("so")], {"tools": [TOOL, TOOL]}),
        ("options_changed", [SYSTEM, user("hi"), YES, user("so")], {"enable_thinking": False}),
        (
            "system_changed",
            [{"role": "system", "content": "Be brief."}, user("hi"), YES, user("so")],
            {},
        ),
        ("system_changed", [user("hi"), YES, user("so")], {}),
        ("history_edited", [SYSTEM, user("hi"), reply("no"), user("so")], {}),
        ("history_edited", [SYSTEM, user("hello"), YES, user("so"), YES, user("so")], {}),
        ("history_edited", [SYSTEM, user("hi"), user("so")], {}),
        ("new_conversation", [SYSTEM, user("what is 3 + 4?")], {}),
        ("parallel_branch", [SYSTEM, user("hi")], {}),
    ],
)
def test_causes_seen_in_the_messages(
    cause: str, then: list[Message], more: Mapping[str, Any], tokenizer_of: Callable[..., Any]
) -> None:
    tok = tokenizer_of("byte_level", TEMPLATE_WITH_OPTION)
    prompt = _split(tok, "yes" + END, YES, then, **more)
    assert prompt.cause == cause and cause in HINTS
    assert list(prompt.ids) == tok.encode(prompt.text)


TEMPLATE_WITH_OPTION = """\
{%- if enable_thinking is defined %}{{- '[option]' }}{% endif %}
{%- if tools %}{{- '<|im_start|>tools' + (tools | tojson) + '<|im_end|>' }}{% endif %}
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"""


def test_a_shortened_history_is_summarised(tokenizer_of: Callable[..., Any]) -> None:
    tok = tokenizer_of()
    tokens = PromptBuilder(tok)
    messages = [SYSTEM, user("hi")]
    for _ in range(4):
        prompt = tokens.prompt(messages)
        tokens.commit(prompt, tok.encode("yes" + END), YES)
        messages += [YES, user("so")]
    assert tokens.prompt([SYSTEM, user("So far: yes, so, yes.")]).cause == "summarised"
    assert (
        tokens.prompt([SYSTEM, user("hi"), user("So far: yes."), YES, user("so")]).cause
        == "summarised"
    )


def test_calls_may_overlap_in_any_order(tokenizer_of: Callable[..., Any]) -> None:
    tok = tokenizer_of()
    tokens = PromptBuilder(tok)
    a, b = tokens.prompt([user("hi")]), tokens.prompt([user("hi")])
    never = tokens.prompt([user("hi")])
    assert a.ids == b.ids == never.ids
    yes, no = tok.encode("yes" + END), tok.encode("no" + END)
    tokens.commit(b, no, reply("no"))
    tokens.commit(a, yes, reply("yes"))
    goes_on(tokens.prompt([user("hi"), reply("yes"), user("so")]), a, yes)
    goes_on(tokens.prompt([user("hi"), reply("no"), user("so")]), b, no)
    goes_on(tokens.prompt([user("hi"), reply("yes"), user("or")]), a, yes)


def test_several_choices_of_one_prompt_are_each_gone_on_from(
    tokenizer_of: Callable[..., Any],
) -> None:
    tok = tokenizer_of()
    tokens = PromptBuilder(tok)
    prompt = tokens.prompt([user("hi")])
    outputs = {text: tok.encode(text + END) for text in ("yes", "no", "so")}
    for text, output in outputs.items():
        tokens.commit(prompt, output, reply(text))
    for text, output in outputs.items():
        goes_on(tokens.prompt([user("hi"), reply(text), user("more")]), prompt, output)


def test_threads_may_share_an_episode(tokenizer_of: Callable[..., Any]) -> None:
    tok = tokenizer_of()
    tokens = PromptBuilder(tok)
    failed: list[BaseException] = []

    def talk(name: str) -> None:
        try:
            messages, before, output = [user(name)], None, []
            for turn in range(8):
                prompt = tokens.prompt(messages)
                if before is not None:
                    goes_on(prompt, before, output)
                text = f"{name} {turn}"
                before, output = prompt, tok.encode(text + END)
                tokens.commit(prompt, output, reply(text))
                messages = [*messages, reply(text), user("so")]
        except BaseException as error:  # noqa: BLE001 - shown to the test
            failed.append(error)

    threads = [threading.Thread(target=talk, args=(f"agent {i}",)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


@pytest.mark.parametrize("other", [{"b": 2, "a": 1}, {"a": True, "b": 2}, {"a": 1.0, "b": 2}])
def test_messages_that_only_python_takes_for_equal_are_rendered_as_they_are(
    other: dict[str, Any], tokenizer_of: Callable[..., Any]
) -> None:
    tok = tokenizer_of()
    tokens = PromptBuilder(tok)
    for arguments in ({"a": 1, "b": 2}, other):
        messages = [user("hi"), reply("", tool_calls=calls(arguments)), result("3")]
        expected = PromptBuilder(tok).prompt(messages).text
        assert tokens.prompt(messages).text == expected


def test_messages_edited_in_place_are_seen_as_edited(tokenizer_of: Callable[..., Any]) -> None:
    tok = tokenizer_of()
    tokens = PromptBuilder(tok)
    messages = [user("hi")]
    tokens.prompt(messages)
    messages[0]["content"] = "hello"
    assert "hello" in tokens.prompt(messages).text

    class Other(dict[str, Any]):
        """As a framework's own messages are."""

    parts = [Other(role="user", content=[Other(type="text", text="hi")])]
    tokens.prompt(parts)
    parts[0]["content"][0]["text"] = "good day"
    assert "good day" in tokens.prompt(parts).text


def test_system_messages_may_come_late_or_not_at_all(tokenizer_of: Callable[..., Any]) -> None:
    tok = tokenizer_of()
    tokens = PromptBuilder(tok)
    first = tokens.prompt([user("hi")])
    output = tok.encode("yes" + END)
    tokens.commit(first, output, YES)
    late = [user("hi"), YES, SYSTEM, user("so")]
    goes_on(tokens.prompt(late), first, output)
    assert "Be kind." in tokens.prompt(late).text


def test_a_tokenizer_without_a_template_says_what_to_do(tokenizer_of: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="no chat template"):
        PromptBuilder(tokenizer_of("byte_level", None)).prompt([user("hi")])
    with pytest.raises(ConfigError, match="cannot be parsed"):
        PromptBuilder(tokenizer_of("byte_level", "{% for %}")).prompt([user("hi")])


def test_what_a_template_refuses_is_the_requests_fault(tokenizer_of: Callable[..., Any]) -> None:
    tokens = PromptBuilder(tokenizer_of("llama2", "inst"))
    with pytest.raises(RequestRefused, match="only user and assistant") as refused:
        tokens.prompt([SYSTEM, user("hi")])
    assert refused.value.parameter == "messages"


def test_the_time_that_a_template_is_told_stays_that_of_the_episode(
    tokenizer_of: Callable[..., Any],
) -> None:
    tok = tokenizer_of(
        "byte_level",
        "{{ strftime_now('%H:%M:%S.%f') }}{% for m in messages %}|{{ m.content }}{% endfor %}",
    )
    tokens = PromptBuilder(tok)
    assert tokens.prompt([user("hi")]).text == tokens.prompt([user("hi")]).text
    assert PromptBuilder(tok).prompt([user("hi")]).text != tokens.prompt([user("hi")]).text


IN_PARTS = """\
{% for m in messages %}{% for p in m.content %}
{%- if p.type == 'text' %}{{ p.text }};{% endif %}{% endfor %}{% endfor %}"""
AS_STRING = """\
{% for m in messages %}{{ m.content }}
{%- for c in m.tool_calls or [] %}{{ c.function.name + '(' + c.function.arguments + ')' }}{% endfor %}{% endfor %}"""
NO_DEVELOPER = (
    "{% for m in messages %}{% if m.role in ('user', 'system') %}{{ m.content }}{% endif %}{%"
    " endfor %}"
)


def test_templates_are_fed_what_they_read(tokenizer_of: Callable[..., Any]) -> None:
    assert PromptBuilder(tokenizer_of("byte_level", IN_PARTS)).prompt([user("hi")]).text == "hi;"
    said = reply("", tool_calls=calls({"a": 1}))
    assert (
        PromptBuilder(tokenizer_of("byte_level", AS_STRING)).prompt([user("hi"), said]).text
        == 'hicalc({"a": 1})'
    )
    told = [{"role": "developer", "content": "be brief;"}, user("hi")]
    assert (
        PromptBuilder(tokenizer_of("byte_level", NO_DEVELOPER)).prompt(told).text == "be brief;hi"
    )


def test_each_token_is_encoded_once(tokenizer_of: Callable[..., Any]) -> None:
    tok = tokenizer_of()
    tokens = PromptBuilder(tok)
    messages = [SYSTEM, user("hi")]
    sampled = 0
    tok.encoded = 0
    for turn in range(60):
        prompt = tokens.prompt(messages, [TOOL])
        made = tok.encoded
        output = tok.encode(f"the quick brown fox {turn}" + END)
        tok.encoded = made
        sampled += len(output)
        tokens.commit(prompt, output, reply(f"the quick brown fox {turn}"))
        messages = [
            *messages,
            reply(f"the quick brown fox {turn}"),
            user("jumps over the lazy dog"),
        ]
    assert tok.encoded <= 1.25 * (len(prompt.ids) - sampled) + 200


def test_a_conversation_that_splits_at_each_turn_is_encoded_about_once_too(
    tokenizer_of: Callable[..., Any],
) -> None:
    tok = tokenizer_of("byte_level", "forgetful")
    tokens = PromptBuilder(tok)
    messages = [SYSTEM, user("hi")]
    for turn in range(40):
        prompt = tokens.prompt(messages)
        assert turn == 0 or prompt.cause == "think_stripped"
        text = f"<think>is that so {turn}?</think>yes"
        tokens.commit(prompt, tok.encode(text + END), reply(text))
        messages = [*messages, reply(text), user("jumps over the lazy dog")]
    tok.encoded = 0
    whole = tokens.prompt(messages)
    assert tok.encoded < 0.2 * len(whole.ids)
    assert list(whole.ids) == tok.encode(whole.text)


def test_tools_changed_in_place_are_shown_as_they_are_now(tokenizer_of: Callable[..., Any]) -> None:
    each = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    tok = tokenizer_of(
        FAMILIES[0], each + "{% for m in messages %}{{ m.role + m.content }}{% endfor %}"
    )
    tokens = PromptBuilder(tok)
    tools = [
        {
            "type": "function",
            "function": {"name": "look", "description": "Look round.", "parameters": {}},
        }
    ]
    assert "Look round." in tokens.prompt([user("a")], tools).text
    assert (
        tokens.prompt([user("a")], [dict(tool) for tool in tools]).text
        == tokens.prompt([user("a")], tools).text
    )
    tools[0]["function"]["description"] = "Look up."  # type: ignore[index]
    assert "Look up." in tokens.prompt([user("a")], tools).text
    assert "Look" not in tokens.prompt([user("a")]).text


@pytest.mark.parametrize(
    ("one", "other"),
    [({"a": 1, "b": 2}, {"b": 2, "a": 1}), ({"a": 1}, {"a": True}), ({"a": 1}, {"a": 1.0})],
)
def test_tools_are_shown_as_this_request_spells_them(
    one: Any, other: Any, tokenizer_of: Callable[..., Any]
) -> None:
    """Whatever was asked before: Python's 1 == 1.0 == True, and its objects have no order, but JSON
    text does."""
    each = "{% for tool in tools or [] %}{{ tool | tojson(separators=[', ', ': ']) }}{% endfor %}"
    tokens = PromptBuilder(
        tokenizer_of(FAMILIES[0], each + "{% for m in messages %}{{ m.content }}{% endfor %}")
    )
    for value in (one, other, one):
        tools = [{"type": "function", "function": {"name": "f", "parameters": value}}]
        assert json.dumps(value) in tokens.prompt([user("a")], tools).text


@given(data=st.data())
def test_pieces_are_what_the_tokenizer_gives(
    data: st.DataObject, tokenizer_of: Callable[..., Any]
) -> None:
    tok = tokenizer_of(data.draw(st.sampled_from(FAMILIES)), "chatml")
    encoder = PieceEncoder(tok, CutPoints(tok), limit=200)
    words = [
        "<|im_start|>",
        "<|im_end|>",
        "</s>",
        "<s>",
        "<think>",
        "user",
        " ",
        "\n",
        "the fox",
        "é",
        "🦊",
        "12",
        "▁",
    ]
    for parts in data.draw(st.lists(st.lists(st.sampled_from(words), max_size=12), max_size=6)):
        text = "".join(parts)
        assert encoder.encode(text) == tok.encode(text)


@given(data=st.data())
def test_random_conversations_of_random_tokens(
    data: st.DataObject, tokenizer_of: Callable[..., Any]
) -> None:
    """Whatever is sampled, garbage too: a prompt is an earlier one gone on from, exactly, or the
    template's text."""
    tok = tokenizer_of(
        data.draw(st.sampled_from(FAMILIES)),
        data.draw(st.sampled_from(["chatml", "tools", "forgetful"])),
    )
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    tokens = PromptBuilder(tok)
    size = tok.inner.get_vocab_size()
    open_ends: list[list[Message]] = [[user("hi")]]
    committed: list[tuple[Prompt, list[int]]] = []
    for _ in range(8):
        messages = copy.deepcopy(rng.choice(open_ends))
        if rng.random() < 0.2 and len(messages) > 2:
            messages[rng.randrange(len(messages))]["content"] = "edited"
        prompt = tokens.prompt(messages)
        heads = [[*p.ids, *out] for p, out in committed]
        if prompt.reused:
            head = list(prompt.ids[: prompt.reused])
            assert head in heads
            tail = tok.decode(prompt.ids[prompt.reused - 1 :]).removeprefix(tok.decode(head[-1:]))
            shown = tok.decode(tok.encode(prompt.text))
            assert "".join(shown.split()).endswith(
                "".join(tail.split())
            )  # some tokenizers show blanks of their own
        else:
            assert list(prompt.ids) == tok.encode(prompt.text)
        output = [rng.randrange(size) for _ in range(rng.randint(0, 6))]
        output += tok.encode(END)[-1:] if rng.random() < 0.7 else []
        text = tok.decode(output).removesuffix(END)
        said = reply(text.strip() if rng.random() < 0.5 else text)
        tokens.commit(prompt, output, said)
        committed.append((prompt, output))
        open_ends.append([*messages, said, user(rng.choice(["so", "12", "é"]))])


def test_alignment_minds_values_and_not_spelling() -> None:
    assert align('{"a":1.0}', '{ "a": 1 } x') == len('{ "a": 1 }')
    assert align('"h\\u00e9"', '"hé"') == 4
    assert align("a b", "ab") == 2
    assert align("yes\n", "yes\n\n") == 4
    assert align("yes", "no") is None
    assert align("12345678901234567890123", "12345678901234567890124") is None
    assert align("cut \ufffd", "cut \ufffd|") == 5
    assert align("cut \ufffd", "cut|") == 3


def test_a_request_that_ends_with_the_reply_goes_on_from_it(
    tokenizer_of: Callable[..., Any],
) -> None:
    """As an agent asks that wants the model to go on with another turn of its own."""
    tok = tokenizer_of()
    tokens = PromptBuilder(tok)
    first = tokens.prompt([user("hi")])
    output = [i for piece in (*"yes", END) for i in tok.encode(piece)]
    tokens.commit(first, output, YES)
    goes_on(tokens.prompt([user("hi"), YES]), first, output)


def test_a_request_that_is_the_beginning_of_an_earlier_one_is_that_beginning(
    tokenizer_of: Callable[..., Any],
) -> None:
    tok = tokenizer_of()
    tokens = PromptBuilder(tok)
    tokens.prompt([user("hi"), YES, user("so")])
    for messages in ([user("hi"), YES], [user("hi")], []):
        assert tokens.prompt(messages).ids == PromptBuilder(tok).prompt(messages).ids


def test_of_replies_that_are_the_same_to_the_letter_the_latest_is_gone_on_from(
    tokenizer_of: Callable[..., Any],
) -> None:
    tok = tokenizer_of()
    tokens = PromptBuilder(tok)
    outputs = [tok.encode("yes" + END), [i for piece in (*"yes", END) for i in tok.encode(piece)]]
    for output in outputs:
        tokens.commit(tokens.prompt([user("hi")]), output, YES)
    goes_on(tokens.prompt([user("hi"), YES, user("so")]), tokens.prompt([user("hi")]), outputs[-1])


def test_what_stands_before_the_reply_has_to_be_the_same_to_the_letter(
    tokenizer_of: Callable[..., Any],
) -> None:
    """Also where it is of one length, so that the reply stands at its old place."""
    tok = tokenizer_of("byte_level", TEMPLATE_WITH_OPTION)
    other = {"type": "function", "function": {**TOOL["function"], "name": "find"}}  # type: ignore[dict-item]
    prompt = _split(tok, "yes" + END, YES, [SYSTEM, user("hi"), YES, user("so")], tools=[other])
    assert (prompt.reused, prompt.cause) == (0, "tools_changed") and list(prompt.ids) == tok.encode(
        prompt.text
    )


def test_an_edit_is_compared_with_the_conversation_that_was_edited(
    tokenizer_of: Callable[..., Any],
) -> None:
    """Not with the last one, and of several choices not with another."""
    tok = tokenizer_of("byte_level", "forgetful")
    tokens = PromptBuilder(tok)
    for text in ("What is 3 + 4?", "hi"):
        tokens.commit(tokens.prompt([user(text)]), tok.encode("yes" + END), YES)
    assert (
        tokens.prompt([user("What is 3 + 4?"), reply("no"), user("so")]).cause == "history_edited"
    )
    first = tokens.prompt([user("hello")])
    for text in ("yes", "no"):
        tokens.commit(first, tok.encode(text + "<|endoftext|>"), reply(text))
    assert tokens.prompt([user("hello"), YES, user("so")]).cause == "end_token"


def test_text_that_would_be_one_token_with_the_reply_is_encoded_apart() -> None:
    """Also by a tokenizer without special tokens, of which none could stand before it."""
    inner = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    inner.decoder = decoders.Fuse()  # type: ignore[assignment]
    tok = Tok(
        inner,
        "{% for m in messages %}{{ m.content }}{{ 'b' if m.role == 'assistant' }}{% endfor %}",
    )
    tokens = PromptBuilder(tok)
    first = tokens.prompt([user("b")])
    tokens.commit(first, [0], reply("a"))
    assert list(tokens.prompt([user("b"), reply("a")]).ids) == [1, 0, 1]


def test_a_tool_call_that_the_client_wrote_itself_stands_behind_the_reply(
    tokenizer_of: Callable[..., Any],
) -> None:
    tok = tokenizer_of()
    tokens = PromptBuilder(tok)
    first = tokens.prompt([user("hi")], [TOOL])
    output = tok.encode("yes" + END)
    tokens.commit(first, output, YES)
    own = reply("", tool_calls=calls('{"a": 1}'))
    prompt = tokens.prompt([user("hi"), YES, own, result("1")], [TOOL])
    goes_on(prompt, first, output)
    assert '"arguments": {"a": 1}' in prompt.text


@given(data=st.data())
def test_messages_that_are_known_to_be_the_same_make_the_ids_of_equal_ones(
    tokenizer_of: Callable[..., Any], data: Any
) -> None:
    """Requests as the gateway shares them, beside equal ones; the text is that of a new
    conversation's, but for calls in the model's own spelling."""
    template = data.draw(st.sampled_from(["tools", "forgetful", CHAT_TEMPLATE]))
    tok = tokenizer_of("byte_level", template)
    kept, shared, plain = OpenCalls(), PromptBuilder(tok), PromptBuilder(tok)
    messages: list[Message] = [user("hi")]
    for number in range(5):
        change = data.draw(st.sampled_from(["goes on", "goes on", "goes on", "edited", "cut"]))
        if change == "edited":
            messages = [user("edited"), *messages[1:]]
        elif change == "cut":
            messages = messages[: data.draw(st.integers(1, len(messages)))]
        same = kept.shared({"messages": copy.deepcopy(messages)})["messages"]
        mine = shared.prompt(same, [TOOL])
        theirs = plain.prompt(copy.deepcopy(messages), [TOOL])
        assert (mine.ids, mine.reused, mine.cause) == (theirs.ids, theirs.reused, theirs.cause)
        assert mine.text == theirs.text
        if data.draw(st.booleans()):
            written = f'{{"name":"calc","arguments":{{"n":{number}}}}}'
            output = tok.encode(f"<tool_call>\n{written}\n</tool_call>{END}")
            said = reply("", tool_calls=calls(f'{{"n": {number}}}', f"c{number}"))
            more = [said, result(str(number), f"c{number}")]
        else:
            output = tok.encode(f"yes{END}")
            more = [reply("yes"), user("more")]
        shared.commit(mine, output, more[0])
        plain.commit(theirs, output, more[0])
        messages = [*messages, *copy.deepcopy(more)]
