"""The OpenAI Agents SDK, by Responses, its default."""

from __future__ import annotations

from agents import Agent, Runner, function_tool, set_tracing_disabled

import ajet
from tests.frameworks.calculators import calc

set_tracing_disabled(True)
agent = Agent(
    name="Calculator",
    instructions="Answer with a number.",
    tools=[function_tool(calc)],
    model="gpt-4o",
)


@ajet.workflow
async def solve(question: str) -> str:
    return str((await Runner.run(agent, question, max_turns=3)).final_output)
