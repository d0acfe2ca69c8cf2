"""Validation: several sampled attempts and a greedy one at each task, without training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ajet_sdk.backbones.shared.steps import Rollouts
from ajet_sdk.gateway.episode import SamplingOverride
from ajet_sdk.reporting.held_out import rewards_by_set, sets_of
from ajet_sdk.reporting.loggers import Loggers
from ajet_sdk.reporting.metrics import episode_metrics, group_metrics, mean_reward
from ajet_sdk.rollout.outcomes import failures_by_cause, untrained_entries
from ajet_sdk.tasks.jsonl import VALIDATION_SET
from ajet_sdk.trace.counted import counted_rewards
from ajet_sdk.types import Episode, Task

if TYPE_CHECKING:
    from ajet_sdk.config.config import Config
    from ajet_sdk.protocols import Job

GREEDY = SamplingOverride(temperature=0.0, greedy=True)
"""Sampling of val/greedy_reward."""


def validation_tasks(job: Job) -> Sequence[Task]:
    """The validation tasks of a job: all, or the first `val_tasks`."""
    limit = job.config.trainer_common.val_tasks
    return job.val if limit is None else job.val[:limit]


def validation_sampling(config: Config) -> SamplingOverride:
    """The sampling of the other validation attempts: temperature 1, or that of `val_kwargs`."""
    kwargs = config.rollout.val_kwargs
    heat = 1.0 if kwargs.greedy else kwargs.temperature
    return SamplingOverride(temperature=heat, top_p=kwargs.top_p, top_k=kwargs.top_k)


def validation_sets(job: Job) -> dict[str, set[str]]:
    """Ids of the validation tasks by named set: the keys of `val_by`, and separate files."""
    return sets_of(validation_tasks(job), [VALIDATION_SET, *job.config.trainer_common.val_by])


def validation_metrics(
    sampled: Sequence[Episode],
    greedy: Sequence[Episode],
    repeats: int,
    sets: Mapping[str, set[str]],
    failure_reward: float | None,
) -> dict[str, float]:
    """Metrics of a validation: `repeats` sampled attempts per task, and greedy ones, which replace
    them if it is 0."""
    chosen = sampled if repeats else greedy
    metrics = episode_metrics("val", chosen, failure_reward)
    if counted_rewards(greedy, failure_reward):
        metrics["val/greedy_reward"] = mean_reward(greedy, failure_reward)
    metrics |= rewards_by_set("val/reward", chosen, sets, failure_reward)
    metrics |= rewards_by_set("val/greedy_reward", greedy, sets, failure_reward)
    metrics |= group_metrics("val", sampled, repeats) if repeats > 1 else {}
    return metrics


def due(step: int, frequency: int) -> bool:
    """Whether `step` is a multiple of `frequency`; never for a frequency of 0 or less."""
    return frequency > 0 and step % frequency == 0


def validations_left(config: Config, done: int, total: int) -> int:
    """Validations that remain after `done` steps: at the start, every `test_freq` steps, and at the
    end."""
    common = config.trainer_common
    after = sum(step == total or due(step, common.test_freq) for step in range(done + 1, total + 1))
    return after + int(done == 0 and common.val_before_train)


@dataclass
class Validation:
    rollouts: Rollouts
    loggers: Loggers
    total: int
    """Steps of the run, for the display."""
    dropped: bool = field(default=False, init=False)
    """Whether the newest validation is worse than the first, on all tasks or on a set of them."""

    @property
    def tasks(self) -> Sequence[Task]:
        return validation_tasks(self.rollouts.job)

    @property
    def episodes(self) -> int:
        return len(self.tasks) * (self.rollouts.job.config.validation_attempts + 1)

    async def run(self, step: int) -> None:
        """Sample each task `val_pass_n` times at temperature 1 (or that of `val_kwargs`), and once
        greedily."""
        if not self.tasks:
            return
        config = self.rollouts.job.config
        repeats = config.validation_attempts
        episodes = list[Episode]()
        if repeats:
            episodes = await self._sample(step, repeats, validation_sampling(config), "val")
        greedy = await self._sample(step, 1, GREEDY, "val, greedy")
        sets = validation_sets(self.rollouts.job)
        measured = validation_metrics(
            episodes, greedy, repeats, sets, config.rollout.failure_reward
        )
        self.loggers.log(step, measured)
        self.rollouts.writer.flush()
        self.dropped = self.loggers.held_out(step, sets, greedy=not repeats)

    async def _sample(
        self, step: int, repeats: int, sampling: SamplingOverride, purpose: str
    ) -> list[Episode]:
        rollout = self.rollouts.begin(self.tasks, repeats, sampling, purpose, step)
        episodes = await rollout.episodes(
            self.loggers.display, f"step {step}/{self.total} {purpose}"
        )
        self.rollouts.writer.put(
            *(entry for episode in episodes for entry in untrained_entries(episode))
        )
        for line in failures_by_cause(episodes):
            self.loggers.say(f"{purpose}: {line}")
        return episodes
