"""OpenAI's Responses, asked by OpenAI's own client over HTTP and through the captured door of this
process."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from ajet_sdk.agent.context import current_episode
from ajet_sdk.capture.hooks import installed
from ajet_sdk.dialects.fields import COMPLETIONS
from ajet_sdk.dialects.openai_chat import CHAT
from ajet_sdk.dialects.openai_responses import RESPONSE_FIELDS, RESPONSES
from ajet_sdk.engines.scripted import ScriptedEngine
from ajet_sdk.errors import EngineUnavailable
from ajet_sdk.gateway import answer as answer_module
from ajet_sdk.gateway.episode import EpisodeSpec, OpenEpisode
from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.protocols import Answer, Ask, Choice
from ajet_sdk.samples.timelines import merge
from ajet_sdk.tokens.template import same_reply
from ajet_sdk.types import Episode
from ajet_tools.trace.episode.messages import conversation
from ajet_tools.trace.export.conversations import conversations
from tests.sdk.conftest import Tok

ADD = {
    "type": "function",
    "name": "add",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
ADD_OF_CHAT = {"type": "function", "function": {"name": "add", "parameters": ADD["parameters"]}}
SHELL = {"type": "custom", "name": "shell", "description": "Runs a command."}
CALLING = {
    "content": "Let me see.",
    "tool_calls": [{"function": {"name": "add", "arguments": {"a": 6}}}],
}
THINKING = {"content": "<think>\nhm, six\n</think>\n\nIt is 42."}

Opener = Callable[..., OpenEpisode]


@pytest.fixture(params=["bytes", "byte-level BPE"])
def open_episode(
    request: pytest.FixtureRequest, tokenizer_of: Callable[..., Tok]
) -> Iterator[Opener]:
    """Of a scripted engine, with its own tokenizer, and with one of the usual kind and a template
    like Qwen's."""
    tokenizer = tokenizer_of("byte_level", "tools") if request.param != "bytes" else None

    def open_one(*replies: Any) -> OpenEpisode:
        return running.open(
            EpisodeSpec(
                "one", ScriptedEngine(list(replies), tokenizer, max_model_len=4000, logprob=-1.0)
            )
        )

    with installed(), Gateway() as running:
        yield open_one


@pytest.fixture(params=["http", "captured"])
def client_of(request: pytest.FixtureRequest) -> Iterator[Callable[[OpenEpisode], openai.OpenAI]]:
    """An unmodified client in the episode's context, or one that another process would have."""
    tokens = []

    def client(episode: OpenEpisode) -> openai.OpenAI:
        if request.param == "captured":
            tokens.append(current_episode.set(episode.active))
            return openai.OpenAI(
                api_key="sk-none", base_url="http://model.invalid/v1", max_retries=0
            )
        handle = episode.model()
        return openai.OpenAI(api_key=handle.api_key, base_url=handle.base_url, max_retries=0)

    yield client
    for token in tokens:
        current_episode.reset(token)


def one_timeline(episode: OpenEpisode) -> None:
    merged = merge(episode.calls, episode.spec.engine.tokenizer.decode)
    assert len(merged.timelines) == 1 and not merged.splits
    for call in episode.calls:
        assert call.prompt_ids is not None and call.logprobs is not None


def test_text_in_text_out(open_episode: Opener, client_of: Any) -> None:
    episode = open_episode("forty-two")
    asked = {
        "instructions": "Be brief.",
        "input": "Six times seven?",
        "max_output_tokens": 50,
        "temperature": 0.5,
    }
    response = client_of(episode).responses.create(model="m", metadata={"a": "b"}, **asked)
    assert (
        response.output_text == "forty-two"
        and response.status == "completed"
        and response.error is None
    )
    assert (
        response.instructions == "Be brief."
        and response.max_output_tokens == 50
        and response.metadata == {"a": "b"}
    )
    assert response.usage is not None and response.usage.output_tokens > 2
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    (call,) = episode.calls
    assert call.request["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Six times seven?"},
    ]
    assert call.request["metadata"] == {"a": "b"} and "input" not in call.request
    assert (
        call.response["id"] == response.id
        and call.response["choices"][0]["message"]["content"] == "forty-two"
    )
    assert call.sampling["max_tokens"] == 50 and call.sampling["temperature"] == 0.5
    assert call.prompt_ids is not None and call.output_ids is not None and call.error is None
    assert episode.spec.engine.tokenizer.decode(call.output_ids.tolist()) == "forty-two<|im_end|>"


def test_a_reply_that_reaches_its_limit_is_incomplete(open_episode: Opener, client_of: Any) -> None:
    client = client_of(open_episode("forty-two", "forty-two"))
    response = client.responses.create(model="m", input="?", max_output_tokens=2)
    assert (response.status, response.output_text) == (
        "incomplete",
        "forty-two"[: len(response.output_text)],
    )
    assert (
        0 < len(response.output_text) < 9
        and response.incomplete_details.reason == "max_output_tokens"
    )
    with client.responses.stream(model="m", input="?", max_output_tokens=2) as stream:
        assert [event.type for event in stream][-1] == "response.incomplete"


def echo_items(client: openai.OpenAI, **common: Any) -> list[Any]:
    """A conversation whose client sends every item again."""
    items: list[Any] = [{"role": "user", "content": "Six and?"}]
    for _ in range(3):
        response = client.responses.create(model="m", input=items, store=False, **common)
        items += response.output
        for item in response.output:
            if item.type == "function_call":
                items.append(
                    {"type": "function_call_output", "call_id": item.call_id, "output": "42"}
                )
        if items[-1] is response.output[-1]:
            items.append({"role": "user", "content": [{"type": "input_text", "text": "And now?"}]})
    return items


def name_the_last(client: openai.OpenAI, **common: Any) -> None:
    """A conversation whose client sends what is new, and the id of the response before."""
    response = client.responses.create(model="m", input="Six and?", **common)
    for _ in range(2):
        new: list[Any] = [
            {"type": "function_call_output", "call_id": item.call_id, "output": "42"}
            for item in response.output
            if item.type == "function_call"
        ] or [{"role": "user", "content": "And now?"}]
        response = client.responses.create(
            model="m", input=new, previous_response_id=response.id, **common
        )


@pytest.mark.parametrize("talk", [echo_items, name_the_last])
@pytest.mark.parametrize("instructions", [{}, {"instructions": "Add."}])
def test_a_conversation_with_tools_and_reasoning_is_one_timeline(
    open_episode: Opener, client_of: Any, talk: Any, instructions: dict[str, Any]
) -> None:
    episode = open_episode(CALLING, THINKING, "Bye.")
    talk(client_of(episode), tools=[ADD], **instructions)
    one_timeline(episode)
    messages = episode.calls[-1].request["messages"]
    roles = ["user", "assistant", "tool", "assistant", "user"]
    assert [m["role"] for m in messages] == (["system"] if instructions else []) + roles
    assert (
        messages[-4]["tool_calls"][0]["function"]["name"] == "add"
        and messages[-4]["content"] == "Let me see."
    )
    assert messages[-2]["reasoning_content"] and messages[-2]["content"] == "It is 42."
    assert episode.calls[0].request["tools"] == [ADD_OF_CHAT]
    read = conversation(episode.calls)  # what `ajet trace show` and the viewer print
    assert [m.role for m in read] == [*(m["role"] for m in messages), "assistant"] and read[
        -1
    ].content == "Bye."
    (exported,) = conversations(Episode(calls=episode.calls))
    assert len(exported.messages) == len(read) and len(exported.turns) == 3


def test_a_conversation_that_changes_its_dialect_is_one_timeline(
    open_episode: Opener, client_of: Any
) -> None:
    episode = open_episode(CALLING, "Forty-two.", THINKING, "Bye.", "Really.")
    client = client_of(episode)
    system = {"role": "system", "content": "Add."}
    messages: list[Any] = [system, {"role": "user", "content": "Six and?"}]
    chat = (
        client.chat.completions.create(model="m", messages=messages, tools=[ADD_OF_CHAT])
        .choices[0]
        .message
    )
    call = chat.tool_calls[0]
    items: list[Any] = [
        {"role": "user", "content": "Six and?"},
        {"role": "assistant", "content": [{"type": "output_text", "text": chat.content}]},
        {
            "type": "function_call",
            "call_id": call.id,
            "name": "add",
            "arguments": call.function.arguments,
        },
        {"type": "function_call_output", "call_id": call.id, "output": "42"},
    ]
    about = {"model": "m", "instructions": "Add.", "tools": [ADD]}
    second = client.responses.create(input=items, **about)
    third = client.responses.create(input="Why?", previous_response_id=second.id, **about)
    messages += [
        chat,
        {"role": "tool", "tool_call_id": call.id, "content": "42"},
        {"role": "assistant", "content": second.output_text},
        {"role": "user", "content": "Why?"},
        {
            "role": "assistant",
            "content": third.output_text,
            "reasoning_content": third.output[0].content[0].text,
        },
        {"role": "user", "content": "Thanks."},
    ]
    client.chat.completions.create(model="m", messages=messages, tools=[ADD_OF_CHAT])
    thought, said = third.output[0].content[0].text, third.output_text
    claude = pytest.importorskip("anthropic").Anthropic(
        api_key=client.api_key, base_url=str(client.base_url).removesuffix("v1/"), max_retries=0
    )
    claude.messages.create(
        model="m",
        max_tokens=100,
        system="Add.",
        tools=[{"name": "add", "input_schema": ADD["parameters"]}],
        messages=[
            {"role": "user", "content": "Six and?"},
            {
                "role": "assistant",
                "content": [
                    {"type": "text", "text": chat.content},
                    {
                        "type": "tool_use",
                        "id": call.id,
                        "name": "add",
                        "input": json.loads(call.function.arguments),
                    },
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "42"}],
            },
            {"role": "assistant", "content": second.output_text},
            {"role": "user", "content": "Why?"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": thought, "signature": ""},
                    {"type": "text", "text": said},
                ],
            },
            {"role": "user", "content": "Thanks."},
            {"role": "assistant", "content": "Bye."},
            {"role": "user", "content": "Really?"},
        ],
    )
    assert [call.error for call in episode.calls] == [None] * 5
    one_timeline(episode)


@pytest.mark.parametrize("reply", ["forty-two " * 20, CALLING, THINKING])
@pytest.mark.parametrize(
    "more", [{}, {"reasoning": {"summary": "auto"}, "include": ["reasoning.encrypted_content"]}]
)
def test_a_stream_says_what_the_whole_response_says(
    open_episode: Opener, client_of: Any, reply: Any, more: dict[str, Any]
) -> None:
    client = client_of(open_episode(reply, reply))
    asked = {"model": "m", "input": "?", "tools": [ADD], **more}
    whole = client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert (
        kinds[:2] == ["response.created", "response.in_progress"]
        and kinds[-1] == "response.completed"
    )

    def said(output: Any) -> Any:
        plain = [item.model_dump(exclude={"id", "call_id", "parsed_arguments"}) for item in output]
        for item in plain:
            for part in item.get("content") or ():
                part.pop("parsed", None)
        return plain

    assert said(final.output) == said(whole.output)
    for index, item in enumerate(final.output):
        mine = [event for event in events if getattr(event, "output_index", None) == index]
        assert [mine[0].type, mine[-1].type] == [
            "response.output_item.added",
            "response.output_item.done",
        ]
        assert mine[0].item.status == "in_progress"
        spelt = "".join(event.delta for event in mine if event.type.endswith(".delta"))
        if item.type == "message":
            assert spelt == item.content[0].text
        elif item.type == "function_call":
            assert spelt == item.arguments
        else:
            assert spelt == "".join(part.text for part in item.content or item.summary)


def test_a_tool_of_a_namespace_keeps_its_name(open_episode: Opener, client_of: Any) -> None:
    calling = {
        "content": "",
        "tool_calls": [{"function": {"name": "sums__add", "arguments": {"a": 6}}}],
    }
    episode = open_episode(calling, "Six.")
    sums: Any = {"type": "namespace", "name": "sums", "description": "Sums.", "tools": [ADD]}
    responses = client_of(episode).responses
    [item] = responses.create(model="m", input="add", tools=[sums]).output
    assert (item.type, item.namespace, item.name) == ("function_call", "sums", "add")
    result = {"type": "function_call_output", "call_id": item.call_id, "output": "6"}
    history = [{"role": "user", "content": "add"}, item.model_dump(exclude_none=True), result]
    assert responses.create(model="m", input=history, tools=[sums]).output_text == "Six."
    first, second = episode.calls
    assert first.request["tools"] == [
        {**ADD_OF_CHAT, "function": {**ADD_OF_CHAT["function"], "name": "sums__add"}}
    ]
    assert second.extends_call_id == first.call_id


def test_a_custom_tool_gets_its_free_text(open_episode: Opener, client_of: Any) -> None:
    command = {"tool_calls": [{"function": {"name": "shell", "arguments": {"input": 'ls -l "ü"'}}}]}
    episode = open_episode(command, command, "done")
    client = client_of(episode)
    with client.responses.stream(model="m", input="List.", tools=[SHELL]) as stream:
        kinds = [event.type for event in stream]
    assert (
        "response.custom_tool_call_input.delta" in kinds
        and "response.custom_tool_call_input.done" in kinds
    )
    response = client.responses.create(model="m", input="List.", tools=[SHELL])
    (item,) = response.output
    assert (item.type, item.name, item.input) == ("custom_tool_call", "shell", 'ls -l "ü"')
    result = {"type": "custom_tool_call_output", "call_id": item.call_id, "output": "nothing"}
    items = [{"role": "user", "content": "List."}, item, result]
    client.responses.create(model="m", input=items, tools=[SHELL])
    merged = merge(episode.calls[1:], episode.spec.engine.tokenizer.decode)
    assert len(merged.timelines) == 1 and not merged.splits


def test_reasoning_comes_back_from_what_was_encrypted(open_episode: Opener, client_of: Any) -> None:
    episode = open_episode(THINKING, "Bye.", "Bye.")
    client = client_of(episode)
    include = ["reasoning.encrypted_content"]
    first = client.responses.create(model="m", input="?", include=include, store=False)
    thought, message = first.output
    assert thought.encrypted_content
    bare = {
        "type": "reasoning",
        "id": thought.id,
        "summary": [],
        "encrypted_content": thought.encrypted_content,
    }
    foreign = {"type": "reasoning", "id": "rs_x", "summary": [], "encrypted_content": "gAAAAAB"}
    items: list[Any] = [
        {"role": "user", "content": "?"},
        bare,
        message,
        {"role": "user", "content": "So?"},
        foreign,
    ]
    client.responses.create(model="m", input=items[:4])
    one_timeline(episode)
    assert client.responses.create(model="m", input=items).output_text == "Bye."


class Answered(BaseModel):
    value: int


def test_async_clients_and_parsed_outputs(open_episode: Opener) -> None:
    seen = list[Ask]()

    class Seen(ScriptedEngine):
        async def answer(self, ask: Ask) -> Answer:
            seen.append(ask)
            message = {"role": "assistant", "content": '{"value": 42}'}
            return Answer((Choice(message, None, "stop"),), "m", usage={})

    with Gateway() as gateway:
        episode = gateway.open(EpisodeSpec("typed", Seen([])))

        async def ask() -> Any:
            handle = episode.model()
            async with openai.AsyncOpenAI(
                api_key=handle.api_key, base_url=handle.base_url
            ) as client:
                parsed = await client.responses.parse(model="m", input="?", text_format=Answered)
                async with client.responses.stream(
                    model="m", input="?", text_format=Answered
                ) as stream:
                    async for _ in stream:
                        pass
                    return parsed.output_parsed, (await stream.get_final_response()).output_parsed

        assert asyncio.run(ask()) == (Answered(value=42), Answered(value=42))
    form = seen[0].options["response_format"]
    assert form["type"] == "json_schema" and form["json_schema"]["name"] == "Answered"
    assert form["json_schema"]["schema"]["properties"]["value"]["type"] == "integer"


def test_state_is_the_episodes_and_store_false_keeps_none(
    open_episode: Opener, client_of: Any
) -> None:
    episode = open_episode("one", "two", "three", "four")
    client = client_of(episode)
    unknown = client.responses.create(model="m", input="a", store=False).id
    for missing in (unknown, "resp_other"):
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(model="m", input="b", previous_response_id=missing)
        assert (
            refused.value.code == "previous_response_not_found"
            and refused.value.param == "previous_response_id"
        )
        assert f"Previous response with id '{missing}' not found." in str(refused.value)
    first = client.responses.create(model="m", input="a", instructions="Only once.")
    reference = {"type": "item_reference", "id": first.output[0].id}
    items: list[Any] = [
        {"role": "user", "content": "a"},
        reference,
        {"role": "user", "content": "b"},
    ]
    client.responses.create(model="m", input=items)
    client.responses.create(model="m", input="b", previous_response_id=first.id)
    asked = [call.request["messages"] for call in episode.calls if call.error is None][2:]
    assert asked[0] == asked[1] and [m["content"] for m in asked[0]] == ["a", "two", "b"]


def test_stored_responses_are_read_deleted_and_counted_over_http(open_episode: Opener) -> None:
    episode = open_episode("one")
    handle = episode.model()
    client = openai.OpenAI(api_key=handle.api_key, base_url=handle.base_url, max_retries=0)
    created = client.responses.create(model="m", input="a")
    assert client.responses.retrieve(created.id) == created
    assert created.usage is not None
    assert (
        client.responses.input_tokens.count(model="m", input="a").input_tokens
        == created.usage.input_tokens
    )
    client.responses.delete(created.id)
    for use in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError, match="not found"):
            use(created.id)
    with pytest.raises(openai.BadRequestError, match="not found"):
        client.responses.create(model="m", input="b", previous_response_id=created.id)


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    (
        {"tools": [{"type": "web_search"}]},
        "tools",
        r"tools\[0\] is of type 'web_search'.*function tool",
    ),
    ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools", "'mcp'"),
    ({"tool_choice": {"type": "web_search"}}, "tool_choice", "'web_search'.*name a function"),
    ({"background": True}, "background", "wait for it, or stream"),
    ({"conversation": "conv_1"}, "conversation", "previous_response_id"),
    ({"truncation": "auto"}, "truncation", "shorten the input"),
    ({"nonsense": 1}, "nonsense", "leave it out"),
    (
        {"input": [{"type": "web_search_call", "id": "ws"}]},
        "input",
        r"input\[0\] of type 'web_search_call'",
    ),
    (
        {"input": [{"role": "user", "content": [{"type": "input_hologram"}]}]},
        "input",
        "input_hologram",
    ),
    ({"input": []}, "input", "needs input"),
    ({"text": {"format": {"type": "grammar"}}}, "text", "json_schema"),
]


@pytest.mark.parametrize(("more", "parameter", "said"), REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(
    open_episode: Opener, more: dict[str, Any], parameter: str, said: str
) -> None:
    episode = open_episode("never")
    handle = episode.model()
    headers = {"authorization": f"Bearer {handle.api_key}"}
    body = {"model": "m", "input": "?", **more}
    reply = httpx.post(f"{handle.base_url}/responses", json=body, headers=headers)
    error = reply.json()["error"]
    assert reply.status_code == 400 and error["param"] == parameter
    assert re.search(said, error["message"])
    (call,) = episode.calls
    assert call.error == error["message"]


def test_log_probabilities_stand_beside_the_text(open_episode: Opener, client_of: Any) -> None:
    client = client_of(open_episode("forty-two", "forty-two"))
    asked: dict[str, Any] = {
        "model": "m",
        "input": "?",
        "include": ["message.output_text.logprobs"],
    }
    (part,) = client.responses.create(**asked).output[0].content
    with client.responses.stream(**asked) as stream:
        (streamed,) = stream.get_final_response().output[0].content
    assert part.logprobs == streamed.logprobs and {token.logprob for token in part.logprobs} == {
        -1.0
    }
    assert b"".join(bytes(token.bytes) for token in part.logprobs).startswith(b"forty-two")


def test_an_engine_that_fails_in_a_stream_is_an_error_of_the_client(
    client_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        answer_module, "HEARTBEAT", 0.0
    )  # the stream has begun when the engine fails

    async def fail(ask: Ask) -> str:
        await asyncio.sleep(0.01)
        raise EngineUnavailable("the engine is gone")

    with installed(), Gateway() as gateway:
        client = client_of(gateway.open(EpisodeSpec("failing", ScriptedEngine(fail))))
        with pytest.raises(openai.APIError, match="the engine is gone") as raised:
            list(client.responses.create(model="m", input="?", stream=True))
        assert type(raised.value) is openai.APIError  # an event of the stream, and no status


def test_every_parameter_of_openais_client_stands_in_a_table() -> None:
    client = openai.OpenAI(api_key="none")
    of_the_transport = {"self", "extra_headers", "extra_query", "extra_body"}
    for create, table in (
        (client.responses.create, RESPONSE_FIELDS),
        (client.chat.completions.create, COMPLETIONS),
    ):
        assert inspect.signature(create).parameters.keys() - of_the_transport <= table.keys()


def test_chat_completions_own_parameters_reach_the_engine(open_episode: Opener) -> None:
    episode = open_episode("42")
    handle = episode.model()
    client = openai.OpenAI(api_key=handle.api_key, base_url=handle.base_url, max_retries=0)
    extra = {"top_k": 5, "stop": "2", "seed": 7, "return_token_ids": True}
    response = client.responses.create(model="m", input="?", extra_body=extra)
    (call,) = episode.calls
    assert (call.sampling["top_k"], call.sampling["stop"], response.output_text) == (5, ["2"], "4")
    assert call.output_ids is not None and response.model_extra is not None
    assert response.model_extra["token_ids"] == call.output_ids.tolist()


TEXT = st.text(min_size=1, max_size=8)
REPLY = st.fixed_dictionaries(
    {"role": st.just("assistant")},
    optional={
        "content": TEXT,
        "reasoning_content": TEXT,
        "tool_calls": st.lists(
            st.builds(
                lambda key, name: {
                    "id": key,
                    "type": "function",
                    "function": {"name": name, "arguments": '{"a": 1}'},
                },
                TEXT,
                st.sampled_from(["add", "sub"]),
            ),
            min_size=1,
            max_size=3,
        ),
    },
)


@given(st.lists(REPLY, min_size=1, max_size=5), st.booleans(), st.booleans())
def test_replies_sent_back_as_items_are_the_replies(
    replies: list[Any], summary: bool, ids: bool
) -> None:
    """However many replies follow each other, the items of each become that message again."""
    body = {"input": "?", "reasoning": {"summary": "auto"} if summary else None}
    items: list[Any] = [{"role": "user", "content": "?"}]
    for number, reply in enumerate(replies):
        answer = Answer((Choice({"content": None, **reply}, None, "stop"),), "m")
        ask = CHAT.ask({"messages": items}, "e", "a")
        completion = CHAT.completion(answer, ask, f"{number:032x}")
        output = RESPONSES.response(completion, {"messages": []}, {**body, "store": False}, {})[
            "output"
        ]
        items += (
            output if ids else [{k: v for k, v in item.items() if k != "id"} for item in output]
        )
        items += [] if ids else [{"role": "user", "content": "?"}]
    read = [
        m for m in RESPONSES.neutral({"input": items}, {})["messages"] if m["role"] == "assistant"
    ]
    assert len(read) == len(replies) and all(map(same_reply, read, replies))
