"""LangGraph's prebuilt agent, by LangChain."""

from __future__ import annotations

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI

import ajet
from tests.frameworks.calculators import calc

agent = create_agent(
    ChatOpenAI(model="gpt-4o"), tools=[calc], system_prompt="Answer with a number."
)


@ajet.workflow
async def solve(question: str) -> str:
    result = await agent.ainvoke(
        {"messages": [{"role": "user", "content": question}]}, {"recursion_limit": 8}
    )
    return str(result["messages"][-1].content)
