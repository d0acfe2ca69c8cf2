"""Trains with Trinity on the episodes of a swarm's clients.

The driver serves Trinity's current weights to the clients, collects each step's episodes, and hands
their experiences over to Trinity's runners. When the runners ask for a step is Trinity's pace, so
that `rollout.max_staleness` holds as in any run.
"""

from __future__ import annotations

import asyncio
import zlib
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trinity.common.models.allocator import Allocator

from ajet_sdk.backbones.shared.swarm import SwarmSteps
from ajet_sdk.backbones.trinity.workflow import (
    AnySampler,
    build_batch,
    experiences_of,
    sampler_over,
)
from ajet_sdk.engines.chat import TokenEngine
from ajet_sdk.engines.local.loading import local_engine
from ajet_sdk.pictures import PlacedPicture
from ajet_sdk.protocols import Sampled, Sampling
from ajet_sdk.reporting.loggers import Loggers
from ajet_sdk.tokens.huggingface import HFTokenizer
from ajet_sdk.types import LedgerEntry

if TYPE_CHECKING:
    from ray.actor import ActorHandle
    from trinity.common.config import Config as TrinityConfig
    from trinity.common.experience import Experience

    from ajet_sdk.backbones.shared.progress import Progress
    from ajet_sdk.protocols import Job
    from ajet_sdk.trace.writer import TraceWriter


class SamplerBySession:
    """A `Sampler` over several engines with the same weights; a session stays at its engine,
    which has its prefixes."""

    def __init__(self, samplers: Sequence[AnySampler]) -> None:
        self._samplers = samplers
        self.model = samplers[0].model
        self.max_model_len = samplers[0].max_model_len
        self.takes_pictures = samplers[0].takes_pictures

    def _of(self, session: str) -> AnySampler:
        return self._samplers[zlib.crc32(session.encode()) % len(self._samplers)]

    async def version(self) -> int:
        """Updates behind the weights that every engine has."""
        return min(await asyncio.gather(*(sampler.version() for sampler in self._samplers)))

    async def sample(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        session: str,
        pictures: Sequence[PlacedPicture] = (),
    ) -> list[Sampled]:
        """Raises as the engine's own sampler."""
        return await self._of(session).sample(prompt_ids, sampling, session, pictures)

    def forget(self, session: str) -> None:
        self._of(session).forget(session)

    async def aclose(self) -> None:
        await asyncio.gather(*(sampler.aclose() for sampler in self._samplers))


class ClientSteps:
    """The steps of a run whose episodes clients make."""

    def __init__(
        self, job: Job, writer: TraceWriter, loggers: Loggers, total: int, done: int, model: str
    ) -> None:
        assert job.swarm is not None
        self.job = job
        self.config = job.config
        self.writer = writer
        self.loggers = loggers
        self.total = total
        self.done = done
        self.steps = SwarmSteps(
            job, job.swarm, writer, lambda: self.done, loggers, total, steps_are_updates=True
        )
        self._tokenizer = HFTokenizer(model)
        self._ledger: dict[int, list[LedgerEntry]] = defaultdict(list)
        """The rows of the steps that clients were not told of yet."""
        self._trained: asyncio.Queue[int] = asyncio.Queue()
        """Trained steps that clients were not told of yet."""
        self._told = done
        self._is_open = False

    # News of the trainer

    def book(self, step: int, rows: Sequence[LedgerEntry]) -> None:
        """Note what the trainer took for a step."""
        self._ledger[step] += rows

    def trained(self, step: int) -> None:
        """Note that the trainer has finished a step."""
        if step > self.done:
            self.done = step
            self._trained.put_nowait(step)

    # While Trinity runs

    async def feed(
        self,
        config: TrinityConfig,
        handover: ActorHandle,
        progress: Progress,
        run: asyncio.Task[None],
    ) -> None:
        """Collect each step that the runners ask for, until the last one. The server's owner stops
        the task `run`."""
        first = self.done + 1
        await handover.wait_for_demand.remote(first)  # the engines serve the model
        sampler = await self._sampler(config)
        engine = TokenEngine(
            sampler,
            self._tokenizer,
            tool_call_parser=self.config.model.tool_call_parser,
            rescored=False,
        )
        await self.steps.open(self.done, engine, run)
        self._is_open = True
        try:
            for step in range(first, self.total + 1):
                await handover.wait_for_demand.remote(step)
                await self._tell_of_steps(await sampler.version())
                await handover.forget.remote(self._told)
                await handover.put.remote(step, await self._collect(step, progress))
        finally:
            await engine.aclose()

    async def _sampler(self, config: TrinityConfig) -> SamplerBySession:
        """The sampler over Trinity's engines."""
        rollout = config.explorer.rollout_model
        allocator = Allocator(config.explorer)
        models = [allocator.get_model(rollout, "rollout", n) for n in range(rollout.engine_num)]
        for model in models:
            await model.prepare()
        samplers = [sampler_over(model, self.config, self._tokenizer) for model in models]
        return SamplerBySession(samplers)

    async def _collect(self, step: int, progress: Progress) -> list[Experience]:
        """Wait for a step's episodes; returns their experiences, and books the other tokens."""
        title = f"step {step}/{self.total} train"
        episodes = await self.steps.begin_step(step).episodes(self.loggers.display, title)
        batch = await asyncio.to_thread(
            build_batch, self.config, episodes, self._tokenizer, self.writer
        )
        metrics = batch.metrics | self.steps.metrics_by_kind(episodes)
        progress.add_collected(step, episodes, metrics)
        self.book(step, [row for row in batch.ledger if row.outcome != "trained"])
        return experiences_of(batch, episodes, self._tokenizer)

    async def _tell_of_steps(self, version: int) -> None:
        """Tell clients of the steps whose weights sample now, so that a validation is of the policy
        that it is logged with. The trainer's messages come a little later than its weights."""
        while self._told < version:
            await self._tell(await self._trained.get())

    async def _tell(self, step: int) -> None:
        self._told = step
        await self.steps.trained(step, self._ledger.pop(step, []))

    # After Trinity

    async def finish(self, model: Path) -> None:
        """Let clients validate the trained model, which this process samples from, and end."""
        changed = self.config.model.model_copy(update={"path": str(model), "recipe": None})
        engine = local_engine(self.config.model_copy(update={"model": changed}))
        try:
            await self.steps.serve(engine)
            for step in range(self._told + 1, self.total + 1):
                await self._tell(step)
            await self.steps.close("the training is finished", is_last=True)
        finally:
            await engine.aclose()

    async def stop(self) -> None:
        """Stop collecting; what has ended counts when the run is resumed."""
        if self._is_open:
            await self.steps.close("the server was stopped", is_last=False)
