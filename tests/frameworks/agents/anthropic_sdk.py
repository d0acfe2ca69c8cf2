"""The Anthropic SDK."""

from __future__ import annotations

from typing import Any

from anthropic import Anthropic

import ajet

client = Anthropic()
MODEL: Any = "claude-sonnet-4-0"
TOOL: Any = {
    "name": "get_weather",
    "description": "The weather in a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}
FORECAST: Any = {
    "name": "forecast",
    "description": "Record the forecast",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "degrees": {"type": "integer"}},
        "required": ["city", "degrees"],
    },
}


def user(question: str) -> Any:
    return [{"role": "user", "content": question}]


@ajet.workflow
def messages_tools(question: str) -> str:
    messages = user(question)
    while True:
        reply = client.messages.create(
            model=MODEL, max_tokens=1024, messages=messages, tools=[TOOL]
        )
        if reply.stop_reason != "tool_use":
            return "".join(block.text for block in reply.content if block.type == "text")
        messages.append({"role": "assistant", "content": reply.content})
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": f"sunny: {block.input}"}
            for block in reply.content
            if block.type == "tool_use"
        ]
        messages.append({"role": "user", "content": results})


@ajet.workflow
def messages_plain(question: str) -> Any:
    return (
        client.messages.create(model=MODEL, max_tokens=1024, messages=user(question))
        .content[0]
        .text
    )


@ajet.workflow
def messages_stream(question: str) -> str:
    with client.messages.stream(model=MODEL, max_tokens=1024, messages=user(question)) as stream:
        return "".join(stream.text_stream)


messages_parallel = messages_tools


@ajet.workflow
def messages_typed(question: str) -> Any:
    forced: Any = {"type": "tool", "name": "forecast"}
    reply = client.messages.create(
        model=MODEL, max_tokens=1024, messages=user(question), tools=[FORECAST], tool_choice=forced
    )
    return reply.content[0].input
