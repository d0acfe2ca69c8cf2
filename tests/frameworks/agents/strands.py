"""Strands."""

from __future__ import annotations

from typing import Any

from strands import Agent, tool
from strands.models.anthropic import AnthropicModel
from strands.models.openai import OpenAIModel

import ajet
from tests.frameworks.agents.weather import Forecast


@tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


def agent(model: Any = None, **more: Any) -> Agent:
    openai = OpenAIModel(client_args={"api_key": "key"}, model_id="gpt-4o")
    return Agent(model=model or openai, callback_handler=None, **more)


@ajet.workflow
def chat_plain(question: str) -> str:
    return str(agent()(question))


@ajet.workflow
async def chat_stream(question: str) -> str:
    return "".join(
        [event["data"] async for event in agent().stream_async(question) if "data" in event]
    )


@ajet.workflow
def chat_tools(question: str) -> str:
    return str(agent(tools=[get_weather])(question))


chat_parallel = chat_tools


@ajet.workflow
def chat_typed(question: str) -> Any:
    return agent().structured_output(Forecast, question)


@ajet.workflow
def messages_tools(question: str) -> str:
    claude = AnthropicModel(
        client_args={"api_key": "key"}, model_id="claude-sonnet-4-0", max_tokens=1024
    )
    return str(agent(claude, tools=[get_weather])(question))
