"""Laws of the dialects: one conversation is one request in each, and a stream says what the whole
response says."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajet_sdk.dialects.anthropic_messages import MESSAGES
from ajet_sdk.dialects.gemini import Gemini
from ajet_sdk.dialects.openai_chat import CHAT
from ajet_sdk.dialects.table import endpoint

TEXT = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=120)
NAME = st.from_regex(r"[a-z]{1,8}", fullmatch=True)
VALUES = st.dictionaries(
    NAME,
    st.one_of(TEXT, st.integers(-9, 9), st.booleans(), st.lists(st.integers(0, 9))),
    max_size=3,
)


@st.composite
def calls(draw: st.DrawFn, *, of: int) -> list[dict[str, Any]]:
    drawn = draw(st.lists(st.tuples(NAME, VALUES), max_size=3))
    return [
        {
            "id": f"call{of:03d}{n:02d}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
        }
        for n, (name, arguments) in enumerate(drawn)
    ]


@st.composite
def replies(draw: st.DrawFn, of: int = 0) -> dict[str, Any]:
    called = draw(calls(of=of))
    reply: dict[str, Any] = {
        "role": "assistant",
        "content": draw(TEXT if not called else st.none() | TEXT),
    }
    if draw(st.booleans()):
        reply["reasoning_content"] = draw(TEXT)
    return {**reply, "tool_calls": called} if called else reply


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    """A system message or none, then turns; the last is the user's or a tool's."""
    messages = [{"role": "system", "content": draw(TEXT)}] if draw(st.booleans()) else []
    messages.append({"role": "user", "content": draw(TEXT)})
    for turn in range(draw(st.integers(0, 3))):
        reply = draw(replies(of=turn))
        messages.append(reply)
        results = reply.get("tool_calls", ())
        messages += [
            {"role": "tool", "tool_call_id": one["id"], "content": draw(TEXT)} for one in results
        ]
        if not results or draw(st.booleans()):
            messages.append({"role": "user", "content": draw(TEXT)})
    return messages


def turns(messages: list[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Messages as turns of user and assistant; results and what the user says after them are one
    turn."""
    found: list[tuple[str, list[dict[str, Any]]]] = []
    for message in messages:
        role = "assistant" if message["role"] == "assistant" else "user"
        if found and found[-1][0] == role:
            found[-1][1].append(message)
        else:
            found.append((role, [message]))
    return found


def block(message: dict[str, Any]) -> list[dict[str, Any]]:
    if message["role"] == "tool":
        return [
            {
                "type": "tool_result",
                "tool_use_id": message["tool_call_id"],
                "content": message["content"],
            }
        ]
    found: list[dict[str, Any]] = []
    if message.get("reasoning_content"):
        found.append(
            {"type": "thinking", "thinking": message["reasoning_content"], "signature": "s"}
        )
    if message["content"] is not None:
        found.append(
            {"type": "text", "text": message["content"], "cache_control": {"type": "ephemeral"}}
        )
    for call in message.get("tool_calls", ()):
        function = call["function"]
        used = {
            "id": call["id"],
            "name": function["name"],
            "input": json.loads(function["arguments"]),
        }
        found.append({"type": "tool_use", **used})
    return found


def as_messages(asked: dict[str, Any]) -> dict[str, Any]:
    system, rest = split(asked["messages"])
    tools = [
        {"name": t["function"]["name"], "input_schema": t["function"]["parameters"]}
        for t in asked["tools"]
    ]
    said = [
        {"role": role, "content": [b for m in spoken for b in block(m)]}
        for role, spoken in turns(rest)
    ]
    body = {name: asked[name] for name in ("model", "max_tokens", "temperature", "top_p", "top_k")}
    return {**body, **system, "messages": said, "tools": tools, "stop_sequences": asked["stop"]}


def split(messages: list[dict[str, Any]]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    if messages[0]["role"] == "system":
        return {"system": messages[0]["content"]}, messages[1:]
    return {}, messages


def part(message: dict[str, Any], names: dict[str, str]) -> list[dict[str, Any]]:
    if message["role"] == "tool":
        known = message["tool_call_id"]
        return [
            {
                "functionResponse": {
                    "id": known,
                    "name": names[known],
                    "response": {"result": message["content"]},
                }
            }
        ]
    found: list[dict[str, Any]] = []
    if message.get("reasoning_content"):
        found.append({"text": message["reasoning_content"], "thought": True})
    if message["content"] is not None:
        found.append({"text": message["content"]})
    for call in message.get("tool_calls", ()):
        function = call["function"]
        names[call["id"]] = function["name"]
        called = {
            "id": call["id"],
            "name": function["name"],
            "args": json.loads(function["arguments"]),
        }
        found.append({"function_call": called})
    return found


def as_gemini(asked: dict[str, Any], snake: bool) -> dict[str, Any]:
    system, rest = split(asked["messages"])
    names: dict[str, str] = {}
    contents = [
        {
            "role": "model" if role == "assistant" else "user",
            "parts": [p for m in spoken for p in part(m, names)],
        }
        for role, spoken in turns(rest)
    ]
    declared = [
        {"name": t["function"]["name"], "parameters": upper(t["function"]["parameters"])}
        for t in asked["tools"]
    ]
    config: dict[str, Any] = {
        "temperature": asked["temperature"],
        "topP": asked["top_p"],
        "top_k": asked["top_k"],
    }
    config |= {"maxOutputTokens": asked["max_tokens"], "stop_sequences": asked["stop"]}
    return {
        "contents": contents,
        "tools": [{"function_declarations" if snake else "functionDeclarations": declared}],
        "generation_config" if snake else "generationConfig": config,
        **({"systemInstruction": {"parts": [{"text": system["system"]}]}} if system else {}),
    }


def upper(schema: dict[str, Any]) -> dict[str, Any]:
    """A JSON schema as Google spells it."""
    found = {**schema, "type": schema["type"].upper()}
    if "properties" in schema:
        found["properties"] = {name: upper(one) for name, one in schema["properties"].items()}
    if "items" in schema:
        found["items"] = upper(schema["items"])
    return found


LEAF = st.sampled_from([{"type": kind} for kind in ("string", "integer", "number", "boolean")])
SCHEMAS = st.recursive(
    LEAF,
    lambda inner: st.one_of(
        inner.map(lambda one: {"type": "array", "items": one}),
        st.dictionaries(NAME, inner, max_size=3).map(
            lambda named: {"type": "object", "properties": named}
        ),
    ),
    max_leaves=4,
)
TOOLS = st.lists(
    st.tuples(NAME, st.dictionaries(NAME, SCHEMAS, max_size=3)).map(
        lambda one: {
            "type": "function",
            "function": {"name": one[0], "parameters": {"type": "object", "properties": one[1]}},
        }
    ),
    min_size=1,
    max_size=2,
)
REQUESTS = st.fixed_dictionaries(
    {
        "model": st.just("m"),
        "messages": conversations(),
        "tools": TOOLS,
        "max_tokens": st.integers(1, 999),
        "temperature": st.sampled_from([0, 0.5, 1]),
        "top_p": st.sampled_from([0.5, 1]),
        "top_k": st.integers(1, 50),
        "stop": st.lists(TEXT, min_size=1, max_size=2),
    }
)


@pytest.mark.slow
@given(asked=REQUESTS, snake=st.booleans())
def test_one_conversation_is_one_request_in_each_dialect(
    asked: dict[str, Any], snake: bool
) -> None:
    def ask(neutral: dict[str, Any]) -> Any:
        return CHAT.ask(neutral, "e", "a")

    wanted = ask(asked)
    assert ask(MESSAGES.neutral(as_messages(asked), {})) == wanted
    assert ask(Gemini("m", "generateContent").neutral(as_gemini(asked, snake), {})) == wanted


def completion(reply: dict[str, Any], finish: str = "stop") -> dict[str, Any]:
    choice = {"index": 0, "message": reply, "finish_reason": finish, "logprobs": None}
    usage = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    return {"id": "chatcmpl-x", "model": "m", "choices": [choice], "usage": usage}


@given(reply=replies(), finish=st.sampled_from(["stop", "length", "tool_calls"]))
def test_the_events_of_messages_put_together_are_the_message(
    reply: dict[str, Any], finish: str
) -> None:
    whole = MESSAGES.response(completion(reply, finish), {}, {}, {})
    events = [json.loads(one.partition(b"data: ")[2]) for one in MESSAGES.events(whole, {})]
    message: dict[str, Any] = {}
    spelt: dict[int, str] = {}
    for event in events:
        if event["type"] == "message_start":
            message = event["message"]
        elif event["type"] == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
        elif event["type"] == "content_block_delta":
            delta, at = event["delta"], message["content"][event["index"]]
            if delta["type"] == "input_json_delta":
                spelt[event["index"]] = spelt.get(event["index"], "") + delta["partial_json"]
                continue
            ((name, text),) = [(key, value) for key, value in delta.items() if key != "type"]
            at[name] += text
        elif event["type"] == "message_delta":
            message.update(event["delta"], usage=event["usage"])
    for index, text in spelt.items():
        message["content"][index]["input"] = json.loads(text)
    assert message == whole
    assert events[-1] == {"type": "message_stop"}


@given(first=replies(), second=replies(), sse=st.booleans(), shown=st.booleans())
def test_the_parts_of_gemini_put_together_are_the_response(
    first: dict[str, Any], second: dict[str, Any], sse: bool, shown: bool
) -> None:
    dialect = Gemini("m", "streamGenerateContent", sse)
    both = completion(first)
    both["choices"].append({**both["choices"][0], "index": 1, "message": second})
    body = {"generationConfig": {"thinkingConfig": {"include_thoughts": shown}}}
    whole = dialect.response(both, {}, body, {})
    sent = dialect.events(whole, body)
    chunks = [json.loads(one[6:]) for one in sent] if sse else json.loads(b"".join(sent))
    parts: dict[int, list[dict[str, Any]]] = {0: [], 1: []}
    ends: dict[int, str] = {}
    for chunk in chunks:
        (candidate,) = chunk["candidates"]
        into = parts[candidate["index"]]
        for one in candidate["content"]["parts"]:
            if (
                into
                and "text" in one
                and "text" in into[-1]
                and one.get("thought") == into[-1].get("thought")
            ):
                into[-1] = {**into[-1], **one, "text": into[-1]["text"] + one["text"]}
            else:
                into.append(one)
        if "finishReason" in candidate:
            ends[candidate["index"]] = candidate["finishReason"]
    assert [parts[c["index"]] for c in whole["candidates"]] == [
        c["content"]["parts"] for c in whole["candidates"]
    ]
    assert ends == {0: "STOP", 1: "STOP"} and chunks[-1]["usageMetadata"] == whole["usageMetadata"]


@given(first=replies())
def test_what_gemini_answered_is_read_back_as_it_was(first: dict[str, Any]) -> None:
    dialect = Gemini("m", "generateContent")
    content = dialect.response(completion(first), {}, {}, {})["candidates"][0]["content"]
    asked = {"contents": [{"parts": [{"text": "q"}]}, content, {"parts": [{"text": "r"}]}]}
    assert dialect.neutral(asked, {})["messages"][1] == first


def test_a_route_is_found_behind_any_version_and_prefix() -> None:
    for path, route in (
        ("/v1/chat/completions", "chat/completions"),
        ("chat/completions", "chat/completions"),
        ("/openai/deployments/a/chat/completions", "chat/completions"),
        ("/v1/v1/messages", "messages"),
        ("/v1/messages/count_tokens", "messages/count_tokens"),
        ("/v1/completions", "completions"),
        ("/v1beta/models/a%2Fb:generateContent", "models/a%2Fb:generateContent"),
        (
            "/v1/projects/p/locations/l/publishers/google/models/g:countTokens",
            "models/g:countTokens",
        ),
        ("/v1/embeddings", "embeddings"),
        ("/v1/models/a", "models/a"),
    ):
        assert endpoint(path).route == route
    streamed = endpoint("/v1beta/models/a%2Fb:streamGenerateContent", "alt=sse&key=k")
    assert streamed.route == "models/a%2Fb:streamGenerateContent?alt=sse"
    assert streamed.dialect == Gemini("a/b", "streamGenerateContent", True)


def test_forced_tools_typed_outputs_and_prefills_are_spelt_as_in_chat_completions() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    said: list[Any] = [{"role": "user", "content": "q"}]
    base = {"model": "m", "max_tokens": 9, "messages": said}

    def message(**more: Any) -> dict[str, Any]:
        return MESSAGES.neutral({**base, **more}, {})

    def gemini(**more: Any) -> dict[str, Any]:
        return Gemini("m", "generateContent").neutral(
            {"contents": [{"parts": [{"text": "q"}]}], **more}, {}
        )

    def calling(**config: Any) -> Any:
        return gemini(toolConfig={"functionCallingConfig": config})["tool_choice"]

    named = {"type": "function", "function": {"name": "f"}}
    assert message(tool_choice={"type": "any"})["tool_choice"] == calling(mode="ANY") == "required"
    assert message(tool_choice={"type": "none"})["tool_choice"] == calling(mode="NONE") == "none"
    one = message(tool_choice={"type": "tool", "name": "f", "disable_parallel_tool_use": True})
    assert one["tool_choice"] == calling(mode="any", allowed_function_names=["f"]) == named
    assert one["parallel_tool_calls"] is False
    two = calling(mode="ANY", allowedFunctionNames=["f", "g"])
    assert two["allowed_tools"]["mode"] == "required" and len(two["allowed_tools"]["tools"]) == 2
    typed = message(
        output_config={"format": {"type": "json_schema", "schema": schema}, "effort": "low"}
    )
    config = {"responseMimeType": "application/json", "response_schema": upper(schema)}
    assert typed["response_format"] == gemini(generationConfig=config)["response_format"]
    assert (
        typed["response_format"]["json_schema"]["schema"] == schema
        and typed["reasoning_effort"] == "low"
    )
    assert gemini(generationConfig={"responseMimeType": "application/json"})["response_format"] == {
        "type": "json_object"
    }
    off = {"enable_thinking": False}
    assert message(thinking={"type": "disabled"})["chat_template_kwargs"] == off
    assert (
        gemini(generationConfig={"thinkingConfig": {"thinkingBudget": 0}})["chat_template_kwargs"]
        == off
    )
    assert (
        message(messages=[*said, {"role": "assistant", "content": "I"}])["continue_final_message"]
        is True
    )
    begun = [{"parts": [{"text": "q"}]}, {"role": "model", "parts": [{"text": "I"}]}]
    assert gemini(contents=begun)["continue_final_message"] is True
