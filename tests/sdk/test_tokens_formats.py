"""The spelling of tool calls in each family of models: found from a template, read back, and kept
in the history."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ajet_sdk.dialects.openai_chat import CHAT
from ajet_sdk.engines.chat import TokenEngine
from ajet_sdk.engines.scripted import ByteTokenizer
from ajet_sdk.errors import RequestRefused
from ajet_sdk.pictures import PlacedPicture
from ajet_sdk.protocols import Sampled, Sampling
from ajet_sdk.rollout.judging import fault_in, metrics_of
from ajet_sdk.tokens.formats import PARSERS, CallFormat, ReplyFormat
from ajet_sdk.tokens.probing import learn
from ajet_sdk.tokens.template import ChatTemplate
from ajet_sdk.types import Call

_JSON = "c.function.arguments | tojson"
_V = "{% if v is string %}{{ v }}{% else %}{{ v | tojson }}{% endif %}"
_PAIRS = "{% for k, v in c.function.arguments.items() %}"
SPELLINGS: dict[str, tuple[str, str, str, str]] = {
    # what opens, one call, what stands between, what closes
    "hermes": ("", '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ %s }}}\n</tool_call>', "\n", ""),
    "qwen3_coder": ("", "<tool_call>\n<function={{ c.function.name }}>\n" + _PAIRS + "<parameter={{ k }}>\n"
                    "{% if v is mapping or v is sequence and v is not string %}{{ v | tojson }}{% else %}{{ v }}"
                    "{% endif %}"
                    "\n</parameter>\n{% endfor %}</function>\n</tool_call>", "\n", ""),
    "glm45": ("", "\n<tool_call>{{ c.function.name }}\n" + _PAIRS + "<arg_key>{{ k }}</arg_key>\n<arg_value>" + _V
              + "</arg_value>\n{% endfor %}</tool_call>", "", ""),
    "mistral list": ("[TOOL_CALLS][", '{"name": "{{ c.function.name }}", "arguments": {{ %s }}, "id": "{{ c.id }}"}',
                     ", ", "]"),
    "mistral": ("", "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ %s }}", "", ""),
    "mistral id": ("", "[TOOL_CALLS]{{ c.function.name }}[CALL_ID]{{ c.id }}[ARGS]{{ %s }}", "", ""),
    "deepseek_v3": ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ c.function.name }}\n"
                    "```json\n{{ %s }}\n```<｜tool▁call▁end｜>", "\n", "<｜tool▁calls▁end｜>"),
    "deepseek_v31": ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>{{ c.function.name }}<｜tool▁sep｜>{{ %s }}"
                     "<｜tool▁call▁end｜>", "", "<｜tool▁calls▁end｜>"),
    "deepseek v3.2": ("<|D|calls>\n", '<|D|invoke name="{{ c.function.name }}">\n' + _PAIRS
                      + '<|D|parameter name="{{ k }}" string="{{ "true" if v is string else "false" }}">' + _V
                      + "</|D|parameter>\n{% endfor %}</|D|invoke>\n", "", "</|D|calls>"),
    "kimi_k2": ("<|tool_calls_section_begin|>", "<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{{ %s }}"
                "<|tool_call_end|>", "", "<|tool_calls_section_end|>"),
    "granite": ("<|tool_call|>[", '{"name": "{{ c.function.name }}", "arguments": {{ %s }}}', ", ", "]"),
    "cohere": ("<|START_ACTION|>[\n", '    {"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ c.function.name }}", '
               '"parameters": {{ %s }}}', ",\n", "\n]<|END_ACTION|>"),
    "pythonic": ("[", "{{ c.function.name }}(" + _PAIRS + "{{ k }}={{ '%%r' | format(v) }}"
                 "{{ '' if loop.last else ', ' }}{%% endfor %%})", ", ", "]"),
    "llama3_json": ("", '{"name": "{{ c.function.name }}", "parameters": {{ %s }}}', ";", ""),
}  # fmt: skip
NAMES = ("calc", "get_weather")
KINDS = {"s": "string", "n": "integer", "o": "object", "a": "array", "b": "boolean", "x": "number"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "d",
            "parameters": {
                "type": "object",
                "properties": {k: {"type": t} for k, t in KINDS.items()},
            },
        },
    }
    for name in NAMES
]
Calls = Sequence[tuple[str, Mapping[str, Any]]]


def template_of(name: str) -> str:
    opening, item, between, closing = SPELLINGS[name]
    if "%s" in item:
        item = item.replace("%s", _JSON)
    item = item.replace("%%", "%")
    return (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}<think>\n{{"
        " m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content or '' }}{% if m.tool_calls %}"
        + opening
        + "{% for c in m.tool_calls %}"
        + item
        + "{% if not loop.last %}"
        + between
        + "{% endif %}{% endfor %}"
        + closing
        + "{% endif %}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


def tokenizer_of(name: str) -> ByteTokenizer:
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = template_of(name)
    return tokenizer


def rendered(name: str, calls: Calls, content: str = "", reasoning: str | None = None) -> str:
    """The reply as the template writes it, up to the end of the turn."""
    made = [
        {
            "id": f"functions.{called}:{number}" if name == "kimi_k2" else f"abcdefgh{number}",
            "type": "function",
            "function": {"name": called, "arguments": json.dumps(arguments)},
        }
        for number, (called, arguments) in enumerate(calls)
    ]
    message = {
        "role": "assistant",
        "content": content,
        "tool_calls": made,
        "reasoning_content": reasoning,
    }
    tokenizer = tokenizer_of(name)
    text = ChatTemplate.of(tokenizer.chat_template, tokenizer.variables).reply_text(message, TOOLS)
    assert text.endswith("<|im_end|>\n")
    return text.removesuffix("<|im_end|>\n")


@cache
def learnt(name: str) -> ReplyFormat:
    return learn(tokenizer_of(name))


text = st.text(
    st.characters(exclude_categories=("Cs", "Cc"), exclude_characters="<"), max_size=12
) | st.sampled_from(
    [
        "Zürich 東京 🙂",
        'say "hi"\nthere',
        "it's {a} [b], (c); d",
        "  padded  ",
        "True",
        "12",
        "null",
        "a\\nb",
    ]
)
value = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=6,
)
arguments = st.fixed_dictionaries(
    {},
    optional={
        "s": text,
        "n": st.integers(-(10**9), 10**9),
        "o": st.dictionaries(text, value, max_size=3),
        "a": st.lists(value, max_size=3),
        "b": st.booleans(),
        "x": st.floats(-1e6, 1e6, allow_nan=False),
    },
)
some_calls = st.lists(st.tuples(st.sampled_from(NAMES), arguments), min_size=1, max_size=3)
plain = st.sampled_from(["", "Let me see.", "zwei\n\nAbsätze"])


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.data(), some_calls, plain, st.sampled_from([None, "I should\ncompute it"]))
@pytest.mark.parametrize("name", list(SPELLINGS))
def test_calls_are_read_back_as_they_were_rendered(
    name: str, data: st.DataObject, calls: Calls, content: str, reasoning: str | None
) -> None:
    if name in ("llama3_json", "pythonic"):  # calls in these stand alone
        content = ""
    forms = [learnt(name)]
    if name.split()[0] in PARSERS:
        forms.append(ReplyFormat(PARSERS[name.split()[0]], learnt(name).reasoning))
    reply = rendered(name, calls, content, reasoning)
    for form in forms:
        parsed = form.parse(reply, prompt="<|im_start|>assistant\n", tools=TOOLS)
        assert [(n, json.loads(a)) for n, a in parsed.calls] == [(n, dict(a)) for n, a in calls], (
            reply,
            form,
        )
        assert (parsed.content or "", parsed.reasoning, parsed.unread) == (
            content,
            reasoning,
            False,
        )


@pytest.mark.parametrize("name", list(SPELLINGS))
def test_a_cut_call_is_text_and_told(name: str) -> None:
    reply = rendered(name, [("calc", {"s": "x", "n": 1})])
    broken = reply[: reply.rindex("x")]
    parsed = learnt(name).parse(broken, tools=TOOLS)
    assert not parsed.calls and parsed.content == broken
    assert parsed.unread == (name != "pythonic"), "a bracket alone is no sign of a call"
    assert not learnt(name).parse("Nothing of the sort [1], {2}.", tools=TOOLS).unread
    assert not learnt(name).parse(broken).unread, "no tools, no calls"


class Told:
    model, max_model_len, takes_pictures = "told", 4000, False

    def __init__(self, text: str, finish: str = "stop") -> None:
        ids = [
            *ByteTokenizer().encode(text),
            *([min(ByteTokenizer.eos_ids)] if finish == "stop" else []),
        ]
        self.reply = Sampled(ids, [-0.1] * len(ids), finish, 0)

    async def sample(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        session: str,
        pictures: Sequence[PlacedPicture] = (),
    ) -> list[Sampled]:
        return [self.reply]

    def forget(self, session: str) -> None:
        return

    async def aclose(self) -> None:
        return


@pytest.mark.parametrize("name", list(SPELLINGS))
@pytest.mark.parametrize("reasoning", [None, "so"])
def test_the_next_prompt_has_the_sampled_ids_with_the_ids_of_calls_that_the_model_wrote(
    name: str, reasoning: str | None
) -> None:
    calls = [
        ("calc", {"s": "a b", "n": 2, "o": {"p": [1, None]}}),
        ("get_weather", {"s": "Zürich"}),
    ]
    told = Told(rendered(name, calls, "", reasoning))
    engine = TokenEngine(told, tokenizer_of(name))

    def ask(messages: Any) -> Any:
        return asyncio.run(
            engine.answer(CHAT.ask({"messages": messages, "tools": TOOLS}, "e", "a"))
        )

    user = [{"role": "user", "content": "hi"}]
    first = ask(user)
    (choice,) = first.choices
    assert choice.message is not None and choice.finish_reason == "tool_calls" and not choice.unread
    assert choice.message.get("reasoning_content") == reasoning
    ids = [call["id"] for call in choice.message["tool_calls"]]
    assert len(set(ids)) == 2
    if name == "kimi_k2":
        assert ids == ["functions.calc:0", "functions.get_weather:1"]
    if name in ("mistral list", "mistral id"):
        assert ids == ["abcdefgh0", "abcdefgh1"]
    results = [{"role": "tool", "content": "1", "tool_call_id": i} for i in ids]
    second = ask([*user, choice.message, *results])
    before = [*first.prompt_ids, *choice.output_ids]
    assert list(second.prompt_ids)[: len(before)] == before


def test_reasoning_that_is_not_closed_may_end_in_a_call_and_an_empty_block_is_no_content() -> None:
    form = ReplyFormat(PARSERS["hermes"], (("<think>", "</think>"),))
    call = '<tool_call>{"name": "calc", "arguments": {}}</tool_call>'
    parsed = form.parse("well\n" + call, prompt="<think>\n", tools=TOOLS)
    assert (parsed.content, parsed.reasoning, parsed.calls) == (None, "well", (("calc", "{}"),))
    assert form.parse("</think>\n\nfine", tools=TOOLS).content == "fine"
    assert form.parse("well", prompt="<think>\n").reasoning == "well"


def test_a_list_in_brackets_is_no_call_of_a_tool_that_is_not_there() -> None:
    form = ReplyFormat(PARSERS["pythonic"])
    assert (
        not form.parse("[f(x=1)]", tools=TOOLS).calls
        and form.parse("[calc(s='x', b=true)]", tools=TOOLS).calls
    )
    assert not form.parse("[calc(__import__('os'))]", tools=TOOLS).calls


def test_a_reply_that_begins_a_call_is_told_to_the_agent_and_the_trace() -> None:
    engine = TokenEngine(
        Told('<tool_call>{"name": "calc", "arguments": {]</tool_call>'), tokenizer_of("hermes")
    )
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
    ask = CHAT.ask(body, "e", "a")
    answer = asyncio.run(engine.answer(ask))
    assert answer.choices[0].unread and answer.choices[0].finish_reason == "stop"
    assert CHAT.completion(answer, ask, "1")["choices"][0]["unread_tool_call"] is True


def test_a_tool_call_that_is_cut_at_the_token_limit_cannot_be_read_either() -> None:
    """Its finish reason tells it from one that the model ended; only the latter is a wrong call."""
    engine = TokenEngine(
        Told('<tool_call>{"name": "calc", "arguments": {"s": "1', "length"), tokenizer_of("hermes")
    )
    ask = CHAT.ask({"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}, "e", "a")
    [choice] = CHAT.completion(asyncio.run(engine.answer(ask)), ask, "1")["choices"]
    assert (choice["unread_tool_call"], choice["finish_reason"]) == (True, "length")
    ended = {**choice, "finish_reason": "stop"}
    cut, wrong = (
        Call(
            episode_id="e",
            request={"tools": TOOLS},
            response={"choices": [of]},
            finish_reason=of["finish_reason"],
            output_ids=[1],
        )
        for of in (choice, ended)
    )
    assert metrics_of([cut, wrong]) == {"unread_tool_calls": 2.0, "cut_tool_calls": 1.0}
    assert [fault_in(call, ["wrong_toolcall"], engine) for call in (cut, wrong)] == [
        None,
        "wrong_toolcall",
    ]


def test_formats_are_found_from_templates() -> None:
    found = {name: learnt(name).calls for name in SPELLINGS}
    assert all(
        len(forms) == (2 if name == "llama3_json" else 1) for name, forms in found.items()
    ), found
    kinds: dict[str, Any] = {name: forms[0] for name, forms in found.items()}
    assert all(isinstance(form, CallFormat) and "zqkey" in form.item for form in kinds.values())
    assert {name for name, form in kinds.items() if form.pairs} == {
        "qwen3_coder",
        "glm45",
        "deepseek v3.2",
    }
    assert {name for name, form in kinds.items() if form.python} == {"pythonic"}


@pytest.mark.parametrize("name", list(SPELLINGS))
def test_without_parallel_calls_a_reply_ends_after_the_first(name: str) -> None:
    calls = [("calc", {"s": "a b", "n": 2}), ("get_weather", {"s": "Zürich"})]
    told = Told(rendered(name, calls))
    engine = TokenEngine(told, tokenizer_of(name))

    def ask(messages: Any) -> Any:
        body = {"messages": messages, "tools": TOOLS, "parallel_tool_calls": False}
        return asyncio.run(engine.answer(CHAT.ask(body, "e", "a")))

    user = [{"role": "user", "content": "hi"}]
    first = ask(user)
    (choice,) = first.choices
    assert choice.message is not None and choice.finish_reason == "tool_calls"
    [call] = choice.message["tool_calls"]
    assert call["function"]["name"] == "calc"
    ids = list(choice.output_ids)
    assert ids == list(told.reply.output_ids)[: len(ids)] and len(choice.logprobs) == len(ids)
    said = ByteTokenizer().decode(ids)
    assert "get_weather" not in said and rendered(name, calls[:1]).startswith(said)
    second = ask(
        [*user, choice.message, {"role": "tool", "content": "1", "tool_call_id": call["id"]}]
    )
    before = [*first.prompt_ids, *ids]
    assert list(second.prompt_ids)[: len(before)] == before


def test_a_reply_goes_on_with_a_message_that_the_client_began() -> None:
    engine = TokenEngine(Told("42."), ByteTokenizer())

    def ask(messages: Any, **more: Any) -> Any:
        return asyncio.run(engine.answer(CHAT.ask({"messages": messages, **more}, "e", "a")))

    begun = [
        {"role": "user", "content": "6*7?"},
        {"role": "assistant", "content": "The answer is "},
    ]
    first = ask(begun, continue_final_message=True, add_generation_prompt=False)
    assert (
        ByteTokenizer().decode(first.prompt_ids).endswith("<|im_start|>assistant\nThe answer is ")
    )
    (choice,) = first.choices
    assert choice.message == {"role": "assistant", "content": "42."}
    whole = {"role": "assistant", "content": "The answer is 42."}
    before = [*first.prompt_ids, *choice.output_ids]

    second = ask([begun[0], whole, {"role": "user", "content": "sure?"}])
    text = ByteTokenizer().decode(second.prompt_ids)
    assert text.count("42.") == 1 and list(second.prompt_ids)[: len(before)] == before, text
    with pytest.raises(RequestRefused, match="continue_final_message"):
        ask([{"role": "user", "content": "6*7?"}], continue_final_message=True)
