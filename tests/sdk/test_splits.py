"""What is said of two calls, by what of them is at hand: messages, texts, both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from ajet_sdk.samples.splits import Side, Texts, align, explain
from ajet_sdk.tokens.template import ChatTemplate
from tests.sdk.conftest import Message, reply, user


def named(name: str) -> list[Message]:
    return [{"id": "c1", "type": "function", "function": {"name": name, "arguments": "{}"}}]


HI, SO, YES = user("hi"), user("so"), reply("yes")


@pytest.mark.parametrize(
    ("gave", "got", "cause"),
    [
        (reply("yes", reasoning_content="hm"), YES, "think_stripped"),
        (reply("<think>hm</think>\nyes \n"), reply(" yes"), "think_stripped"),
        (
            reply("yes", reasoning_content="hm"),
            reply("yes", reasoning_content="oh"),
            "history_edited",
        ),
        (reply("yes", reasoning_content="hm"), reply("no"), "history_edited"),
        (reply("yes ", reasoning_content="hm"), YES, "history_edited"),
        (reply("yes"), reply(""), "history_edited"),
        (reply("yes", reasoning_content="hm", tool_calls=named("a")), YES, "history_edited"),
    ],
)
def test_what_became_of_the_reply(gave: Message, got: Message, cause: str) -> None:
    assert explain(Side([HI], reply=gave), Side([HI, got, SO]))[0] == cause


@pytest.mark.parametrize(
    ("now", "cause"),
    [
        ([user("yes, so"), YES, user("and")], "summarised"),
        ([user("yes, so"), user("and")], "summarised"),
        ([user("hello"), YES, SO, user("and")], "history_edited"),
        ([user("a"), user("b"), user("c"), user("d")], "new_conversation"),
        ([HI, YES], "parallel_branch"),
    ],
)
def test_a_history_that_became_no_longer_was_shortened(now: list[Message], cause: str) -> None:
    assert explain(Side([HI, YES, SO], reply=reply("end")), Side(now))[0] == cause


def test_what_is_not_at_hand_is_not_told() -> None:
    texts = Texts("hi;yes", "hi;no", 3)
    one, other = {"tools": ["a"]}, {"tools": ["b"]}
    assert (
        explain(Side(), Side())[0]
        == explain(Side(), Side([HI]))[0]
        == explain(Side([HI]), Side())[0]
        == "unknown"
    )
    assert explain(Side(), Side(), texts)[0] == "unknown"
    assert explain(Side([HI], reply=YES), Side([HI, YES, SO]), texts)[0] == "template_rewrites"
    tones = [
        Side([HI], options={"a": 1, "b": 2}, reply=YES),
        Side([HI, YES, SO], options={"b": 2, "a": 1}),
    ]
    assert explain(*tones, texts)[0] == "template_rewrites"
    assert explain(Side(**one), Side(**other))[0] == "tools_changed"  # type: ignore[arg-type]
    assert explain(Side([HI], reply=YES, **one), Side([HI, YES], **other))[0] == "tools_changed"  # type: ignore[arg-type]


CALLED = reply("yes", tool_calls=named("calc"))
BOTH = reply("yes", tool_calls=[*named("calc"), *named("find")])


@pytest.mark.parametrize(
    ("prompt", "sampled", "last", "now", "said", "stop", "cause"),
    [
        # the same text
        ("hi;", "yes", "yes", "hi;yes;so;", YES, [], "retokenised"),
        ("hi;", '{"a":1}', "}", 'hi;{"a":1};so;', YES, [], "retokenised"),
        # the same but for its spelling
        ("hi;", "y es", "es", "hi;yes;so;", YES, [], "retokenised"),
        ("hi;", '{"a":1}', "}", 'hi;{"a": 1};so;', reply('{"a":1}'), [], "tool_call_reserialised"),
        ("hi;", "<calc 1.0>", ">", "hi;<calc 1>;so;", CALLED, [], "tool_call_reserialised"),
        # its end
        ("", "yes<end>", "<end>", "yes;so;", YES, [], "end_token"),
        ("hi;", "yes<end>", "<end>", "hi;yes;so;", YES, [], "end_token"),
        ("hi;", "yes<end>", "<end>", "hi;yes;so;", None, [], "end_token"),
        ("hi;", "the fox", " fox", "hi;the;so;", None, [], "unknown"),
        ("hi;", "yes<end>", "<other>", "hi;yes;so;", YES, [], "template_rewrites"),
        ("hi;", "yesQ:A:", "A:", "hi;yes;so;", YES, ["A:", "Q:", "B:"], "stop_string"),
        ("hi;", "Q:", "Q:", "hi;;so;", reply(""), ["Q:"], "stop_string"),
        # a call
        ("hi;", "yes<find/>", "/>", "hi;yes[calc];so;", CALLED, [], "tool_call_reserialised"),
        ("hi;", "no<find/>", "/>", "hi;yes[calc];so;", CALLED, [], "template_rewrites"),
        ("hi;", "yes<find/>", "/>", "hi;yes;so;", CALLED, [], "template_rewrites"),
        ("hi;", "yes<calc/><find/>", "/>", "hi;yes[calc];so;", BOTH, [], "template_rewrites"),
        ("hi;", "yes<find/>", "/>", "hi;ye[calc];so;", CALLED, [], "template_rewrites"),
        (
            "hi;",
            "<think>yes</think>yes<find/>",
            "/>",
            "hi;<think>yes</think>no[calc];so;",
            CALLED,
            [],
            "tool_call_reserialised",
        ),
        (
            "hi;",
            "<think>yes</think>yes<find/>",
            "/>",
            "hi;<think>yes, but</think>yes[calc];",
            CALLED,
            [],
            "several",
        ),
        (
            "hi;",
            "<think>a</think><think>yes</think>yes<find/>",
            "/>",
            "hi;<think>a</think><think>yes, but</think>yes[calc]",
            CALLED,
            [],
            "several",
        ),
        # reasoning
        (
            "hi;",
            "<think>hm</think>yes<calc/>",
            "/>",
            "hi;yes<calc/>;so;",
            CALLED,
            [],
            "think_stripped",
        ),
        ("hi;", "<think>hm</think>yes<end>", "<end>", "hi;yes;so;", YES, [], "several"),
        (
            "hi;",
            "(well I wonder) yes, the fox",
            "x",
            "hi; yes, the fox;",
            reply("yes", reasoning_content="wonder"),
            [],
            "think_stripped",
        ),
        (
            "hi;",
            "(well I wonder) yes, the fox",
            "x",
            "hi; yes, the fox;",
            reply("yes", reasoning_content="hm"),
            [],
            "template_rewrites",
        ),
    ],
)
def test_what_two_texts_show(
    prompt: str,
    sampled: str,
    last: str,
    now: str,
    said: Message | None,
    stop: Sequence[str],
    cause: str,
) -> None:
    texts = Texts(prompt + sampled, now, len(prompt), last)
    old, new = (
        (Side(stop=stop), Side())
        if said is None
        else (Side([HI], reply=said, stop=stop), Side([HI, said, SO]))
    )
    assert explain(old, new, texts)[0] == cause
    long = "The quick brown fox jumps over the lazy dog. " * 9
    assert (
        explain(old, new, Texts(long + texts.old, long + now, len(long + prompt), last))[0] == cause
    )


SHOWS_ALL = (
    "{{ tools | tojson if tools }}{{ tone }}|{% for m in messages %}{{ m.content }};{% endfor %}"
)


@pytest.mark.parametrize(
    ("first", "now", "old", "new", "causes"),
    [
        (
            [user("be kind"), HI],
            [user("be kind"), HI, YES, SO],
            {"tools": [{"a": 1, "b": 2}]},
            {"tools": [{"b": 2, "a": 1}]},
            "tools_changed",
        ),
        (
            [HI],
            [user("hello"), YES, SO],
            {"options": {"tone": "dry"}},
            {"options": {"tone": "wry"}},
            "several: options_changed, history_edited",
        ),
        (
            [{"role": "system", "content": "kind"}, HI],
            [{"role": "system", "content": "brief"}, user("hello"), YES, SO],
            {},
            {},
            "several: system_changed, history_edited",
        ),
    ],
)
def test_all_that_has_to_be_undone_is_named(
    first: list[Message],
    now: list[Message],
    old: Any,
    new: Any,
    causes: str,
    tokenizer_of: Callable[..., Any],
) -> None:
    tok = tokenizer_of("byte_level", SHOWS_ALL)
    assert _rendered(tok, first, now, old, new, "yes;") == causes


def test_a_change_and_the_end_of_the_reply_are_named_together(
    tokenizer_of: Callable[..., Any],
) -> None:
    tok = tokenizer_of("byte_level", SHOWS_ALL)
    system = [{"role": "system", "content": text} for text in ("kind", "brief")]
    causes = _rendered(tok, [system[0], HI], [system[1], HI, YES, SO], {}, {}, "yes<end>", "<end>")
    assert causes == "several: system_changed, end_token"


def _rendered(
    tok: Any,
    first: list[Message],
    now: list[Message],
    old: Any,
    new: Any,
    sampled: str,
    last: str = "",
) -> str:
    """The cause, or the several, by a template that shows all."""
    template = ChatTemplate.of(tok.chat_template, {})
    before, after = Side(first, reply=YES, **old), Side(now, **new)
    prompt, text = (
        template.render([template.form(m) for m in side.messages or ()], side.tools, **side.options)
        for side in (before, after)
    )
    cause, hint = explain(before, after, Texts(prompt + sampled, text, len(prompt), last), template)
    return f"{cause}: {hint.split('. ')[0]}" if cause == "several" else cause


def test_a_backslash_that_escapes_nothing_is_itself() -> None:
    assert align("C:\\x", "C: \\x;") == 5
    assert align("\\u00e9", "é") == 1 and align("\\u00", "é") is None


FOX = "the quick brown fox jumps over the lazy dog"


@pytest.mark.parametrize(
    ("said", "now", "cause"),
    [
        ("(hm, is that so) it is the sea", f"hi; {FOX};so; it is the sea;", "think_stripped"),
        ("(hm, is that so) no", f"hi; {FOX};so; no;", "think_stripped"),
        (
            "(so it is, is that so) it is the sea",
            f"hi; {FOX};so; it is the sea;",
            "think_stripped",
        ),  # begins alike
        (
            "(hm, is that so)no",
            f"hi; {FOX};so;no;",
            "template_rewrites",
        ),  # too little to be found again
        ("(hm, is that so) it is the sea", f"hi; {FOX};so; no;", "template_rewrites"),
        ("(hm, who knows) it is the sea", f"hi; {FOX};so; it is the sea;", "template_rewrites"),
    ],
)
def test_reasoning_without_marks_is_gone_where_nothing_else_is(
    said: str, now: str, cause: str
) -> None:
    messages = [HI, reply(FOX, reasoning_content="I wonder"), SO]
    replied = reply("it is the sea", reasoning_content="is that so")
    prompt = f"hi;(well, I wonder) {FOX};so;"
    old, new = Side(messages, reply=replied), Side([*messages, replied, SO])
    assert explain(old, new, Texts(prompt + said, now, len(prompt)))[0] == cause


def test_a_template_that_does_not_mark_where_reasoning_begins_has_no_blocks() -> None:
    template = ChatTemplate.of(
        "{% for m in messages %}{{ m.reasoning_content }}///{{ m.content }};{% endfor %}", {}
    )
    assert template.reasoning == ("", "///")
    texts = Texts("///hi;///yes", "///hi;///no;", 6)
    assert (
        explain(Side([HI], reply=YES), Side([HI, YES, SO]), texts, template)[0] != "think_stripped"
    )
