"""A cause is stated where the calls would merge without it: whatever the template, whatever
changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajet_sdk.engines.prompts import PromptBuilder
from ajet_sdk.samples.splits import HINTS
from ajet_sdk.samples.timelines import merge
from ajet_sdk.tokens.template import ChatTemplate
from ajet_sdk.types import Call, Split
from tests.sdk.conftest import TEMPLATES, Message, user

BEGAN = datetime(2026, 1, 1, tzinfo=timezone.utc)
END = "<|im_end|>"
TOOL = {"type": "function", "function": {"name": "calc", "parameters": {"type": "object"}}}

TURN = "{{- '<|im_start|>' + m.role + '\\n' }}"
ASSISTANT = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"
CALLS = """\
{%- for c in m.tool_calls or [] %}
{{- '<tool_call>\\n{"name": "' + c.function.name + '", "arguments": ' + (c.function.arguments | tojson) }}
{{- '}\\n</tool_call>' }}{% endfor %}"""


def shown(message: str, before: str = "", prompt: str = ASSISTANT) -> str:
    """A template of turns, with what stands before them."""
    return (
        f"{before}{{%- for m in messages %}}{TURN}{message}{{{{- '{END}\\n' }}}}{{% endfor"
        f" %}}{prompt}"
    )


KEEPS = shown("{%- if m.reasoning_content %}{{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n' }}{% endif %}"
              "{{- m.content }}" + CALLS)  # fmt: skip
OPENED = shown(
    "{{- m.content }}" + CALLS, prompt=ASSISTANT.replace("assistant\\n", "assistant\\n<think>\\n")
)
"""The prompt opens a block of reasoning that history never shows."""
EMPTY_LAST = shown(
    "{%- if loop.last and m.role == 'assistant' %}{{- '<think>\\n' + (m.reasoning_content or '') +"
    " '\\n</think>\\n' }}{% endif %}{{- m.content }}" + CALLS
)
"""A block of reasoning, maybe an empty one, before the last message only."""
CHANNELS = (
    "{%- for m in messages %}{%- if m.role == 'assistant' %}"
    "{%- if m.reasoning_content and loop.last %}"
    "{{- '<|im_start|>assistant/thinks/' + m.reasoning_content + '<|im_end|>' }}{% endif %}"
    "{{- '<|im_start|>assistant/says/' + m.content }}"
    + CALLS
    + "{{- '<|im_end|>' }}{%- else %}{{- '<|im_start|>' + m.role + '/says/' + m.content +"
    " '<|im_end|>' }}{% endif %}{% endfor %}{%- if add_generation_prompt %}{{-"
    " '<|im_start|>assistant' }}{% endif %}"
)
"""Reasoning and answer are turns of their own, and the earlier reasoning is not shown."""

KEEPING = {"chatml": TEMPLATES["chatml"], "tools": TEMPLATES["tools"], "keeps": KEEPS}
DROPPING = {
    "forgetful": TEMPLATES["forgetful"],
    "opened": OPENED,
    "empty_last": EMPTY_LAST,
    "channels": CHANNELS,
}


class Talk:
    """A conversation by an engine that samples what it is told to, and its calls as they are
    recorded."""

    def __init__(self, tok: Any) -> None:
        self.tok = tok
        self.template = ChatTemplate.of(tok.chat_template, tok.variables)
        self.tokens = PromptBuilder(tok)
        self.calls: list[Call] = []
        self.told: dict[str, str | None] = {}

    def turn(
        self, messages: Sequence[Message], reply: Message, *, sampled: str = "", tools: Any = None,
        stop: str = "", **options: Any,
    ) -> Message:  # fmt: skip
        """One call; what was sampled is the reply as the template writes it, or as given. The reply
        comes back."""
        number = len(self.calls)
        prompt = self.tokens.prompt(messages, tools, **options)
        text = sampled or self._spelt(messages, reply, prompt.text, tools, options)
        if stop:
            text = text[: text.rindex(reply["content"]) + len(reply["content"])] + stop
        output = self.tok.encode(text)
        self.tokens.commit(prompt, output, reply, [stop] if stop else [])
        self.told[f"c{number}"] = prompt.cause
        self.calls.append(
            Call(
                call_id=f"c{number}",
                episode_id="e",
                request={
                    "messages": list(messages),
                    "tools": tools,
                    "chat_template_kwargs": options,
                },
                response={"choices": [{"message": reply}]},
                prompt_ids=prompt.ids,  # type: ignore[arg-type]
                output_ids=output,
                logprobs=[-1.0] * len(output),  # type: ignore[arg-type]
                sampling={"stop": [stop] if stop else []},
                started_at=BEGAN + timedelta(seconds=2 * number),
                ended_at=BEGAN + timedelta(seconds=2 * number + 1),
            )
        )
        return reply

    def _spelt(
        self, messages: Sequence[Message], reply: Message, prompt: str, tools: Any, options: Any
    ) -> str:
        formed = [self.template.form(m) for m in [*messages, reply]]
        whole = self.template.render(formed, tools, add_generation_prompt=False, **options)
        if whole.startswith(prompt):
            return whole[len(prompt) :].rstrip("\n")
        thought = reply.get("reasoning_content")  # the prompt opens the block of reasoning
        return (f"{thought}\n</think>\n" if thought else "</think>") + reply["content"] + END

    def splits(self, template: bool = True) -> list[Split]:
        return list(merge(self.calls, self.tok.decode, self.template if template else None).splits)

    def causes(self) -> list[str]:
        """What is told of the splits; the engine, which told it while it went on, says the same."""
        found = self.splits()
        assert [s.cause for s in found] == [c for c in self.told.values() if c is not None]
        assert all(s.hint.endswith(HINTS[s.cause]) for s in found)
        return [s.cause for s in found]


turns = st.lists(
    st.tuples(
        st.sampled_from(["", "is that so", "three and four"]),
        st.sampled_from(["yes", "7", "the fox"]),
    ),
    min_size=1,
    max_size=5,
)


def linear(tok: Any, said: Sequence[tuple[str, str]], stop: str = "") -> Talk:
    """A conversation in which nothing but turns is added."""
    talk, messages = Talk(tok), [user("What is 3 + 4?")]
    for number, (thought, text) in enumerate([*said, ("", "end")]):
        reply: Message = {"role": "assistant", "content": text}
        if thought:
            reply["reasoning_content"] = thought
        messages += [talk.turn(messages, reply, stop=stop), user(f"and then {number}?")]
    return talk


@given(said=turns, name=st.sampled_from([*KEEPING, *DROPPING]))
def test_a_linear_conversation_splits_only_where_the_template_drops_reasoning(
    said: list[tuple[str, str]], name: str, tokenizer_of: Callable[..., Any]
) -> None:
    """No branch, no edit: nothing of that kind was done. Also where a call without reasoning stands
    between others."""
    tok = tokenizer_of("byte_level", {**KEEPING, **DROPPING}[name])
    causes = linear(tok, said).causes()
    assert set(causes) <= {"think_stripped"}
    if name in KEEPING or (
        name in ("forgetful", "channels") and not any(thought for thought, _ in said)
    ):
        assert not causes
    elif name in ("forgetful", "channels"):
        assert len(causes) == sum(bool(thought) for thought, _ in said)
    else:
        assert len(causes) == len(said)


@given(
    said=turns,
    name=st.sampled_from([*KEEPING, *DROPPING]),
    stop=st.sampled_from(["Observation:", "\nQ"]),
)
def test_a_stop_string_is_a_cause_of_its_own(
    said: list[tuple[str, str]], name: str, stop: str, tokenizer_of: Callable[..., Any]
) -> None:
    talk = linear(tokenizer_of("byte_level", {**KEEPING, **DROPPING}[name]), said, stop)
    causes = talk.causes()
    assert len(causes) == len(said)
    for split, (thought, _) in zip(talk.splits(), said, strict=True):
        dropped = name in ("opened", "empty_last") or (name in DROPPING and bool(thought))
        assert split.cause == ("several" if dropped else "stop_string")
        assert not dropped or split.hint.startswith("think_stripped, stop_string. ")


SYSTEM = {"role": "system", "content": "Be kind."}
YES: Message = {"role": "assistant", "content": "yes"}
FIRST = [SYSTEM, user("hi")]
CHANGES: dict[str, tuple[list[Message], dict[str, Any], str]] = {
    # by cause: the second request, its other arguments, and what in a template shows it
    "tools_changed": (
        [*FIRST, YES, user("so")],
        {"tools": [TOOL, TOOL]},
        "{%- if tools %}{{- 'tools: ' + (tools | tojson) }}{% endif %}",
    ),
    "options_changed": (
        [*FIRST, YES, user("so")],
        {"tone": "dry"},
        "{%- if tone is defined %}{{- 'tone: ' + tone }}{% endif %}",
    ),
    "system_changed": (
        [{"role": "system", "content": "Be brief."}, user("hi"), YES, user("so")],
        {},
        (
            "{%- for m in messages %}{%- if m.role == 'system' %}{{- m.content }}{% endif %}{%"
            " endfor %}"
        ),
    ),
    "history_edited": (
        [SYSTEM, {**user("hi"), "content": "hello"}, YES, user("so")],
        {},
        (
            "{{- messages | selectattr('role', 'equalto', 'user') | map(attribute='content') |"
            " first }}"
        ),
    ),
}
TURNS = (
    "{%- if m.role != 'system' and not (m.role == 'user' and loop.index0 < 2) %}{{- m.content }}{%"
    " endif %}"
)
"""Neither the system prompt nor the first question: what shows them stands before the turns."""
ONE_TOOL = "{%- if tools %}{{- tools[0] | tojson }}{% endif %}"
"""A template that has a form for tools keeps it: two are shown as one."""
THINKS = (
    "{%- if m.reasoning_content and loop.last %}{{- '<think>' + m.reasoning_content + '</think>'"
    " }}{% endif %}" + TURNS
)


@pytest.mark.parametrize("cause", CHANGES)
@pytest.mark.parametrize("thinks", [False, True])
def test_a_change_is_the_cause_where_the_template_shows_it_and_nowhere_else(
    cause: str, thinks: bool, tokenizer_of: Callable[..., Any]
) -> None:
    """Twice over: where the template also drops the reasoning, undoing the change alone would not
    merge the calls."""
    then, more, shows = CHANGES[cause]
    first = {**YES, "reasoning_content": "is that so"} if thinks else YES
    then = [first if m is YES else m for m in then]
    for visible in (True, False):
        turns = (THINKS if thinks else TURNS) + CALLS
        tok = tokenizer_of("byte_level", shown(turns, ONE_TOOL + (shows if visible else "")))
        talk = Talk(tok)
        talk.turn(FIRST, first, tools=[TOOL])
        talk.turn(then, YES, **{"tools": [TOOL], **more})
        found = [(s.cause, s.hint.removesuffix(HINTS[s.cause])) for s in talk.splits()]
        if visible:
            assert found == [("several", f"{cause}, think_stripped. ") if thinks else (cause, "")]
        else:
            assert found == ([("think_stripped", "")] if thinks else [])


def test_two_changes_of_which_one_is_shown(tokenizer_of: Callable[..., Any]) -> None:
    """Undoing the tools does not help, undoing the system prompt does: without the template neither
    is claimed."""
    tok = tokenizer_of("byte_level", shown(TURNS + CALLS, ONE_TOOL + CHANGES["system_changed"][2]))
    talk = Talk(tok)
    talk.turn(FIRST, YES, tools=[TOOL])
    talk.turn(CHANGES["system_changed"][0], YES, tools=[TOOL, TOOL])
    assert talk.causes() == ["system_changed"]
    (split,) = talk.splits(template=False)
    assert split.cause == "unknown" and "tools_changed, system_changed" in split.hint


def test_what_no_known_cause_explains_is_not_known(tokenizer_of: Callable[..., Any]) -> None:
    """The template counts the messages: undoing the change of the system prompt brings nothing
    together."""
    tok = tokenizer_of(
        "byte_level", shown(TURNS, CHANGES["system_changed"][2] + "{{- messages | length }}")
    )
    talk = Talk(tok)
    talk.turn(FIRST, YES)
    talk.turn(CHANGES["system_changed"][0], YES)
    (split,) = talk.splits()
    assert split.cause == "unknown" and "system_changed" in split.hint
    unchanged = Talk(tok)
    unchanged.turn(FIRST, YES)
    unchanged.turn([*FIRST, YES, user("so")], YES)
    assert unchanged.causes() == ["template_rewrites"]


def test_a_name_that_the_template_shows_is_an_edit(tokenizer_of: Callable[..., Any]) -> None:
    named = "{{- m.name or '' }}{{- m.content }}"
    for template, causes in ((shown(named), ["history_edited"]), (shown("{{- m.content }}"), [])):
        talk = Talk(tokenizer_of("byte_level", template))
        talk.turn(FIRST, YES)
        talk.turn([*FIRST, {**YES, "name": "Friday"}, user("so")], YES)
        assert talk.causes() == causes


def test_a_tool_call_is_written_otherwise_under_a_template_that_shows_none_too(
    tokenizer_of: Callable[..., Any],
) -> None:
    function = {"name": "calc", "arguments": '{"a": 1}'}
    reply = {**YES, "tool_calls": [{"id": "c1", "type": "function", "function": function}]}
    result = {"role": "tool", "content": "1", "tool_call_id": "c1"}
    sampled = '<tool_call>\n{"arguments": {"a": 1}, "name": "calc"}\n</tool_call>'
    for template in (KEEPS, shown("{{- m.content }}")):
        talk = Talk(tokenizer_of("byte_level", template))
        talk.turn(FIRST, reply, sampled=f"yes{sampled}{END}", tools=[TOOL])
        talk.turn([*FIRST, reply, result], YES, tools=[TOOL])
        assert talk.causes() == ["tool_call_reserialised"]


@pytest.mark.parametrize("name", [*KEEPING, *DROPPING])
def test_branches_of_one_place_are_branches_under_any_template(
    name: str, tokenizer_of: Callable[..., Any]
) -> None:
    talk = Talk(tokenizer_of("byte_level", {**KEEPING, **DROPPING}[name]))
    for text in ("yes", "no"):
        talk.turn(FIRST, {**YES, "content": text})
    assert [s.cause for s in talk.splits()] == ["parallel_branch"]
    if name in KEEPING:
        for text in ("so", "but", "and"):
            talk.turn([*FIRST, YES, user(text)], YES)
        assert [s.cause for s in talk.splits()] == ["parallel_branch"] * 3


def test_of_several_choices_the_one_that_was_gone_on_from_was_expected_to(
    tokenizer_of: Callable[..., Any],
) -> None:
    talk = Talk(tokenizer_of("byte_level", DROPPING["forgetful"]))
    replies = [
        {**YES, "content": text, "reasoning_content": "is that so"}
        for text in ("yes", "no", "maybe")
    ]
    for one in replies:
        talk.turn(FIRST, one)
    talk.turn([*FIRST, replies[1], user("so")], YES)
    split = talk.splits()[-1]
    assert (split.call_id, split.parent_call_id, split.cause) == ("c3", "c1", "think_stripped")
