"""An engine of this process in the place of a connection to an endpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ajet_sdk.protocols import Engine

__all__ = ["EngineWire"]


class EngineWire:
    """`limited`: `max_tokens` holds for the engine, and its count of tokens is one to charge."""

    def __init__(self, engine: Engine, *, limited: bool) -> None:
        self._engine, self._limited = engine, limited
        self._asked = 0

    async def post(self, route: str, body: Mapping[str, Any]) -> dict[str, Any]:
        from ajet_sdk.protocols import Ask, Sampling

        self._asked += 1
        episode = f"request-{self._asked}"
        sampling = Sampling(
            temperature=float(body.get("temperature", 1.0)),
            max_tokens=body.get("max_tokens") if self._limited else None,
            seed=body.get("seed"),
            n=int(body.get("n", 1)),
        )
        try:
            answer = await self._engine.answer(Ask("chat/completions", body, sampling, episode, "dataset"))
        finally:
            self._engine.forget(episode)
        choices = [{"message": choice.message, "finish_reason": choice.finish_reason} for choice in answer.choices]
        return {"choices": choices, **({"usage": dict(answer.usage)} if self._limited else {})}

    async def aclose(self) -> None:
        await self._engine.aclose()
