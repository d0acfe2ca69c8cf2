"""Facts about a row for `validate`: what it asks and answers, and its problems."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ajet_sdk.errors import TaskError
from ajet_sdk.tasks.questions import SYSTEM, Reading, without_system
from ajet_sdk.tasks.row_names import QUERY_COLUMNS
from ajet_sdk.tasks.task_rows import to_task
from ajet_tools.dataset.curation.forms import given_away, normalize
from ajet_tools.dataset.files.blocks import Row
from ajet_tools.dataset.files.values import kind_of
from ajet_tools.dataset.prompts import runs_of_prompts

if TYPE_CHECKING:
    from ajet_sdk.types import Task

_PLAIN: Mapping[str, tuple[str, ...]] = {
    "main_query": ("text", "null"),
    "init_messages": ("null",),
    "env_type": ("text", "null"),
    "task_id": ("text", "integer", "null"),
    "metadata": ("object", "null"),
}
"""A row with a question and these kinds of values is a task."""
_SIGNS = {"text": "s", "integer": "i", "bool": "b"}
_OTHER = "j"
_ENCODE = json.JSONEncoder(ensure_ascii=False).encode


@dataclass(frozen=True)
class RowFacts:
    problems: list[tuple[str, str]]
    """Kind of problem and message."""
    is_task: bool
    text: str | None
    """The question with its context in normal form; None if it is blank."""
    asked: str | None
    """The same without a system prompt."""
    task_id: str | None
    """The id that the row gives itself."""
    answer: str | None
    """The answer as JSON, after a letter for its kind."""


def facts_of(row: Row, reading: Reading) -> RowFacts:
    text = reading.text
    problems: list[tuple[str, str]] = []
    excerpt = given_away(reading)
    if excerpt is not None:
        problems.append(("given away", f"contains its answer: {excerpt}"))
    excerpt = runs_of_prompts().first_in(text)
    if excerpt is not None:
        problems.append(("prompt", f"repeats words of a generation prompt: {excerpt}"))
    problem = None
    if not _is_plain_task(row.values):
        problem = _problem_of_task(row)
    if problem is not None:
        problems.append(problem)
    form = normalize(text) or None
    asked = form
    if form is not None and SYSTEM in text:
        asked = normalize(without_system(text))
    answer = None
    if reading.truths:
        truth = reading.truths[0]
        sign = _SIGNS.get(kind_of(truth), _OTHER)
        answer = sign + json.dumps(truth, sort_keys=True, default=str)
    task_id = row.values.get("task_id")
    has_id = task_id not in (None, "") and problem is None
    return RowFacts(
        problems=problems,
        is_task=problem is None,
        text=form,
        asked=asked,
        task_id=str(task_id) if has_id else None,
        answer=answer,
    )


def _is_plain_task(values: Mapping[str, object]) -> bool:
    """Whether a row is sure to be a task, without making one, which takes ten times as long."""
    for name, plain in _PLAIN.items():
        if name in values and kind_of(values[name]) not in plain:
            return False
    for name in QUERY_COLUMNS:
        query = values.get(name)
        if isinstance(query, str):
            return bool(query.strip()) and _is_encodable(_ENCODE(values))
    return False


def _is_encodable(text: str) -> bool:
    """Whether no text is half of a surrogate pair, of which no id can be made."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _problem_of_task(row: Row) -> tuple[str, str] | None:
    """Returns why a row is no task, as the kind of problem and a message."""
    try:
        task: Task = to_task(row, {})
    except TaskError as error:
        return "no task", str(error).removeprefix(f"{row.where}: ").removeprefix(f"{row.where} ")
    if not (task.main_query.strip() or task.init_messages or task.env_type):
        columns = ", ".join(row.values)
        return (
            "asks nothing",
            f"has no main_query and no init_messages; it has {columns} (filter --map)",
        )
    return None
