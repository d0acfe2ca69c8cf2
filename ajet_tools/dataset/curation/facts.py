"""Facts about a row for `validate`: kinds of values, what it asks and answers, and its problems."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ajet_sdk.errors import TaskError
from ajet_sdk.tasks.questions import text_of, truth_of, without_system
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
    kinds: Mapping[str, str]
    """Kinds of values by path, to two levels; integers count as numbers."""
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


def facts_of(row: Row) -> RowFacts:
    text = text_of(row.values)
    problems: list[tuple[str, str]] = []
    excerpt = given_away(row.values, text)
    if excerpt is not None:
        problems.append(("given away", f"contains its answer: {excerpt}"))
    excerpt = runs_of_prompts().first_in(text)
    if excerpt is not None:
        problems.append(("prompt", f"repeats words of a generation prompt: {excerpt}"))
    kinds = kinds_of(row.values)
    if _is_plain_task(row.values, kinds):
        problem = None
    else:
        problem = _problem_of_task(row)
    if problem is not None:
        problems.append(problem)
    form = normalize(text)
    asked = normalize(without_system(text)) if form else form
    task_id = row.values.get("task_id")
    has_id = task_id not in (None, "") and problem is None
    return RowFacts(
        kinds=kinds,
        problems=problems,
        is_task=problem is None,
        text=form or None,
        asked=asked if form else None,
        task_id=str(task_id) if has_id else None,
        answer=_answer(row.values),
    )


def kinds_of(values: Mapping[str, object], before: str = "") -> dict[str, str]:
    """Returns the kinds of a row's columns and of the fields within them, by path."""
    kinds = {}
    for name, value in values.items():
        kind = kind_of(value)
        kinds[f"{before}{name}"] = "number" if kind == "integer" else kind
        if isinstance(value, dict) and not before:
            kinds |= kinds_of(value, f"{name}.")
    return kinds


def _is_plain_task(values: Mapping[str, object], kinds: Mapping[str, str]) -> bool:
    """Whether a row is sure to be a task, without making one, which takes ten times as long."""
    for name, plain in _PLAIN.items():
        if name in kinds and kind_of(values[name]) not in plain:
            return False
    queries = [value for name in QUERY_COLUMNS if isinstance(value := values.get(name), str)]
    return bool(queries and queries[0].strip()) and _is_encodable(_ENCODE(values))


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
        return "asks nothing", f"has no main_query and no init_messages; it has {columns} (--map)"
    return None


def _answer(values: Mapping[str, object]) -> str | None:
    value = truth_of(values)
    if value is None:
        return None
    sign = _SIGNS.get(kind_of(value), _OTHER)
    return sign + (value if sign == "s" else json.dumps(value, sort_keys=True, default=str))
