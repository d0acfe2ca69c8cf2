"""A rendering continued from the last one is the rendering of the whole, for any template and any
change of the messages."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Sequence
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from ajet_sdk.learn.recipe import CHAT_TEMPLATE
from ajet_sdk.tokens.jinja import compile_template, render
from ajet_sdk.tokens.rendering import Rendering
from tests.sdk.conftest import Message

EACH = "{{ m.role }}:{{ m.content }};"
TEMPLATES = {
    "plain": "{% for m in messages %}EACH{% endfor %}",
    "marks the last": "{% for m in messages %}EACH{% if loop.last %}!{% endif %}{% endfor %}",
    "marks the last but one": (
        "{% for m in messages %}EACH{% if loop.revindex == 2 %}!{% endif %}{% endfor %}"
    ),
    "looks at both sides": (
        "{% for m in messages %}{{ (loop.previtem or m).role }}<{{ m.content }}>"
        "{{ (loop.nextitem or m).role }}{% endfor %}"
    ),
    "looks by index": (
        "{% for m in messages %}"
        "{% if loop.first or messages[loop.index0 - 1].role != m.role %}[{% endif %}{{ m.content }}"
        "{% if loop.last or messages[loop.index0 + 1].role != m.role %}]{% endif %}{% endfor %}"
    ),
    "looks two ahead": (
        "{% for m in messages %}{{ m.content }}{{ (messages[loop.index0 + 2] or m).role }},"
        "{% endfor %}"
    ),
    "the number first": "{{ messages | length }}{% for m in messages %}EACH{% endfor %}",
    "the number in each": "{% for m in messages %}EACH{{ messages | length }}{% endfor %}",
    "the last first": "{{ messages[-1].content }}{% for m in messages %}EACH{% endfor %}",
    "a last query": (
        "{% set ns = namespace(at=0) %}{% for m in messages[::-1] %}"
        "{% if m.role == 'user' and ns.at == 0 %}"
        "{% set ns.at = messages | length - loop.index %}{% endif %}{% endfor %}"
        "{% for m in messages %}{{ m.content }}{% if loop.index0 > ns.at %}+{% endif %}{% endfor %}"
    ),
    "counts": (
        "{% set ns = namespace(n=0, seen='') %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% set ns.n = ns.n + 1 %}{% set ns.seen = ns.seen + m.content %}{% endif %}"
        "{{ m.content }}{{ ns.n }}{{ loop.index }}{% endfor %}{{ ns.seen }}{{ ns.n }}"
    ),
    "without the system": (
        "{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}"
        "{% set system = messages[0].content %}{% else %}{% set rest = messages %}{% endif %}"
        "{% for m in rest %}{% if loop.first %}{{ system }}|{% endif %}"
        "{{ m.content }}{{ (rest[loop.index0 + 1] or m).role }}{{ loop.index }}{% endfor %}"
    ),
    "in a branch": (
        "{% if tools %}{% for m in messages %}{{ m.content }}{% endfor %}{% else %}"
        "{% for m in messages %}EACH{% endfor %}{% endif %}"
    ),
    "two loops": (
        "{% for m in messages %}{{ m.role }},{% endfor %}"
        "{% for m in messages %}{{ m.content }}{% if loop.last %}.{% endif %}{% endfor %}"
    ),
    "a macro": (
        "{% set ns = namespace(n=0) %}{% macro show(m) %}{% set ns.n = ns.n + 1 %}"
        "{{ ns.n }}{{ m.content }}{% endmacro %}"
        "{% for m in messages %}{{ show(m) }}{% endfor %}{{ ns.n }}"
    ),
    "remembers": (
        "{% for m in messages %}{% if loop.changed(m.role) %}#{% endif %}{{ m.content }}{% endfor %}"
    ),
    "breaks": (
        "{% for m in messages %}{% if m.content == 'b' %}{% continue %}{% endif %}"
        "{% if m.role == 'tool' %}{% break %}{% endif %}{{ m.content }}{% endfor %}"
    ),
    "refuses": (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('order') }}{% endif %}{{ m.content }}{% endfor %}"
    ),
    "as JSON": "{{ messages | tojson }}{% for m in messages %}EACH{% endfor %}",
    "of another list": (
        "{% for m in messages | list %}EACH{% if loop.last %}!{% endif %}{% endfor %}"
    ),
    "filtered": (
        "{% for m in messages if m.role == 'user' %}EACH{{ loop.index }}{% else %}none{% endfor %}"
    ),
    "added": (
        "{% for m in messages + [{'content': 'end'}] %}EACH{% if loop.last %}!{% endif %}{% endfor %}"
    ),
    "a list of its own": (
        "{% set ns = namespace(all=[]) %}{% for m in messages %}"
        "{% set ns.all = ns.all + [m.content] %}{{ ns.all | join }};{% endfor %}"
    ),
    "cycles": (
        "{% for m in messages %}{{ loop.cycle('a', 'b') }}{{ m.content }}{{ loop.depth }}{% endfor %}"
    ),
    "a switch": (
        "{% set j = joiner(',') %}{% for m in messages %}{{ j() }}{{ m.content }}{% endfor %}"
    ),
    "the recipe's": CHAT_TEMPLATE,
}
FOUND = importlib.util.find_spec("trl")
FOLDER = Path(FOUND.origin).parent / "chat_templates" if FOUND and FOUND.origin else Path("none")
SOURCES = {name: source.replace("EACH", EACH) for name, source in TEMPLATES.items()}
SOURCES |= {path.stem: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.jinja")}
REFUSALS = (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError)
AT = datetime.now()
compiled = cache(compile_template)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}


def message(role: str, content: str, calls: bool) -> Message:
    if role == "assistant" and calls:
        return {"role": role, "content": content, "tool_calls": [CALL]}
    if role == "tool":
        return {"role": role, "content": content, "tool_call_id": "call00001", "name": "f"}
    return {"role": role, "content": content}


messages_of = st.builds(
    message,
    st.sampled_from(["user", "assistant", "tool", "user", "assistant"]),
    st.sampled_from(["a", "b", "a b", "<think>\nc\n</think>\nd", "<tool_response>e</tool_response>"]),
    st.booleans(),
)  # fmt: skip
starts = st.sampled_from([[], [message("system", "s", False)]])


def by_transformers(source: str, messages: Sequence[Message], tools: Any) -> str | None:
    """The text by transformers; None if the template refuses the messages."""
    try:
        [text], _ = render_jinja_template(
            [copy.deepcopy(messages)],
            tools=tools,
            chat_template=source,
            add_generation_prompt=True,
            bos_token="<s>",
            eos_token="</s>",
        )
    except REFUSALS:
        return None
    return str(text)


def ours(
    template: jinja2.Template, messages: Sequence[Message], tools: Any, last: Rendering | None
) -> Rendering | None:
    variables = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "add_generation_prompt": True,
        "messages": messages,
        "tools": tools,
        "strftime_now": AT.strftime,
    }
    try:
        return render(template, variables, last)
    except REFUSALS:
        return None


@pytest.mark.parametrize("name", SOURCES)
@settings(max_examples=12)
@given(data=st.data())
def test_a_rendering_continued_from_another_is_that_of_the_whole(name: str, data: Any) -> None:
    """Messages are added, exchanged and taken away in turn, and tools come and go."""
    template = compiled(SOURCES[name])
    more = st.lists(messages_of, min_size=1, max_size=3)
    messages = [*data.draw(starts), message("user", "q", False), *data.draw(more)]
    tools = data.draw(st.sampled_from([None, [TOOL]]))
    last: Rendering | None = None
    for _ in range(4):
        last = ours(template, messages, tools, last)
        assert (last and last.text) == by_transformers(SOURCES[name], messages, tools)
        change = data.draw(st.sampled_from(["add", "add", "add", "exchange", "take", "tools"]))
        if change == "add":
            messages = [*messages, *data.draw(more)]
        elif change == "exchange":
            place = data.draw(st.integers(0, len(messages) - 1))
            messages = [*messages[:place], data.draw(messages_of), *messages[place + 1 :]]
        elif change == "take":
            messages = messages[: data.draw(st.integers(1, len(messages)))]
        else:
            tools = None if tools else [TOOL]


class Counted(dict[str, Any]):
    """Counts how often a template reads a message."""

    reads = 0

    def __getitem__(self, key: str) -> Any:
        self.reads += 1
        return super().__getitem__(key)


GROWING = [
    "plain", "marks the last", "looks at both sides", "looks by index", "looks two ahead",
    "the number first", "counts", "without the system", "in a branch", "a macro", "a list of its own", "cycles",
    "the recipe's",
]  # fmt: skip
"""Templates whose text of a message does not depend on much later ones."""


@pytest.mark.parametrize("name", GROWING)
def test_messages_long_past_are_not_read_again(name: str) -> None:
    template = compiled(SOURCES[name])
    messages: list[Message] = [Counted(message("system", "s", False))]
    messages.append(Counted(message("user", "q", False)))
    last = None
    for turn in range(6):
        messages += [
            Counted(message("assistant", f"a{turn}", False)),
            Counted(message("tool", f"t{turn}", False)),
        ]
        before = [m.reads for m in messages if isinstance(m, Counted)]
        last = ours(template, messages, None, last)
        assert last is not None
    assert [m.reads for m in messages[2:-5] if isinstance(m, Counted)] == before[2:-5]
