"""LiteLLM."""

from __future__ import annotations

import json
from typing import Any

import litellm

import ajet
from tests.frameworks.agents.weather import Forecast

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}


def user(question: str) -> list[Any]:
    return [{"role": "user", "content": question}]


async def loop(question: str, model: str = "gpt-4o") -> Any:
    messages = user(question)
    while True:
        message = (
            (await litellm.acompletion(model=model, messages=messages, tools=[TOOL]))
            .choices[0]
            .message
        )
        if not message.tool_calls:
            return message.content
        messages.append(message)
        for call in message.tool_calls:
            city = json.loads(call.function.arguments)["city"]
            messages.append(
                {"role": "tool", "tool_call_id": call.id, "content": f"sunny in {city}"}
            )


@ajet.workflow
def chat_plain(question: str) -> Any:
    return litellm.completion(model="gpt-4o", messages=user(question)).choices[0].message.content


@ajet.workflow
def chat_stream(question: str) -> Any:
    chunks = litellm.completion(model="gpt-4o", messages=user(question), stream=True)
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


@ajet.workflow
async def chat_tools(question: str) -> Any:
    return await loop(question)


chat_parallel = chat_tools


@ajet.workflow
def chat_typed(question: str) -> Any:
    return (
        litellm.completion(model="gpt-4o", messages=user(question), response_format=Forecast)
        .choices[0]
        .message.content
    )


@ajet.workflow
def responses_plain(question: str) -> Any:
    return str(litellm.responses(model="openai/gpt-4o", input=question).output)


@ajet.workflow
def messages_plain(question: str) -> Any:
    return (
        litellm.completion(model="anthropic/claude-sonnet-4-0", messages=user(question))
        .choices[0]
        .message.content
    )


@ajet.workflow
async def messages_tools(question: str) -> Any:
    return await loop(question, "anthropic/claude-sonnet-4-0")


@ajet.workflow
def gemini_plain(question: str) -> Any:
    return (
        litellm.completion(model="gemini/gemini-2.5-flash", messages=user(question))
        .choices[0]
        .message.content
    )
