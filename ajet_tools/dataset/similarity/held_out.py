"""Keeps validation tasks and their near copies out of training data."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from ajet_sdk.errors import ConfigError
from ajet_sdk.protocols import TraceReader
from ajet_sdk.tasks.lineage import clash, question_of_task, same_tasks
from ajet_sdk.trace.schema import OF_VALIDATION
from ajet_sdk.types import Task
from ajet_tools.dataset.files.writer import Writer
from ajet_tools.dataset.similarity.decontaminate import Leaks
from ajet_tools.dataset.similarity.near import NearIndex
from ajet_tools.trace.export import IMITATED, SUFFIXES, TRAINING, Exported, Format, export
from ajet_tools.trace.export.demonstrations import worthwhile_ids
from ajet_tools.trace.export.job import refuse_trace
from ajet_tools.trace.queries.base import rows

INCLUDE = "--include-validation keeps them"
KEEP = "--include-failures keeps them"
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
    of = {row["episode_id"]: row for row in rows(reader, sql, run_id)}
    sql = """
        SELECT task_id, any_value(task) AS task FROM episodes WHERE $1::VARCHAR IS NULL OR run_id = $1
        GROUP BY task_id ORDER BY task_id"""
    tasks = [_task(row["task"]) for row in rows(reader, sql, run_id)]
    same = {tasks[place].task_id for place, _ in same_tasks(tasks, held_out)}
    near = {tasks[place].task_id for place, _ in near_copies(tasks, held_out)} - same
    kept, left_out = list[str](), Counter[str]()
    for episode_id in ids:
        row = of.get(episode_id, {"validates": False, "task_id": ""})
        if row["validates"]:
            left_out[f"validation episodes; {INCLUDE}"] += 1
        elif row["task_id"] in same or row["task_id"] in near:
            is_task = "is" if row["task_id"] in same else "nearly repeats"
            left_out[f"episodes whose task {is_task} a validation task; {INCLUDE}"] += 1
        else:
            kept.append(episode_id)
    return kept, left_out


def export_rows(
    reader: TraceReader,
    /,
    episode_ids: Sequence[str],
    format: Format,
    target: Path | BinaryIO,
    run_id: str | None = None,
    *,
    include_validation: bool = False,
    include_failures: bool = False,
    **how: Any,
) -> Exported:
    """Exports as `export`, without validation tasks and near copies if the format is for training.

    Formats to imitate are without replies that were cut at their limit and without episodes that
    earned nothing. Considers the validation tasks of the run, or of all runs. Raises ConfigError if
    nothing is left, and as `export` does.
    """
    left_out = Counter[str]()
    if format in TRAINING and not include_validation:
        episode_ids, left_out = training_ids(reader, episode_ids, run_id)
    if format in IMITATED and not include_failures:
        episode_ids, failures = worthwhile_ids(reader, episode_ids, KEEP)
        left_out += failures
    how["keep_cut"] = include_failures
    if left_out and not episode_ids:
        raise ConfigError(
            "nothing to export; left out:"
            f" {'; '.join(f'{n:,} {why}' for why, n in left_out.items())}"
        )
    if (
        isinstance(target, Path)
        and format in TRAINING
        and target.suffix.lower() not in (SUFFIXES[format], "")
    ):
        done = _export_table(reader, episode_ids, format, target, **how)
    else:
        done = export(reader, episode_ids, format, target, **how)
    return replace(done, left_out={**left_out, **done.left_out})


def _export_table(
    reader: TraceReader, episode_ids: Sequence[str], format: Format, target: Path, **how: object
) -> Exported:
    """Exports in the format of the file's suffix; tokens are always Parquet."""
    if format == "tokens":
        raise ConfigError(f"tokens is written as Parquet: name the file *.parquet (got {target})")
    refuse_trace(target)
    with tempfile.SpooledTemporaryFile(max_size=32 << 20) as file, Writer(target) as writer:
        done = export(reader, episode_ids, format, file, **how)  # type: ignore[arg-type]
        file.seek(0)
        for line in file:
            writer.write(json.loads(line))
    return replace(done, path=target)


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
