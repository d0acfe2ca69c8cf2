"""Keeps validation tasks and their near copies out of training data."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence

from ajet_sdk.protocols import TraceReader
from ajet_sdk.tasks.lineage import clash, question_of_task, same_tasks
from ajet_sdk.trace.schema import OF_VALIDATION
from ajet_sdk.types import Task
from ajet_tools.dataset.similarity.decontaminate import Leaks
from ajet_tools.dataset.similarity.near import NearIndex
from ajet_tools.trace.queries.base import rows

INCLUDE = "--include-validation keeps them"
_WHOLE = 1_000_000
"""A run of this many words is a whole question; phrases shared by tasks of one template don't
count."""


def near_copies(tasks: Sequence[Task], held_out: Sequence[Task]) -> list[tuple[int, int]]:
    """Returns pairs of indices of tasks and the held-out tasks they nearly repeat, ignoring
    answers."""
    index = NearIndex()
    for place, task in enumerate(held_out):
        if text := question_of_task(task):
            index.add(str(place), text)
    if not len(index):
        return []
    matches = index.find_all([question_of_task(task) for task in tasks])
    return [
        (place, int(match.key))
        for place, match in enumerate(matches)
        if match is not None
        and not (
            match.kind == "exact" and clash(tasks[place], held_out[int(match.key)], by_answer=False)
        )
    ]


def validation_tasks(reader: TraceReader, run_id: str | None = None) -> list[Task]:
    """Returns the validation tasks of a run, or of all runs of a trace."""
    sql = f"""
        SELECT task_id, any_value(task) AS task FROM episodes e
        WHERE ($1::VARCHAR IS NULL OR run_id = $1) AND {OF_VALIDATION} GROUP BY task_id ORDER BY task_id"""
    return [_task(row["task"]) for row in rows(reader, sql, run_id)]


def training_ids(
    reader: TraceReader, ids: Sequence[str], run_id: str | None = None
) -> tuple[list[str], Counter[str]]:
    """Those of the episodes that are of no validation task of the run (None: of any run), nor of a
    near copy of one.

    The others are counted, by a reason.
    """
    held_out = validation_tasks(reader, run_id)
    if not held_out:
        return list(ids), Counter()
    sql = f"""
        SELECT episode_id, task_id, {OF_VALIDATION} AS validates FROM episodes e
        WHERE $1::VARCHAR IS NULL OR run_id = $1"""
    episode_by_id = {row["episode_id"]: row for row in rows(reader, sql, run_id)}
    sql = """
        SELECT task_id, any_value(task) AS task FROM episodes WHERE $1::VARCHAR IS NULL OR run_id = $1
        GROUP BY task_id ORDER BY task_id"""
    tasks = [_task(row["task"]) for row in rows(reader, sql, run_id)]
    same = {tasks[place].task_id for place, _ in same_tasks(tasks, held_out)}
    near = {tasks[place].task_id for place, _ in near_copies(tasks, held_out)} - same
    training: list[str] = []
    left_out: Counter[str] = Counter()
    for episode_id in ids:
        row = episode_by_id.get(episode_id, {"validates": False, "task_id": ""})
        if row["validates"]:
            left_out[f"validation episodes; {INCLUDE}"] += 1
        elif row["task_id"] in same or row["task_id"] in near:
            is_task = "is" if row["task_id"] in same else "nearly repeats"
            left_out[f"episodes whose task {is_task} a validation task; {INCLUDE}"] += 1
        else:
            training.append(episode_id)
    return training, left_out


def leaks_of(held_out: Iterable[Task]) -> Leaks | None:
    """Returns a check for rows that repeat a held-out question, also altered; None without such
    questions."""
    known = [
        (f"validation task {task.task_id}", text)
        for task in held_out
        if (text := question_of_task(task))
    ]
    return Leaks(known, ngram=_WHOLE) if known else None


def _task(stored: str | dict[str, object]) -> Task:
    return Task.model_validate(json.loads(stored) if isinstance(stored, str) else stored)
