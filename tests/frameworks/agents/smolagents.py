"""smolagents: the agent that writes code, and the one that calls tools."""

from __future__ import annotations

import json
import re
from typing import Any

from smolagents import CodeAgent, OpenAIServerModel, ToolCallingAgent, tool

import ajet
from ajet_sdk.protocols import Ask


@tool
def get_weather(city: str) -> str:
    """The weather in a city.

    Args:
        city: its name.
    """
    return f"sunny in {city}"


def reply(case: str, ask: Ask) -> Any:
    """Both agents end with `final_answer`; one of them writes code."""
    text = json.dumps(ask.messages)
    marker = (re.findall(r"marker-\w+", text) or [""])[0]
    looked = "sunny in" in text
    if ask.tools is None:
        opening, closing = ("<code>", "</code>") if "<code>" in text else ("```py", "```<end_code>")
        code = f"final_answer({f'It is sunny. {marker}'!r})"
        if case == "tools" and not looked:
            code = "print(get_weather(city='Paris'))"
        return f"Thought: go on.\n{opening}\n{code}\n{closing}"
    names = [
        ("get_weather", {"city": city})
        for city in (("Paris", "Rome") if case == "parallel" else ("Paris",))
    ]
    if looked or case not in ("tools", "parallel"):
        names = [("final_answer", {"answer": f"It is sunny. {marker}"})]
    calls = [
        {
            "id": f"c{i}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments)},
        }
        for i, (name, arguments) in enumerate(names)
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def model() -> OpenAIServerModel:
    return OpenAIServerModel(model_id="gpt-4o", api_key="key")


@ajet.workflow
def chat_plain_code(question: str) -> Any:
    return CodeAgent(tools=[], model=model()).run(question)


@ajet.workflow
def chat_tools_code(question: str) -> Any:
    return CodeAgent(tools=[get_weather], model=model()).run(question)


@ajet.workflow
def chat_plain(question: str) -> Any:
    return ToolCallingAgent(tools=[], model=model()).run(question)


@ajet.workflow
def chat_tools(question: str) -> Any:
    return ToolCallingAgent(tools=[get_weather], model=model()).run(question)


chat_parallel = chat_tools


@ajet.workflow
def chat_stream(question: str) -> Any:
    return ToolCallingAgent(tools=[], model=model(), stream_outputs=True).run(question)
