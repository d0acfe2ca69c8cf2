"""What a worker runs for a training at a swarm's server, and what it has done."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ajet_sdk.errors import ConfigError
from ajet_sdk.judges.call import is_group_judge
from ajet_sdk.rollout.attempts import named_targets
from ajet_sdk.rollout.outcomes import failures_by_cause
from ajet_sdk.swarm.messages import EpisodeSplit, Receipt
from ajet_sdk.types import Episode, Task

if TYPE_CHECKING:
    from ajet_sdk.config.config import Config


@dataclass(frozen=True)
class Work:
    """What a worker runs."""

    config: Config
    workflow: object
    judge: object
    tasks: Sequence[Task] | None = None
    """None: those of the server."""
    split: EpisodeSplit = "train"
    attempts: int | None = None
    """Attempts at each of `tasks`; None: the server's number for a group, for a validation 1."""
    concurrency: int = 1
    val_tasks: Sequence[Task] = ()
    """Tasks of validations during the training, by `trainer_common.test_freq`."""

    def __post_init__(self) -> None:
        if self.config.rollout.trained_seats is not None:
            raise ConfigError(
                "rollout.trained_seats is not supported by workers of a swarm: the server and the"
                " workers would draw different seats; name rollout.trainable_targets"
            )
        if is_group_judge(self.judge) and self.tasks is None:
            raise ConfigError(
                "a group judge compares all attempts at a task, and the server gives those at its"
                " tasks to any worker: give the tasks here (--tasks), or use a judge of single"
                " attempts"
            )

    @property
    def targets(self) -> list[str] | None:
        """The targets to train that the config or the workflow names."""
        return named_targets(self.config.rollout, self.workflow)


@dataclass(frozen=True)
class Finished:
    """An episode that was run here, and its receipt; None if the server knows no result of it."""

    episode: Episode
    receipt: Receipt | None


@dataclass
class WorkSummary:
    """What a worker has done."""

    finished: list[Finished] = field(default_factory=list)

    @property
    def episodes(self) -> list[Episode]:
        return [each.episode for each in self.finished]

    @property
    def reward(self) -> float | None:
        """Mean reward of the training episodes with one; of a validation alone, of its
        episodes."""
        trained = [episode for episode in self.episodes if episode.split == "train"]
        return mean_reward(trained or self.episodes)

    @property
    def tokens(self) -> dict[str, int]:
        """Sampled tokens by outcome, from the receipts."""
        total = Counter[str]()
        for each in self.finished:
            if each.receipt is not None:
                total.update(each.receipt.tokens)
        return dict(total)

    @property
    def statuses(self) -> dict[str, int]:
        """Number of episodes by status."""
        return dict(Counter(episode.status for episode in self.episodes))

    @property
    def failures(self) -> list[str]:
        """A line for each cause of failure."""
        return failures_by_cause(self.episodes)


def mean_reward(episodes: Sequence[Episode]) -> float | None:
    """The mean over the episodes with a reward; None without any."""
    rewards = [episode.reward for episode in episodes if episode.reward is not None]
    return sum(rewards) / len(rewards) if rewards else None
