"""What `validate` asks of rows: their kinds of values, whether they are tasks, what tells one task from another."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import polars as pl

from ajet_sdk.errors import TaskError
from ajet_sdk.tasks.rows import Row as TaskRow
from ajet_sdk.tasks.rows import to_task
from ajet_tools.dataset.files.blocks import Block, Row, encodable, text_of
from ajet_tools.dataset.files.hashes import normalize
from ajet_tools.dataset.files.values import kind_of
from ajet_tools.dataset.prompts import repeated, wording
from ajet_tools.dataset.rows.forms import given_away

if TYPE_CHECKING:
    from ajet_sdk.types import Task

_SIGNS = {"text": "s", "integer": "i", "bool": "b"}
_OTHER = "j"
_TASKS = pl.Schema({"text": pl.String, "id": pl.String, "answer": pl.String, "is_task": pl.Boolean})


@dataclass(frozen=True)
class BlockFacts:
    """What is known of the rows of a block."""

    kinds: list[tuple[int, dict[str, str], int]]
    """Kinds of values by path: the index of the first row that has just these, the kinds, how many rows have them."""
    problems: list[tuple[int, str, str]]
    """Index of a row, kind of problem, what is wrong."""
    tasks: pl.DataFrame
    """Of each row: `text`, what it asks after what was said before, in its normal form; `id`, the task id that it
    brings; `answer`; null for nothing. `is_task` is false where it is none."""


def facts_of(block: Block) -> BlockFacts:
    kinds: dict[tuple[tuple[str, str], ...], tuple[int, int]] = {}
    problems: list[tuple[int, str, str]] = []
    questions: list[str] = []
    tasks: list[tuple[str | None, str | None, str | None, bool]] = []
    for index, row in enumerate(block.rows()):
        shape = tuple(_kinds_of(row.values).items())
        first, times = kinds.get(shape, (index, 0))
        kinds[shape] = first, times + 1
        questions.append(text_of(row.values))
        if (excerpt := given_away(row.values)) is not None:
            problems.append((index, "given away", f"contains its answer: {excerpt}"))
        task = _task(row)
        if isinstance(task, tuple):
            problems.append((index, *task))
            tasks.append((None, None, None, False))
        else:
            tasks.append((_asked(task, questions[-1]), _own_id(task, row.values), _answer(row.values), True))
    forms = pl.Series([encodable(normalize(text)) for text in questions], dtype=pl.String)
    for index in forms.str.contains_any(list(wording())).arg_true():
        if (excerpt := repeated(questions[index], wording())) is not None:
            problems.append((index, "prompt", f"has words of the prompt that such rows are generated with: {excerpt}"))
    return BlockFacts(
        [(first, dict(shape), times) for shape, (first, times) in kinds.items()],
        problems,
        pl.DataFrame(tasks, _TASKS, orient="row"),
    )


def _kinds_of(values: Mapping[str, Any], before: str = "") -> dict[str, str]:
    """The kinds of the columns of a row, and of the fields within them, by path; whole numbers are numbers."""
    kinds = {}
    for name, value in values.items():
        kinds[f"{before}{name}"] = kind_of(value).replace("integer", "number")
        if isinstance(value, dict) and not before:
            kinds |= _kinds_of(value, f"{name}.")
    return kinds


def _task(row: Row) -> Task | tuple[str, str]:
    """The task that a row is, or why it is none."""
    try:
        task = to_task(TaskRow(row.where, row.values), {})
    except TaskError as error:
        return "no task", str(error).removeprefix(f"{row.where}: ").removeprefix(f"{row.where} ")
    if not (task.main_query.strip() or task.init_messages or task.env_type):
        columns = ", ".join(row.values)
        return "asks nothing", f"has no main_query and no init_messages; it has {columns} (--map)"
    return task


def _asked(task: Task, text: str) -> str | None:
    """A question, with what was said before it."""
    before = task.init_messages if task.main_query else task.init_messages[:-1]
    return (
        encodable(normalize(f"{text}\n{json.dumps(before, default=str)}" if before else text)) if text.strip() else None
    )


def _own_id(task: Task, values: Mapping[str, Any]) -> str | None:
    return encodable(task.task_id) if values.get("task_id") not in (None, "") else None


def _answer(values: Mapping[str, Any]) -> str | None:
    """The answer, with a sign of its kind."""
    metadata = values.get("metadata")
    value = (metadata if isinstance(metadata, Mapping) and "answer" in metadata else values).get("answer")
    if value is None:
        return None
    sign = _SIGNS.get(kind_of(value), _OTHER)
    text = value if sign == "s" else json.dumps(value, sort_keys=True, default=str)
    return encodable(sign + text)
