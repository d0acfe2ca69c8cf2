"""Anthropic's and Google's own clients against the policy, over HTTP and captured in this
process."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest

from ajet_sdk.agent.context import current_episode
from ajet_sdk.capture.hooks import installed
from ajet_sdk.capture.processes import endpoint_variables
from ajet_sdk.engines.scripted import ScriptedEngine
from ajet_sdk.gateway import answer as answer_module
from ajet_sdk.gateway.episode import EpisodeSpec, OpenEpisode
from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.protocols import Answer, Ask
from tests.waiting import FOREVER

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOL = {"name": "double", "description": "Twice a.", "input_schema": SCHEMA}
CALLS = [{"function": {"name": "double", "arguments": {"a": a}}} for a in (3, 4)]


def replies(ask: Ask) -> Any:
    """Two calls at once where there are tools and no result yet; else what was said last, thought
    about."""
    last = ask.messages[-1] if ask.messages else {}
    if ask.tools and last.get("role") == "user":
        return {"reasoning_content": "Both at once.", "content": "I double.", "tool_calls": CALLS}
    if last.get("content") == "long":
        return "word " * 200
    return {"reasoning_content": "Easy.", "content": f"You said {last.get('content')} END and more"}


Doors = Callable[[str], tuple[OpenEpisode, Any, Any]]


@pytest.fixture(params=["http", "captured"])
def episode(gateway: Gateway, request: pytest.FixtureRequest) -> Iterator[OpenEpisode]:
    """An episode; where it is captured, clients ask their vendors' own hosts with keys of their
    own."""
    opened = gateway.open(EpisodeSpec("one", ScriptedEngine(replies, max_model_len=4000)))
    if request.param == "http":
        yield opened
        return
    with installed():
        token = current_episode.set(opened.active)
        try:
            yield opened
        finally:
            current_episode.reset(token)


def of_anthropic(episode: OpenEpisode, kind: Any = None) -> Any:
    anthropic = pytest.importorskip("anthropic")

    captured = current_episode.get() is not None
    model = episode.model()
    named = (
        {"api_key": "sk-ant"}
        if captured
        else {"api_key": model.api_key, "base_url": model.base_url[: -len("/v1")]}
    )
    return (kind or anthropic.Anthropic)(**named, max_retries=0)


def of_google(episode: OpenEpisode) -> Any:
    genai = pytest.importorskip("google.genai")

    captured = current_episode.get() is not None
    model = episode.model()
    url = None if captured else model.base_url[: -len("/v1")]
    options = genai.types.HttpOptions(base_url=url)
    return genai.Client(api_key="AIza" if captured else model.api_key, http_options=options)


def test_anthropics_client(episode: OpenEpisode) -> None:
    client = of_anthropic(episode)
    common: dict[str, Any] = {"model": "claude", "max_tokens": 300}
    asked = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}],
        }
    ]
    whole = client.messages.create(
        **common, messages=asked, system="Be brief.", stop_sequences=[" END"]
    )
    assert [block.type for block in whole.content] == ["thinking", "text"]
    assert (whole.content[1].text, whole.stop_reason, whole.stop_sequence) == (
        "You said hi",
        "stop_sequence",
        " END",
    )
    (call,) = episode.calls
    assert call.prompt_ids is not None and call.output_ids is not None
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (
        len(call.prompt_ids),
        len(call.output_ids),
    )
    assert call.request["messages"][0] == {"role": "system", "content": "Be brief."}
    assert call.response["choices"][0]["message"]["content"] == "You said hi"
    counted = client.messages.count_tokens(model="claude", messages=asked, system="Be brief.")
    assert counted.input_tokens == len(call.prompt_ids) and len(episode.calls) == 1
    with client.messages.stream(
        **common, messages=asked, system="Be brief.", stop_sequences=[" END"]
    ) as stream:
        assert "".join(stream.text_stream) == "You said hi"
        final = stream.get_final_message()
    assert (final.stop_reason, final.usage) == (whole.stop_reason, whole.usage)
    assert [b.text for b in final.content if b.type == "text"] == ["You said hi"] and final.content[
        0
    ] == whole.content[0]
    cut = client.messages.create(
        model="claude", max_tokens=10, messages=[{"role": "user", "content": "long"}]
    )
    assert cut.stop_reason == "max_tokens" and cut.usage.output_tokens == 10


def test_anthropics_client_calls_tools_in_parallel_and_the_calls_merge(
    episode: OpenEpisode,
) -> None:
    anthropic = pytest.importorskip("anthropic")

    async def agent() -> Any:
        client = of_anthropic(episode, anthropic.AsyncAnthropic)
        messages: list[Any] = [{"role": "user", "content": "double 3 and 4"}]
        common: dict[str, Any] = {
            "model": "claude",
            "max_tokens": 300,
            "tools": [TOOL],
            "messages": messages,
        }
        async with client.messages.stream(**common) as stream:
            reply = await stream.get_final_message()
        assert reply.stop_reason == "tool_use" and reply.content[1].text == "I double."
        used = [block for block in reply.content if block.type == "tool_use"]
        assert [(one.name, one.input) for one in used] == [
            ("double", {"a": 3}),
            ("double", {"a": 4}),
        ]
        messages.append(
            {"role": "assistant", "content": [block.model_dump() for block in reply.content]}
        )
        messages.append(
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": used[0].id, "content": "6"},
                    {
                        "type": "tool_result",
                        "tool_use_id": used[1].id,
                        "is_error": True,
                        "content": [{"type": "text", "text": "too large"}],
                    },
                ],
            }
        )
        return await client.messages.create(**common)

    last = asyncio.run(agent())
    assert (
        last.content[-1].text == "You said Error: too large END and more"
        and last.stop_reason == "end_turn"
    )
    first, second = episode.calls
    assert second.extends_call_id == first.call_id
    said = second.request["messages"]
    assert [m["role"] for m in said] == ["user", "assistant", "tool", "tool"]
    assert said[1]["reasoning_content"] == "Both at once."


def test_anthropics_tool_runner_keeps_its_thread(episode: OpenEpisode) -> None:
    """It sends `thread`, and from the second turn on the new messages alone."""
    anthropic = pytest.importorskip("anthropic")

    @anthropic.beta_tool
    def double(a: int) -> str:
        """Twice a."""
        return str(2 * a)

    client = of_anthropic(episode)
    common: dict[str, Any] = {
        "model": "claude",
        "max_tokens": 300,
        "system": "Be brief.",
        "tools": [double],
    }
    final = client.beta.messages.tool_runner(
        **common, messages=[{"role": "user", "content": "3 and 4"}]
    ).until_done()
    assert final.content[-1].text == "You said 8 END and more"
    first, second = episode.calls
    assert (
        first.request["x_without_effect"].keys() <= {"betas"}
        if "x_without_effect" in first.request
        else True
    )
    assert [message["role"] for message in second.request["messages"]] == [
        "system", "user", "assistant", "tool", "tool",
    ]  # fmt: skip
    assert (
        second.request["tools"] == first.request["tools"]
        and second.extends_call_id == first.call_id
    )

    raw = {"model": "claude", "max_tokens": 300, "messages": [{"role": "user", "content": "go on"}]}
    before = {"type": "continue", "previous_message_id": final.id}
    with client.beta.messages.stream(**raw, thread=before) as stream:
        assert stream.get_final_message().content[-1].type == "tool_use"
    assert len(episode.calls[-1].request["messages"]) == 7
    for thread, says in (
        ({"type": "continue", "previous_message_id": "msg_1"}, "no message 'msg_1'"),
        ("x", "must be"),
    ):
        with pytest.raises(anthropic.BadRequestError, match=says):
            client.beta.messages.create(**raw, thread=thread)
    with pytest.raises(anthropic.BadRequestError, match="compaction="):
        client.beta.messages.create(**raw, compaction={"type": "enabled"})


def test_anthropics_errors_are_its_clients_exceptions(gateway: Gateway) -> None:
    anthropic = pytest.importorskip("anthropic")

    episode = gateway.open(EpisodeSpec("one", ScriptedEngine(replies, max_model_len=40)))
    client = of_anthropic(episode)
    hi: dict[str, Any] = {
        "model": "m",
        "max_tokens": 9,
        "messages": [{"role": "user", "content": "hi"}],
    }
    search = {"type": "web_search_20250305", "name": "web_search"}
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}
    for changed, words in (
        ({"tools": [search]}, "web_search_20250305"),
        ({"container": "c"}, "container"),
        ({"messages": [{"role": "user", "content": [image]}]}, "picture"),
        ({"messages": [{"role": "user", "content": "much " * 20}]}, "prompt is too long"),
        ({"max_tokens": 0}, "max_tokens"),
    ):
        with pytest.raises(anthropic.BadRequestError, match=words) as refused:
            client.messages.create(**{**hi, **changed})
        assert refused.value.body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.AuthenticationError):
        client.with_options(api_key="wrong").messages.create(**hi)
    assert client.models.list().data[0].id == client.models.retrieve("scripted").id == "scripted"
    with pytest.raises(anthropic.NotFoundError):
        client.models.retrieve("other")


def test_googles_client(episode: OpenEpisode) -> None:
    genai = pytest.importorskip("google.genai")

    client, types = of_google(episode), genai.types
    config = types.GenerateContentConfig(
        system_instruction="Be brief.",
        stop_sequences=[" END"],
        temperature=0,
        top_k=5,
        seed=7,
        max_output_tokens=300,
    )
    whole = client.models.generate_content(model="gemini", contents="hi", config=config)
    assert whole.text == "You said hi" and whole.candidates[0].finish_reason.name == "STOP"
    (call,) = episode.calls
    assert call.prompt_ids is not None and call.output_ids is not None
    usage = whole.usage_metadata
    assert (usage.prompt_token_count, usage.candidates_token_count) == (
        len(call.prompt_ids),
        len(call.output_ids),
    )
    assert (
        call.sampling["temperature"] == 0
        and call.sampling["top_k"] == 5
        and call.request["model"] == "gemini"
    )
    parts = list(
        client.models.generate_content_stream(model="gemini", contents="hi", config=config)
    )
    assert (
        "".join(part.text for part in parts) == "You said hi" and parts[-1].usage_metadata == usage
    )
    assert (
        client.models.count_tokens(model="gemini", contents="hi").total_tokens > 0
        and len(episode.calls) == 2
    )
    thinking = types.GenerateContentConfig(
        thinking_config=types.ThinkingConfig(include_thoughts=True)
    )
    shown = (
        client.models.generate_content(model="gemini", contents="hi", config=thinking)
        .candidates[0]
        .content.parts
    )
    assert (shown[0].text, shown[0].thought) == ("Easy.", True)
    several = types.GenerateContentConfig(candidate_count=2)
    assert (
        len(
            client.models.generate_content(model="gemini", contents="hi", config=several).candidates
        )
        == 2
    )


def test_googles_client_calls_tools_in_parallel_and_the_calls_merge(episode: OpenEpisode) -> None:
    genai = pytest.importorskip("google.genai")

    types = genai.types

    async def agent() -> list[Any]:
        declared = types.FunctionDeclaration(
            name="double",
            description="Twice a.",
            parameters=types.Schema(
                type="OBJECT", properties={"a": types.Schema(type="INTEGER")}, required=["a"]
            ),
        )
        config = types.GenerateContentConfig(tools=[types.Tool(function_declarations=[declared])])
        chat = of_google(episode).aio.chats.create(model="gemini", config=config)
        reply = await chat.send_message("double 3 and 4")
        calls = reply.function_calls
        assert [(call.name, call.args) for call in calls] == [
            ("double", {"a": 3}),
            ("double", {"a": 4}),
        ]
        results = [
            types.Part.from_function_response(name="double", response={"result": 2 * c.args["a"]})
            for c in calls
        ]
        return [part async for part in await chat.send_message_stream(results)]

    parts = asyncio.run(agent())
    assert "".join(part.text for part in parts) == "You said 8 END and more"
    first, second = episode.calls
    assert second.extends_call_id == first.call_id
    assert first.request["tools"][0]["function"]["parameters"] == SCHEMA
    said = second.request["messages"]
    assert [m["role"] for m in said] == ["user", "assistant", "tool", "tool"]
    assert said[1]["reasoning_content"] == "Both at once." and said[3]["content"] == "8"


def test_googles_errors_and_models(gateway: Gateway) -> None:
    genai = pytest.importorskip("google.genai")

    episode = gateway.open(EpisodeSpec("one", ScriptedEngine(replies, max_model_len=40)))
    client, types = of_google(episode), genai.types
    search = types.GenerateContentConfig(tools=[types.Tool(google_search=types.GoogleSearch())])
    cached = types.GenerateContentConfig(cached_content="c")
    for config, contents, words in (
        (search, "hi", "googleSearch"),
        (cached, "hi", "cachedContent"),
        (None, "much " * 20, "40"),
    ):
        with pytest.raises(genai.errors.ClientError, match=words) as refused:
            client.models.generate_content(model="gemini", contents=contents, config=config)
        assert (refused.value.code, refused.value.status) == (400, "INVALID_ARGUMENT")
    assert [one.name for one in client.models.list()] == ["models/scripted"]
    assert client.models.get(model="scripted").name == "models/scripted"
    model = episode.model()
    url = f"{model.base_url[:-3]}/v1beta/models/m:streamGenerateContent"
    body = {"contents": {"parts": {"text": "h"}}, "generation_config": {"max_output_tokens": 5}}
    listed = httpx.post(url, params={"key": model.api_key}, json=body)
    assert (
        listed.headers["content-type"] == "application/json" and listed.json()[-1]["usageMetadata"]
    )
    wrong = httpx.post(url, params={"key": "no"}, json=body)
    assert wrong.status_code == 401 and wrong.json()["error"]["status"] == "UNAUTHENTICATED"


def test_clients_of_every_vendor_find_the_policy_by_their_own_variables(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    anthropic = pytest.importorskip("anthropic")
    genai = pytest.importorskip("google.genai")

    episode = gateway.open(EpisodeSpec("one", ScriptedEngine(replies, max_model_len=4000)))
    model, hi = episode.model(), [{"role": "user", "content": "hi"}]
    monkeypatch.setenv("ANTHROPIC_AUTH_TOKEN", "sk-mine")
    for name, value in endpoint_variables(model.base_url, model.api_key).items():
        monkeypatch.setenv(name, value)
    assert os.environ["ANTHROPIC_AUTH_TOKEN"] == model.api_key
    openai.OpenAI().responses.create(model="m", input="hi")
    anthropic.Anthropic().messages.create(model="m", max_tokens=99, messages=hi)
    google = genai.Client()  # closed once nobody holds it
    google.models.generate_content(model="m", contents="hi")
    assert (
        len(
            {
                tuple(call.prompt_ids.tolist())
                for call in episode.calls
                if call.prompt_ids is not None
            }
        )
        == 1
    )
    assert [call.error for call in episode.calls] == [None] * 3


def test_a_conversation_that_changes_its_dialect_midway_still_merges(gateway: Gateway) -> None:
    episode = gateway.open(EpisodeSpec("one", ScriptedEngine(replies, max_model_len=4000)))
    tools = [
        {
            "type": "function",
            "function": {"name": "double", "description": "Twice a.", "parameters": SCHEMA},
        }
    ]
    asked = {"role": "user", "content": "double 3 and 4"}
    reply = (
        episode.model().openai().chat.completions.create(model="m", messages=[asked], tools=tools)
    )
    calls = reply.choices[0].message.tool_calls or []
    thought = {"type": "thinking", "thinking": "Both at once.", "signature": ""}
    used = [
        {
            "type": "tool_use",
            "id": c.id,
            "name": c.function.name,
            "input": json.loads(c.function.arguments),
        }
        for c in calls
    ]
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "9"} for call in calls]
    history: list[Any] = [
        asked,
        {"role": "assistant", "content": [thought, {"type": "text", "text": "I double."}, *used]},
        {"role": "user", "content": results},
    ]
    of_anthropic(episode).messages.create(model="m", max_tokens=99, messages=history, tools=[TOOL])
    answers = [{"id": one["id"], "name": "double", "response": {"result": "9"}} for one in used]
    contents = [
        {"role": "user", "parts": [{"text": "double 3 and 4"}]},
        {"role": "model", "parts": [{"text": "Both at once.", "thought": True}, {"text": "I double."}, *(
            {"functionCall": {"id": u["id"], "name": u["name"], "args": u["input"]}} for u in used)]},
        {"role": "user", "parts": [{"functionResponse": answer} for answer in answers]},
        {"role": "model", "parts": [{"text": "Easy.", "thought": True}, {"text": "You said 9 END and more"}]},
        {"role": "user", "parts": [{"text": "thanks"}]},
    ]  # fmt: skip
    declared = {"name": "double", "description": "Twice a.", "parametersJsonSchema": SCHEMA}
    model = episode.model()
    body = {"contents": contents, "tools": [{"functionDeclarations": [declared]}]}
    url = f"{model.base_url[:-3]}/v1beta/models/m:generateContent"
    assert httpx.post(url, headers={"x-goog-api-key": model.api_key}, json=body).status_code == 200
    first, second, third = episode.calls
    assert (second.extends_call_id, third.extends_call_id) == (first.call_id, second.call_id)


class PatientEngine(ScriptedEngine):
    """Answers once the client has seen that the stream goes on."""

    def __init__(self, reply: Callable[[Ask], Any]) -> None:
        super().__init__(reply)
        self.seen = threading.Event()

    async def answer(self, ask: Ask) -> Answer:
        await asyncio.to_thread(self.seen.wait, FOREVER)
        return await super().answer(ask)


@pytest.fixture
def patient(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> tuple[PatientEngine, OpenEpisode]:
    monkeypatch.setattr(answer_module, "HEARTBEAT", 0.02)
    engine = PatientEngine(replies)
    return engine, gateway.open(EpisodeSpec("one", engine))


def test_a_message_that_takes_long_has_events_that_are_no_pings(
    patient: tuple[PatientEngine, OpenEpisode],
) -> None:
    """A client that counts events ends a stream that has pings only."""
    engine, episode = patient
    kinds = list[str]()
    request: Any = {
        "model": "m",
        "max_tokens": 999,
        "messages": [{"role": "user", "content": "hello"}],
    }
    tools: Any = [TOOL]
    with of_anthropic(episode).messages.stream(**request, tools=tools) as stream:
        for event in stream:
            kinds.append(event.type)
            if kinds.count("message_delta") == 3:
                engine.seen.set()
        final = stream.get_final_message()
    assert kinds[0] == "message_start" and kinds.count("message_start") == 1
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert (
        final.stop_reason == "tool_use"
        and final.usage.input_tokens > 0
        and final.usage.output_tokens > 0
    )
    (call,) = episode.calls
    assert call.error is None and final.id == call.response["id"]


def test_a_response_that_takes_long_has_events_that_are_no_comments(
    patient: tuple[PatientEngine, OpenEpisode],
) -> None:
    engine, episode = patient
    kinds, ids, numbers = list[str](), set[str](), list[int]()
    model = episode.model()
    client = openai.OpenAI(base_url=model.base_url, api_key=model.api_key)
    with client.responses.stream(model="m", input="hello") as stream:
        for event in stream:
            kinds.append(event.type)
            numbers.append(event.sequence_number)
            if event.type in ("response.created", "response.in_progress", "response.completed"):
                ids.add(event.response.id)
            if kinds.count("response.in_progress") == 3:
                engine.seen.set()
        final = stream.get_final_response()
    assert kinds[0] == "response.created" and kinds.count("response.created") == 1
    assert kinds[-1] == "response.completed" and ids == {final.id} and numbers == sorted(numbers)
    assert final.output_text.startswith("You said hello") and episode.calls[0].error is None
