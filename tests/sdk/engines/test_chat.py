"""`TokenEngine`: exact ids over turns, tool calls and reasoning in the spellings of several
templates."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajet_sdk.dialects.openai_chat import CHAT, TEXT
from ajet_sdk.engines.chat import TokenEngine
from ajet_sdk.engines.scripted import ByteTokenizer
from ajet_sdk.errors import ConfigError, ContextOverflow, RequestRefused
from ajet_sdk.pictures import PlacedPicture
from ajet_sdk.protocols import Answer, Sampled, Sampling
from ajet_sdk.tokens.probing import call_id, learn

TOOLS = [
    {
        "type": "function",
        "function": {"name": "calc", "parameters": {"properties": {"a": {"type": "integer"}}}},
    }
]
USER = [{"role": "user", "content": "hi"}]

_TURNS = "{% for m in messages %}<|im_start|>{{ m.role }}\n"
_END = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_CALLS = "{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
TEMPLATES: dict[str, str] = {
    "hermes": (
        _TURNS
        + _CALLS
        + '\n<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments |'
        " tojson }}}" + "\n</tool_call>{% endfor %}" + _END
    ),
    "llama": (
        _TURNS
        + _CALLS
        + '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}{%'
        " endfor %}" + _END
    ),
    "mistral": (
        _TURNS
        + "{{ m.content or '' }}{% if m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}"
        + '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }},'
        ' "id": "{{ c.id }}"}'
        + "{% if not loop.last %}, {% endif %}{% endfor %}]{% endif %}"
        + _END
    ),
    "named": (
        _TURNS
        + _CALLS
        + "<|call|>function<|sep|>{{ c.function.name }}\n```json\n{{ c.function.arguments | tojson"
        " }}\n```<|end|>" + "{% endfor %}" + _END
    ),
    "xml": (
        _TURNS + _CALLS + "\n<tool_call>\n<function={{ c.function.name }}>\n{% for k, v in"
        " c.function.arguments.items() %}"
        + "<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}</function>\n</tool_call>{%"
        " endfor %}" + _END
    ),
}
SPELT = {
    "hermes": ('<tool_call>\n{"name": "calc", "arguments": {"a": 1}}\n</tool_call>', "\n"),
    "llama": ('{"name": "calc", "parameters": {"a": 1}}', ""),
    "mistral": ('{"name":"calc","arguments":{"a":1}}', ","),
    "named": ('<|call|>function<|sep|>calc\n```json\n{"a":1}\n```<|end|>', ""),
    "xml": (
        "<tool_call>\n<function=calc>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
        "\n",
    ),
}


def tokenizer_of(template: str | None) -> ByteTokenizer:
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = template
    return tokenizer


class Told:
    """A sampler that says what it is told, and remembers what it was asked."""

    model = "told"
    max_model_len = 500
    takes_pictures = False

    def __init__(self, *texts: str | Sampled) -> None:
        self.texts = list(texts)
        self.prompts: list[Sequence[int]] = []
        self.samplings: list[Sampling] = []
        self.forgotten: list[str] = []

    async def sample(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        session: str,
        pictures: Sequence[PlacedPicture] = (),
    ) -> list[Sampled]:
        self.prompts.append(list(prompt_ids))
        self.samplings.append(sampling)
        text = self.texts.pop(0)
        if isinstance(text, Sampled):
            return [text] * sampling.n
        ids = [*ByteTokenizer().encode(text), 257]
        return [Sampled(ids, [-0.1] * len(ids), "stop", 7)] * sampling.n

    def forget(self, session: str) -> None:
        self.forgotten.append(session)

    async def aclose(self) -> None:
        return


def ask(
    engine: TokenEngine, messages: Any = USER, *, sampling: Sampling | None = None, **body: Any
) -> Answer:
    request = {"messages": messages, **body}
    return asyncio.run(
        engine.answer(replace(CHAT.ask(request, "e", "a"), sampling=sampling or Sampling()))
    )


def message_of(text: str, template: str | None = None, **body: Any) -> Mapping[str, Any]:
    engine = TokenEngine(Told(text), tokenizer_of(template or TEMPLATES["hermes"]))
    message = ask(engine, **body).choices[0].message
    assert message is not None
    return message


@pytest.mark.parametrize("name", list(TEMPLATES))
def test_tool_calls_are_read_as_the_template_spells_them(name: str) -> None:
    spelt, between = SPELT[name]
    one, two = spelt, spelt + between + spelt
    if name == "mistral":
        one, two = f"[TOOL_CALLS][{one}]", f"[TOOL_CALLS][{two}]"
    for text, count in ((one, 1), (two, 2)):
        if name == "llama" and count == 2:
            continue
        engine = TokenEngine(Told(text), tokenizer_of(TEMPLATES[name]))
        (choice,) = ask(engine, tools=TOOLS).choices
        assert choice.message is not None and choice.finish_reason == "tool_calls", (
            name,
            text,
            choice,
        )
        calls = choice.message["tool_calls"]
        assert [call["function"]["name"] for call in calls] == ["calc"] * count
        assert all(json.loads(call["function"]["arguments"]) == {"a": 1} for call in calls)
        assert len({call["id"] for call in calls}) == count and choice.message["content"] is None


def test_the_text_before_a_call_is_content() -> None:
    message = message_of(
        "Let me see.\n<tool_call>\n" + '{"name": "calc", "arguments": {}}\n</tool_call>',
        tools=TOOLS,
    )
    assert message["content"] == "Let me see." and len(message["tool_calls"]) == 1


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "calc", "arguments": {"a": }}\n</tool_call>',
        '<tool_call>\n{"name": "calc", "arguments": {"a": 1}',
        '<tool_call>\n{"name": 5, "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "calc", "arguments": [1]}\n</tool_call>',
        '<tool_call>\n{"name": "calc", "arguments": {}} and then some\n</tool_call>',
        "<tool_call>",
        "</tool_call>",
        '{"name": "calc", "arguments": {}}',
        "<tool_call>" + "{" * 5000,
    ],
)
def test_a_malformed_call_stays_text(text: str) -> None:
    long = TokenEngine(Told(text), tokenizer_of(TEMPLATES["hermes"]))
    (choice,) = ask(long, tools=TOOLS).choices
    assert (
        choice.message == {"role": "assistant", "content": text} and choice.finish_reason == "stop"
    )


@given(st.text(alphabet='<>/{}[]":,tolcalname_ \n1', max_size=60))
def test_no_reply_is_an_error(text: str) -> None:
    for template in TEMPLATES.values():
        parsed = learn(tokenizer_of(template)).parse(text, tools=TOOLS)
        assert parsed.calls or parsed.content == text


def test_without_tools_or_with_choice_none_a_call_is_text() -> None:
    text = '<tool_call>\n{"name": "calc", "arguments": {}}\n</tool_call>'
    assert message_of(text)["content"] == text
    assert message_of(text, tools=TOOLS, tool_choice="none")["content"] == text


def test_under_a_template_without_tools_calls_are_read_in_the_form_that_is_rendered() -> None:
    plain = _TURNS + "{{ m.content }}" + _END
    assert len(message_of(SPELT["hermes"][0], plain, tools=TOOLS)["tool_calls"]) == 1
    assert "tool_calls" not in message_of(
        f"[TOOL_CALLS][{SPELT['mistral'][0]}]", plain, tools=TOOLS
    )
    assert "tool_calls" not in message_of("just words", plain, tools=TOOLS)


def test_a_parser_can_be_named() -> None:
    plain = _TURNS + "{{ m.content }}" + _END
    engine = TokenEngine(Told(SPELT["hermes"][0]), tokenizer_of(plain), tool_call_parser="none")
    assert "tool_calls" not in (ask(engine, tools=TOOLS).choices[0].message or {})
    with pytest.raises(ConfigError, match="hermes"):
        learn(tokenizer_of(plain), "hermez")


THINKING = (
    _TURNS
    + "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{"
    " m.content or '' }}" + _END
)


def test_reasoning_is_told_from_content() -> None:
    message = message_of("<think>\nsix times seven\n</think>\n\n42", THINKING)
    assert message == {"role": "assistant", "content": "42", "reasoning_content": "six times seven"}
    assert message_of("42", THINKING)["content"] == "42"
    assert message_of("<think>\n\n</think>\n\n42", THINKING) == {
        "role": "assistant",
        "content": "42",
    }
    opened = THINKING.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    assert message_of("six\n</think>\n\n42", opened)["reasoning_content"] == "six"
    cut = Sampled(list(b"<think>\nand so"), [-0.1] * 14, "length", 0)
    (choice,) = ask(TokenEngine(Told(cut), tokenizer_of(THINKING))).choices
    assert choice.message == {"role": "assistant", "content": "", "reasoning_content": "and so"}
    assert choice.finish_reason == "length"


def test_a_second_turn_reuses_the_ids_that_were_sampled() -> None:
    sampler = Told(SPELT["hermes"][0].replace(" ", ""), "two")
    engine = TokenEngine(sampler, tokenizer_of(TEMPLATES["hermes"]))
    first = ask(engine, tools=TOOLS)
    reply = first.choices[0].message
    result = {"role": "tool", "tool_call_id": "x", "content": "1"}
    second = ask(engine, [*USER, reply, result], tools=TOOLS)
    assert (
        first.prompt_ids is not None
        and second.prompt_ids is not None
        and first.choices[0].output_ids is not None
    )
    before = [*first.prompt_ids, *first.choices[0].output_ids]
    assert list(second.prompt_ids)[: len(before)] == before
    assert first.choices[0].policy_version == 7 and first.usage["completion_tokens"] == len(
        first.choices[0].output_ids
    )
    engine.forget("e")
    assert sampler.forgotten == ["e/a"]


def test_stop_strings_cut_the_text_and_keep_the_ids() -> None:
    sampled = Sampled(list(b"one END"), [-0.1] * 7, "stop", 0, text="one ")
    (choice,) = ask(TokenEngine(Told(sampled), ByteTokenizer())).choices
    assert choice.message == {"role": "assistant", "content": "one "} and [*choice.output_ids] == [
        *b"one END"
    ]


def test_what_does_not_fit_is_an_overflow_and_the_reply_is_limited() -> None:
    engine = TokenEngine(sampler := Told("x", "y"), ByteTokenizer())
    ask(engine, sampling=Sampling(max_tokens=10_000))
    ask(engine, sampling=Sampling(max_tokens=5))
    assert sampler.samplings[0].max_tokens == 500 - len(sampler.prompts[0])
    assert sampler.samplings[1].max_tokens == 5
    with pytest.raises(ContextOverflow, match="500 tokens"):
        ask(engine, [{"role": "user", "content": "x" * 500}])


def test_what_the_template_refuses_is_the_requests_fault() -> None:
    strict = (
        "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}"
        + THINKING
    )
    with pytest.raises(RequestRefused, match="user first"):
        ask(TokenEngine(Told("x"), tokenizer_of(strict)), [{"role": "assistant", "content": "x"}])


@pytest.mark.parametrize("name", ["messages", "tools", "continue_last", "at", "self"])
def test_a_template_argument_with_the_name_of_another_value_is_refused(name: str) -> None:
    with pytest.raises(RequestRefused) as refused:
        message_of("hello", chat_template_kwargs={name: 1})
    assert refused.value.parameter == "chat_template_kwargs"


def test_a_message_that_goes_on_has_no_generation_prompt_whatever_the_template_is_told() -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "well"}]
    prompts = []
    for told in ({}, {"chat_template_kwargs": {"add_generation_prompt": True}}):
        engine = TokenEngine(sampler := Told("a"), tokenizer_of(TEMPLATES["hermes"]))
        body = {"messages": messages, "continue_final_message": True, **told}
        asyncio.run(engine.answer(CHAT.ask(body, "e", "a")))
        prompts += sampler.prompts
    assert prompts[0] == prompts[1]


def test_completions_take_text_or_ids_without_a_template() -> None:
    engine = TokenEngine(sampler := Told("a", "b", "c"), tokenizer_of(None))
    for prompt, ids in (("hi", [104, 105]), ([1, 2], [1, 2]), (["hi"], [104, 105])):
        answer = asyncio.run(engine.answer(TEXT.ask({"prompt": prompt}, "e", "a")))
        assert sampler.prompts[-1] == ids and answer.choices[0].text in "abc"
    with pytest.raises(RequestRefused, match="prompt"):
        asyncio.run(engine.answer(TEXT.ask({"prompt": ["a", "b"]}, "e", "a")))


def test_call_ids_are_the_same_whenever_the_tokens_are() -> None:
    one = call_id(b"1 2", [3], 0, 0)
    assert one == call_id(b"1 2", [3], 0, 0) and len(one) == 9 and one.isalnum()
    assert (
        len(
            {
                one,
                call_id(b"1", [2, 3], 0, 0),
                call_id(b"1 2", [3], 1, 0),
                call_id(b"1 2", [3], 0, 1),
            }
        )
        == 4
    )
