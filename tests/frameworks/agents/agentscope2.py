"""AgentScope 2.x: its agent, toolkit and structured output."""

from __future__ import annotations

from typing import Any

from agentscope.agent import Agent
from agentscope.credential import OpenAICredential
from agentscope.message import UserMsg
from agentscope.model import OpenAIChatModel
from agentscope.permission import PermissionBehavior, PermissionDecision
from agentscope.tool import FunctionTool, Toolkit

import ajet
from tests.frameworks.agents.weather import Forecast, get_weather


class Allowed(FunctionTool):
    async def check_permissions(self, *_: Any, **__: Any) -> PermissionDecision:
        return PermissionDecision(behavior=PermissionBehavior.ALLOW, message="harmless")


def agent(stream: bool = True) -> Agent:
    return Agent(
        name="Friday",
        system_prompt="You're a helpful assistant.",
        model=OpenAIChatModel(
            credential=OpenAICredential(api_key="key"), model="gpt-4o", stream=stream
        ),
        toolkit=Toolkit(tools=[Allowed(get_weather)]),
    )


async def reply_text(question: str, stream: bool = True) -> Any:
    return (await agent(stream).reply(UserMsg("user", question))).get_text_content()


@ajet.workflow
async def chat_plain(question: str) -> Any:
    return await reply_text(question, stream=False)


@ajet.workflow
async def chat_stream(question: str) -> Any:
    return await reply_text(question)


@ajet.workflow
async def chat_tools(question: str) -> Any:
    return await reply_text(question)


chat_parallel = chat_tools


@ajet.workflow
async def chat_typed(question: str) -> Any:
    return (
        await agent().reply(UserMsg("user", question), structured_schema=Forecast)
    ).structured_output
