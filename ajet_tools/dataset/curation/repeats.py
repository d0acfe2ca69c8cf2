"""Tasks that come more than once: with one id and two contents, in two files, with two answers, or as they are.

Of each row some 50 bytes are remembered: hashes of its text, its id, its answer and its line, and its place. Rows with
the id of another are read again.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from ajet_sdk.errors import TaskError
from ajet_sdk.tasks.json_rows import BadRows
from ajet_sdk.tasks.task_rows import Row as TaskRow
from ajet_sdk.tasks.task_rows import to_task
from ajet_tools.dataset.files.blocks import LineBlock, as_lines
from ajet_tools.dataset.files.tables import read_blocks

if TYPE_CHECKING:
    from ajet_sdk.types import Task

_MADE_ID = r"^[0-9a-f]{24}$"
"""The form of an id that a task's content gives it."""


class Tasks:
    """The rows of some files that were looked at, one file after the other."""

    def __init__(self, told: int) -> None:
        """`told`: problems of a kind that are told; the others are counted."""
        self.rows = 0
        self._told = told
        self._files: list[tuple[str, str, int]] = []
        """Name, path, and the number of the first row."""
        self._places: list[tuple[int, str, Any]] = []
        """The number of the first row of a block, its file, and its numbers."""
        self._frames: list[pl.DataFrame] = []
        self._held: list[LineBlock] = []
        """Of stdin."""
        self._has_made_ids = False

    def begin(self, name: str, path: str) -> None:
        self._files.append((name, path, self.rows))

    def add(self, block: LineBlock, tasks: pl.DataFrame) -> None:
        """Rows of that file, with what `BlockFacts.tasks` says of them."""
        text, task_id, answer = pl.col("text"), pl.col("id"), pl.col("answer")
        self._has_made_ids |= bool(tasks.select(task_id.str.contains(_MADE_ID).any()).item())
        self._frames.append(
            tasks.with_columns(block.lines.alias("line")).select(
                text=pl.when(text.is_not_null()).then(text.hash()),
                id=pl.when(task_id.is_not_null()).then(task_id.hash()),
                answer=answer.fill_null("").hash(),
                line=pl.col("line").hash(),
                is_task="is_task",
            )
        )
        self._places.append((self.rows, block.name, block.numbers))
        if self._files[-1][1] == "-":
            self._held.append(block)
        self.rows += len(block)

    def where(self, row: int) -> str:
        start, name, numbers = self._places[bisect_right(self._places, row, key=lambda entry: entry[0]) - 1]
        return LineBlock(name, pl.Series(dtype=pl.String), numbers).where(row - start)

    def file_of(self, row: int) -> int:
        return bisect_right(self._files, row, key=lambda entry: entry[2]) - 1

    def problems(self, mapping: Mapping[str, str] | None, others: Counter[str]) -> Iterator[tuple[int, str, str]]:
        """Number of a row, kind, what is wrong: the first of each kind. `others` gets how many more there are."""
        if not self._frames:
            return
        rows = pl.concat(self._frames).with_row_index("row")
        rows = rows.with_columns(file=pl.Series(np.searchsorted([n for *_, n in self._files], rows["row"], "right")))
        for row, first, name in self._of_two_contents(rows, mapping, others):
            yield row, "id", f"has the task_id {name!r} of another task, {self._at(first, row)}"
        again = _repeated(rows, "text").with_columns(
            kind=pl.when(pl.col("file") != pl.col("file_of_first"))
            .then(pl.lit("leakage"))
            .when(pl.col("answer") != pl.col("answer_of_first"))
            .then(pl.lit("contradiction"))
            .otherwise(pl.lit("duplicate"))
        )
        for kind, addition in ("leakage", ""), ("contradiction", ", but has a different answer"), ("duplicate", ""):
            some = again.filter(pl.col("kind") == kind)
            others[kind] += max(0, len(some) - self._told)
            for row, first in some.select("row", "row_of_first").head(self._told).iter_rows():
                yield row, kind, f"asks the same as {self._at(first, row)}{addition}"

    def _of_two_contents(
        self, rows: pl.DataFrame, mapping: Mapping[str, str] | None, others: Counter[str]
    ) -> Iterator[tuple[int, int, str]]:
        """Rows with the id of an earlier one that has another content, that row, and the id."""
        if self._has_made_ids and len(loose := rows.filter(pl.col("is_task") & pl.col("id").is_null())["row"]):
            made_ids = [task.task_id for _, task in self._read_again(set(loose), mapping)]
            rows = rows.with_columns(rows["id"].scatter(loose, pl.Series(made_ids, dtype=pl.String).hash()))
        again = _repeated(rows, "id").filter(pl.col("line") != pl.col("line_of_first"))
        tasks = set(again["row"]) | set(again["row_of_first"])
        known = {row: (task.task_id, _digest(task)) for row, task in self._read_again(tasks, mapping)} if tasks else {}
        pairs = zip(again["row"], again["row_of_first"], strict=True)
        conflicts = [(row, first, known[row][0]) for row, first in pairs if known[row][1] != known[first][1]]
        others["id"] += max(0, len(conflicts) - self._told)
        yield from islice(conflicts, self._told)

    def _read_again(self, wanted: Collection[int], mapping: Mapping[str, str] | None) -> Iterator[tuple[int, Task]]:
        """These rows, which are tasks."""
        chosen = np.zeros(self.rows, bool)
        chosen[list(wanted)] = True
        for _, path, start in self._files:
            for block in self._blocks(path, mapping):
                for index, row in zip(
                    indices := np.flatnonzero(chosen[start : start + len(block)]), block.rows(indices), strict=True
                ):
                    yield start + int(index), to_task(TaskRow(row.where, row.values), {})
                start += len(block)

    def _blocks(self, path: str, mapping: Mapping[str, str] | None) -> Iterator[LineBlock]:
        if path == "-":
            yield from self._held
            return
        try:
            yield from map(as_lines, read_blocks(path, mapping=mapping, bad=BadRows(skip=True)))
        except TaskError:  # it was told when the rows were read first
            return

    def _at(self, place: int, row: int) -> str:
        """A place; its file too, where that has the name of another one."""
        where, (file, row_file) = self.where(place), (Path(self._name(each)) for each in (place, row))
        is_clear = self._name(place) == self._name(row) or (file.name in where and file.name != row_file.name)
        return where if is_clear else f"{where} of {self._name(place)}"

    def _name(self, row: int) -> str:
        return self._files[self.file_of(row)][0]


def _repeated(rows: pl.DataFrame, column: str) -> pl.DataFrame:
    """The rows with a value that an earlier one has, each with the first such row."""
    known = rows.filter(pl.col(column).is_not_null())
    is_first = known[column].is_first_distinct()
    again = known.filter(~is_first)
    firsts = known.filter(is_first).join(again, on=column, how="semi")
    return again.join(firsts, on=column, how="left", suffix="_of_first", maintain_order="left")


def _digest(task: Task) -> bytes:
    content = task.model_dump(exclude={"task_id"})
    content["metadata"].pop("provenance", None)
    return hashlib.blake2b(json.dumps(content, sort_keys=True, default=str).encode(), digest_size=8).digest()
