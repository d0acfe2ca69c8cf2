"""LangChain and LangGraph."""

from __future__ import annotations

from typing import Any

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI

import ajet
from tests.frameworks.agents.weather import Forecast, get_weather

llm = ChatOpenAI(model="gpt-4o")
agent = create_agent(llm, tools=[get_weather], system_prompt="You are a helpful assistant")
responses_agent = create_agent(
    ChatOpenAI(model="gpt-4o", use_responses_api=True), tools=[get_weather]
)


def asked(question: str) -> Any:
    return {"messages": [{"role": "user", "content": question}]}


@ajet.workflow
def chat_plain(question: str) -> Any:
    return llm.invoke(question).content


@ajet.workflow
def chat_stream(question: str) -> str:
    return "".join(str(chunk.content) for chunk in llm.stream(question))


@ajet.workflow
def chat_tools(question: str) -> Any:
    return agent.invoke(asked(question))["messages"][-1].content


@ajet.workflow
async def chat_parallel(question: str) -> Any:
    return (await agent.ainvoke(asked(question)))["messages"][-1].content


@ajet.workflow
def chat_typed(question: str) -> Any:
    return llm.with_structured_output(Forecast).invoke(question)


@ajet.workflow
def chat_typed_by_tool(question: str) -> Any:
    return llm.with_structured_output(Forecast, method="function_calling").invoke(question)


@ajet.workflow
def responses_tools(question: str) -> Any:
    return str(responses_agent.invoke(asked(question))["messages"][-1].content)
