"""Keeps the tasks of training and validation apart, whatever clients claim: a validation with a
task that was trained measures memorization."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ajet_sdk.swarm.refusals import Refused
from ajet_sdk.tasks.lineage import Descent, TaskIndex, roots_of, seeds_of
from ajet_sdk.types import Task


class Splits:
    """The tasks of a run by split: those of its config, and those that clients bring."""

    def __init__(self, train: Iterable[Task] = (), val: Iterable[Task] = ()) -> None:
        self._train = TaskIndex()
        self._val = TaskIndex()
        self._train_sources: set[str] = set()
        """Ids of the tasks that training tasks were made of."""
        self._val_ids: set[str] = set()
        """Ids by which a training task may name a validation task as its source."""
        for task in train:
            self.add(task, "train")
        for task in val:
            self.add(task, "val")

    def add(self, task: Task, split: str) -> None:
        """Note that a task was given out in a split."""
        if split == "val":
            self._val.add(task)
            self._val_ids |= Descent.of(task).ids
        else:
            self._train.add(task)
            self._train_sources |= _sources_of(task)

    def restore(self, given_out: Sequence[tuple[Task, str]]) -> None:
        """Note the tasks that were given out before a restart, with their splits.

        A training task that a client used for a validation, which did not count, stays one.
        """
        for task, split in given_out:
            if split != "val":
                self.add(task, split)
        for task, split in given_out:
            if split == "val" and not self.in_other(task, split):
                self.add(task, split)

    def in_other(self, task: Task, split: str) -> bool:
        """Whether a task, or one with the same question, belongs to the other split, or one of the
        two was made of the other (`provenance`)."""
        if split == "val":
            is_source = not self._train_sources.isdisjoint(Descent.of(task).ids)
            return is_source or self._train.find(task) is not None
        is_made = not self._val_ids.isdisjoint(_sources_of(task))
        return is_made or self._val.find(task) is not None

    def check(self, task: Task, split: str) -> None:
        """Raise Refused for a task of the other split."""
        if not self.in_other(task, split):
            return
        if split == "val":
            raise Refused(
                409,
                "held_out",
                f"task {task.task_id} is a training task of this run, asks the same question, or is the"
                " source of one: a validation with it would measure memorization",
            )
        raise Refused(
            409,
            "held_out",
            f"task {task.task_id} is a validation task of this training, asks the same question, or"
            " was made of one; claim it with split `val`",
        )


def _sources_of(task: Task) -> frozenset[str]:
    return seeds_of(task.metadata) | roots_of(task.metadata)
