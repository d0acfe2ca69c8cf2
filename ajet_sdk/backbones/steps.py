"""The work of a training step or of a validation: tasks, attempts at them, how they sample, what is learnt from."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ajet_sdk.backbones.seeds import seed_of
from ajet_sdk.episode import Attempt
from ajet_sdk.gateway import SamplingOverride
from ajet_sdk.protocols import Tokenizer
from ajet_sdk.samples import Batch, build
from ajet_sdk.template import ChatTemplate
from ajet_sdk.types import Episode, Task, new_id

if TYPE_CHECKING:
    from ajet_sdk.config import Config

__all__ = [
    "attempts_at",
    "attempts_of",
    "order_of_tasks",
    "samples_of",
    "tasks_of_step",
    "total_steps",
    "training_sampling",
]


def total_steps(config: Config, tasks: int) -> int:
    """Training steps of a run: `total_steps`, else as many batches as the epochs hold."""
    common = config.trainer_common
    return common.total_steps or max(1, common.total_epochs * tasks // config.data.train_batch_size)


def tasks_of_step(tasks: Sequence[Task], step: int, size: int, seed: int) -> list[Task]:
    """The tasks of a step (from 1)."""
    return [tasks[at] for at in order_of_tasks(len(tasks), range((step - 1) * size, step * size), seed)]


def order_of_tasks(count: int, places: Iterable[int], seed: int) -> list[int]:
    """Which of `count` tasks come at these places of an endless stream of epochs, each shuffled anew from the seed."""
    chosen, orders = [], dict[int, list[int]]()
    for place in places:
        epoch, at = divmod(place, count)
        if epoch not in orders:
            orders[epoch] = list(range(count))
            random.Random(f"{seed}/{epoch}").shuffle(orders[epoch])
        chosen.append(orders[epoch][at])
    return chosen


def attempts_at(
    task: Task, position: int, attempts: Iterable[int], *, run_id: str, step: int, what: str, seed: int
) -> list[Attempt]:
    """A group: the attempts of these numbers at the task at a position of a batch.

    `what` is "train", or what is validated: its seeds differ from those of others, and a step's from other steps'.
    """
    group, part = new_id(), step if what == "train" else what
    return [
        Attempt(
            task=task,
            run_id=run_id,
            group_id=group,
            attempt=attempt,
            step=step,
            split="train" if what == "train" else "val",
            seed=seed_of(seed, part, position, attempt),
        )
        for attempt in attempts
    ]


def attempts_of(tasks: Sequence[Task], repeats: int, *, run_id: str, step: int, what: str, seed: int) -> list[Attempt]:
    """`repeats` attempts at each task of a batch, those at one task behind one another."""
    return [
        attempt
        for position, task in enumerate(tasks)
        for attempt in attempts_at(task, position, range(repeats), run_id=run_id, step=step, what=what, seed=seed)
    ]


def samples_of(
    config: Config,
    episodes: Sequence[Episode],
    tokenizer: Tokenizer,
    *,
    max_tokens: int | None = None,
    policy_version: int | None = None,
) -> Batch:
    """The training samples of a batch, and what became of each call.

    Timelines are at most `max_tokens` long, by default the model's context. With a `policy_version`, the updates behind
    the trainer, what is older than `rollout.max_staleness` is left out.
    """
    algorithm, rollout = config.trainer_common.algorithm, config.rollout
    return build(
        episodes,
        estimator=algorithm.adv_estimator,
        normalize_std=algorithm.normalize_std,
        policy_version=policy_version,
        max_staleness=None if policy_version is None else rollout.max_staleness,
        max_tokens=max_tokens or rollout.max_model_len,
        failure_reward=rollout.failure_reward,
        decode=tokenizer.decode,
        template=ChatTemplate.known(tokenizer),
    )


def training_sampling(config: Config) -> SamplingOverride | None:
    """How training samples; None leaves it to the agent's own parameters."""
    rollout = config.rollout
    if rollout.sampling == "request":
        return None
    return SamplingOverride(temperature=rollout.temperature, top_p=rollout.top_p, top_k=rollout.top_k)
