"""One engine in front of several, each for the calls of a target."""

from __future__ import annotations

from collections.abc import Mapping

from ajet_sdk.errors import RequestRefused
from ajet_sdk.protocols import Answer, Ask, Engine


class EngineByTarget:
    """Answers a request with the model of its target."""

    def __init__(self, model: str, engines: Mapping[str, Engine]) -> None:
        self.model = model
        self._engines = engines
        self._targets: dict[str, dict[str, str]] = {}
        """The target of each agent, by episode."""

    @property
    def tokenizer(self) -> object:
        """The tokenizer, which all models share; None if it isn't known."""
        return getattr(next(iter(self._engines.values())), "tokenizer", None)

    @property
    def takes_pictures(self) -> bool | None:
        return next(iter(self._engines.values())).takes_pictures

    async def answer(self, ask: Ask) -> Answer:
        return await self._engine_for(ask).answer(ask)

    async def count(self, ask: Ask) -> int:
        return await self._engine_for(ask).count(ask)

    def _engine_for(self, ask: Ask) -> Engine:
        """The engine of a request's target. Raises RequestRefused."""
        engine = self._engines.get(ask.target)
        if engine is None:
            raise RequestRefused(
                f"there is no model for {ask.target!r}: rollout.trained_models is separate, with"
                f" models for {', '.join(self._engines)}; call it with one of these as its target"
                " tag, or give it a debug model"
            )
        # Calls of one agent merge into one timeline, which trains one model.
        of_agents = self._targets.setdefault(ask.episode_id, {})
        known = of_agents.setdefault(ask.agent, ask.target)
        if known != ask.target:
            raise RequestRefused(
                f"agent {ask.agent!r} called as {known!r} and now as {ask.target!r}; with separate"
                " models (rollout.trained_models) give the agents of two targets different names"
            )
        return engine

    def forget(self, episode_id: str) -> None:
        self._targets.pop(episode_id, None)
        for engine in self._engines.values():
            engine.forget(episode_id)

    async def aclose(self) -> None:
        for engine in self._engines.values():
            await engine.aclose()
