"""The groups that a training step takes: those that are done first, if `rollout.carry_over` allows
others to come later.

Groups are begun in batches of one per task, batch k for step k. With a carry-over of C the sampler
runs C steps less ahead of the trainer, and each group has C steps more until it is awaited: step k
takes the first groups that are done, whichever batch they are of, and waits for those of batch
k - C only. Every group is trained exactly once, so nothing is chosen by how long it took.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from heapq import nlargest
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ajet_sdk.backbones.shared.steps import Rollout, Rollouts
    from ajet_sdk.reporting.loggers import Display
    from ajet_sdk.types import Episode


class GroupPlace(NamedTuple):
    """Where a group stands in the order of tasks."""

    batch: int
    """The step that it was begun for, from 1."""
    position: int


def groups_of_step(
    step: int, size: int, carry_over: int, in_flight: Mapping[GroupPlace, bool]
) -> list[GroupPlace] | None:
    """The `size` groups that a step trains; None while it has to wait.

    `in_flight` says of each group that was begun and not trained whether it is done. Earlier groups
    go first.
    """
    ready = []
    for place in sorted(in_flight):
        if in_flight[place]:
            ready.append(place)
        elif place.batch + carry_over <= step:
            return None
    return ready[:size] if len(ready) >= size else None


class TakenGroups:
    """The groups that were trained: every one of the batches up to `whole`, and those `beyond`."""

    def __init__(self, size: int, whole: int = 0, beyond: Iterable[GroupPlace] = ()) -> None:
        self._size = size
        self.whole = whole
        self.beyond = set(beyond)

    def add(self, places: Iterable[GroupPlace]) -> None:
        """Add the groups of a step."""
        self.beyond.update(places)
        while not self.left(self.whole + 1):
            self.whole += 1
            self.beyond = {place for place in self.beyond if place.batch > self.whole}

    def left(self, batch: int) -> list[int]:
        """The positions of a batch that were not trained."""
        if batch <= self.whole:
            return []
        return [n for n in range(self._size) if GroupPlace(batch, n) not in self.beyond]


class SampledSteps:
    """The steps of a run that samples its own tasks."""

    def __init__(self, rollouts: Rollouts) -> None:
        config = rollouts.job.config
        self.size = config.data.train_batch_size
        self.repeats = config.rollout.num_repeat
        self.taken = TakenGroups(self.size)
        self._rollouts = rollouts
        self._carry_over = config.rollout.carry_over
        self._begun = 0
        """The newest batch that was begun."""
        self._groups = dict[GroupPlace, "Rollout"]()
        """Those in flight."""
        self._changed = asyncio.Event()

    def resume(self, taken: TakenGroups) -> None:
        """Go on after the groups that were trained. What else an interrupted run had begun is
        sampled again."""
        self.taken = taken
        self._begun = taken.whole

    def begin_step(self, step: int) -> SampledStep:
        """Begin the batches up to a step."""
        groups = []
        for batch in range(self._begun + 1, step + 1):
            positions = self.taken.left(batch)
            begun = self._rollouts.begin_groups(batch, positions, self._changed.set)
            for position, rollout in begun.items():
                self._groups[GroupPlace(batch, position)] = rollout
                groups.append(rollout)
        self._begun = max(self._begun, step)
        return SampledStep(self, step, groups)

    async def take(self, step: int, display: Display | None) -> list[Rollout]:
        """Wait for the groups of a step and take them; the display shows their finished episodes.
        Raises the error of any group in flight."""
        shown = 0
        while True:
            self._changed.clear()
            places = self._chosen(step)
            finished = self._finished(step)
            if display is not None:
                display.advance(finished - shown)
            shown = finished
            if places is not None:
                break
            await self._changed.wait()
        self.taken.add(places)
        return [self._groups.pop(place) for place in places]

    def _chosen(self, step: int) -> list[GroupPlace] | None:
        done = {}
        for place, rollout in self._groups.items():
            if rollout.failure is not None:
                raise rollout.failure
            done[place] = rollout.is_done
        return groups_of_step(step, self.size, self._carry_over, done)

    def _finished(self, step: int) -> int:
        """Number of finished episodes in the groups that are nearest to their end."""
        candidates = [
            rollout.finished
            for place, rollout in self._groups.items()
            if place.batch <= step or self._carry_over
        ]
        return sum(nlargest(self.size, candidates))

    def move(self, episodes: Sequence[Episode], step: int) -> list[Episode]:
        """Record episodes as those of the step that trains them."""
        moved = [episode.episode_id for episode in episodes if episode.step != step]
        if not moved:
            return list(episodes)
        self._rollouts.writer.move_to_step(moved, step)
        return [episode.model_copy(update={"step": step}) for episode in episodes]

    async def stop(self) -> None:
        """Stop the groups in flight."""
        await asyncio.gather(*(rollout.stop() for rollout in self._groups.values()))


class SampledStep:
    """A `StepBatch`: the groups that were begun for a step, and later those that it takes."""

    def __init__(self, steps: SampledSteps, step: int, groups: Sequence[Rollout]) -> None:
        self._steps = steps
        self._step = step
        self._groups = groups
        self._begun = time.perf_counter()

    async def episodes(self, display: Display | None, title: str) -> list[Episode]:
        """Wait for the groups, and return their episodes group by group. An error or a cancellation
        stops every group in flight."""
        if display is not None:
            display.begin(title, self._steps.size * self._steps.repeats)
        try:
            self._groups = await self._steps.take(self._step, display)
        except BaseException:
            await self._steps.stop()
            raise
        episodes: list[Episode] = []
        for group in self._groups:
            episodes += await group.episodes(None, "")
        return self._steps.move(episodes, self._step)

    async def stop(self) -> None:
        """Stop every group in flight, as the run ends."""
        await self._steps.stop()

    @property
    def seconds(self) -> float:
        """Duration in seconds, so far or in total."""
        return self._ended(time.perf_counter()) - self._started

    def overlap(self, begin: float, end: float) -> float:
        """Seconds of running time between two `time.perf_counter` values."""
        return max(0.0, min(end, self._ended(end)) - max(begin, self._started))

    @property
    def _started(self) -> float:
        return min((group.started for group in self._groups), default=self._begun)

    def _ended(self, now: float) -> float:
        """When the last group ended, or `now`."""
        return max((group.ended or now for group in self._groups), default=self._begun)
