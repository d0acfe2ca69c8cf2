"""The few rows that a dataset grows from: read, told apart, and fit for a prompt."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from pathlib import Path

from ajet_sdk.errors import TaskError
from ajet_sdk.tasks.rows import Row as TaskRow
from ajet_sdk.tasks.rows import to_task
from ajet_tools.dataset.drawing import Example
from ajet_tools.dataset.shape import OURS, query_of
from ajet_tools.dataset.tables import Row, read, text_of

__all__ = ["as_example", "read_seeds", "task_id_of"]

log = logging.getLogger("ajet.dataset")

LARGEST = 64 << 10
"""Characters of a seed as JSON: several of them stand in each prompt."""


def read_seeds(path: str | Path, *, mapping: dict[str, str] | None = None, skip_bad: bool = False) -> list[Row]:
    """The seeds of a file, each once. Raises TaskError where there are fewer than two, or one is no seed."""
    return chosen(read(path, mapping=mapping, skip_bad=skip_bad), str(path), skip_bad=skip_bad)


def chosen(rows: Iterable[Row], name: str, *, skip_bad: bool = False) -> list[Row]:
    """Those of the rows that are seeds: no row twice, none too long, none without a question."""
    seeds: dict[str, Row] = {}
    read_rows = 0
    for row in rows:
        read_rows += 1
        problem = _problem(row)
        if problem is None:
            seeds.setdefault(_content(row), row)
        elif skip_bad:
            log.warning("%s %s: skipped", row.where, problem)
        else:
            raise TaskError(f"{row.where} {problem}. --skip-bad-rows leaves such rows out")
    if read_rows == 0:
        raise TaskError(f"{name} is empty: a dataset grows from at least 2 seeds, better 5 or more")
    if len(seeds) < 2:
        what = "has one row" if read_rows == 1 else f"has {read_rows} rows, which are one and the same"
        if read_rows > 1 and not seeds:
            what = "has no row that can be a seed"
        raise TaskError(f"{name} {what}: a dataset grows from at least 2 different seeds, better 5 or more")
    if len(seeds) < read_rows:
        log.warning("%d of %d seeds are there more than once or were skipped", read_rows - len(seeds), read_rows)
    return list(seeds.values())


def task_id_of(values: dict[str, object]) -> str:
    """The id of the task that a row is; provenance is no part of it."""
    return to_task(TaskRow("row", {k: v for k, v in values.items() if k != "provenance"}), {}).task_id


def as_example(row: Row) -> Example:
    return Example.of(task_id_of(row.values), row.values, text_of(row.values))


def _problem(row: Row) -> str | None:
    size = len(json.dumps(row.values, ensure_ascii=False, default=str))
    if size > LARGEST:
        long = f"{size / 1e6:.1f} MB" if size > 500_000 else f"{size:,} characters"
        return f"is {long} long; a seed stands in every prompt and may have {LARGEST:,} characters"
    name = query_of(row.values)
    if name is not None and not row.values[name].strip():
        return f"asks nothing: {name} is empty"
    if not text_of(row.values).strip():
        return "asks nothing: it has no text at all (--map COLUMN=main_query names the question)"
    return None


def _content(row: Row) -> str:
    return json.dumps({k: v for k, v in row.values.items() if k not in OURS}, sort_keys=True, default=str)
