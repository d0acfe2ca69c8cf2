"""google-genai; its functions are called by the SDK itself."""

from __future__ import annotations

from typing import Any

from google import genai
from google.genai import types

import ajet
from tests.frameworks.agents.weather import Forecast, get_weather

MODEL = "gemini-2.5-flash"


client = genai.Client()


@ajet.workflow
def gemini_plain(question: str) -> Any:
    return client.models.generate_content(model=MODEL, contents=question).text


@ajet.workflow
def gemini_stream(question: str) -> Any:
    return "".join(
        chunk.text or ""
        for chunk in client.models.generate_content_stream(model=MODEL, contents=question)
    )


@ajet.workflow
def gemini_tools(question: str) -> Any:
    config = types.GenerateContentConfig(tools=[get_weather])
    return client.models.generate_content(model=MODEL, contents=question, config=config).text


@ajet.workflow
async def gemini_parallel(question: str) -> Any:
    config = types.GenerateContentConfig(tools=[get_weather])
    return (
        await genai.Client().aio.models.generate_content(
            model=MODEL, contents=question, config=config
        )
    ).text


@ajet.workflow
def gemini_typed(question: str) -> Any:
    config = types.GenerateContentConfig(
        response_mime_type="application/json", response_schema=Forecast
    )
    return client.models.generate_content(model=MODEL, contents=question, config=config).parsed
