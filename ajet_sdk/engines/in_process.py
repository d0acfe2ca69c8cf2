"""`InProcess`: an engine of this process where a connection to an OpenAI-compatible endpoint is expected."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ajet_sdk.dialects.table import CHAT
from ajet_sdk.protocols import Engine

__all__ = ["InProcess"]


class InProcess:
    """Posts requests of `chat/completions` to an engine.

    `limited`: `max_tokens` holds for the engine, and its count of tokens is one to charge.
    """

    def __init__(self, engine: Engine, *, limited: bool) -> None:
        self._engine, self._limited = engine, limited
        self._requests = 0

    async def post(self, route: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The reply as JSON of OpenAI's API. Raises what the engine raises."""
        self._requests += 1
        episode = f"request-{self._requests}"
        asked = body if self._limited else {name: value for name, value in body.items() if name != "max_tokens"}
        try:
            answer = await self._engine.answer(CHAT.ask(asked, episode, "default"))
        finally:
            self._engine.forget(episode)
        choices = [{"message": choice.message, "finish_reason": choice.finish_reason} for choice in answer.choices]
        return {"choices": choices, **({"usage": dict(answer.usage)} if self._limited else {})}

    async def aclose(self) -> None:
        """Close the engine."""
        await self._engine.aclose()
