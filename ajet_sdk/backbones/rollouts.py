"""Batches of episodes under way: the attempts of a step or of a validation, run beside whatever else goes on."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ajet_sdk.backbones.seeds import seed_of
from ajet_sdk.episode import Attempt, run_batch
from ajet_sdk.gateway import Gateway, SamplingOverride
from ajet_sdk.loggers import Display
from ajet_sdk.protocols import Engine
from ajet_sdk.types import Episode, Task, new_id

if TYPE_CHECKING:
    from ajet_sdk.config import Config
    from ajet_sdk.protocols import Job
    from ajet_sdk.trace.writer import TraceWriter

__all__ = ["Rollout", "Rollouts", "attempts_at", "tasks_of_step", "training_sampling"]


def tasks_of_step(tasks: Sequence[Task], step: int, size: int, seed: int) -> list[Task]:
    """The tasks of a step (from 1): the next of an endless stream of epochs, each shuffled anew from the seed."""
    chosen, orders = [], dict[int, list[int]]()
    for position in range((step - 1) * size, step * size):
        epoch, at = divmod(position, len(tasks))
        if epoch not in orders:
            orders[epoch] = list(range(len(tasks)))
            random.Random(f"{seed}/{epoch}").shuffle(orders[epoch])
        chosen.append(tasks[orders[epoch][at]])
    return chosen


def attempts_at(
    tasks: Sequence[Task],
    repeats: int,
    run_id: str,
    step: int,
    split: Literal["train", "val"],
    seed: int,
    seeded_by: Any,
) -> list[Attempt]:
    """`repeats` attempts at each task, those at one task behind one another.

    `seeded_by` (the step, or what is validated) tells their seeds from those of others.
    """
    return [
        Attempt(
            task=task,
            run_id=run_id,
            group_id=group,
            attempt=attempt,
            step=step,
            split=split,
            seed=seed_of(seed, seeded_by, position, attempt),
        )
        for position, (task, group) in enumerate(zip(tasks, [new_id() for _ in tasks], strict=True))
        for attempt in range(repeats)
    ]


def training_sampling(config: Config) -> SamplingOverride | None:
    """How training samples; None leaves it to the agent's own parameters."""
    rollout = config.rollout
    if rollout.sampling == "request":
        return None
    return SamplingOverride(temperature=rollout.temperature, top_p=rollout.top_p, top_k=rollout.top_k)


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
        attempts = self._attempts(tasks, config.rollout.num_repeat, step, "train", step)
        return self._begin(attempts, training_sampling(config))

    def of_validation(
        self, tasks: Sequence[Task], repeats: int, sampling: SamplingOverride, what: str, step: int
    ) -> Rollout:
        """Begin `repeats` attempts at each task after a step; `what` tells their seeds from those of others."""
        return self._begin(self._attempts(tasks, repeats, step, "val", what), sampling)

    def _attempts(
        self, tasks: Sequence[Task], repeats: int, step: int, split: Literal["train", "val"], seeded_by: Any
    ) -> list[Attempt]:
        seed = self.job.config.trainer_common.seed
        return attempts_at(tasks, repeats, self.job.run_id, step, split, seed, seeded_by)

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
