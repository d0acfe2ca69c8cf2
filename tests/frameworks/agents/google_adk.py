"""Google ADK, with its own Gemini model and with LiteLLM."""

from __future__ import annotations

from typing import Any

from google.adk.agents import LlmAgent
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.genai import types

import ajet


def get_weather(city: str) -> dict[str, str]:
    """The weather in a city."""
    return {"report": f"sunny in {city}"}


async def answer(question: str, model: Any, tools: Any = ()) -> str:
    agent = LlmAgent(name="assistant", model=model, instruction="Be helpful.", tools=list(tools))
    runner = InMemoryRunner(agent=agent, app_name="weather")
    session = await runner.session_service.create_session(app_name="weather", user_id="user")
    content = types.Content(role="user", parts=[types.Part(text=question)])
    final = ""
    async for event in runner.run_async(user_id="user", session_id=session.id, new_message=content):
        if event.is_final_response() and event.content and event.content.parts:
            final = "".join(part.text or "" for part in event.content.parts)
    return final


@ajet.workflow
async def chat_plain(question: str) -> str:
    return await answer(question, LiteLlm(model="openai/gpt-4o"))


@ajet.workflow
async def chat_tools(question: str) -> str:
    return await answer(question, LiteLlm(model="openai/gpt-4o"), [get_weather])


chat_parallel = chat_tools


@ajet.workflow
async def gemini_plain(question: str) -> str:
    return await answer(question, "gemini-2.5-flash")


@ajet.workflow
async def gemini_tools(question: str) -> str:
    return await answer(question, "gemini-2.5-flash", [get_weather])
