"""The OpenAI Agents SDK; its default is Responses."""

from __future__ import annotations

from typing import Any

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool
from openai import AsyncOpenAI

import ajet
from tests.frameworks.agents.weather import Forecast


@function_tool
def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


def agent(chat: bool, **more: Any) -> Agent[Any]:
    if chat:
        more["model"] = OpenAIChatCompletionsModel(model="gpt-4o", openai_client=AsyncOpenAI())
    return Agent(name="Assistant", instructions="You are a helpful assistant", **more)


async def streamed(one: Agent[Any], question: str) -> Any:
    result = Runner.run_streamed(one, question)
    async for _ in result.stream_events():
        pass
    return result.final_output


@ajet.workflow
def chat_plain(question: str) -> Any:
    return Runner.run_sync(agent(True), question).final_output


@ajet.workflow
async def chat_stream(question: str) -> Any:
    return await streamed(agent(True), question)


@ajet.workflow
async def chat_tools(question: str) -> Any:
    return (await Runner.run(agent(True, tools=[get_weather]), question)).final_output


chat_parallel = chat_tools


@ajet.workflow
async def chat_typed(question: str) -> Any:
    return (await Runner.run(agent(True, output_type=Forecast), question)).final_output


@ajet.workflow
def responses_plain(question: str) -> Any:
    return Runner.run_sync(agent(False), question).final_output


@ajet.workflow
async def responses_stream(question: str) -> Any:
    return await streamed(agent(False), question)


@ajet.workflow
async def responses_tools(question: str) -> Any:
    return (await Runner.run(agent(False, tools=[get_weather]), question)).final_output


responses_parallel = responses_tools


@ajet.workflow
async def responses_typed(question: str) -> Any:
    return (await Runner.run(agent(False, output_type=Forecast), question)).final_output
