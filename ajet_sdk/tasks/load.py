"""Loads a job's tasks from its task reader, or from Python (objects, rows, a table, a path).

The reader `random_dummy` generates sums, for testing a setup without a dataset.
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ajet_sdk.config.config import Config
from ajet_sdk.environments.client import task_ids
from ajet_sdk.errors import ConfigError, TaskError
from ajet_sdk.tasks.huggingface import path_rows, read_huggingface
from ajet_sdk.tasks.jsonl import read_jsonl
from ajet_sdk.tasks.lineage import HELD_OUT, Descent, descended, same_tasks, seeds_of, splits_of
from ajet_sdk.tasks.row_pictures import unreadable_files
from ajet_sdk.tasks.task_rows import Row, to_task
from ajet_sdk.types import Json, JsonView, Task

if TYPE_CHECKING:
    from typing import TypeAlias

    GivenTasks: TypeAlias = Iterable[Task | JsonView] | str | os.PathLike[str] | Any
    """Tasks, or rows as in a file of tasks; a table (pandas, polars, pyarrow); a
    `datasets.Dataset`; a path."""

log = logging.getLogger("ajet.tasks")


@dataclass(frozen=True)
class TaskSets:
    """Disjoint training and validation tasks of a job."""

    train: list[Task]
    val: list[Task]


def load_tasks(
    config: Config, tasks: GivenTasks | None = None, val_tasks: GivenTasks | None = None
) -> TaskSets:
    """Load the training and validation tasks of `task_reader`.

    `tasks` replace both, `val_tasks` the validation tasks. Raises TaskError for a row that is no
    task (with file and line), for an id of two different tasks, and for a task in both splits;
    ConfigError without a source.
    """
    train_rows, val_rows = (
        (given_rows(tasks), iter(())) if tasks is not None else _reader(config)(config)
    )
    if val_tasks is not None:
        val_rows = given_rows(val_tasks, "val_tasks")
    train, val = (
        _collect(rows, config.task_reader.field_mapping) for rows in (train_rows, val_rows)
    )
    if not train:
        raise TaskError(
            f"there are no training tasks: {_source(config, tasks)} has no rows. Each row of a task"
            ' file is a JSON object, such as {"question": "What is 2 + 3?", "answer": "5"}'
        )
    _check_apart(train, val)
    return TaskSets(train=[task for task, _ in train], val=[task for task, _ in val])


def _source(config: Config, tasks: GivenTasks | None) -> str:
    """Where the training tasks come from, for messages."""
    if isinstance(tasks, str | os.PathLike):
        return os.fspath(tasks)
    if tasks is not None:
        return "the given list"
    reader = config.task_reader
    if reader.type == "jsonl_dataset_file" and reader.jsonl_dataset_file.training.file_path:
        return str(reader.jsonl_dataset_file.training.file_path)
    return f"the source of task_reader ({reader.type})"


_ACCEPTED = (
    "a list of dicts or Tasks, a DataFrame (pandas or polars), a datasets.Dataset, or the path of a"
    " file"
)


def given_rows(tasks: GivenTasks, name: str = "tasks") -> Iterator[Row]:
    """Reads rows from a caller's argument `name`. Raises TaskError for unsupported types."""
    if isinstance(tasks, str | os.PathLike):
        return path_rows(Path(tasks).expanduser(), os.fspath(tasks))
    if isinstance(tasks, Mapping):
        inside = ", ".join(map(str, list(tasks)[:8])) or "nothing"
        raise TaskError(
            f"{name} is a single mapping (of {inside}); pass {_ACCEPTED}, such as"
            f" {name}=data['train']"
        )
    given: Any = tasks
    if hasattr(given, "collect_schema") and hasattr(given, "collect"):  # a lazy frame
        given = given.collect()
    if hasattr(given, "__arrow_c_stream__"):
        given = _table_rows(given)
    elif hasattr(given, "to_dict") and hasattr(
        given, "columns"
    ):  # a pandas without Arrow's protocol
        given = given.to_dict("records")
    if not isinstance(given, Iterable):
        raise TaskError(f"{name} must be {_ACCEPTED} (got {type(tasks).__name__})")
    return (Row(f"{name}[{number}]", values) for number, values in enumerate(given))


def _table_rows(table: object) -> Iterator[Json]:
    """Yields rows of any table with Arrow's protocol, without a pandas index."""
    import pyarrow as pa

    for batch in pa.table(table).to_batches():
        for row in batch.to_pylist():
            yield {
                name: value for name, value in row.items() if not name.startswith("__index_level_")
            }


_Reader = Callable[["Config"], tuple[Iterator[Row], Iterator[Row]]]

_GROUP = "ajet.task_readers"
"""Entry points of readers in other packages."""

_TOOLKIT = "ajet_tools.dataset"
_MADE = {
    "data_generation": "readers:read_generated",
    "growing": "growing:read_growing",
    "growth": "growing:Growing",
    "tracing": "readers:read_traced",
}
"""The toolkit's readers, for a checkout without installed entry points."""


def _reader(config: Config) -> _Reader:
    kind = config.task_reader.type
    reader: _Reader = _plugged_in(kind, config) if kind in _MADE else _READERS.get(kind, _custom)
    return reader


def read_environment(config: Config) -> tuple[Iterator[Row], Iterator[Row]]:
    """Reads task ids of both splits from `task_reader.env_service`."""
    service = config.task_reader.env_service

    def rows(split: str | None) -> Iterator[Row]:
        if split:
            ids = task_ids(service.env_url, service.env_type, split)
        else:
            ids = []
        for number, task in enumerate(ids, 1):
            yield Row(
                f"{split} task {number} of {service.env_type}",
                {"task_id": task, "env_type": service.env_type},
            )

    return rows(service.training_split), rows(service.validation_split)


def _custom(config: Config) -> tuple[Iterator[Row], Iterator[Row]]:
    """Reads tasks with a user's reader class, `task_reader.type`."""
    path = config.task_reader.type
    reader_class: object = config.load(path)
    methods = ("get_training_tasks", "get_validation_tasks")
    if not isinstance(reader_class, type) or not all(
        hasattr(reader_class, name) for name in methods
    ):
        raise ConfigError(
            f"task_reader.type: {path} ({config.origin('task_reader.type')}) is not a task reader:"
            f" a class that takes the section task_reader and has {' and '.join(methods)}, for"
            " example derived from BaseTaskReader"
        )
    reader = reader_class(config.task_reader)

    def rows(name: str) -> Iterator[Row]:
        for number, task in enumerate(getattr(reader, name)(), 1):
            values = task.model_dump() if isinstance(task, Task) else task
            yield Row(f"{path}.{name} task {number}", values)

    return rows(methods[0]), rows(methods[1])


def open_growth(config: Config, run_id: str) -> Any:
    """Opens the `Growth` that adds tasks during training; None unless `task_reader.type` is
    `growing`."""
    if config.task_reader.type != "growing":
        return None
    if config.backbone != "local" or config.trainer_common.algorithm.stored:
        raise ConfigError(
            f"task_reader.type: growing ({config.origin('task_reader.type')}) is for backbone:"
            " local, with an algorithm that learns from episodes of its own; elsewhere grow the"
            " tasks first (type: data_generation)"
        )
    return _plugged_in("growth", config)(config, run_id)


def _plugged_in(kind: str, config: Config) -> Any:
    """Loads a reader from a higher package, only if a job needs it."""
    for entry in entry_points(group=_GROUP, name=kind):
        return entry.load()
    module, _, name = _MADE[kind].partition(":")
    try:
        return getattr(import_module(f"{_TOOLKIT}.{module}"), name)
    except ModuleNotFoundError as error:
        if not _TOOLKIT.startswith(str(error.name)):
            raise
        raise ConfigError(
            f"task_reader.type: {config.task_reader.type} ({config.origin('task_reader.type')})"
            f" makes tasks with the dataset toolkit, which is not installed (no {error.name})."
            ' Install ajet as a whole, with: pip install "ajet[tools]"'
        ) from error


def _collect(rows: Iterator[Row], mapping: Mapping[str, str]) -> list[tuple[Task, str]]:
    """Converts rows to tasks, with their locations."""
    tasks: list[tuple[Task, str]] = []
    first_of: dict[str, tuple[Task, str]] = {}
    for row in rows:
        task = to_task(row, mapping)
        known, place = first_of.setdefault(task.task_id, (task, row.where))
        if known != task:
            raise TaskError(
                f"{row.where}: task_id {task.task_id!r} is already used for another task in {place}"
            )
        tasks.append((task, row.where))
    return tasks


def _check_apart(train: list[tuple[Task, str]], val: list[tuple[Task, str]]) -> None:
    """Raises TaskError if a training task is a validation task, has the same question, or was
    derived from one."""
    if not val:
        return
    _warn_of_unreadable_pictures([*train, *val])
    tasks = [task for task, _ in train]
    places = {task.task_id: where for task, where in val}
    shared = [
        (place, same.task_id, _how(tasks[place], same))
        for place, same in same_tasks(tasks, (t for t, _ in val))
    ]
    val_tasks = [task for task, _ in val]
    if any(seeds_of(task.metadata) for task in tasks):
        for place, held_out in descended([*map(Descent.of, tasks)], [*map(Descent.of, val_tasks)]):
            shared.append((place, val_tasks[held_out].task_id, "was made of it (provenance)"))
    if shared:
        place, task_id, how = min(shared)
        different = len({seed for seed, _, _ in shared})
        count = "1 task" if different == 1 else f"{different:,} tasks"
        raise TaskError(
            f"training and validation share {count}, the first with task_id {task_id!r}:"
            f" {train[place][1]} {how} ({places[task_id]}); validation would measure memorization:"
            " remove them from one split"
        )
    derived = sum(HELD_OUT in splits_of(task.metadata) for task in tasks)
    if derived:
        log.warning(
            "%d training tasks were made of validation tasks of an earlier run (provenance.splits);"
            " none of them is a validation task of this job, but its results must not be compared"
            " with those of that run",
            derived,
        )
    _warn_of_near_copies(train, val)


def _warn_of_unreadable_pictures(tasks: list[tuple[Task, str]]) -> None:
    """Warns of tasks whose pictures are told by the names of their files alone. It is no error: the
    agent may find them elsewhere."""
    problems: list[str] = []
    for task, where in tasks:
        for problem in unreadable_files([task.metadata, task.init_messages]):
            problems.append(f"{where} {problem}")
    if problems:
        log.warning(
            "%d pictures of tasks are compared by their names, to keep training and validation"
            " apart, the first: %s",
            len(problems),
            problems[0],
        )


def _how(task: Task, same: Task) -> str:
    if task.task_id == same.task_id:
        return "is a validation task"
    return "asks what a validation task asks"


def _warn_of_near_copies(train: list[tuple[Task, str]], val: list[tuple[Task, str]]) -> None:
    """Warns of near copies, which may be different tasks. Needs the dataset toolkit."""
    try:
        find = import_module(f"{_TOOLKIT}.similarity.held_out").near_copies
    except ModuleNotFoundError:
        return
    pairs: list[tuple[int, int]] = find([task for task, _ in train], [task for task, _ in val])
    if pairs:
        [(index, val_index), *_] = pairs
        log.warning(
            "%d of %d training tasks nearly repeat a validation task, the first: %s and %s. "
            "`ajet dataset dedup --against` shows and removes them",
            *(len(pairs), len(train), train[index][1], val[val_index][1]),
        )


LARGEST = 999


def read_random(config: Config) -> tuple[Iterator[Row], Iterator[Row]]:
    """Generates distinct sums of two numbers by random seed.

    `metadata["random_number"]` is unique for each task, for workflows that generate their task from
    it.
    """
    sizes = config.task_reader.random_dummy
    count = sizes.training + sizes.validation
    pairs = random.Random(config.trainer_common.seed).sample(range((LARGEST + 1) ** 2), count)
    rows = [_row(number, pair) for number, pair in enumerate(pairs, 1)]
    return iter(rows[: sizes.training]), iter(rows[sizes.training :])


def _row(number: int, pair: int) -> Row:
    a, b = divmod(pair, LARGEST + 1)
    query = f"What is {a} + {b}?"
    return Row(
        f"random task {number}", {"main_query": query, "answer": str(a + b), "random_number": pair}
    )


_READERS: dict[str, _Reader] = {
    "jsonl_dataset_file": read_jsonl,
    "huggingface_dat_repo": read_huggingface,
    "random_dummy": read_random,
    "env_service": read_environment,
}
