"""AutoGen."""

from __future__ import annotations

from typing import Any

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.base import TaskResult
from autogen_ext.models.openai import OpenAIChatCompletionClient

import ajet
from tests.frameworks.agents.weather import Forecast


async def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


def agent(**more: Any) -> AssistantAgent:
    return AssistantAgent(
        "assistant", model_client=OpenAIChatCompletionClient(model="gpt-4o"), **more
    )


@ajet.workflow
async def chat_plain(question: str) -> Any:
    return (await agent().run(task=question)).messages[-1].content


@ajet.workflow
async def chat_stream(question: str) -> Any:
    async for event in agent(model_client_stream=True).run_stream(task=question):
        if isinstance(event, TaskResult):
            return event.messages[-1].content
    return None


@ajet.workflow
async def chat_tools(question: str) -> Any:
    result = await agent(tools=[get_weather], reflect_on_tool_use=True).run(task=question)
    return result.messages[-1].content


chat_parallel = chat_tools


@ajet.workflow
async def chat_typed(question: str) -> Any:
    return (await agent(output_content_type=Forecast).run(task=question)).messages[-1].content
