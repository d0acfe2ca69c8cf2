"""Instructor."""

from __future__ import annotations

from typing import Any

import instructor
from openai import AsyncOpenAI, OpenAI

import ajet
from tests.frameworks.agents.weather import Forecast


def user(question: str) -> Any:
    return [{"role": "user", "content": question}]


@ajet.workflow
def chat_typed(question: str) -> Any:
    client = instructor.from_openai(OpenAI())
    return client.chat.completions.create(
        model="gpt-4o", messages=user(question), response_model=Forecast
    )


@ajet.workflow
async def chat_typed_json(question: str) -> Any:
    client = instructor.from_openai(AsyncOpenAI(), mode=instructor.Mode.JSON)
    return await client.chat.completions.create(
        model="gpt-4o", messages=user(question), response_model=Forecast
    )
