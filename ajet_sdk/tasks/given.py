"""Tasks that a caller gives in Python: objects, rows, a table, a file, a dataset of the hub."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ajet_sdk.errors import TaskError
from ajet_sdk.tasks.huggingface import path_rows
from ajet_sdk.tasks.task_rows import Row
from ajet_sdk.types import Json, JsonView, Task

if TYPE_CHECKING:
    from typing import TypeAlias

    GivenTasks: TypeAlias = Iterable[Task | JsonView] | str | os.PathLike[str] | Any
    """Tasks, or rows as a file of tasks has them; a table (pandas, polars, pyarrow); a `datasets.Dataset`; a path."""

_ACCEPTED = "a list of dicts or Tasks, a DataFrame (pandas or polars), a datasets.Dataset, or the path of a file"


def given_rows(tasks: GivenTasks, name: str = "tasks") -> Iterator[Row]:
    """The rows of what a caller gave as `name`. Raises TaskError where it can't hold tasks."""
    if isinstance(tasks, str | os.PathLike):
        return path_rows(Path(tasks).expanduser(), os.fspath(tasks))
    if isinstance(tasks, Mapping):
        inside = ", ".join(map(str, list(tasks)[:8])) or "nothing"
        raise TaskError(f"{name} is a single mapping (of {inside}); pass {_ACCEPTED}, such as {name}=data['train']")
    given: Any = tasks
    if hasattr(given, "collect_schema") and hasattr(given, "collect"):  # a lazy frame
        given = given.collect()
    if hasattr(given, "__arrow_c_stream__"):
        given = _table_rows(given)
    elif hasattr(given, "to_dict") and hasattr(given, "columns"):  # a pandas without Arrow's protocol
        given = given.to_dict("records")
    if not isinstance(given, Iterable):
        raise TaskError(f"{name} must be {_ACCEPTED} (got {type(tasks).__name__})")
    return (Row(f"{name}[{number}]", values) for number, values in enumerate(given))


def _table_rows(table: object) -> Iterator[Json]:
    """The rows of a table of any library that speaks Arrow; a pandas index is none of its columns."""
    import pyarrow as pa

    for batch in pa.table(table).to_batches():
        for row in batch.to_pylist():
            yield {name: value for name, value in row.items() if not name.startswith("__index_level_")}
