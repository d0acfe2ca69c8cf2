"""A real swarm server whose model is scripted and whose steps a test begins and ends."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

from ajet_sdk.config.config import Config
from ajet_sdk.engines.scripted import Replies, ScriptedEngine
from ajet_sdk.gateway.episode import SamplingOverride
from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.swarm.attempts import RunSettings
from ajet_sdk.swarm.collection import Collection
from ajet_sdk.swarm.host import SwarmHost
from ajet_sdk.swarm.routes import Keys, Owner, SwarmRoutes
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Episode, Run, Task

T = TypeVar("T")
RUN = "run"


class RecordedOwner(Owner):
    """Records what the owner's routes are asked."""

    def __init__(self, server: ScriptedSwarm) -> None:
        self.server = server
        self.configs: list[str] = []

    async def configure(self, text: str) -> None:
        self.configs.append(text)

    async def start(self) -> None:
        await self.server.begin()

    async def stop(self) -> None:
        self.server.host.board.enter("offline")


class ScriptedSwarm:
    """A server in this process, from `with ScriptedSwarm(directory) as server:`."""

    def __init__(
        self,
        directory: Path,
        replies: Replies = lambda ask: "ok",
        *,
        keys: Keys | None = None,
        port: int = 0,
        online: bool = True,
        val: Sequence[Task] = (),
        planned: Sequence[Task] = (),
        groups: int = 2,
        attempts: int = 2,
        swarm: dict[str, object] | None = None,
        **rollout: Any,
    ) -> None:
        self.config = Config(
            experiment_name="swarm",
            data={"train_batch_size": groups},
            rollout={"num_repeat": attempts, **rollout},
            swarm={"grace": 5.0, **(swarm or {})},
        )
        self.directory, self.replies, self.val = directory, replies, val
        self.planned = list(planned)
        self.owner = RecordedOwner(self)
        self.routes = SwarmRoutes(keys or Keys(), self.owner)
        self.gateway = Gateway(port=port, routes=self.routes.routes())
        self.host = self.routes.host = SwarmHost(self.gateway)
        self._online = online
        self._stack = ExitStack()

    @property
    def url(self) -> str:
        return self.gateway.url

    @property
    def collection(self) -> Collection:
        assert self.host.collection is not None
        return self.host.collection

    def __enter__(self) -> ScriptedSwarm:
        self.gateway.start()
        self._stack.callback(self.gateway.close)
        self.directory.mkdir(parents=True, exist_ok=True)
        self.writer = self._stack.enter_context(TraceWriter(self.directory / "trace.duckdb"))
        self.writer.put(Run(run_id=RUN))
        self._stack.enter_context(self.gateway.recording(self.writer))
        if self._online:
            self.run(self.begin())
        return self

    def __exit__(self, *_: object) -> None:
        if self.host.collection is not None:
            self.run(self.collection.close("the test is over"))
        self._stack.close()

    def run(self, work: Coroutine[object, object, T]) -> T:
        return self.host.submit(work).result(timeout=60)

    async def begin(self) -> None:
        """Collect the first step."""
        settings = RunSettings(
            config=self.config,
            run_id=RUN,
            engine=ScriptedEngine(self.replies),
            writer=self.writer,
            gateway=self.gateway,
            policy_version=lambda: self.collection.done,
            training=SamplingOverride(temperature=1.0),
            validation={
                "sampled": SamplingOverride(temperature=1.0),
                "greedy": SamplingOverride(greedy=True),
            },
            train_tasks=(),
            val_tasks=self.val,
            secret=b"secret",
            total=100,
        )
        self.host.collection = Collection(self.host.board, self.host.clients, settings)
        self.gateway.recognize(self.collection.attempts.episode_of)
        await self.collection.collect(1, self.planned)

    def end_step(self) -> list[Episode]:
        """Wait for the step's episodes, as the training loop does."""
        return self.run(self.collection.gathered(lambda: None))

    def next_step(self) -> None:
        """Report the step as trained, and collect the next one."""
        step = self.collection.step
        self.run(self.collection.trained(step))
        self.run(self.collection.collect(step + 1, self.planned))

    def finish(self) -> None:
        """Refuse further claims: the training is finished."""

        async def finish() -> None:
            self.host.board.enter("finished")
            await self.collection.close("the training is finished")

        self.run(finish())

    def recorded(self) -> list[Episode]:
        """The ended episodes of the step, in the pool."""

        async def ended() -> list[Episode]:
            return [e for group in self.collection.pool.groups for e in group.ended]

        return self.run(ended())


async def until(holds: Any) -> None:
    while not holds():
        await asyncio.sleep(0.01)
