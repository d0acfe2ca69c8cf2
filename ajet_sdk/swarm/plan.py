"""Which attempts a worker makes, in which order."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ajet_sdk.judges.call import is_group_judge
from ajet_sdk.rollout.judging import Group
from ajet_sdk.swarm.messages import EpisodeSplit
from ajet_sdk.swarm.work import Work
from ajet_sdk.types import Task

Decoding = Literal["sampled", "greedy"]

GROUP_WAIT = 10.0
"""Seconds that a further attempt of a group waits for its place, while the others wait for it."""


class Members:
    """The attempts at a task that run here and that a group judge compares.

    The attempts of the next group of the same task begin when these are over, as the server would
    mix them.
    """

    def __init__(self, judge: object, size: int, before: Members | None) -> None:
        self.group = Group(judge, size)
        self.first_claimed = asyncio.Event()
        """Set once the first attempt has its place, or has given it up."""
        self.over = asyncio.Event()
        self.before = before
        self._left = size

    async def take_turn(self, number: int) -> float | None:
        """Wait until an attempt may be claimed; returns the seconds that it may wait for its place
        then: the first one without a limit, the others as the first one waits for them."""
        if self.before is not None:
            await self.before.over.wait()
            self.before = None
        if number == 0:
            return None
        await self.first_claimed.wait()
        return GROUP_WAIT

    def leave(self) -> None:
        """Note that an attempt is over."""
        self._left -= 1
        self.group.leave()
        self.first_claimed.set()
        if not self._left:
            self.over.set()


@dataclass(frozen=True, eq=False)
class Piece:
    """An attempt to make; `task` is None for one that the server chooses."""

    task: Task | None = None
    split: EpisodeSplit = "train"
    number: int = 0
    decoding: Decoding | None = None
    members: Members | None = None
    """The attempts that a group judge compares with it."""
    validates: int | None = None
    """Of a validation during the training: the steps done when it was planned."""


class Plan:
    """The attempts of a worker: those of a validation that is due first."""

    def __init__(self, work: Work, attempts: int, order: str) -> None:
        """`attempts` at each task; workers with another `order` begin with other tasks."""
        self._work = work
        self._attempts = attempts
        self._order = order
        self._members = dict[str, Members]()
        """The newest group of each task, for group judges."""
        self._validations: deque[Piece] = deque()
        self._validated = -1
        """Steps done at the newest validation."""
        self._pieces = self._all()

    def next_piece(self) -> Piece | None:
        """The next attempt; None: there are no more."""
        return self.next_validation() or next(self._pieces, None)

    def next_validation(self) -> Piece | None:
        """The next attempt of a validation that is due, if any is left."""
        return self._validations.popleft() if self._validations else None

    def _all(self) -> Iterator[Piece]:
        work = self._work
        if work.tasks is None:
            yield from itertools.repeat(Piece(split=work.split))
            return
        if work.split == "val":
            for task in work.tasks:
                yield from self._attempts_at(task)
            return
        for epoch in itertools.count():
            order = list(work.tasks)
            # Workers with the same tasks begin with different ones.
            seed = f"{work.config.trainer_common.seed}/{self._order}/{epoch}"
            random.Random(seed).shuffle(order)
            for task in order:
                yield from self._attempts_at(task)

    def _attempts_at(self, task: Task) -> Iterator[Piece]:
        work = self._work
        members: Members | None = None
        if is_group_judge(work.judge):
            before = self._members.get(task.task_id)
            members = Members(work.judge, self._attempts, before)
            self._members[task.task_id] = members
        for number in range(self._attempts):
            yield Piece(task, work.split, number, members=members)

    def validate(self, done: int, *, is_last: bool = False) -> bool:
        """Add the attempts of a validation after `done` steps, if one is due, as after the last
        step; returns whether it is.

        It is also due if the step at which it was due has passed, with the attempts of others.
        """
        common = self._work.config.trainer_common
        frequency = common.test_freq
        due = common.val_before_train
        if done > 0:
            due = frequency > 0 and done // frequency > max(self._validated, 0) // frequency
        due = due or is_last
        if not self._work.val_tasks or not due or self._validated >= done:
            return False
        self._validated = done
        for task in self._work.val_tasks:
            for number in range(self._work.config.validation_attempts):
                sampled = Piece(task, "val", number, "sampled", validates=done)
                self._validations.append(sampled)
            self._validations.append(Piece(task, "val", 0, "greedy", validates=done))
        return True

    @property
    def validation_size(self) -> int:
        """Number of attempts of a validation."""
        return len(self._work.val_tasks) * (self._work.config.validation_attempts + 1)
