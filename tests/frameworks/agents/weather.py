"""What the agents share: the tool that they call, and the typed output that they are asked for."""

from __future__ import annotations

from pydantic import BaseModel


class Forecast(BaseModel):
    """A forecast."""

    city: str
    degrees: int


def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"sunny in {city}"
