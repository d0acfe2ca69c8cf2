"""CrewAI."""

from __future__ import annotations

from typing import Any

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool

import ajet
from tests.frameworks.agents.weather import Forecast


@tool("get_weather")
def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


def kickoff(question: str, tools: Any = (), stream: bool = False, **task: Any) -> Any:
    agent = Agent(
        role="Forecaster",
        goal="Tell the weather",
        backstory="You know the weather.",
        llm=LLM(model="gpt-4o", stream=stream),
        tools=list(tools),
    )
    work = Task(description=question, expected_output="The weather", agent=agent, **task)
    return Crew(agents=[agent], tasks=[work]).kickoff()


@ajet.workflow
def chat_plain(question: str) -> str:
    return str(kickoff(question).raw)


@ajet.workflow
def chat_stream(question: str) -> str:
    return str(kickoff(question, stream=True).raw)


@ajet.workflow
def chat_tools(question: str) -> str:
    return str(kickoff(question, [get_weather]).raw)


chat_parallel = chat_tools


@ajet.workflow
def chat_typed(question: str) -> Any:
    return kickoff(question, output_pydantic=Forecast).pydantic
