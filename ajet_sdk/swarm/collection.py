"""Collects the episodes of one training run: gives places to claims, and each step its episodes.

A collection belongs to the gateway's event loop: routes call it there, and the training loop
through `SwarmHost.submit`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from ajet_sdk.errors import AjetError
from ajet_sdk.protocols import Engine
from ajet_sdk.rollout.outcomes import untrained_entries
from ajet_sdk.samples.prefixes import is_trained
from ajet_sdk.swarm.attempts import REMEMBERED, Attempts, OpenAttempt, RunSettings
from ajet_sdk.swarm.board import Board
from ajet_sdk.swarm.clients import Clients
from ajet_sdk.swarm.messages import (
    Claim,
    Claimed,
    ClientInfo,
    Code,
    EpisodeState,
    EventKind,
    Group,
    OpenInfo,
    ServerState,
    SwarmStatus,
    Target,
)
from ajet_sdk.swarm.pool import AttemptGroup, Goal, Pool
from ajet_sdk.swarm.refusals import Refused
from ajet_sdk.swarm.splits import Splits
from ajet_sdk.types import Episode, LedgerEntry, Task, new_id

log = logging.getLogger("ajet")

LONGEST_WAIT = 600.0
"""Seconds for which a claim is held at most."""
LAST_CLAIM = 3.0
"""Seconds after the training, or after another such claim, in which a client may claim an attempt
of the last validation."""
MOST_WAITING = 10_000
"""Claims that wait for a place at once."""
IsGone = Callable[[], Awaitable[bool]]
"""Whether the client of a request has left."""


@dataclass(eq=False)
class _Waiting:
    """A claim that waits for a place."""

    claim: Claim
    turn: asyncio.Future[OpenAttempt]


class Collection:
    """The episodes of one training run."""

    def __init__(self, board: Board, clients: Clients, settings: RunSettings) -> None:
        self.board = board
        self.clients = clients
        self.settings = settings
        config = settings.config
        self.pool = Pool(
            Goal(
                config.swarm.collect,
                config.data.train_batch_size,
                config.rollout.num_repeat,
                config.swarm.shares,
            )
        )
        self.attempts = Attempts(settings, self)
        self.step = settings.done
        """The step that is being collected, or was last."""
        self.done = settings.done
        """Finished steps."""
        self.is_collecting = False
        self.is_closed = False
        """Nothing is claimed any more."""
        self._will_resume = False
        """Whether a later server of the closed run will give places."""
        self._claimed_at = time.monotonic()
        """Time of the newest claim."""
        self._validated: dict[int, list[Episode]] = {}
        """Ended validation episodes, by the steps done at their claim."""
        self._validation_attempts = Counter[str]()
        """Attempts at each validation task that was only named at its end."""
        self._claims: OrderedDict[str, asyncio.Future[Claimed]] = OrderedDict()
        """Claims by `request_id`."""
        self._waiting: deque[_Waiting] = deque()
        self._changed = asyncio.Event()
        """Set by everything that may end the wait of `gathered`."""
        self.splits = Splits(settings.train_tasks, settings.val_tasks)
        self.splits.restore(settings.given_out)
        self._has_warned = False
        """Of a validation with tasks that were trained."""
        self._began = time.monotonic()

    def serve(self, engine: Engine) -> None:
        """Sample from another engine from now on; open episodes, too."""
        self.settings = replace(self.settings, engine=engine)
        self.attempts.settings = self.settings

    # Claims

    async def claim(self, claim: Claim, is_gone: IsGone | None) -> tuple[Claimed, bool]:
        """See `SwarmHost.claim`."""
        earlier = self._claims.get(claim.request_id)
        if earlier is not None:
            return await asyncio.shield(earlier), False
        promise: asyncio.Future[Claimed] = asyncio.get_running_loop().create_future()
        self._claims[claim.request_id] = promise
        try:
            attempt = await self._await_place(claim, is_gone)
        except BaseException as error:
            self._claims.pop(claim.request_id, None)
            if isinstance(error, Refused):
                refusal = error
            else:
                refusal = _again("the claim was not answered")
            promise.set_exception(refusal)
            promise.exception()  # there may be no duplicate that awaits it
            raise
        promise.set_result(attempt.claimed)
        while len(self._claims) > REMEMBERED:
            self._claims.popitem(last=False)
        return attempt.claimed, True

    async def _await_place(self, claim: Claim, is_gone: IsGone | None) -> OpenAttempt:
        if claim.task is not None:  # at once, and not after a wait
            self.splits.check(claim.task, claim.split)
        refusal = self._refusal(claim)
        if refusal is None:
            return self._open(claim)
        if refusal.retry_after is None or not claim.wait:
            raise refusal
        if len(self._waiting) >= MOST_WAITING:
            raise Refused(503, "full", f"{MOST_WAITING:,} claims are waiting for a place", 10.0)
        waiting = _Waiting(claim, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        try:
            await asyncio.wait([waiting.turn], timeout=min(claim.wait, LONGEST_WAIT))
        finally:
            with suppress(ValueError):
                self._waiting.remove(waiting)
        if not waiting.turn.done():
            raise self._refusal(claim) or refusal
        attempt = waiting.turn.result()
        if is_gone is not None and await is_gone():
            await self.attempts.abandon(attempt, "its client left before it got the episode")
            raise _again("the client has left")
        return attempt

    def serve_claims(self) -> None:
        """Give places to waiting claims, first come first served."""
        is_full = self._is_full()
        for waiting in list(self._waiting):
            if waiting.turn.done() or (is_full and waiting.claim.split == "train"):
                continue
            refusal = self._refusal(waiting.claim)
            if refusal is None:
                try:
                    waiting.turn.set_result(self._open(waiting.claim))
                except AjetError as error:  # that of one claim; others go on
                    waiting.turn.set_exception(error)
                is_full = self._is_full()
            elif refusal.retry_after is None or self.is_closed:
                waiting.turn.set_exception(refusal)

    def _is_full(self) -> bool:
        """Whether no claim for training finds a place now; spares looking at each of many."""
        if self.is_closed or self.board.state == "finished":
            return False  # they are told
        return not self.is_collecting or self.pool.is_full

    def _refusal(self, claim: Claim) -> Refused | None:
        """Why a claim gets no place now."""
        if self.is_closed and self._will_resume:
            return Refused(503, "offline", "the server is being stopped", 5.0)
        if self.is_closed or (self.board.state == "finished" and claim.split == "train"):
            return Refused(409, "finished", "the training is finished; nothing is collected")
        limit = self.settings.config.swarm.max_open
        if len(self.attempts.open) >= limit:
            message = f"{limit} episodes are open (swarm.max_open); end some"
            return Refused(503, "full", message, 2.0)
        if claim.split == "val":
            return self._refusal_of_validation(claim)
        if not self.is_collecting:
            code: Code = "closing" if self.board.state == "closing" else "updating"
            return Refused(503, code, f"step {self.step} is being trained", 1.0)
        if claim.task_at_end:
            if self.pool.has_spare_attempts:
                return None
            return Refused(503, "full", "the step has enough attempts", 2.0)
        if claim.task is None:
            return self._refusal_of_own_task()
        return self._refusal_of_task(claim.task)

    def _refusal_of_validation(self, claim: Claim) -> Refused | None:
        if self.board.state == "updating":
            return Refused(503, "updating", "the policy is being updated", 1.0)
        if claim.task is None and not claim.task_at_end:
            return Refused(422, "bad_request", "a claim for validation names its task")
        return None

    def _refusal_of_own_task(self) -> Refused | None:
        if self.pool.has_own_room(self.kind_of):
            return None
        if not self.pool.has_own_tasks:
            return Refused(
                422, "bad_request", "the server has no tasks of its own (task_reader): name one"
            )
        return Refused(503, "full", "all attempts of the step have been given out", 2.0)

    def _refusal_of_task(self, task: Task) -> Refused | None:
        kind = self.kind_of(task)
        if self.pool.has_room(task.task_id, kind):
            return None
        if self.pool.quotas and not self.pool.may_begin(kind):
            named = f"kind {kind!r}" if kind else "tasks without a kind"
            message = f"the step has its share of {named} (swarm.shares)"
            return Refused(503, "kind_full", message, 2.0)
        message = "the step has groups for all its tasks; this one comes later"
        return Refused(503, "group_full", message, 2.0)

    def kind_of(self, task: Task) -> str:
        """The kind of a task, for mixtures."""
        value = task.metadata.get(self.settings.config.swarm.kind_key)
        return str(value) if value is not None else task.env_type

    def _open(self, claim: Claim) -> OpenAttempt:
        """Open an episode in the place that `_refusal` has found. Raises Refused for a task that
        another client took for the other split while this claim waited."""
        if claim.task is not None:
            self.splits.check(claim.task, claim.split)
        episode_id = new_id()
        task = claim.task or Task()
        group: AttemptGroup | None = None
        if claim.split == "train":
            if claim.task_at_end:
                group = self.pool.begin_unknown()
            elif claim.task is not None:
                group = self.pool.find_place(task.task_id, self.kind_of(task))
            else:
                group = self.pool.find_own_place(self.kind_of)
                if group is not None and group.task is not None:
                    task = group.task
            assert group is not None
            number = self.pool.open(group, episode_id)
            step = self.step
        else:
            number = claim.attempt or 0
            step = self.done
        if not claim.task_at_end:
            self.splits.add(task, claim.split)
        try:
            attempt = self.attempts.begin(
                claim, task, episode_id=episode_id, group=group, number=number, step=step
            )
        except BaseException:  # such as an opponent that is missing
            if group is not None:
                self.pool.free(group, episode_id)
            raise
        self._claimed_at = time.monotonic()
        self._tell("claimed", attempt, step=step, split=claim.split)
        return attempt

    def _tell(self, kind: EventKind, attempt: OpenAttempt, **more: object) -> None:
        self.board.emit(
            kind,
            episode_id=attempt.episode_id,
            client_id=attempt.claim.client_id,
            task_id=attempt.episode.task.task_id,
            **more,
        )

    # Ends (the interface of `attempts.Listener`)

    def placed(self, attempt: OpenAttempt, episode: Episode, counts: bool) -> Episode:
        if attempt.group is None:
            if self.settings.steps_are_updates:
                episode = _at_its_version(episode)
            if attempt.claim.task_at_end:
                return self._placed_in_validation(episode)
            return episode
        group = attempt.group = self.pool.group_of(episode.episode_id)
        if counts and attempt.claim.task_at_end:
            task = episode.task
            self.splits.add(task, "train")
            group = attempt.group = self.pool.adopt(group, task.task_id, self.kind_of(task))
        place = {
            "group_id": group.group_id,
            "attempt": group.open.get(episode.episode_id, episode.attempt),
            "step": self.step,
        }
        return episode.model_copy(update=place)

    def _placed_in_validation(self, episode: Episode) -> Episode:
        """An attempt whose task was unknown at its claim, as the next one of its task's group."""
        group_id = f"val-{episode.step}-{episode.task.task_id}"
        number = self._validation_attempts[group_id]
        self._validation_attempts[group_id] += 1
        return episode.model_copy(update={"group_id": group_id, "attempt": number})

    def _may_validate(self, episode: Episode) -> bool:
        """Whether a validation episode counts: not with a task that is trained, which a claim
        without a task can't tell."""
        if not self.splits.in_other(episode.task, "val"):
            self.splits.add(episode.task, "val")
            return True
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "Episodes of split `val` with tasks of the training, such as %s, do not count in"
                " the validation: it would measure memorization",
                episode.task.task_id,
            )
        return False

    def settled(
        self, attempt: OpenAttempt, episode: Episode, state: EpisodeState, counts: bool
    ) -> None:
        if attempt.group is None:
            if counts and self._may_validate(episode):
                self._validated.setdefault(episode.step, []).append(episode)
        elif counts:
            self.pool.end(attempt.group, episode)
        else:
            self.pool.free(attempt.group, episode.episode_id)
        self.clients.count_end(attempt.claim.client_id, state)
        kind: EventKind = "ended" if state in ("ended", "failed") else "aborted"
        if state == "abandoned":
            kind = "abandoned"
        self._tell(
            kind,
            attempt,
            state=state,
            step=episode.step,
            reward=episode.reward,
            cause=episode.cause,
        )
        self._changed.set()
        self.serve_claims()

    # Steps

    def _enter(self, state: ServerState) -> None:
        self.board.enter(state)
        self.serve_claims()

    async def collect(self, step: int, planned: Iterable[Task]) -> None:
        """Begin to collect a step, without waiting. `planned`: see `Pool.begin`."""
        self.step = step
        self._began = time.monotonic()
        self.clients.begin_step()
        span = max(1, self.settings.total - 1)
        self.pool.begin(planned, min(1.0, (step - 1) / span))
        self.is_collecting = True
        self.board.emit("step", step=step, policy_version=self.settings.policy_version())
        self._enter("collecting")

    async def gathered(self, on_episode: Callable[[], None]) -> list[Episode]:
        """Wait until the step has enough; returns its episodes, group by group."""
        is_late = await self._enough(on_episode)
        carries = self.settings.config.rollout.max_staleness > 0
        if not carries:
            await self._close()
        counts_episodes = self.pool.goal.rule in ("episodes", "any_client", "all_clients")
        groups = self.pool.take(partial=is_late or counts_episodes or not carries)
        self.is_collecting = False
        self._enter("updating")
        return self._episodes_of(groups)

    async def _enough(self, on_episode: Callable[[], None]) -> bool:
        """Wait until the step has enough, or its time is over with something; returns whether it
        was that."""
        limit = self.settings.config.swarm.step_timeout
        told = 0
        while True:
            ended = sum(len(group.ended) for group in self.pool.groups)
            for _ in range(ended - told):
                on_episode()
            told = max(told, ended)
            if self.pool.is_enough(self.clients.voters()):
                return False
            patience = None
            if limit is not None and ended:
                patience = self._began + limit - time.monotonic()
                if patience <= 0:
                    text = f"step {self.step} ends at swarm.step_timeout, {limit:g} s"
                    self.board.emit("message", text=text)
                    return True
            await self._wait(patience)

    async def _wait(self, patience: float | None) -> None:
        """Wait for a change."""
        self._changed.clear()
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._changed.wait(), patience)

    async def _close(self) -> None:
        """Give open training episodes a last moment, then abandon them."""
        self.is_collecting = False
        deadline = time.monotonic() + self.settings.config.swarm.grace
        while training := [a for a in self.attempts.open.values() if a.group is not None]:
            self._enter("closing")
            left = deadline - time.monotonic()
            if left > 0:
                await self._wait(left)
                continue
            reason = f"step {self.step} had enough attempts, and swarm.grace was over"
            await asyncio.gather(*(self.attempts.abandon(a, reason) for a in training))

    def _episodes_of(self, groups: Sequence[AttemptGroup]) -> list[Episode]:
        """The episodes of groups, as attempts of this step also in the trace."""
        episodes = [episode for group in groups for episode in group.ended]
        earlier = [episode.episode_id for episode in episodes if episode.step != self.step]
        if earlier:
            self.settings.writer.move_to_step(earlier, self.step)
        return [episode.model_copy(update={"step": self.step}) for episode in episodes]

    def restore(self, episodes: Sequence[Episode]) -> None:
        """Let episodes count that ended before a restart."""
        groups: dict[str, AttemptGroup] = {}
        for episode in episodes:
            group = groups.get(episode.group_id)
            if group is None:
                task = episode.task
                size = self.pool.goal.attempts
                group = AttemptGroup(task.task_id, size, self.kind_of(task), task)
                group.group_id = episode.group_id
                groups[episode.group_id] = group
                self.pool.groups.append(group)
            group.ended.append(episode)

    async def trained(self, step: int, ledger: Iterable[LedgerEntry] = ()) -> None:
        """Note that a step was trained, and what became of its tokens."""
        self.done = step
        self.attempts.book(ledger)
        self.board.emit("trained", step=step, policy_version=self.settings.policy_version())

    def take_validated(self, before: int | None = None) -> dict[int, list[Episode]]:
        """Remove and return the validation episodes by step; `before`: only of steps before it."""
        steps = [step for step in self._validated if before is None or step < before]
        return {step: self._validated.pop(step) for step in sorted(steps)}

    async def finish(self) -> None:
        """Collect no more, and let clients validate the last policy: until none has claimed for a
        moment, and none is at it."""
        self.is_collecting = False
        self._enter("finished")
        training = [a for a in self.attempts.open.values() if a.group is not None]
        await asyncio.gather(*(self.attempts.abandon(a, "the training ended") for a in training))
        self._claimed_at = time.monotonic()
        while self.attempts.open or time.monotonic() < self._claimed_at + LAST_CLAIM:
            await self._wait(LAST_CLAIM)

    async def close(self, reason: str, *, will_resume: bool = False) -> None:
        """Abandon what is open. Claims are refused; with `will_resume` clients are to wait for the
        next server."""
        self.is_collecting = False
        self.is_closed = True
        self._will_resume = will_resume
        await self.attempts.close(reason)
        self.serve_claims()

    def book_left(self) -> None:
        """Book the tokens of ended episodes that no step trains any more."""
        writer = self.settings.writer
        never = self.step + 1
        left = [episode for group in self.pool.groups for episode in group.ended]
        writer.move_to_step([episode.episode_id for episode in left], never)
        for episode in left:
            moved = episode.model_copy(update={"step": never})
            writer.put(*untrained_entries(moved, "abandoned"))
        self.pool.groups.clear()

    # Looking

    def agree(self, client_id: str) -> tuple[bool, str]:
        """Take a client's consent to train what was collected. Returns whether, and why not."""
        rule = self.pool.goal.rule
        if rule not in ("any_client", "all_clients"):
            return False, f"the step ends by its own rule (swarm.collect: {rule})"
        if not self.is_collecting:
            return False, "no step is being collected"
        if not self.clients.took_part(client_id):
            return False, "this client has ended no episode since the last update"
        self.pool.agreed.add(client_id)
        self._changed.set()
        return True, ""

    def status(self, clients: tuple[ClientInfo, ...]) -> SwarmStatus:
        """See `SwarmHost.status`."""
        settings = self.settings
        goal = self.pool.goal
        state = self.board.state
        waiting = {
            "updating": f"step {self.step} is being trained",
            "saving": "a checkpoint is being written",
            "finished": "the training is finished",
            "closing": f"step {self.step} has enough; open episodes get a last moment",
        }.get(state)
        return SwarmStatus(
            state=state,
            run_id=settings.run_id,
            name=settings.config.experiment_name,
            directory=str(settings.config.directory),
            step=self.step,
            total_steps=settings.total,
            policy_version=settings.policy_version(),
            target=Target(rule=goal.rule, groups=goal.groups, attempts=goal.attempts),
            groups=tuple(map(_group_info, self.pool.groups)),
            open=tuple(map(_open_info, self.attempts.open.values())),
            clients=clients,
            waiting=waiting or self.pool.missing,
            ages=self._ages(),
        )

    def _ages(self) -> dict[str, int]:
        """Collected tokens by how many updates ago they were sampled."""
        version = self.settings.policy_version()
        ages: Counter[str] = Counter()
        for group in self.pool.groups:
            for episode in group.ended:
                for call in episode.calls:
                    if is_trained(call) and call.versions is not None:
                        found, counts = np.unique(version - call.versions, return_counts=True)
                        ages.update(dict(zip(map(str, found), counts.tolist(), strict=True)))
        return dict(ages)


def _at_its_version(episode: Episode) -> Episode:
    """A validation episode at the step of the only version that sampled it, if there is one."""
    versions = {call.policy_version for call in episode.calls}
    versions |= {call.last_version for call in episode.calls}
    version = versions.pop() if len(versions) == 1 else None
    if version is None:
        return episode
    return episode.model_copy(update={"step": version})


def _again(message: str) -> Refused:
    return Refused(503, "full", message, 1.0)


def _group_info(group: AttemptGroup) -> Group:
    return Group(
        group_id=group.group_id,
        task_id=group.task_id,
        kind=group.kind,
        ended=len(group.ended),
        open=len(group.open),
        size=group.size,
        rewards=tuple(episode.reward for episode in group.ended),
    )


def _open_info(attempt: OpenAttempt) -> OpenInfo:
    return OpenInfo(
        episode_id=attempt.episode_id,
        client_id=attempt.claim.client_id,
        task_id=attempt.episode.task.task_id,
        split=attempt.claim.split,
        calls=len(attempt.opened.calls),
        idle=attempt.idle(),
        idle_timeout=attempt.claim.idle_timeout,
        age=time.monotonic() - attempt.begun,
        policy_version=attempt.claimed.policy_version,
    )
