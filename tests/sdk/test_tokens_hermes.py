"""Templates that render no tools: tools, calls and results are written in the Hermes form, and read
in it."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ajet_sdk.dialects.openai_chat import CHAT
from ajet_sdk.engines.prompts import PromptBuilder
from ajet_sdk.engines.scripted import ByteTokenizer, ScriptedEngine
from ajet_sdk.errors import ConfigError
from ajet_sdk.gateway.episode import EpisodeSpec
from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.samples.build import build
from ajet_sdk.tokens.grammars import admits, reply_grammar
from ajet_sdk.tokens.probing import learn
from ajet_sdk.tokens.template import ChatTemplate
from ajet_sdk.types import Episode, Reward

END = "<|im_end|>"
SMOL = """\
{% for m in messages %}{% if loop.first and messages[0].role != 'system' %}<|im_start|>system
You are a helpful assistant.<|im_end|>
{% endif %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' + '\\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""As SmolLM2-Instruct's and many others: a role and a content."""
STRICT = """\
{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Roles must alternate') }}{% endif %}
{{ '<|im_start|>' + m.role + '\\n' + (m.content | trim) + '<|im_end|>\\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""As Gemma's: no system message, and roles that take turns."""
PARTS = SMOL.replace("+ m.content +", "+ (m.content | map(attribute='text') | join) +")
"""Content as a list of parts."""
ERASING = SMOL.replace("You are a helpful assistant.", "Tools: {{ tools | tojson }}")
"""Tools are shown, the model's calls are not."""
UNTOLD = SMOL.replace(
    "+ m.content +", "+ m.content + (m.tool_calls | tojson if m.tool_calls else '') +"
)
"""Calls and results are shown, tools are not: as DeepSeek V3's."""
LACKING = {"smol": SMOL, "strict": STRICT, "parts": PARTS, "erasing": ERASING}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"The tool {name}.",
            "parameters": {"type": "object", "properties": {"e": {"type": "string"}}, "required": ["e"],
                           "additionalProperties": False},
        },
    }
    for name in ("calc", "look")
]  # fmt: skip
USER = {"role": "user", "content": "What is 12*34?"}
Message = dict[str, Any]


def tokenizer(template: str) -> ByteTokenizer:
    known = ByteTokenizer()
    known.chat_template = template
    return known


def called(*calls: tuple[str, str], content: str | None = None) -> Message:
    made = [
        {
            "id": f"call{i:05}",
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
        for i, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": content, "tool_calls": made}


def result(content: str, number: int = 0) -> Message:
    return {"role": "tool", "content": content, "tool_call_id": f"call{number:05}"}


def rendered(source: str, messages: Sequence[Message], tools: Any = TOOLS) -> str:
    template = ChatTemplate.of(source, {})
    return template.render([template.form(m) for m in messages], tools)


def test_the_probe_finds_what_a_template_does_not_render() -> None:
    lacks = {name: set(ChatTemplate.of(source, {}).lacks) for name, source in LACKING.items()}
    assert lacks.pop("erasing") == {"calls"} and all(
        found == {"tools", "calls"} for found in lacks.values()
    )
    assert ChatTemplate.of(UNTOLD, {}).lacks == {"tools"}
    assert not ChatTemplate.of(ByteTokenizer().chat_template, {}).lacks


def test_the_hermes_form_to_the_letter() -> None:
    asked = [
        USER,
        called(("calc", '{"e": "12*34"}'), ("look", "{}"), content="Wait."),
        result("408"),
        result("no", 1),
    ]
    system, user, assistant, results, generated = rendered(SMOL, asked).split("<|im_start|>")[1:]
    assert system.startswith("system\n# Tools\n") and system.endswith(f"</tool_response>.{END}\n")
    listed = system.partition("<tools>\n")[2].partition("\n</tools>")[0].splitlines()
    assert [json.loads(line) for line in listed] == TOOLS
    assert user == f"user\nWhat is 12*34?{END}\n"
    assert (
        assistant == 'assistant\nWait.\n<tool_call>\n{"name": "calc", "arguments": {"e":'
        ' "12*34"}}\n</tool_call>\n<tool_call>\n{"name": "look", "arguments":'
        f" {{}}}}\n</tool_call>{END}\n"
    )
    assert (
        results
        == f"user\n<tool_response>\n408\n</tool_response>\n<tool_response>\nno\n</tool_response>{END}\n"
    )
    assert generated == "assistant\n"


def test_tools_are_added_to_the_system_message_and_to_the_user_where_none_is_shown() -> None:
    told = rendered(SMOL, [{"role": "system", "content": "Be kind."}, USER])
    assert (
        told.startswith("<|im_start|>system\nBe kind.\n\n# Tools\n") and told.count("system\n") == 1
    )
    assert rendered(STRICT, [USER]).startswith("<|im_start|>user\n# Tools\n")
    assert f"\n\n{USER['content']}{END}" in rendered(STRICT, [USER])


@pytest.mark.parametrize("source", [*LACKING.values(), UNTOLD])
def test_a_conversation_without_tools_stays_the_templates(source: str) -> None:
    talk = [USER, {"role": "assistant", "content": "408"}, USER]
    template = ChatTemplate.of(source, {})
    formed = [template.form(m) for m in talk]
    assert rendered(source, talk, None) == template._compiled.render(
        messages=formed, tools=None, add_generation_prompt=True
    )
    assert "tool" not in rendered(source, talk, None).replace("Tools: null", "")


def test_only_tools_are_added_where_the_template_has_a_form_for_calls() -> None:
    asked = [USER, called(("calc", '{"e": "1"}')), result("408")]
    text = rendered(UNTOLD, asked)
    assert (
        "<tools>\n" in text and "tool_call>" not in text and '"name": "calc", "arguments"' in text
    )
    assert text.endswith(f"<|im_start|>tool\n408{END}\n<|im_start|>assistant\n")


@pytest.mark.parametrize("source", LACKING.values(), ids=LACKING)
def test_replies_are_read_in_the_form_that_is_rendered(source: str) -> None:
    form, template = learn(tokenizer(source)), ChatTemplate.of(source, {})
    for calls in ([("calc", {"e": "12*34"})], [("calc", {"e": 'Zürich "東京"\n'}), ("look", {})]):
        spelt = [(name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in calls]
        text = template.reply_text(called(*spelt, content="Wait."), TOOLS).partition(END)[0]
        parsed = form.parse(text, tools=TOOLS)
        assert [(name, json.loads(arguments)) for name, arguments in parsed.calls] == calls
        assert parsed.content == "Wait."
    grammar = reply_grammar({"tool_choice": "required"}, TOOLS, form, ByteTokenizer())
    forced = '<tool_call>\n{"name": "look", "arguments": {"e": "x"}}\n</tool_call>'
    assert admits(
        grammar, ByteTokenizer(), [*ByteTokenizer().encode(forced), *ByteTokenizer().eos_ids]
    )


words = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc", "Z")), max_size=8)
turns = st.lists(
    st.tuples(
        st.lists(st.tuples(st.sampled_from(["calc", "look"]), words), min_size=1, max_size=3),
        words.filter(lambda text: "<" not in text and "{" not in text and "[" not in text),
        words,
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(LACKING)), turns, st.sampled_from([" ", "", "\n "]))
def test_turns_with_tools_are_token_exact_and_merge(name: str, talk: Any, blank: str) -> None:
    """The next prompt begins with this prompt and the ids that were sampled, however the model
    spaces its JSON."""
    tok = tokenizer(LACKING[name])
    form, tokens = learn(tok), PromptBuilder(tok)
    messages: list[Message] = [USER]
    before: list[int] = []
    for calls, content, returned in talk:
        prompt = tokens.prompt(messages, TOOLS)
        assert list(prompt.ids[: len(before)]) == before and prompt.cause is None
        items = [
            f'{{"name":{blank}"{n}",{blank}"arguments": {{"e":{blank}{json.dumps(e)}}}}}'
            for n, e in calls
        ]
        said = content.strip() + "".join(f"\n<tool_call>\n{item}\n</tool_call>" for item in items)
        output = [*tok.encode(said), min(tok.eos_ids)]
        parsed = form.parse(said, tools=TOOLS)
        assert [json.loads(arguments)["e"] for _, arguments in parsed.calls] == [
            e for _, e in calls
        ]
        reply = called(*parsed.calls, content=parsed.content)
        tokens.commit(prompt, output, reply)
        before = [*prompt.ids, *output]
        messages += [reply, *(result(returned, i) for i in range(len(calls)))]
    last = tokens.prompt(messages, TOOLS)
    assert list(last.ids[: len(before)]) == before and last.reused == len(before)


# Through an engine


CALL = '<tool_call>\n{"name": "calc", "arguments": {"e": "12*34"}}\n</tool_call>'


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    with Gateway() as running:
        yield running


def two_turns(client: openai.OpenAI) -> str:
    messages: list[Any] = [USER]
    for _ in range(2):
        message = (
            client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
            .choices[0]
            .message
        )
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls or ():
            assert (call.function.name, json.loads(call.function.arguments)) == (
                "calc",
                {"e": "12*34"},
            )
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "408"})
    return str(messages[-1]["content"])


@pytest.mark.parametrize("source", LACKING.values(), ids=LACKING)
def test_an_agent_with_a_tool_is_one_timeline_and_told_once(
    gateway: Gateway, source: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = ScriptedEngine([CALL, "It is 408."], tokenizer(source), logprob=-1.0)
    with caplog.at_level(logging.WARNING, "ajet"):
        for name in ("one", "two"):
            episode = gateway.open(EpisodeSpec(name, engine))
            assert two_turns(episode.model().openai()) == "It is 408."
            calls = episode.calls
    assert len([r for r in caplog.records if "Hermes form" in r.getMessage()]) == 1
    whole = Episode(
        episode_id="two", group_id="g", calls=tuple(calls), rewards=(Reward(value=1.0),)
    )
    batch = build([whole], estimator="opd")
    [sample] = batch.samples
    text = engine.tokenizer.decode(sample.timeline.token_ids.tolist())
    assert (
        not batch.splits
        and "<tool_response>\n408\n</tool_response>" in text
        and text.count(CALL) == 1
    )


def test_a_scripted_message_is_spelt_in_the_form(gateway: Gateway) -> None:
    engine = ScriptedEngine([called(("calc", '{"e": "12*34"}')), "It is 408."], tokenizer(SMOL))
    episode = gateway.open(EpisodeSpec("one", engine))
    assert two_turns(episode.model().openai()) == "It is 408."
    assert engine.tokenizer.decode(episode.calls[0].output_ids.tolist()) == CALL + END


def test_the_config_may_insist_on_the_template(gateway: Gateway) -> None:
    engine = ScriptedEngine(["408"], tokenizer(SMOL), tool_call_parser="template")
    episode = gateway.open(EpisodeSpec("one", engine))
    with pytest.raises(openai.BadRequestError, match=r"does not render tool calls.*Set it to auto"):
        two_turns(episode.model().openai())
    assert [type(error) for error in episode.errors] == [ConfigError]
    plain = gateway.open(EpisodeSpec("two", engine)).model().openai()
    assert (
        plain.chat.completions.create(model="m", messages=[USER]).choices[0].message.content
        == "408"
    )
    known = ScriptedEngine([CALL, "It is 408."], ByteTokenizer(), tool_call_parser="template")
    assert two_turns(gateway.open(EpisodeSpec("three", known)).model().openai()) == "It is 408."


def test_another_parser_than_the_form_is_refused() -> None:
    with pytest.raises(ConfigError, match="llama3_json does not read what the model is shown"):
        learn(tokenizer(SMOL), "llama3_json")
    assert learn(tokenizer(SMOL), "none").calls == ()
    engine = ScriptedEngine([CALL], tokenizer(SMOL), tool_call_parser="hermes")
    [choice] = asyncio.run(
        engine.answer(CHAT.ask({"messages": [USER], "tools": TOOLS}, "e", "a"))
    ).choices
    assert choice.message is not None and choice.message["tool_calls"]
