"""Finds errors in a dataset before a run: invalid tasks, ids, shapes, duplicates, leakage.

An error would stop a run or teach something wrong; a warning may be intended.
"""

from __future__ import annotations

import hashlib
import json
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import polars as pl

from ajet_sdk.errors import TaskError
from ajet_sdk.tasks.json_rows import BadRows
from ajet_sdk.tasks.lineage import descended
from ajet_sdk.tasks.questions import text_of, without_system
from ajet_sdk.tasks.row_names import INNER, is_answer
from ajet_sdk.tasks.row_pictures import pictures_of
from ajet_sdk.tasks.task_rows import to_task
from ajet_tools.dataset.curation.descent import descent_of, has_lineage
from ajet_tools.dataset.curation.facts import RowFacts, facts_of
from ajet_tools.dataset.files.blocks import Block, Row
from ajet_tools.dataset.files.tables import read, read_blocks
from ajet_tools.dataset.similarity.near import NearIndex

if TYPE_CHECKING:
    from ajet_sdk.types import Task

Level = Literal["error", "warning"]
Place = tuple[int, int, int]
"""The index of a source, of a row among all, and of a problem in it."""

KINDS: dict[str, tuple[Level, str]] = {
    "unreadable": ("error", "a row cannot be read"),
    "no task": ("error", "a row is not a valid task"),
    "asks nothing": ("error", "a task has neither main_query nor init_messages"),
    "id": ("error", "two tasks have the same task_id"),
    "contradiction": ("error", "a question has two answers"),
    "leakage": ("error", "a task is in two files"),
    "near leakage": ("error", "nearly the same question is in two files"),
    "shared picture": ("warning", "a picture is in two files, under other questions or the same"),
    "duplicate": ("warning", "a question is repeated in a file"),
    "given away": ("warning", "a question contains its answer"),
    "prompt": ("warning", "a question repeats the prompt that it was generated with"),
    "picture": ("error", "a picture cannot be read"),
    "answer": ("warning", "some tasks have an answer and some have none"),
    "shape": ("warning", "rows have different shapes"),
    "empty": ("error", "a file has no rows"),
}
"""Severity and description of each kind of problem."""
_FIRST = 20
"""Maximum number of problems listed per kind; the others are only counted."""


@dataclass(frozen=True)
class Problem:
    """A problem with its location."""

    at: Place
    kind: str
    where: str
    message: str

    @property
    def level(self) -> Level:
        return KINDS[self.kind][0]


@dataclass
class Report:
    """The first few problems of each kind, and counts of all."""

    rows: dict[str, int] = field(default_factory=dict)
    """Number of rows by file."""
    pictures: dict[str, int] = field(default_factory=dict)
    """Number of pictures by file, of those that have any."""
    different_pictures: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    problems: list[Problem] = field(default_factory=list)

    def add(self, at: Place, kind: str, where: str, message: str) -> None:
        self.counts[kind] += 1
        if self.counts[kind] <= _FIRST:
            self.problems.append(Problem(at, kind, where, message))

    @property
    def errors(self) -> int:
        return sum(number for kind, number in self.counts.items() if KINDS[kind][0] == "error")

    @property
    def warnings(self) -> int:
        return self.counts.total() - self.errors


def validate(
    sources: Mapping[str, str],
    *,
    mapping: Mapping[str, str] | None = None,
    near: float | None = None,
) -> Report:
    """Validates datasets, which may be splits of one. Raises nothing for problems in them.

    Args:
        sources: name in messages -> path.
        mapping: as in `read`.
        near: also find questions in two files that have at least this similarity (0 to 1).
    """
    report = Report()
    tasks = Tasks()
    first_with: dict[str, tuple[int, str]] = {}
    """The source and row that first has a picture, by its digest."""
    for number, (name, path) in enumerate(sources.items()):
        shapes = _Shapes()
        first = tasks.rows
        directory = Path(path) if Path(path).is_dir() else Path(path).parent
        tasks.begin(name, path)
        for block in _readable(path, mapping, report, number, tasks):
            tasks.begin_block(block)
            for row in block.rows():
                facts = facts_of(row)
                shapes.add(facts.kinds, row.where)
                for kind, message in facts.problems:
                    at = (number, tasks.rows, _ORDER.index(kind))
                    report.add(at, kind, row.where, message)
                found, unreadable = pictures_of(row.values, directory)
                if found:
                    report.pictures[name] = report.pictures.get(name, 0) + len(found)
                for digest in dict.fromkeys(found):
                    source, where = first_with.setdefault(
                        digest, (number, f"{row.where} of {name}")
                    )
                    if source != number:
                        place = (number, tasks.rows, _ORDER.index("shared picture"))
                        report.add(place, "shared picture", row.where, f"has a picture of {where}")
                for problem in unreadable:
                    place = (number, tasks.rows, _ORDER.index("picture"))
                    report.add(place, "picture", row.where, problem)
                tasks.add(row, facts)
        report.rows[name] = tasks.rows - first
        end = (number, tasks.rows, len(_ORDER))
        if report.rows[name]:
            for kind, message in shapes.problems():
                report.add(end, kind, name, message)
        else:
            report.add(end, "empty", name, "has no rows")
    report.different_pictures = len(first_with)
    for index, message in tasks.grown_apart(mapping):
        place = (tasks.file_of(index), index, _ORDER.index("leakage"))
        report.add(place, "leakage", tasks.where(index), message)
    others = Counter[str]()
    for index, kind, message in tasks.problems(mapping, others):
        place = (tasks.file_of(index), index, _ORDER.index(kind))
        report.add(place, kind, tasks.where(index), message)
    report.counts += others
    if near is not None:
        _check_near_leakage(sources, mapping, near, report)
    report.problems.sort(key=lambda problem: problem.at)
    return report


_ORDER = (
    "unreadable",
    "given away",
    "prompt",
    "no task",
    "asks nothing",
    "picture",
    "id",
    "leakage",
    "shared picture",
    "contradiction",
    "duplicate",
)
"""The order of problems of a row."""


def _readable(
    path: str, mapping: Mapping[str, str] | None, report: Report, number: int, tasks: Tasks
) -> Iterator[Block]:
    class FirstProblems(BadRows):
        def add(self, where: str, problem: str) -> None:
            report.add((number, tasks.rows, 0), "unreadable", where, problem)

    try:
        yield from read_blocks(path, mapping=mapping, bad=FirstProblems(skip=True))
    except TaskError as error:
        report.add((number, tasks.rows, 0), "unreadable", path, str(error))


_MADE_ID = re.compile(r"[0-9a-f]{24}")
"""Matches ids derived from a task's content."""


_HASHED = ("text", "asked", "id", "answer")
"""Columns of hashes: of the question, without its system prompt, of the task's id, the answer."""


class Tasks:
    """The rows of several files, one after the other."""

    def __init__(self) -> None:
        self.rows = 0
        self._files: list[tuple[str, str, int]] = []
        """Name, path, and index of the first row."""
        self._places: list[tuple[int, Block]] = []
        """Blocks of rows, without their content, and the index of the first row of each."""
        self._hashes: dict[str, list[int | None]] = {name: [] for name in _HASHED}
        self._is_task: list[bool] = []
        self._held: list[Block] = []
        """Blocks of stdin."""
        self._has_made_ids = False
        self._has_lineage = False

    def begin(self, name: str, path: str) -> None:
        self._files.append((name, path, self.rows))

    def begin_block(self, block: Block) -> None:
        """Begins with the next rows of the current file."""
        self._places.append((self.rows, block.without_rows()))
        if self._files[-1][1] == "-":
            self._held.append(block)
        self._has_lineage |= has_lineage(block)

    def add(self, row: Row, facts: RowFacts) -> None:
        """Adds the next row of the block."""
        values = (facts.text, facts.asked, facts.task_id, facts.answer or "")
        for name, value in zip(_HASHED, values, strict=True):
            self._hashes[name].append(None if value is None else hash(value))
        self._is_task.append(facts.is_task)
        if facts.task_id is not None and not self._has_made_ids:
            self._has_made_ids = _MADE_ID.fullmatch(facts.task_id) is not None
        self.rows += 1

    def where(self, row: int) -> str:
        number = bisect_right(self._places, row, key=lambda entry: entry[0]) - 1
        start, block = self._places[number]
        return block.where(row - start)

    def file_of(self, row: int) -> int:
        return bisect_right(self._files, row, key=lambda entry: entry[2]) - 1

    def grown_apart(self, mapping: Mapping[str, str] | None) -> Iterator[tuple[int, str]]:
        """Yields rows that were grown from a row of another file, over any number of
        generations."""
        if not self._has_lineage or len(self._files) < 2:
            return
        rows = [
            descent_of(row.values)
            for _, path, _ in self._files
            for block in self._blocks(path, mapping)
            for row in block.rows()
        ]
        bounds = [*(start for *_, start in self._files), self.rows]
        for start, end in pairwise(bounds):
            others = [place for place in range(len(rows)) if not start <= place < end]
            for place, source in descended(rows[start:end], [rows[other] for other in others]):
                message = f"was grown from {self._at(others[source], start + place)} (provenance)"
                yield start + place, message

    def problems(
        self, mapping: Mapping[str, str] | None, others: Counter[str]
    ) -> Iterator[tuple[int, str, str]]:
        """Yields row index, kind and message of the first problems of each kind; `others` counts
        the rest."""
        if not self.rows:
            return
        hashes = {name: pl.Series(some, dtype=pl.Int64) for name, some in self._hashes.items()}
        rows = pl.DataFrame({**hashes, "is_task": self._is_task}).with_row_index("row")
        rows = rows.with_columns(
            file=pl.Series(np.searchsorted([n for *_, n in self._files], rows["row"], "right"))
        )
        for row, first, name in self._of_two_contents(rows, mapping, others):
            yield row, "id", f"has the task_id {name!r} of another task, {self._at(first, row)}"
        # a system prompt makes no other question, unless a file asks the same under several
        of_file = rows.group_by("file", "asked").agg(several=pl.col("text").n_unique() > 1)
        several = of_file.filter(pl.col("several"))["asked"].implode()
        rows = rows.with_columns(
            asked=pl.when(pl.col("asked").is_in(several)).then("text").otherwise("asked")
        )
        leaks = _repeated(rows, "asked").filter(pl.col("file") != pl.col("file_of_first"))
        again = _repeated(rows, "text").filter(pl.col("file") == pl.col("file_of_first"))
        again = again.with_columns(
            kind=pl.when(pl.col("answer") != pl.col("answer_of_first"))
            .then(pl.lit("contradiction"))
            .otherwise(pl.lit("duplicate"))
        )
        for kind, addition in (
            ("leakage", ""),
            ("contradiction", ", but has a different answer"),
            ("duplicate", ""),
        ):
            some = leaks if kind == "leakage" else again.filter(pl.col("kind") == kind)
            others[kind] += max(0, len(some) - _FIRST)
            for row, first in some.select("row", "row_of_first").head(_FIRST).iter_rows():
                yield row, kind, f"asks the same as {self._at(first, row)}{addition}"

    def _of_two_contents(
        self, rows: pl.DataFrame, mapping: Mapping[str, str] | None, others: Counter[str]
    ) -> Iterator[tuple[int, int, str]]:
        """Yields rows that share an id with an earlier row of different content: indices and id."""
        if self._has_made_ids and len(
            loose := rows.filter(pl.col("is_task") & pl.col("id").is_null())["row"]
        ):
            made_ids = [hash(task.task_id) for _, task in self._read_again(set(loose), mapping)]
            rows = rows.with_columns(rows["id"].scatter(loose, pl.Series(made_ids, dtype=pl.Int64)))
        again = _repeated(rows, "id")
        tasks = set(again["row"]) | set(again["row_of_first"])
        known = (
            {row: (task.task_id, _digest(task)) for row, task in self._read_again(tasks, mapping)}
            if tasks
            else {}
        )
        pairs = zip(again["row"], again["row_of_first"], strict=True)
        conflicts = [
            (row, first, known[row][0]) for row, first in pairs if known[row][1] != known[first][1]
        ]
        others["id"] += max(0, len(conflicts) - _FIRST)
        yield from islice(conflicts, _FIRST)

    def _read_again(
        self, wanted: Collection[int], mapping: Mapping[str, str] | None
    ) -> Iterator[tuple[int, Task]]:
        """Reads these rows again as tasks."""
        for _, path, start in self._files:
            number = start
            for block in self._blocks(path, mapping):
                for row in block.rows():
                    if number in wanted:
                        yield number, to_task(row, {})
                    number += 1

    def _blocks(self, path: str, mapping: Mapping[str, str] | None) -> Iterator[Block]:
        if path == "-":
            yield from self._held
            return
        try:
            yield from read_blocks(path, mapping=mapping, bad=BadRows(skip=True))
        except TaskError:  # reported by the first pass
            return

    def _at(self, place: int, row: int) -> str:
        """Returns a location, with its file if that is not clear."""
        where, (file, row_file) = (
            self.where(place),
            (Path(self._name(each)) for each in (place, row)),
        )
        is_clear = self._name(place) == self._name(row) or (
            file.name in where and file.name != row_file.name
        )
        return where if is_clear else f"{where} of {self._name(place)}"

    def _name(self, row: int) -> str:
        return self._files[self.file_of(row)][0]


def _repeated(rows: pl.DataFrame, column: str) -> pl.DataFrame:
    """Returns the rows whose value occurred before, joined with its first row."""
    known = rows.filter(pl.col(column).is_not_null())
    is_first = known[column].is_first_distinct()
    again = known.filter(~is_first)
    firsts = known.filter(is_first).join(again, on=column, how="semi")
    return again.join(firsts, on=column, how="left", suffix="_of_first", maintain_order="left")


def _digest(task: Task) -> bytes:
    content = task.model_dump(exclude={"task_id"})
    content["metadata"].pop("provenance", None)
    return hashlib.blake2b(
        json.dumps(content, sort_keys=True, default=str).encode(), digest_size=8
    ).digest()


class _Shapes:
    """Keys and kinds of the rows of a file, and where they first differ."""

    def __init__(self) -> None:
        self._rows = 0
        self._kinds: dict[str, dict[str, tuple[int, str]]] = {}
        self._lacking: dict[str, str] = {}
        self._first = ""

    def add(self, kinds_by_path: Mapping[str, str], where: str) -> None:
        """Adds a row with these kinds, by path."""
        is_first = not self._rows
        self._first = self._first or where
        self._rows += 1
        for path, kind in kinds_by_path.items():
            if path not in self._kinds and len(self._kinds) >= 500:
                continue
            kinds = self._kinds.setdefault(path, {})
            if not kinds and not is_first:
                self._lacking.setdefault(path, self._first)
            number, first = kinds.get(kind, (0, where))
            kinds[kind] = (number + 1, first)
        for path in self._kinds.keys() - kinds_by_path.keys():
            self._lacking.setdefault(path, where)

    def problems(self) -> Iterator[tuple[str, str]]:
        for path, kinds in self._kinds.items():
            ranked_kinds = sorted(
                ((n, kind, where) for kind, (n, where) in kinds.items()), reverse=True
            )
            if len({kind for _, kind, _ in ranked_kinds} - {"null"}) > 1:
                parts = ", ".join(
                    f"{kind} in {n:,} (first {where})" for n, kind, where in ranked_kinds
                )
                yield "shape", f"{path} is of several kinds: {parts}"
            number = self._rows - sum(n for n, _, _ in ranked_kinds)
            if not number or path.startswith("provenance"):
                continue
            lacking = f"{number:,} of {self._rows:,} rows, the first {self._lacking[path]}"
            outer, _, name = path.rpartition(".")
            if is_answer(name) and outer in ("", *INNER):
                yield "answer", f"{path} is missing in {lacking}"
            elif 2 * number <= self._rows:
                yield "shape", f"{path} is missing in {lacking}"


def _check_near_leakage(
    sources: Mapping[str, str], mapping: Mapping[str, str] | None, least: float, report: Report
) -> None:
    known, end = NearIndex(least), len(sources)
    for name, path in sources.items():
        rows = [
            (row.where, without_system(text_of(row.values)))
            for row in read(path, mapping=mapping, skip_bad=True)
        ]
        for (where, _), match in zip(rows, known.find_all([text for _, text in rows]), strict=True):
            if match is not None and match.kind == "near":
                report.add(
                    (end, 0, 0),
                    "near leakage",
                    where,
                    f"is {match.similarity:.0%} similar to {match.key}",
                )
        for where, text in rows:
            known.add(f"{where} of {name}", text)
