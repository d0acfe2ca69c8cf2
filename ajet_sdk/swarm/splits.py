"""Keeps the tasks of training and validation apart, whatever clients claim: a validation with a
task that was trained measures memorization."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ajet_sdk.swarm.refusals import Refused
from ajet_sdk.tasks.lineage import TaskIndex
from ajet_sdk.types import Task


class Splits:
    """The tasks of a run by split: those of its config, and those that clients bring."""

    def __init__(self, train: Iterable[Task] = (), val: Iterable[Task] = ()) -> None:
        self._train = TaskIndex(train)
        self._val = TaskIndex(val)

    def add(self, task: Task, split: str) -> None:
        """Note that a task was given out in a split."""
        index = self._val if split == "val" else self._train
        index.add(task)

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
        """Whether a task, or one with the same question, belongs to the other split."""
        other = self._train if split == "val" else self._val
        return other.find(task) is not None

    def check(self, task: Task, split: str) -> None:
        """Raise Refused for a task of the other split."""
        if not self.in_other(task, split):
            return
        if split == "val":
            raise Refused(
                409,
                "held_out",
                f"task {task.task_id} is a training task of this run, or asks the same question: a"
                " validation with it would measure memorization",
            )
        raise Refused(
            409,
            "held_out",
            f"task {task.task_id} is a validation task of this training, or asks the same"
            " question; claim it with split `val`",
        )
