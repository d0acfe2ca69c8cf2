"""Runs an agent and its judge here, for a training at a swarm's server.

A worker claims episodes, as many at once as it may, until the training is finished or its tasks are
done. A server that is away is waited for; a failure of the agent counts as an attempt there, one of
the infrastructure frees the place for another.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress

from ajet_sdk.errors import (
    EpisodeOver,
    SwarmError,
    SwarmFinished,
    SwarmOffline,
    SwarmUnavailable,
    TrainingError,
    UnattributedCall,
)
from ajet_sdk.judges.call import is_group_judge
from ajet_sdk.judges.rewards import numbers
from ajet_sdk.rollout.attempts import Attempt
from ajet_sdk.rollout.episode import all_of, run_at, workers_of
from ajet_sdk.rollout.judging import Member
from ajet_sdk.rollout.outcomes import failures_by_cause
from ajet_sdk.swarm.client import IDLE_TIMEOUT, AsyncSwarmClient
from ajet_sdk.swarm.episodes import AT_THE_END
from ajet_sdk.swarm.exchange import WITHOUT_PLACE
from ajet_sdk.swarm.failure import abort_of_episode
from ajet_sdk.swarm.messages import Abort, Claim, Claimed
from ajet_sdk.swarm.plan import Decoding, Piece, Plan
from ajet_sdk.swarm.remote import SwarmPlace
from ajet_sdk.swarm.requests import end_of
from ajet_sdk.swarm.work import Finished, Work, WorkSummary, mean_reward
from ajet_sdk.types import Episode, Status

log = logging.getLogger("ajet")

FEWEST_FAILURES = 8
"""Episodes in a row that fail before a worker stops: its agent is broken, and would go on for
ever."""
BEFORE_ASKING_AGAIN = 1.0
"""Seconds between two looks at a server that has no training yet."""


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
        self._is_finished = False
        self._plan = Plan(work, self._attempts, swarm.client_id)
        self._failed: list[Episode] = []
        """The newest episodes in a row that failed."""
        self._step = 0
        """The newest step of which an episode was claimed."""
        self._validations = dict[int, list[tuple[Decoding | None, Episode]]]()
        """The attempts of validations, by the steps done when they were planned."""
        self._validated = asyncio.Event()
        """Set unless a validation is under way."""
        self._validated.set()
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
        if self._work.attempts is None and self._work.tasks and self._work.split == "train":
            self._attempts = await self._group_size()
            self._plan = Plan(self._work, self._attempts, self._swarm.client_id)
        plan = self._plan
        with workers_of(self._work.config):
            await all_of(
                [asyncio.create_task(self._fill_slot(plan)) for _ in range(self._concurrency)]
            )
        return self.summary

    async def _group_size(self) -> int:
        """The server's number of attempts in a group, once it has loaded its config."""
        offline_since: float | None = None
        while True:
            status = await self._swarm.status()
            if status.target.attempts or status.state == "finished":
                return max(1, status.target.attempts)
            now = time.monotonic()
            if status.state != "offline":
                offline_since = None
            elif offline_since is None:
                offline_since = now
            elif now - offline_since > self._swarm.requests.patience:
                raise SwarmOffline(
                    f"{self._swarm.url} waits for a config and a start (`ajet train --conf FILE"
                    " --swarm URL`)",
                    code="offline",
                )
            await asyncio.sleep(BEFORE_ASKING_AGAIN)

    async def _fill_slot(self, plan: Plan) -> None:
        while (piece := plan.next_piece()) is not None:
            try:
                await self._make(piece)
            except SwarmFinished as finished:
                if not self._is_finished:
                    log.info("%s", finished)
                self._validated.set()
                await self._validate_last()
                return
            finally:
                if piece.members is not None:
                    piece.members.leave()

    async def _validate_last(self) -> None:
        """Make attempts of the validation of the last policy, if this worker validates. The server
        takes them for a moment after the training."""
        if not self._is_finished:
            self._is_finished = True
            status = await self._swarm.status()
            self._plan.validate(status.step, is_last=True)
        with suppress(SwarmError):
            while (piece := self._plan.next_validation()) is not None:
                await self._make(piece)

    # One attempt

    async def _make(self, piece: Piece) -> None:
        """Make an attempt, and again after a fault of the infrastructure."""
        if piece.task is not None:
            remaining = self._work.config.rollout.max_retries
        else:
            remaining = 0
        while True:
            claimed = await self._claim(piece)
            if claimed is None:
                return
            finished = await self._run(piece, claimed)
            self._note(finished)
            judged = piece.members is not None and piece.members.group.judged
            if not (finished.episode.infrastructure and remaining) or judged:
                break
            remaining -= 1
        if piece.validates is not None:
            self._note_validation(piece.validates, piece.decoding, finished.episode)

    async def _validate_first(self, claimed: Claimed) -> None:
        """Make the attempts of a validation that is due, before the claimed attempt: the policy
        would change while they are made."""
        try:
            while (piece := self._plan.next_validation()) is not None:
                await self._make(piece)
            await self._validated.wait()
        except BaseException:
            abort = Abort(reason="the worker ended before this attempt began")
            with suppress(SwarmError):
                await self._swarm.arun(self._swarm.requests.abort(claimed, abort, AT_THE_END))
            raise

    async def _claim(self, piece: Piece) -> Claimed | None:
        """Claim an episode; None if the others of the group shall not wait for it."""
        wait: float | None = None
        if piece.members is not None:
            wait = await piece.members.take_turn(piece.number)
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
        except asyncio.CancelledError:
            await self._give_back(claim)
            raise
        except SwarmUnavailable as refused:
            if wait is None or refused.code not in WITHOUT_PLACE:
                raise
            log.info("An attempt is left out of its group: %s", refused)
            return None
        if piece.members is not None:
            piece.members.first_claimed.set()
        if piece.split == "train":
            self._follow(claimed.step)
        return claimed

    async def _give_back(self, claim: Claim) -> None:
        """Free the place of a claim whose answer was not awaited: the same claim names it."""
        requests = self._swarm.requests
        with suppress(SwarmError):
            claimed = await self._swarm.arun(requests.claim(claim, 0.0, AT_THE_END))
            abort = Abort(reason="the worker ended before it got the episode")
            await self._swarm.arun(requests.abort(claimed, abort, AT_THE_END))

    async def _run(self, piece: Piece, claimed: Claimed) -> Finished:
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
            self.summary.finished += finished

        alive = asyncio.create_task(self._keep_alive(claimed))
        try:
            if piece.split == "train":
                await self._validate_first(claimed)
            await run_at(
                work.workflow,
                work.judge,
                attempt,
                record,
                place=SwarmPlace(self._swarm, claimed, work.config),
                config=work.config,
                member=None if piece.members is None else Member(piece.members.group),
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
                    self._swarm.requests.receipt(claimed.episode_id, claimed.end_key)
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
        if self._plan.validate(step - 1):
            self._validated.clear()

    def _note_validation(self, done: int, decoding: Decoding | None, episode: Episode) -> None:
        """Say what a validation has measured, once its last attempt is over."""
        made = self._validations.setdefault(done, [])
        made.append((decoding, episode))
        if len(made) < self._plan.validation_size:
            return
        self._validated.set()
        parts = [f"validation after step {done}"]
        for name in ("sampled", "greedy"):
            reward = mean_reward([e for by, e in made if by == name])
            if reward is not None:
                parts.append(f"{name} reward {reward:.3f}")
        self._say(", ".join(parts))

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
