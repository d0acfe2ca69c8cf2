"""pydantic-ai."""

from __future__ import annotations

from typing import Any

from pydantic_ai import Agent
from pydantic_ai.models.google import GoogleModel
from pydantic_ai.models.openai import OpenAIChatModel

import ajet
from tests.frameworks.agents.weather import Forecast, get_weather


def agent(model: Any, **more: Any) -> Agent[Any, Any]:
    return Agent(model, instructions="Be concise.", **more)


CHAT, RESPONSES, MESSAGES, GEMINI = (
    OpenAIChatModel("gpt-4o"),
    "openai-responses:gpt-4o",
    "anthropic:claude-sonnet-4-0",
    GoogleModel("gemini-2.5-flash"),
)


async def streamed(one: Agent[Any, Any], question: str) -> Any:
    async with one.run_stream(question) as result:
        return await result.get_output()


@ajet.workflow
def chat_plain(question: str) -> Any:
    return agent(CHAT).run_sync(question).output


@ajet.workflow
async def chat_stream(question: str) -> Any:
    return await streamed(agent(CHAT), question)


@ajet.workflow
async def chat_tools(question: str) -> Any:
    return (await agent(CHAT, tools=[get_weather]).run(question)).output


chat_parallel = chat_tools


@ajet.workflow
async def chat_typed(question: str) -> Any:
    return (await agent(CHAT, output_type=Forecast).run(question)).output


@ajet.workflow
async def responses_plain(question: str) -> Any:
    return (await agent(RESPONSES).run(question)).output


@ajet.workflow
async def responses_tools(question: str) -> Any:
    return (await agent(RESPONSES, tools=[get_weather]).run(question)).output


@ajet.workflow
async def responses_typed(question: str) -> Any:
    return (await agent(RESPONSES, output_type=Forecast).run(question)).output


@ajet.workflow
async def messages_plain(question: str) -> Any:
    return (await agent(MESSAGES).run(question)).output


@ajet.workflow
async def messages_stream(question: str) -> Any:
    return await streamed(agent(MESSAGES), question)


@ajet.workflow
async def messages_tools(question: str) -> Any:
    return (await agent(MESSAGES, tools=[get_weather]).run(question)).output


@ajet.workflow
async def messages_typed(question: str) -> Any:
    return (await agent(MESSAGES, output_type=Forecast).run(question)).output


@ajet.workflow
async def gemini_plain(question: str) -> Any:
    return (await agent(GEMINI).run(question)).output


@ajet.workflow
async def gemini_tools(question: str) -> Any:
    return (await agent(GEMINI, tools=[get_weather]).run(question)).output
