"""LlamaIndex."""

from __future__ import annotations

from typing import Any

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai import OpenAI

import ajet
from tests.frameworks.agents.weather import Forecast, get_weather


def llm() -> OpenAI:
    return OpenAI(model="gpt-4o")


@ajet.workflow
def chat_plain(question: str) -> str:
    return str(llm().chat([ChatMessage(role="user", content=question)]).message.content)


@ajet.workflow
def chat_stream(question: str) -> str:
    return "".join(
        part.delta or "" for part in llm().stream_chat([ChatMessage(role="user", content=question)])
    )


@ajet.workflow
async def chat_tools(question: str) -> str:
    return str(
        await FunctionAgent(tools=[get_weather], llm=llm(), system_prompt="Be helpful.").run(
            question
        )
    )


chat_parallel = chat_tools


@ajet.workflow
def chat_typed(question: str) -> Any:
    return llm().as_structured_llm(Forecast).complete(question).raw
