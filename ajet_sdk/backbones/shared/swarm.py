"""A run whose episodes come from the clients of a swarm server, with the interface of
`steps.Rollouts`."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ajet_sdk.backbones.shared.steps import order_of_tasks, training_sampling
from ajet_sdk.backbones.shared.validation import (
    GREEDY,
    validation_metrics,
    validation_sampling,
    validation_sets,
)
from ajet_sdk.errors import ConfigError
from ajet_sdk.reporting.loggers import Display, Loggers
from ajet_sdk.rollout.outcomes import failures_by_cause
from ajet_sdk.swarm.attempts import RunSettings
from ajet_sdk.swarm.claimed import ClaimedEpisodes
from ajet_sdk.swarm.collection import Collection
from ajet_sdk.swarm.host import SwarmHost
from ajet_sdk.swarm.receipts import ABANDONED
from ajet_sdk.trace.counted import counted_rewards
from ajet_sdk.trace.reader import episodes as read_episodes
from ajet_sdk.trace.reader import open_trace
from ajet_sdk.trace.schema import LAST_VERSION, SAMPLED
from ajet_sdk.types import Episode, LedgerEntry, Task, now
from ajet_sdk.whole_file import write_whole

if TYPE_CHECKING:
    from ajet_sdk.protocols import Engine, Job
    from ajet_sdk.trace.writer import TraceWriter

SECRET = "swarm.secret"
"""File in the experiment's directory that signs the keys of episodes."""
CLAIMED = "swarm.claimed.jsonl"
"""File in the experiment's directory with the episodes that clients claimed."""

_ENDED = f"""
    SELECT e.episode_id
    FROM episodes e JOIN calls c USING (episode_id)
    WHERE e.run_id = $1 AND e.split = 'train' AND NOT e.superseded
        AND (e.status = 'succeeded' OR e.status IN ('failed', 'timeout') AND NOT e.infrastructure)
    GROUP BY e.episode_id
    HAVING coalesce(max({LAST_VERSION}) FILTER (c.trainable), 0) <= $2
        AND count(*) FILTER (c.call_id IN (SELECT call_id FROM ledger)) = 0
        AND sum({SAMPLED}) > 0
    ORDER BY min(e.started_at)"""
"""Episodes that ended before a restart and were not trained, by the policy or an older one."""

_ORPHANS = f"""
    SELECT c.episode_id, c.call_id, c.started_at, c.trainable AND c.phase = 'rollout' AS counts,
        {SAMPLED} AS tokens
    FROM calls c LEFT JOIN episodes e USING (episode_id)
    WHERE e.episode_id IS NULL
        AND c.started_at >= (SELECT min(started_at) FROM runs WHERE run_id = $1)
    ORDER BY c.started_at"""
"""Calls of episodes that were open when the server was killed."""


def episode_secret(directory: Path) -> bytes:
    """The secret of an experiment's episode keys; made once."""
    path = directory / SECRET
    if not path.exists():
        path.touch(mode=0o600)
        write_whole(path, secrets.token_hex(32))
        path.chmod(0o600)
    return path.read_text().strip().encode()


class SwarmSteps:
    """Collects each step's episodes from clients."""

    def __init__(
        self,
        job: Job,
        host: SwarmHost,
        writer: TraceWriter,
        policy_version: Callable[[], int],
        loggers: Loggers,
        total: int,
        *,
        steps_are_updates: bool = False,
    ) -> None:
        """`policy_version()` is the number of updates so far; `steps_are_updates`: each step makes
        one, at a time that the driver hears of later."""
        self.job = job
        self.host = host
        self.writer = writer
        self.policy_version = policy_version
        self.loggers = loggers
        self.total = total
        self.steps_are_updates = steps_are_updates
        self._claimed = ClaimedEpisodes(job.directory / CLAIMED)
        self._claimed_before: dict[str, Episode] = {}
        """The episodes that the run gave out before a restart."""
        self._collection: Collection | None = None

    @property
    def collection(self) -> Collection:
        if self._collection is None:
            raise ConfigError("the collection of episodes has not begun")
        return self._collection

    async def open(self, done: int, engine: Engine, run: asyncio.Task[Any]) -> None:
        """Take claims from now on, for episodes over `engine`. The server's owner stops the task
        `run`."""
        config = self.job.config
        settings = RunSettings(
            config=config,
            run_id=self.job.run_id,
            engine=engine,
            writer=self.writer,
            gateway=self.host.gateway,
            policy_version=self.policy_version,
            steps_are_updates=self.steps_are_updates,
            training=training_sampling(config),
            validation={"sampled": validation_sampling(config), "greedy": GREEDY},
            train_tasks=self.job.train,
            val_tasks=self.job.val,
            on_claim=self._claimed.add,
            given_out=self._given_out() if self.job.resume else (),
            secret=episode_secret(self.job.directory),
            done=done,
            total=self.total,
        )

        async def begin() -> Collection:
            collection = Collection(self.host.board, self.host.clients, settings)
            collection.restore(self._ended)
            self.host.collection = collection
            self.host.gateway.recognize(collection.attempts.episode_of)
            return collection

        loop = asyncio.get_running_loop()
        self.host.stop_run = lambda: loop.call_soon_threadsafe(run.cancel)
        if self.host.stop_requested:
            raise asyncio.CancelledError
        self._ended: Sequence[Episode] = ()
        if not self.job.resume:
            self._claimed.clear()
        else:
            self._ended = await asyncio.to_thread(self._left, self.policy_version())
        self._collection = await asyncio.wrap_future(self.host.submit(begin()))
        self.loggers.say(f"collecting episodes at {self.host.gateway.url}")
        if self._ended:
            self.loggers.say(f"{len(self._ended)} episodes that ended before the restart count")

    def keep(self, done: int) -> list[str]:
        """Book what the last process left: returns the ids of episodes that stay as they are.

        Those that had ended and were not trained count in the next step; those that were open are
        abandoned.
        """
        self.writer.flush()  # what the last process left in a journal
        run_id = self.job.run_id
        version = self.policy_version()
        ended = self.writer.query(_ENDED, [run_id, version]).to_pylist()
        orphans = self.writer.query(_ORPHANS, [run_id]).to_pylist()
        self._claimed_before = self._claimed.read()
        began: dict[str, datetime] = {}
        for row in orphans:
            began.setdefault(row["episode_id"], row["started_at"])
        for episode_id, started_at in began.items():
            episode = self._claimed_before.get(episode_id) or Episode(
                episode_id=episode_id, run_id=run_id, group_id=episode_id, client="unknown"
            )
            abandoned = {
                "step": done,
                "status": "aborted",
                "cause": ABANDONED,
                "error": "the server ended during this episode",
                "infrastructure": True,
                "started_at": started_at,
                "ended_at": now(),
            }
            self.writer.put(episode.model_copy(update=abandoned))
        self.writer.put(
            *(
                LedgerEntry(
                    run_id=run_id,
                    step=done,
                    episode_id=row["episode_id"],
                    call_id=row["call_id"],
                    outcome="abandoned",
                    tokens=row["tokens"],
                )
                for row in orphans
                if row["counts"] and row["tokens"]
            )
        )
        self.writer.flush()
        return [*(row["episode_id"] for row in ended), *began]

    def _given_out(self) -> list[tuple[Task, str]]:
        """The tasks of the run's episodes so far, with their splits; also of those that a kill left
        open without a call, which the trace does not have."""
        self.writer.flush()
        sql = "SELECT DISTINCT split, task FROM episodes WHERE run_id = ? AND client <> ''"
        rows = self.writer.query(sql, [self.job.run_id]).to_pylist()
        given_out = [(Task.model_validate_json(row["task"]), row["split"]) for row in rows]
        for episode in self._claimed_before.values():
            # an attempt whose client names its task at the end has none yet
            if episode.split in ("train", "val") and (
                episode.task.main_query or episode.task.init_messages
            ):
                given_out.append((episode.task, episode.split))
        return given_out

    def _left(self, version: int) -> list[Episode]:
        """The episodes that ended before the restart, with their calls."""
        self.writer.flush()
        rows = self.writer.query(_ENDED, [self.job.run_id, version]).to_pylist()
        ids = [row["episode_id"] for row in rows]
        if not ids:
            return []
        with open_trace(self.job.directory, writer=self.writer) as trace:
            by_id = {e.episode_id: e for e in read_episodes(trace, episode_ids=ids)}
        return [by_id[episode_id] for episode_id in ids if episode_id in by_id]

    async def serve(self, engine: Engine) -> None:
        """Sample from another engine from now on."""

        async def serve() -> None:
            self.collection.serve(engine)

        await asyncio.wrap_future(self.host.submit(serve()))

    def begin_step(self, step: int) -> SwarmBatch:
        """Begin to collect a step."""
        return SwarmBatch(self, step)

    def tasks_of(self, step: int) -> list[Task]:
        """The server's own tasks for a step, in the order in which they are given out.

        With `swarm.shares` each kind has its own order. More follow than the step needs, to take
        the place of tasks whose attempts are lost.
        """
        config = self.job.config
        tasks = self.job.train
        size = config.data.train_batch_size
        seed = config.trainer_common.seed
        if not tasks:
            return []
        if not config.swarm.shares:
            places = range((step - 1) * size, (step + 1) * size)
            return [tasks[at] for at in order_of_tasks(len(tasks), places, seed)]
        planned = []
        for kind in config.swarm.shares:
            of_kind = [task for task in tasks if self.collection.kind_of(task) == kind]
            if of_kind:
                places = range((step - 1) * size, (step + 1) * size)
                planned += [of_kind[at] for at in order_of_tasks(len(of_kind), places, seed)]
        return planned

    def metrics_by_kind(self, episodes: Sequence[Episode]) -> dict[str, float]:
        """With a mixture of tasks: the mean reward and the number of episodes of each kind."""
        if not self.job.config.swarm.shares:
            return {}
        by_kind: dict[str, list[Episode]] = defaultdict(list)
        for episode in episodes:
            by_kind[self.collection.kind_of(episode.task)].append(episode)
        metrics: dict[str, float] = {}
        for kind, of_kind in by_kind.items():
            metrics[f"train/episodes/{kind}"] = len(of_kind)
            rewards = counted_rewards(of_kind, self.job.config.rollout.failure_reward)
            if rewards:
                metrics[f"train/reward/{kind}"] = sum(rewards) / len(rewards)
        return metrics

    async def trained(self, step: int, ledger: Sequence[LedgerEntry]) -> None:
        """Tell the clients that a step is trained, and log the validations before it."""
        await asyncio.wrap_future(self.host.submit(self.collection.trained(step, ledger)))
        await self.log_validations(before=step)

    async def log_validations(self, before: int | None = None) -> None:
        """Log the validations of the clients, each at the step of its policy."""

        async def take() -> dict[int, list[Episode]]:
            return self.collection.take_validated(before)

        for step, episodes in (await asyncio.wrap_future(self.host.submit(take()))).items():
            self._log_validation(step, episodes)

    def _log_validation(self, step: int, episodes: Sequence[Episode]) -> None:
        single = [e for e in episodes if _has_one_version(e)]
        if len(single) < len(episodes):
            self.loggers.say(
                f"step {step} val: {len(episodes) - len(single)} episodes spanned an update and do"
                " not count"
            )
        greedy = [e for e in single if e.decoding == "greedy"]
        sampled = [e for e in single if e.decoding != "greedy"]
        by_task = {e.task.task_id for e in sampled}
        repeats = len(sampled) // len(by_task) if by_task else 0
        if repeats * len(by_task) != len(sampled):
            repeats = 1  # of unequal counts, pass@k would compare unlike things
        measured = validation_metrics(
            sampled,
            greedy,
            repeats,
            validation_sets(self.job),
            self.job.config.rollout.failure_reward,
        )
        self.loggers.log(step, measured)
        for line in failures_by_cause(episodes):
            self.loggers.say(f"step {step} val: {line}")

    async def close(self, reason: str, *, is_last: bool) -> None:
        """Stop collecting. `is_last`: no later run of this experiment continues."""
        collection = self._collection
        if collection is None:
            return
        if is_last:
            await asyncio.wrap_future(self.host.submit(collection.finish()))
        await self.log_validations()

        async def close() -> None:
            self.host.board.enter("finished" if is_last else "offline")
            # a stop by the owner ends the training for its clients, Ctrl-C does not
            will_resume = not is_last and not self.host.stop_requested
            await collection.close(reason, will_resume=will_resume)
            if is_last:
                collection.book_left()

        await asyncio.wrap_future(self.host.submit(close()))
        self.writer.flush()


def _has_one_version(episode: Episode) -> bool:
    first = {call.policy_version for call in episode.calls if call.policy_version is not None}
    last = {call.last_version for call in episode.calls if call.last_version is not None}
    return len(first | last) <= 1


class SwarmBatch:
    """The episodes of one step, from clients, with the interface of `steps.StepBatch`."""

    def __init__(self, steps: SwarmSteps, step: int) -> None:
        self._steps = steps
        self._step = step
        self.started = time.perf_counter()
        self.ended: float | None = None
        collection = steps.collection
        self._begun = steps.host.submit(collection.collect(step, steps.tasks_of(step)))

    async def episodes(self, display: Display | None, title: str) -> list[Episode]:
        """Wait until the step has enough; returns its episodes, grouped by task."""
        await asyncio.wrap_future(self._begun)
        collection = self._steps.collection
        loop = asyncio.get_running_loop()
        goal = collection.pool.goal
        if display is not None:
            display.begin(title, goal.groups * goal.attempts)

        def on_episode() -> None:
            if display is not None:
                loop.call_soon_threadsafe(display.advance)

        try:
            return await asyncio.wrap_future(
                self._steps.host.submit(collection.gathered(on_episode))
            )
        finally:
            self.ended = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Duration in seconds, so far or in total."""
        return (self.ended or time.perf_counter()) - self.started

    def overlap(self, begin: float, end: float) -> float:
        """Seconds of running time between two `time.perf_counter` values."""
        return max(0.0, min(end, self.ended or end) - max(begin, self.started))

    async def stop(self) -> None:
        """Stop taking claims; the episodes stay for a resumed run."""

        async def stop() -> None:
            self._steps.collection.is_collecting = False

        await asyncio.wrap_future(self._steps.host.submit(stop()))
