"""The tasks, attempts, sampling and training samples of a training step or validation."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ajet_sdk.config.trainer_schema import Estimator
from ajet_sdk.errors import ConfigError
from ajet_sdk.gateway.episode import SamplingOverride
from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.protocols import Engine, Sampling, Tokenizer
from ajet_sdk.reporting.loggers import Display
from ajet_sdk.rollout.attempts import Attempt, seed_of
from ajet_sdk.rollout.episode import run_batch
from ajet_sdk.rollout.outcomes import untrained_entries
from ajet_sdk.samples.build import Batch, build, has_signal
from ajet_sdk.tokens.grammars import admits
from ajet_sdk.tokens.template import ChatTemplate
from ajet_sdk.trace.schema import SAMPLED
from ajet_sdk.types import Call, Episode, LedgerEntry, Task, new_id
from ajet_sdk.whole_file import write_whole

if TYPE_CHECKING:
    from ajet_sdk.config.config import Config
    from ajet_sdk.protocols import Job
    from ajet_sdk.trace.writer import TraceWriter


WITHOUT_END = 1_000_000
"""Steps of a run whose tasks are its clients', unless the config limits them."""


def check_job(job: Job) -> None:
    """Raise ConfigError for a job without tasks, or with a key that a swarm's server has no use
    for."""
    if job.swarm is None and not job.train:
        raise ConfigError("there is no training task; see task_reader")
    if job.swarm is not None and job.config.rollout.carry_over:
        raise ConfigError(
            "rollout.carry_over is for runs that sample their own tasks: a swarm's step takes the"
            " groups that end first anyway, and with max_staleness above 0 the others go on; remove"
            " the key"
        )


def total_steps(config: Config, tasks: int) -> int:
    """Training steps of a run: `total_steps`, else by the number of epochs; at most
    `total_training_steps`."""
    common = config.trainer_common
    if not tasks and not common.total_steps:
        return common.total_training_steps or WITHOUT_END
    steps = common.total_steps or max(
        1, common.total_epochs * tasks // config.data.train_batch_size
    )
    return min(steps, common.total_training_steps or steps)


_UNBOOKED = f"""
    SELECT e.step, c.episode_id, c.call_id, {SAMPLED} AS tokens,
        if(e.split = 'train', 'failed', 'evaluation') AS outcome
    FROM calls c JOIN episodes e USING (episode_id)
    WHERE e.run_id = ? AND c.trainable AND c.phase = 'rollout' AND {SAMPLED} > 0
        AND c.call_id NOT IN (SELECT call_id FROM ledger)"""
_NEWEST = "latest_checkpointed_iteration.txt"
"""File in which Trinity's trainer and verl record the step of the newest complete checkpoint."""


def saved_step(directory: Path) -> int:
    """The step of the newest checkpoint in a trainer's directory; 0 if there is none.

    The file is empty if the trainer was killed while writing it; the checkpoint itself is then
    complete.
    """
    newest = directory / _NEWEST
    if not newest.exists():
        return 0
    if text := newest.read_text().strip():
        return int(text)
    whole = (
        c
        for c in directory.glob("global_step_*")
        if (c / "actor").is_dir() or (c / ".full_checkpoint").exists()
    )
    return max(
        (int(checkpoint.name.removeprefix("global_step_")) for checkpoint in whole), default=0
    )


def resume_at(directory: Path) -> int:
    """Return `saved_step`, and set the trainer's files so that it begins there.

    The file of Trinity's trainer with the newest weights for the samplers is removed: the weights
    may be newer than the checkpoint, and the trainer would delete them when their steps are trained
    again.
    """
    step = saved_step(directory)
    if step:
        write_whole(directory / _NEWEST, str(step))
    else:
        (directory / _NEWEST).unlink(missing_ok=True)
    (directory / "latest_state_dict_iteration.txt").unlink(missing_ok=True)
    return step


def book_unfinished(writer: TraceWriter, run_id: str) -> None:
    """Add the tokens of an interrupted step or validation to the ledger."""
    writer.flush()
    for row in writer.query(_UNBOOKED, [run_id]).to_pylist():
        writer.put(LedgerEntry(run_id=run_id, **row))


def tasks_of_step(tasks: Sequence[Task], step: int, size: int, seed: int) -> list[Task]:
    """The tasks of a step (from 1)."""
    return [
        tasks[at] for at in order_of_tasks(len(tasks), range((step - 1) * size, step * size), seed)
    ]


def order_of_tasks(count: int, places: Iterable[int], seed: int) -> list[int]:
    """Task indices at positions of an endless sequence of epochs, each shuffled from the seed."""
    chosen = []
    orders = dict[int, list[int]]()
    for position in places:
        epoch, at = divmod(position, count)
        if epoch not in orders:
            orders[epoch] = list(range(count))
            random.Random(f"{seed}/{epoch}").shuffle(orders[epoch])
        chosen.append(orders[epoch][at])
    return chosen


def attempts_at(
    task: Task,
    position: int,
    attempts: Iterable[int],
    *,
    run_id: str,
    step: int,
    purpose: str,
    seed: int,
    latest_step: int | None = None,
) -> list[Attempt]:
    """The attempts of a group, at the task at `position` of a batch.

    `purpose` is "train" or the name of the validation; seeds differ by purpose and step. The
    episodes are recorded as those of `latest_step`, if an earlier one may take them; so a step
    behind the newest checkpoint is never one of an episode that was not trained.
    """
    group = new_id()
    part = step if purpose == "train" else purpose
    shared = seed_of(
        seed, part if purpose == "train" else "val", position
    )  # sampled and greedy: the same opponents
    return [
        Attempt(
            task=task,
            run_id=run_id,
            group_id=group,
            attempt=attempt,
            step=latest_step or step,
            split="train" if purpose == "train" else "val",
            seed=seed_of(seed, part, position, attempt),
            group_seed=shared,
            must_call=True,
        )
        for attempt in attempts
    ]


def attempts_of(
    tasks: Sequence[Task],
    repeats: int,
    *,
    run_id: str,
    step: int,
    purpose: str,
    seed: int,
    first: int = 0,
) -> list[Attempt]:
    """`repeats` attempts at each task of a batch, grouped by task.

    `first`: the position of the first task in its batch.
    """
    attempts: list[Attempt] = []
    for position, task in enumerate(tasks, first):
        attempts += attempts_at(
            task, position, range(repeats), run_id=run_id, step=step, purpose=purpose, seed=seed
        )
    return attempts


def samples_of(
    config: Config,
    episodes: Sequence[Episode],
    tokenizer: Tokenizer,
    *,
    max_tokens: int | None = None,
    policy_version: int | None = None,
    masks: bool = False,
    plain_only: bool = False,
    estimator: Estimator | None = None,
) -> Batch:
    """Build the training samples of a batch, and the outcome of each call.

    Timelines have at most `max_tokens` tokens, by default the model's context. With a
    `policy_version`, calls older than `rollout.max_staleness` are left out. With `masks` the
    trainer applies grammar masks; calls sampled under a grammar are left out without it, or if the
    grammar does not accept the reply. With `plain_only`, and for `opd` with a teacher at an
    endpoint, only calls sampled without limits, penalties and the like are used. `estimator`
    overrides the config's.
    """
    algorithm = config.trainer_common.algorithm
    rollout = config.rollout
    data = config.data
    chosen = estimator or algorithm.adv_estimator
    return build(
        episodes,
        estimator=chosen,
        # a limit spoils rewards; the scores of a teacher and given replies are right up to it
        overlong_filtering=rollout.overlong_filtering and chosen not in ("sft", "dpo", "opd"),
        normalize_std=algorithm.normalize_std,
        policy_version=policy_version,
        max_staleness=None if policy_version is None else rollout.max_staleness,
        max_tokens=max_tokens or rollout.max_model_len,
        max_samples=rollout.multi_turn.max_sample_per_task,
        max_lengths=(data.max_prompt_length, data.max_response_length),
        gamma=rollout.gamma,
        failure_reward=rollout.failure_reward,
        decode=tokenizer.decode,
        template=ChatTemplate.known(tokenizer),
        scorable=partial(_scorable, tokenizer, masks, plain_only or algorithm.remote_teacher),
    )


def _scorable(tokenizer: Tokenizer, masks: bool, plain_only: bool, call: Call) -> bool:
    """Whether the trainer can score a call's tokens under the distribution that they were sampled
    from."""
    if plain_only and not Sampling.of(call.sampling).plain:
        return False
    grammar = call.sampling.get("grammar")
    if not grammar:
        return True
    return (
        masks
        and call.output_ids is not None
        and admits(grammar, tokenizer, call.output_ids.tolist())
    )


def training_sampling(config: Config) -> SamplingOverride | None:
    """The sampling parameters of training; None keeps those of the agent."""
    rollout = config.rollout
    if rollout.sampling == "request":
        return None
    return SamplingOverride(
        temperature=rollout.temperature, top_p=rollout.top_p, top_k=rollout.top_k
    )


class StepBatch(Protocol):
    """The episodes of a step: sampled here, stored, or from clients."""

    @property
    def seconds(self) -> float:
        """Duration in seconds, so far or in total."""

    async def episodes(self, display: Display | None, title: str) -> list[Episode]:
        """Wait for the episodes; the display shows the number of finished ones."""

    async def stop(self) -> None:
        """Stop early."""

    def overlap(self, begin: float, end: float) -> float:
        """Seconds of running time between two `time.perf_counter` values."""


class StepSource(Protocol):
    """Where the episodes of a run come from."""

    def begin_step(self, step: int) -> StepBatch:
        """Begin the batch of a step (from 1)."""


@dataclass(frozen=True)
class Rollouts:
    """Starts the batches of a run."""

    job: Job
    gateway: Gateway
    writer: TraceWriter
    engine: Engine
    room: asyncio.Semaphore
    """Shared by the batches that are sampled at the same time."""

    def begin_groups(
        self, step: int, positions: Iterable[int], on_change: Callable[[], None]
    ) -> dict[int, Rollout]:
        """Start groups of a step: `num_repeat` attempts at each of the tasks at `positions`.

        `on_change` is called when an episode has finished, and at the end of a group.
        """
        config = self.job.config
        seed = config.trainer_common.seed
        if self.job.growth is not None:
            added = self.job.growth.tasks(step)
        else:
            added = ()
        tasks = tasks_of_step([*self.job.train, *added], step, config.data.train_batch_size, seed)
        begun = {}
        for position in positions:
            attempts = attempts_at(
                tasks[position],
                position,
                range(config.rollout.num_repeat),
                run_id=self.job.run_id,
                step=step,
                purpose="train",
                seed=seed,
                latest_step=step + config.rollout.carry_over,
            )
            begun[position] = Rollout(self, attempts, training_sampling(config), on_change)
        return begun

    def begin_more(self, step: int, episodes: Sequence[Episode]) -> Rollout | None:
        """Start attempts at other tasks to replace groups with equal rewards; None if there are
        none.

        `episodes` are those of the step so far, grouped by task. Tasks of the step are not
        repeated.
        """
        size = self.job.config.rollout.num_repeat
        groups = [episodes[i : i + size] for i in range(0, len(episodes), size)]
        missing = self.job.config.data.train_batch_size - sum(map(has_signal, groups))
        had = {episode.task.task_id for episode in episodes}
        seed = self.job.config.trainer_common.seed
        unused = [task for task in self.job.train if task.task_id not in had]
        chosen = random.Random(f"{seed}/more/{step}/{len(groups)}").sample(
            unused, min(missing, len(unused))
        )
        if not chosen:
            return None
        return self.begin(
            chosen, size, training_sampling(self.job.config), "train", step, first=len(groups)
        )

    def begin(
        self,
        tasks: Sequence[Task],
        repeats: int,
        how: SamplingOverride | None,
        purpose: str,
        step: int,
        first: int = 0,
    ) -> Rollout:
        """Start `repeats` attempts at each task in or after a step, with sampling `how`; see
        `attempts_of`."""
        run_id = self.job.run_id
        seed = self.job.config.trainer_common.seed
        attempts = attempts_of(
            tasks, repeats, run_id=run_id, step=step, purpose=purpose, seed=seed, first=first
        )
        return Rollout(self, attempts, how)

    async def make_trials(self, step: int, attempts: Sequence[Attempt]) -> list[Episode]:
        """Attempt candidate tasks after a step, without training. The episodes are on disk when it
        returns."""
        trials = [
            replace(
                attempt,
                run_id=self.job.run_id,
                step=step,
                split="trial",
                group_id=f"{step}/{attempt.group_id}",
            )
            for attempt in attempts
        ]
        episodes = await Rollout(self, trials, training_sampling(self.job.config)).episodes(
            None, "trials"
        )
        self.writer.put(*(entry for episode in episodes for entry in untrained_entries(episode)))
        await asyncio.to_thread(
            self.writer.flush
        )  # so that a resumed run repeats no finished trial
        return episodes


class Rollout:
    """A running batch; `episodes` waits for its end."""

    def __init__(
        self,
        of: Rollouts,
        attempts: Sequence[Attempt],
        sampling: SamplingOverride | None,
        on_change: Callable[[], None] | None = None,
    ) -> None:
        """`on_change` is called when an episode has finished, and at the end."""
        self.size = len(attempts)
        self.finished = 0
        self._on_change = on_change
        self.started = time.perf_counter()
        self.ended: float | None = None
        self._display: Display | None = None
        self._task = asyncio.create_task(self._run(of, attempts, sampling))
        if on_change is not None:
            self._task.add_done_callback(lambda _: on_change())

    async def _run(
        self, of: Rollouts, attempts: Sequence[Attempt], sampling: SamplingOverride | None
    ) -> list[Episode]:
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
                room=of.room,
            )
        finally:
            self.ended = time.perf_counter()

    def _count(self, _: Episode) -> None:
        self.finished += 1
        if self._display is not None:
            self._display.advance()
        if self._on_change is not None:
            self._on_change()

    @property
    def is_done(self) -> bool:
        return self._task.done()

    @property
    def failure(self) -> BaseException | None:
        """What ended the batch early, if anything did."""
        if not self._task.done():
            return None
        if self._task.cancelled():
            return asyncio.CancelledError()
        return self._task.exception()

    async def episodes(self, display: Display | None, title: str) -> list[Episode]:
        """Wait for all episodes, in the order of the attempts; the display shows the number of
        finished ones."""
        if display is not None:
            display.begin(title, self.size)
            display.advance(self.finished)
        self._display = display
        return await self._task  # cancelling the wait cancels the episodes

    async def stop(self) -> None:
        """Cancel the running episodes, which get status `aborted`, and wait for their end."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)  # the run ends for another reason

    @property
    def seconds(self) -> float:
        """Duration in seconds, so far or in total."""
        return (self.ended or time.perf_counter()) - self.started

    def overlap(self, begin: float, end: float) -> float:
        """Seconds of running time between two `time.perf_counter` values."""
        return max(0.0, min(end, self.ended or end) - max(begin, self.started))
