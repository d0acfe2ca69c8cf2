"""The attempts that a step collects: groups of attempts at one task, and when there are enough.

Nothing here waits or writes; the caller (`host.py`) uses a pool in one thread.

Attempts at one task share a group until it has `num_repeat` of them; the next attempt begins
another group of the same task. A group whose open attempts were lost takes new ones. Beyond the
target, a new group is only begun to replace one that nobody works at, so that a client that is gone
holds nothing up.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ajet_sdk.samples.build import has_signal
from ajet_sdk.swarm.messages import StopRule
from ajet_sdk.types import Episode, Task, new_id


@dataclass(eq=False)
class AttemptGroup:
    """Attempts at one task. `size` is the wanted number."""

    task_id: str
    size: int
    kind: str = ""
    """The kind of the task, for mixtures; empty without them."""
    task: Task | None = None
    """The server's own task; None if clients bring it."""
    position: int = 0
    """Place in its step, from which seeds follow."""
    group_id: str = field(default_factory=new_id)
    open: dict[str, int] = field(default_factory=dict)
    """The numbers of the open attempts, by the ids of their episodes."""
    ended: list[Episode] = field(default_factory=list)
    """Attempts with a result: rewarded, or failed by the agent's own fault."""

    def free_number(self) -> int:
        """The lowest number that no attempt has: that of a lost attempt is given out again."""
        taken = {*self.open.values(), *(episode.attempt for episode in self.ended)}
        return next(number for number in range(len(taken) + 1) if number not in taken)

    @property
    def is_complete(self) -> bool:
        return len(self.ended) >= self.size

    @property
    def has_room(self) -> bool:
        return len(self.ended) + len(self.open) < self.size

    @property
    def is_active(self) -> bool:
        """Whether it is complete, or someone works at it."""
        return self.is_complete or bool(self.open)

    def split_open(self) -> AttemptGroup:
        """Move the open attempts to a new group of the same task, and return it."""
        rest = AttemptGroup(self.task_id, self.size, self.kind, self.task, self.position)
        rest.open = self.open
        self.open = {}
        return rest


@dataclass(frozen=True)
class Goal:
    """When a step has enough."""

    rule: StopRule
    groups: int
    """`data.train_batch_size`."""
    attempts: int
    """`rollout.num_repeat`."""
    shares: Mapping[str, float | tuple[float, float]] = field(default_factory=dict)
    """Share of each kind of task in the groups of a step, or that of the first and the last step;
    empty: any."""


def _at(share: float | tuple[float, float], progress: float) -> float:
    if not isinstance(share, tuple):
        return share
    first, last = share
    return first + (last - first) * progress


class Pool:
    """Collected and open groups."""

    def __init__(self, goal: Goal) -> None:
        self.goal = goal
        self.groups: list[AttemptGroup] = []
        self.quotas: dict[str, int] = {}
        """Groups of each kind that the current step takes."""
        self._owed = dict.fromkeys(goal.shares, 0.0)
        self.agreed: set[str] = set()
        """Clients that have agreed to end the step."""
        self._planned: deque[Task] = deque()
        self._begun = 0
        """Groups begun in this step."""

    # Beginning a step

    def begin(self, planned: Iterable[Task] = (), progress: float = 0.0) -> None:
        """Begin a step; groups that were left by the last one stay.

        `planned` are the server's own tasks, in the order in which attempts at them are given out;
        `progress` of the run, from 0 to 1, sets shares that change over it.
        """
        self.agreed.clear()
        self._planned = deque(planned)
        self._begun = 0
        self.quotas = self._share_out(
            {kind: _at(share, progress) for kind, share in self.goal.shares.items()}
        )

    def _share_out(self, shares: Mapping[str, float]) -> dict[str, int]:
        """Divide the groups of a step by kind. What rounding takes from a kind in one step, it gets
        in a later one (largest remainder)."""
        total = math.fsum(shares.values())
        if not total:
            return {}
        wanted = {
            kind: self._owed.get(kind, 0.0) + self.goal.groups * share / total
            for kind, share in shares.items()
        }
        counts = {kind: max(0, math.floor(want)) for kind, want in wanted.items()}
        left = self.goal.groups - sum(counts.values())
        by_rest = sorted(wanted, key=lambda kind: (counts[kind] - wanted[kind], kind))
        for kind in by_rest[: max(0, left)]:
            counts[kind] += 1
        self._owed = {kind: wanted[kind] - counts[kind] for kind in wanted}
        return counts

    # Places

    def find_place(self, task_id: str, kind: str = "") -> AttemptGroup | None:
        """The group for a new attempt at a task of a client; None if the step has no place for
        it."""
        for group in self.groups:
            if group.task_id == task_id and group.has_room:
                return group
        return self._add(AttemptGroup(task_id, self.goal.attempts, kind))

    def find_own_place(self, kind_of: Callable[[Task], str]) -> AttemptGroup | None:
        """The group for a new attempt at one of the server's own tasks; None if the step has no
        place, or there are no such tasks."""
        for group in self.groups:
            if group.task is not None and group.has_room:
                return group
        for task in self._planned:
            own = AttemptGroup(task.task_id, self.goal.attempts, kind_of(task), task)
            if self._add(own) is not None:
                self._planned.remove(task)
                return own
            if not self.quotas:
                break
        return None

    def _add(self, group: AttemptGroup) -> AttemptGroup | None:
        if not self.may_begin(group.kind):
            return None
        group.position = self._begun
        self._begun += 1
        self.groups.append(group)
        return group

    def has_room(self, task_id: str, kind: str = "") -> bool:
        """Whether `find_place` finds one."""
        open_one = any(g.task_id == task_id and g.has_room for g in self.groups)
        return open_one or self.may_begin(kind)

    @property
    def is_full(self) -> bool:
        """Whether no claim at all finds a place, whatever its task."""
        if self.quotas or self.may_begin():
            return False
        return not any(group.has_room for group in self.groups)

    def has_own_room(self, kind_of: Callable[[Task], str]) -> bool:
        """Whether `find_own_place` finds one."""
        open_one = any(group.task is not None and group.has_room for group in self.groups)
        return open_one or any(self.may_begin(kind_of(task)) for task in self._planned)

    @property
    def has_own_tasks(self) -> bool:
        """Whether the server has tasks of its own."""
        return bool(self._planned) or any(group.task is not None for group in self.groups)

    @property
    def has_spare_attempts(self) -> bool:
        """Whether more attempts may begin, at any task: half as many more than the step needs, so
        that a slow one holds nothing up."""
        if self.goal.rule in ("any_client", "all_clients"):
            return True
        begun = sum(len(group.open) + len(group.ended) for group in self.groups)
        return begun < math.ceil(1.5 * self.goal.groups * self.goal.attempts)

    def may_begin(self, kind: str = "") -> bool:
        """Whether the step has room for another group of a kind."""
        active = [group for group in self.groups if group.is_active]
        if self.quotas:
            mine = sum(group.kind == kind for group in active)
            return mine < self.quotas.get(kind, 0)
        if self.goal.rule in ("any_client", "all_clients", "episodes"):
            return self.has_spare_attempts
        if self.goal.rule == "signal":
            return len(active) - self._without_signal(active) < self.goal.groups
        return len(active) < self.goal.groups

    def adopt(self, group: AttemptGroup, task_id: str, kind: str = "") -> AttemptGroup:
        """Move an attempt whose task is known only at its end to the group of its task.

        `group` has this attempt alone. There is always a place: what was sampled counts. Its number
        may change.
        """
        for other in self.groups:
            if other is not group and other.task_id == task_id and other.has_room:
                self.groups.remove(group)
                for episode_id in group.open:
                    other.open[episode_id] = other.free_number()
                return other
        group.task_id = task_id
        group.kind = kind
        group.size = self.goal.attempts
        return group

    def begin_unknown(self) -> AttemptGroup | None:
        """A group for an attempt whose task is told at its end; None if the step has no place."""
        if not self.has_spare_attempts:
            return None
        group = AttemptGroup("", 1, position=self._begun)
        self._begun += 1
        self.groups.append(group)
        return group

    def open(self, group: AttemptGroup, episode_id: str) -> int:
        """Open an attempt; returns its number in the group."""
        group.open[episode_id] = number = group.free_number()
        return number

    def group_of(self, episode_id: str) -> AttemptGroup:
        """The group of an open attempt, which may have changed since it began."""
        return next(group for group in self.groups if episode_id in group.open)

    def end(self, group: AttemptGroup, episode: Episode) -> None:
        """Add the result of an attempt."""
        group.open.pop(episode.episode_id, None)
        group.ended.append(episode)

    def free(self, group: AttemptGroup, episode_id: str) -> None:
        """Free the place of an attempt without a result."""
        group.open.pop(episode_id, None)
        if not group.open and not group.ended and group in self.groups:
            self.groups.remove(group)

    # Enough?

    @property
    def complete(self) -> list[AttemptGroup]:
        return [group for group in self.groups if group.task_id and group.is_complete]

    @staticmethod
    def _without_signal(groups: Iterable[AttemptGroup]) -> int:
        return sum(group.is_complete and not has_signal(group.ended) for group in groups)

    def is_enough(self, clients: Sequence[str] = ()) -> bool:
        """Whether the step can be trained. `clients` are those that took part in it."""
        complete = self.complete
        ended = sum(len(group.ended) for group in self.groups)
        rule = self.goal.rule
        if rule == "episodes":
            return ended >= self.goal.groups * self.goal.attempts
        if rule == "any_client":
            return bool(self.agreed) and ended > 0
        if rule == "all_clients":
            return ended > 0 and bool(clients) and self.agreed.issuperset(clients)
        if rule == "signal":
            with_signal = len(complete) - self._without_signal(complete)
            # of tasks that never differ there would otherwise be no end
            return with_signal >= self.goal.groups or len(complete) >= 4 * self.goal.groups
        if self.quotas:
            counts = Counter(group.kind for group in complete)
            return all(counts[kind] >= wanted for kind, wanted in self.quotas.items())
        return len(complete) >= self.goal.groups

    def take(self, *, partial: bool) -> list[AttemptGroup]:
        """Remove and return the groups to train, in the order in which they were begun.

        With `partial` also the ended attempts of groups that are not complete; their open attempts
        are then a group of their own, for the next step. Otherwise these groups stay as they are.
        """
        taken: list[AttemptGroup] = []
        left: list[AttemptGroup] = []
        for group in self.groups:
            if group.is_complete or (partial and group.ended):
                group.ended.sort(key=lambda episode: episode.attempt)
                taken.append(group)
                if group.open:
                    left.append(group.split_open())
            elif group.open or group.ended:
                left.append(group)
        self.groups = left
        return taken

    @property
    def missing(self) -> str:
        """One sentence: what the step waits for."""
        goal = self.goal
        ended = sum(len(group.ended) for group in self.groups)
        working = sum(len(group.open) for group in self.groups)
        if goal.rule == "episodes":
            progress = f"{ended} of {goal.groups * goal.attempts} episodes have ended"
        elif goal.rule in ("any_client", "all_clients"):
            whom = "a client" if goal.rule == "any_client" else "all clients"
            progress = (
                f"{ended} episodes have ended; {whom} must agree to train ({len(self.agreed)} did)"
            )
        else:
            with_signal = self.complete
            if goal.rule == "signal":
                with_signal = [group for group in self.complete if has_signal(group.ended)]
            if goal.rule == "signal":
                what = "groups with different rewards"
            else:
                what = "groups"
            progress = f"{len(with_signal)} of {goal.groups} {what} of {goal.attempts} are complete"
        if working:
            return f"{progress}; {working} episodes are open"
        return f"{progress}; no episode is open: no client works at it"
