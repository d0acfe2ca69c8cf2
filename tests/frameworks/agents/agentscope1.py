"""AgentScope 1.x: its ReAct agent, toolkit, memory, pipelines and structured output."""

from __future__ import annotations

from typing import Any

from agentscope.agent import ReActAgent
from agentscope.formatter import OpenAIChatFormatter, OpenAIMultiAgentFormatter
from agentscope.memory import InMemoryMemory
from agentscope.message import Msg, TextBlock
from agentscope.model import OpenAIChatModel
from agentscope.pipeline import MsgHub, sequential_pipeline
from agentscope.tool import Toolkit, ToolResponse

import ajet
from tests.frameworks.agents.weather import Forecast


def get_weather(city: str) -> ToolResponse:
    """The weather in a city.

    Args:
        city: its name.
    """
    return ToolResponse(content=[TextBlock(type="text", text=f"sunny in {city}")])


def agent(
    name: str = "Friday", stream: bool = False, multi: bool = False, **more: Any
) -> ReActAgent:
    toolkit = Toolkit()
    toolkit.register_tool_function(get_weather)
    return ReActAgent(
        name=name,
        sys_prompt="You're a helpful assistant.",
        model=OpenAIChatModel(model_name="gpt-4o", api_key="key", stream=stream),
        formatter=OpenAIMultiAgentFormatter() if multi else OpenAIChatFormatter(),
        memory=InMemoryMemory(),
        toolkit=toolkit,
        **more,
    )


def asked(question: str) -> Msg:
    return Msg("user", question, "user")


@ajet.workflow
async def chat_plain(question: str) -> Any:
    return (await agent()(asked(question))).get_text_content()


@ajet.workflow
async def chat_plain_pipeline(question: str) -> Any:
    alice, bob = agent("Alice", multi=True), agent("Bob", multi=True)
    async with MsgHub([alice, bob], announcement=asked(question)):
        return (await sequential_pipeline([alice, bob], asked(question))).get_text_content()


@ajet.workflow
async def chat_stream(question: str) -> Any:
    return (await agent(stream=True)(asked(question))).get_text_content()


@ajet.workflow
async def chat_tools(question: str) -> Any:
    return (await agent()(asked(question))).get_text_content()


@ajet.workflow
async def chat_parallel(question: str) -> Any:
    return (await agent(parallel_tool_calls=True)(asked(question))).get_text_content()


@ajet.workflow
async def chat_typed(question: str) -> Any:
    return (await agent()(asked(question), structured_model=Forecast)).metadata
