"""Runs an agent and its judge here, for a training at a swarm's server: `ajet work` and
`ajet train --swarm`.

A worker claims episodes, as many at once as it may, until the training is finished or its tasks are
done. A server that is away is waited for; a failure of the agent counts as an attempt there, one of
the infrastructure frees the place for another.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from ajet_sdk.agent.decorators import spec_of
from ajet_sdk.agent.workflow import is_workflow_class, make_workflow
from ajet_sdk.errors import (
    ConfigError,
    EpisodeOver,
    SwarmError,
    SwarmFinished,
    SwarmUnavailable,
    TrainingError,
    UnattributedCall,
)
from ajet_sdk.judges.call import is_group_judge
from ajet_sdk.judges.rewards import numbers
from ajet_sdk.rollout.attempts import Attempt
from ajet_sdk.rollout.episode import all_of, run_at, workers_of
from ajet_sdk.rollout.judging import Group, Member
from ajet_sdk.rollout.outcomes import failures_by_cause
from ajet_sdk.swarm.client import AT_THE_END, IDLE_TIMEOUT, AsyncSwarmClient
from ajet_sdk.swarm.exchange import WITHOUT_PLACE
from ajet_sdk.swarm.failure import abort_of_episode
from ajet_sdk.swarm.messages import Abort, Claimed, EpisodeSplit, Receipt
from ajet_sdk.swarm.remote import SwarmPlace
from ajet_sdk.swarm.requests import end_of
from ajet_sdk.types import Episode, Status, Task

if TYPE_CHECKING:
    from ajet_sdk.config.config import Config

log = logging.getLogger("ajet")

Decoding = Literal["sampled", "greedy"]

FEWEST_FAILURES = 8
"""Episodes in a row that fail before a worker stops: its agent is broken, and would go on for
ever."""
BEFORE_ASKING_AGAIN = 1.0
"""Seconds between two looks at a server that has no training yet."""
GROUP_WAIT = 10.0
"""Seconds that a further attempt of a group waits for its place, while the others wait for it."""


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
                "a group judge compares all attempts at a task, and the server gives the attempts at"
                " its tasks to any worker: give the tasks here (--tasks), or use a judge of single"
                " attempts"
            )

    @property
    def targets(self) -> list[str] | None:
        """The targets to train that the config or the workflow names."""
        named: Sequence[str] | None = self.config.rollout.trainable_targets
        if named is None and is_workflow_class(self.workflow):
            named = make_workflow(self.workflow).trainable_targets
        elif named is None:
            named = spec_of(self.workflow, "workflow").trainable_targets
        return None if named is None else list(named)


@dataclass(frozen=True, eq=False)
class _Piece:
    """An attempt to make; `task` is None for one that the server chooses."""

    task: Task | None = None
    split: EpisodeSplit = "train"
    number: int = 0
    decoding: Decoding | None = None
    group: Group | None = None
    first_claimed: asyncio.Event | None = None
    """Set once the first attempt of the group has its place."""


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
        """Mean reward of the episodes with one."""
        return mean_reward(self.episodes)

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


def _without_result(
    status: Status, cause: str, error: str, infrastructure: bool
) -> dict[str, object]:
    """Fields of an episode that has no result after all."""
    return {
        "status": status,
        "cause": cause,
        "error": error,
        "infrastructure": infrastructure,
        "rewards": (),
    }


class Worker:
    """Runs the attempts of one process."""

    def __init__(
        self,
        swarm: AsyncSwarmClient,
        work: Work,
        say: Callable[[str], None],
        summary: WorkSummary,
    ) -> None:
        """`say` is called with lines of progress; `summary` is filled."""
        self._swarm = swarm
        self._work = work
        self._say = say
        self._attempts = work.attempts or 1
        self._failed: list[Episode] = []
        """The newest episodes in a row that failed."""
        self._validations: deque[_Piece] = deque()
        self._step = 0
        """The newest step of which an episode was claimed."""
        self._validated = -1
        self.summary = summary

    @property
    def _concurrency(self) -> int:
        # The attempts of a group wait for each other before they are judged.
        least = self._attempts if is_group_judge(self._work.judge) else 1
        return max(self._work.concurrency, least)

    @property
    def _most_failures(self) -> int:
        return max(FEWEST_FAILURES, 2 * self._concurrency)

    async def run(self) -> WorkSummary:
        """Work until the training is finished or the tasks are done.

        Raises SwarmError, also SwarmUnavailable if the server is away for too long; TrainingError
        if the agent fails each time.
        """
        pieces = self._pieces()
        with workers_of(self._work.config):
            slots = [asyncio.create_task(self._fill_slot(pieces)) for _ in range(self._concurrency)]
            try:
                await all_of(slots)
            finally:
                await self._swarm.aclose()
        return self.summary

    async def _fill_slot(self, pieces: Iterator[_Piece]) -> None:
        while True:
            piece = self._validations.popleft() if self._validations else next(pieces, None)
            if piece is None:
                return
            try:
                await self._make(piece)
            except SwarmFinished as finished:
                log.info("%s", finished)
                return
            finally:
                if piece.group is not None:
                    piece.group.leave()
                if piece.first_claimed is not None:
                    piece.first_claimed.set()

    # What to run

    def _pieces(self) -> Iterator[_Piece]:
        work = self._work
        if work.tasks is None:
            yield from itertools.repeat(_Piece(split=work.split))
            return
        if work.split == "val":
            for task in work.tasks:
                yield from self._attempts_at(task)
            return
        for epoch in itertools.count():
            order = list(work.tasks)
            # Workers with the same tasks begin with different ones.
            seed = f"{work.config.trainer_common.seed}/{self._swarm.client_id}/{epoch}"
            random.Random(seed).shuffle(order)
            for task in order:
                yield from self._attempts_at(task)

    def _attempts_at(self, task: Task) -> Iterator[_Piece]:
        work = self._work
        group = Group(work.judge, self._attempts) if is_group_judge(work.judge) else None
        first_claimed = None if group is None else asyncio.Event()
        for number in range(self._attempts):
            yield _Piece(
                task,
                work.split,
                number,
                group=group,
                first_claimed=first_claimed,
            )

    def _plan_validation(self, done: int) -> None:
        """Add the attempts of a validation after `done` steps, if one is due."""
        common = self._work.config.trainer_common
        frequency = common.test_freq
        due = common.val_before_train if done == 0 else frequency > 0 and done % frequency == 0
        if not self._work.val_tasks or not due or self._validated >= done:
            return
        self._validated = done
        for task in self._work.val_tasks:
            for number in range(self._work.config.validation_attempts):
                self._validations.append(_Piece(task, "val", number, "sampled"))
            self._validations.append(_Piece(task, "val", 0, "greedy"))

    # One attempt

    async def _make(self, piece: _Piece) -> None:
        """Make an attempt, and again after a fault of the infrastructure."""
        remaining = self._work.config.rollout.max_retries if piece.task is not None else 0
        while True:
            claimed = await self._claim(piece)
            if claimed is None:
                return
            finished = await self._run(piece, claimed)
            self._note(finished)
            judged = piece.group is not None and piece.group.judged
            if not (finished.episode.infrastructure and remaining) or judged:
                return
            remaining -= 1

    async def _claim(self, piece: _Piece) -> Claimed | None:
        """Claim an episode; None if the others of the group shall not wait for it."""
        wait: float | None = None
        if piece.first_claimed is not None and piece.number:
            await piece.first_claimed.wait()
            wait = GROUP_WAIT
        claim = self._swarm.claim_of(
            piece.task,
            split=piece.split,
            idle_timeout=IDLE_TIMEOUT,
            attempt=piece.number if piece.split == "val" else None,
            decoding=piece.decoding,
            trainable_targets=self._work.targets,
        )
        try:
            claimed = await self._swarm.arun(self._swarm.requests.claim(claim, wait))
        except SwarmUnavailable as refused:
            if wait is None or refused.code not in WITHOUT_PLACE:
                raise
            log.info("An attempt is left out of its group: %s", refused)
            return None
        if piece.first_claimed is not None:
            piece.first_claimed.set()
        if piece.split == "train":
            self._follow(claimed.step)
        return claimed

    async def _run(self, piece: _Piece, claimed: Claimed) -> Finished:
        work = self._work
        attempt = Attempt(
            task=claimed.task,
            group_id=claimed.group_id,
            attempt=claimed.attempt,
            step=claimed.step,
            split=piece.split,
            seed=claimed.seed,
            must_call=True,
            episode_id=claimed.episode_id,
        )
        finished: list[Finished] = []

        async def record(episode: Episode) -> None:
            finished.append(await self._report(claimed, episode))

        alive = asyncio.create_task(self._keep_alive(claimed))
        try:
            await run_at(
                work.workflow,
                work.judge,
                attempt,
                record,
                place=SwarmPlace(self._swarm, claimed, work.config),
                config=work.config,
                member=None if piece.group is None else Member(piece.group),
            )
        finally:
            alive.cancel()
        return finished[0]

    async def _keep_alive(self, claimed: Claimed) -> None:
        """Let the server know that the attempt is running, even without calls."""
        while True:
            await asyncio.sleep(claimed.idle_timeout / 3)
            try:
                await self._swarm.arun(
                    self._swarm.requests.receipt(claimed.episode_id, claimed.api_key)
                )
            except SwarmError as error:
                log.debug("Episode %s: %s", claimed.episode_id, error)

    async def _report(self, claimed: Claimed, episode: Episode) -> Finished:
        """Tell the server the result of an episode."""
        requests = self._swarm.requests
        small = episode.model_copy(update={"calls": (), "events": (), "output": None})
        try:
            if episode.status != "succeeded":
                stopped = episode.status == "aborted"
                receipt = await self._swarm.arun(
                    requests.abort(
                        claimed, abort_of_episode(episode), AT_THE_END if stopped else None
                    )
                )
                return Finished(small, receipt)
            end = end_of(
                list(episode.rewards) or None,
                episode.is_success,
                numbers(episode.metrics),
                episode.output,
            )
            receipt = await self._swarm.arun(requests.end(claimed, end))
        except EpisodeOver as over:
            lost = _without_result("aborted", type(over).__name__, str(over), True)
            return Finished(small.model_copy(update=lost), None)
        except SwarmError as refused:
            return await self._refused(claimed, small, refused)
        if receipt.state != "ended":
            # a call that failed at the server, and that the agent ignored
            known = _without_result(
                receipt.status or "failed", receipt.cause or "", receipt.error or "", False
            )
            small = small.model_copy(update=known)
        return Finished(small, receipt)

    async def _refused(self, claimed: Claimed, episode: Episode, refused: SwarmError) -> Finished:
        """Abort an episode whose end the server refuses."""
        if refused.code not in ("bad_reward", "no_calls"):
            raise refused
        infrastructure = refused.code == "no_calls"
        cause = "NoCalls" if infrastructure else "NoReward"
        error = f"{cause}: {refused}"
        abort = Abort(
            reason=str(refused)[:500],
            cause=cause,
            infrastructure=infrastructure,
            status="failed",
            error=error,
        )
        receipt = await self._swarm.arun(self._swarm.requests.abort(claimed, abort))
        fields = _without_result("failed", cause, error, infrastructure)
        return Finished(episode.model_copy(update=fields), receipt)

    # Results

    def _note(self, finished: Finished) -> None:
        """Count an episode. Raises TrainingError if all of the newest ones failed."""
        episode = finished.episode
        self.summary.finished.append(finished)
        if episode.cause == UnattributedCall.__name__:
            raise TrainingError(
                "the agent's calls cannot be attributed to its episodes (episode"
                f" {episode.episode_id}). {episode.error}"
            )
        if episode.status == "succeeded":
            self._failed.clear()
            return
        if episode.cause in (EpisodeOver.__name__, SwarmUnavailable.__name__):
            return
        self._failed.append(episode)
        if len(self._failed) >= self._most_failures:
            causes = "\n  ".join(failures_by_cause(self._failed))
            raise TrainingError(f"the last {len(self._failed)} episodes all failed:\n  {causes}")

    def _follow(self, step: int) -> None:
        """Note the server's step: say what became of the last one, and validate if it is time."""
        if step <= self._step:
            return
        if self._step:
            self._say(self._line_of(self._step))
        self._step = step
        self._plan_validation(step - 1)

    def _line_of(self, step: int) -> str:
        of_step = [e for e in self.summary.episodes if e.step == step and e.split == "train"]
        failed = sum(episode.status != "succeeded" for episode in of_step)
        reward = mean_reward(of_step)
        parts = [f"step {step}: {len(of_step)} episodes here"]
        if reward is not None:
            parts.append(f"reward {reward:.3f}")
        if failed:
            parts.append(f"{failed} failed")
        return ", ".join(parts)

    async def refresh(self) -> None:
        """Ask for the receipts with tokens whose outcome was not known yet."""
        room = asyncio.Semaphore(16)

        async def asked(each: Finished) -> Finished:
            if each.receipt is None or not each.receipt.pending:
                return each
            async with room:
                requests = self._swarm.requests
                receipt = await self._swarm.arun(requests.receipt(each.episode.episode_id))
            return Finished(each.episode, receipt)

        self.summary.finished = list(await asyncio.gather(*map(asked, self.summary.finished)))
