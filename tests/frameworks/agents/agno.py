"""Agno."""

from __future__ import annotations

from typing import Any

from agno.agent import Agent
from agno.models.openai import OpenAIChat, OpenAIResponses

import ajet
from tests.frameworks.agents.weather import get_weather


@ajet.workflow
def chat_plain(question: str) -> Any:
    return Agent(model=OpenAIChat(id="gpt-4o")).run(question).content


@ajet.workflow
def chat_stream(question: str) -> str:
    events = Agent(model=OpenAIChat(id="gpt-4o")).run(question, stream=True)
    return "".join(
        str(event.content) for event in events if isinstance(getattr(event, "content", None), str)
    )


@ajet.workflow
def chat_tools(question: str) -> Any:
    return Agent(model=OpenAIChat(id="gpt-4o"), tools=[get_weather]).run(question).content


@ajet.workflow
async def chat_parallel(question: str) -> Any:
    return (await Agent(model=OpenAIChat(id="gpt-4o"), tools=[get_weather]).arun(question)).content


@ajet.workflow
def responses_tools(question: str) -> Any:
    return Agent(model=OpenAIResponses(id="gpt-4o"), tools=[get_weather]).run(question).content
