"""The OpenAI SDK."""

from __future__ import annotations

import json
from typing import Any

from openai import OpenAI

import ajet
from tests.frameworks.agents.weather import Forecast

client = OpenAI()
TOOL = {
    "name": "get_weather",
    "description": "The weather in a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}


@ajet.workflow
def chat_plain(question: str) -> str | None:
    reply = client.chat.completions.create(
        model="gpt-4o", messages=[{"role": "user", "content": question}]
    )
    return reply.choices[0].message.content


@ajet.workflow
def chat_stream(question: str) -> str:
    chunks = client.chat.completions.create(
        model="gpt-4o", messages=[{"role": "user", "content": question}], stream=True
    )
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


@ajet.workflow
def chat_tools(question: str) -> str | None:
    messages: list[Any] = [{"role": "user", "content": question}]
    while True:
        reply = client.chat.completions.create(
            model="gpt-4o", messages=messages, tools=[{"type": "function", "function": TOOL}]
        )
        message = reply.choices[0].message
        if not message.tool_calls:
            return message.content
        messages.append(message)
        for call in message.tool_calls:
            city = json.loads(call.function.arguments)["city"]
            messages.append(
                {"role": "tool", "tool_call_id": call.id, "content": f"sunny in {city}"}
            )


chat_parallel = chat_tools


@ajet.workflow
def chat_typed(question: str) -> Any:
    reply = client.chat.completions.parse(
        model="gpt-4o", messages=[{"role": "user", "content": question}], response_format=Forecast
    )
    return reply.choices[0].message.parsed


@ajet.workflow
def responses_plain(question: str) -> str:
    return client.responses.create(model="gpt-4o", input=question).output_text


@ajet.workflow
def responses_stream(question: str) -> str:
    with client.responses.stream(model="gpt-4o", input=question) as stream:
        return stream.get_final_response().output_text


@ajet.workflow
def responses_tools(question: str) -> str:
    tools: Any = [{"type": "function", **TOOL}]
    reply = client.responses.create(model="gpt-4o", input=question, tools=tools)
    while calls := [item for item in reply.output if item.type == "function_call"]:
        results: Any = [
            {
                "type": "function_call_output",
                "call_id": call.call_id,
                "output": f"sunny: {call.arguments}",
            }
            for call in calls
        ]
        reply = client.responses.create(
            model="gpt-4o", input=results, previous_response_id=reply.id, tools=tools
        )
    return reply.output_text


responses_parallel = responses_tools


@ajet.workflow
def responses_typed(question: str) -> Any:
    return client.responses.parse(
        model="gpt-4o", input=question, text_format=Forecast
    ).output_parsed
