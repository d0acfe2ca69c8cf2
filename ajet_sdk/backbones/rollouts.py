"""Batches of episodes under way: the attempts of a step or of a validation, run beside whatever else goes on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ajet_sdk.backbones.steps import attempts_of, tasks_of_step, training_sampling
from ajet_sdk.episode import Attempt, run_batch
from ajet_sdk.gateway import Gateway, SamplingOverride
from ajet_sdk.loggers import Display
from ajet_sdk.protocols import Engine
from ajet_sdk.types import Episode, Task

if TYPE_CHECKING:
    from ajet_sdk.protocols import Job
    from ajet_sdk.trace.writer import TraceWriter

__all__ = ["Rollout", "Rollouts"]


@dataclass(frozen=True)
class Rollouts:
    """Where the batches of one run come from."""

    job: Job
    gateway: Gateway
    writer: TraceWriter
    engine: Engine

    def of_step(self, step: int) -> Rollout:
        """Begin the training episodes of a step: `num_repeat` attempts at each of its tasks."""
        config, seed = self.job.config, self.job.config.trainer_common.seed
        tasks = tasks_of_step(self.job.train, step, config.data.train_batch_size, seed)
        attempts = self._attempts(tasks, config.rollout.num_repeat, step, "train")
        return self._begin(attempts, training_sampling(config))

    def of_validation(
        self, tasks: Sequence[Task], repeats: int, sampling: SamplingOverride, what: str, step: int
    ) -> Rollout:
        """Begin `repeats` attempts at each task after a step; `what` tells their seeds from those of others."""
        return self._begin(self._attempts(tasks, repeats, step, what), sampling)

    def _attempts(self, tasks: Sequence[Task], repeats: int, step: int, what: str) -> list[Attempt]:
        seed = self.job.config.trainer_common.seed
        return attempts_of(tasks, repeats, run_id=self.job.run_id, step=step, what=what, seed=seed)

    def _begin(self, attempts: Sequence[Attempt], sampling: SamplingOverride | None) -> Rollout:
        return Rollout(self, attempts, sampling)


class Rollout:
    """A batch under way, from its beginning on; `episodes` waits for its end."""

    def __init__(self, of: Rollouts, attempts: Sequence[Attempt], sampling: SamplingOverride | None) -> None:
        self.size, self.finished = len(attempts), 0
        self.started = time.perf_counter()
        self.ended: float | None = None
        self._display: Display | None = None
        self._task = asyncio.create_task(self._run(of, attempts, sampling))

    async def _run(self, of: Rollouts, attempts: Sequence[Attempt], sampling: SamplingOverride | None) -> list[Episode]:
        try:
            return await run_batch(
                of.job.workflow,
                of.job.judge,
                attempts,
                engine=of.engine,
                gateway=of.gateway,
                config=of.job.config,
                writer=of.writer,
                sampling=sampling,
                on_episode=self._count,
            )
        finally:
            self.ended = time.perf_counter()

    def _count(self, _: Episode) -> None:
        self.finished += 1
        if self._display is not None:
            self._display.advance()

    async def episodes(self, display: Display | None, what: str) -> list[Episode]:
        """Wait for all of them, while the display shows how many there are; in the order of the attempts."""
        if display is not None:
            display.begin(what, self.size)
            display.advance(self.finished)
        self._display = display
        return await self._task  # who cancels the wait cancels the episodes, and waits for their end

    async def stop(self) -> None:
        """Cancel what still runs and wait until it has ended: its episodes are `aborted`."""
        self._task.cancel()
        await asyncio.wait([self._task])

    @property
    def seconds(self) -> float:
        """How long it took, or has taken until now."""
        return (self.ended or time.perf_counter()) - self.started

    def beside(self, begin: float, end: float) -> float:
        """Seconds between two times (of `time.perf_counter`) in which it ran."""
        return max(0.0, min(end, self.ended or end) - max(begin, self.started))
