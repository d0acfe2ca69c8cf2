"""Finds errors in a dataset before a run: invalid tasks, ids, shapes, duplicates, leakage.

An error would stop a run or teach something wrong; a warning may be intended.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa

from ajet_sdk.errors import TaskError
from ajet_sdk.picture_files import files_by_pixels
from ajet_sdk.tasks.json_rows import BadRows
from ajet_sdk.tasks.lineage import descended
from ajet_sdk.tasks.questions import Reading
from ajet_sdk.tasks.row_names import INNER, is_answer
from ajet_sdk.tasks.row_pictures import pictures_of
from ajet_sdk.tasks.task_rows import to_task
from ajet_tools.dataset.curation.descent import descent_of, has_lineage
from ajet_tools.dataset.curation.facts import facts_of
from ajet_tools.dataset.curation.stats import Stats
from ajet_tools.dataset.files.blocks import Block, Row
from ajet_tools.dataset.files.json_columns import connection
from ajet_tools.dataset.files.rows import Rows

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

    stats: dict[str, Stats] = field(default_factory=dict)
    """By file."""
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
    def rows(self) -> dict[str, int]:
        """Number of rows by file."""
        return {name: stats.rows for name, stats in self.stats.items()}

    @property
    def errors(self) -> int:
        return sum(number for kind, number in self.counts.items() if KINDS[kind][0] == "error")

    @property
    def warnings(self) -> int:
        return self.counts.total() - self.errors


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


def validate(sources: Mapping[str, str], on_rows: Callable[[int], None] | None = None) -> Report:
    """Validates datasets, which may be splits of one. Raises nothing for problems in them.

    Args:
        sources: name in messages -> path.
        on_rows: called with the number of rows of each block that was read.
    """
    validation = _Validation(on_rows)
    for name, path in sources.items():
        validation.add_file(name, path)
    validation.add_problems_between_rows()
    report = validation.report
    report.problems.sort(key=lambda problem: problem.at)
    return report


_MADE_ID = re.compile(r"[0-9a-f]{24}")
"""Matches ids derived from a task's content."""
_TABLE = """CREATE TEMP TABLE rows (
    row BIGINT, file BIGINT, place VARCHAR, text BIGINT, asked BIGINT, answer BIGINT, id VARCHAR,
    is_task BOOLEAN
)"""
"""What is compared between rows: hashes of the question, of the question without its system prompt
and of the answer; the task's id."""
_WITHOUT_SYSTEM_PROMPT = """UPDATE rows SET asked = text WHERE asked IN (
    SELECT asked FROM rows GROUP BY file, asked HAVING count(DISTINCT text) > 1
)"""
"""A system prompt makes no other question, unless a file asks the same under several."""
_REPEATED = """
    SELECT rows.row, first.row AS first FROM rows JOIN (
        SELECT {column}, min(row) AS row, arg_min(file, row) AS file, arg_min(answer, row) AS answer
        FROM rows GROUP BY {column}
    ) AS first ON rows.{column} = first.{column} AND rows.row > first.row
"""
"""Rows with a value that an earlier row has."""


class _Validation:
    """The rows of several files, one after the other, and their problems."""

    def __init__(self, on_rows: Callable[[int], None] | None) -> None:
        self.report = Report()
        self._on_rows = on_rows
        self._names: list[str] = []
        self._files: list[Rows] = []
        self._rows = 0
        self._pictures: dict[str, tuple[int, str]] = {}
        """The file and row that first has a picture, by its digest."""
        self._has_made_ids = False
        self._has_lineage = False
        self._database = connection().cursor()
        self._database.execute(_TABLE)

    def add_file(self, name: str, path: str) -> None:
        """Reads the rows of a file, and checks each by itself."""
        number = len(self._files)
        self._names.append(name)
        stats = self.report.stats[name] = Stats()
        start = self._rows
        try:
            bad = _FirstProblems(self, number)
            rows = Rows(path, bad=bad, again=True)
            self._files.append(rows)
            for block in rows.blocks():
                self._add_block(block, number, stats)
        except TaskError as error:
            self.add(number, "unreadable", path, str(error))
        # rows without a question are one, too
        distinct = "SELECT count(DISTINCT coalesce(text, 0)) FROM rows WHERE file = ?"
        [(stats.distinct,)] = self._query(distinct, [number])
        end = (number, self._rows, len(_ORDER))
        if not stats.rows:
            self.report.add(end, "empty", name, "has no rows")
        for kind, message in self._shape_problems(stats, start):
            self.report.add(end, kind, name, message)

    def _shape_problems(self, stats: Stats, start: int) -> Iterator[tuple[str, str]]:
        """Yields where the columns of a file, and the fields within them, differ between rows."""
        for path, column in stats.fields.items():
            if column.depth > 1:
                continue
            counts: Counter[str] = Counter()
            places: dict[str, str] = {}
            for kind, row in column.first_of_kind.items():
                shown = "number" if kind == "integer" else kind
                counts[shown] += column.kinds[kind]
                places.setdefault(shown, self._place(start + row)[1])
            del counts["null"]
            if len(counts) > 1:
                kinds = []
                for kind, count in counts.most_common():
                    kinds.append(f"{kind} in {count:,} (first {places[kind]})")
                yield "shape", f"{path} is of several kinds: {', '.join(kinds)}"
            number = stats.rows - column.rows
            if not number or path.startswith("provenance"):
                continue
            lacking = column.rows if column.first_lacking is None else column.first_lacking
            where = self._place(start + lacking)[1]
            message = f"{path} is missing in {number:,} of {stats.rows:,} rows, the first {where}"
            outer, _, name = path.rpartition(".")
            if is_answer(name) and outer in ("", *INNER):
                yield "answer", message
            elif 2 * number <= stats.rows:
                yield "shape", message

    def add(self, number: int, kind: str, where: str, message: str, row: int | None = None) -> None:
        """Adds a problem of a row, by default the next one, of a file."""
        place = self._rows if row is None else row
        self.report.add((number, place, _ORDER.index(kind)), kind, where, message)

    def _add_block(self, block: Block, number: int, stats: Stats) -> None:
        self._has_lineage |= has_lineage(block)
        entries = []
        for row in block.rows():
            reading = Reading(row.values)
            stats.add(reading)
            facts = facts_of(row, reading)
            for kind, message in facts.problems:
                self.add(number, kind, row.where, message)
            self._add_pictures(row, number)
            if facts.task_id is not None and not self._has_made_ids:
                self._has_made_ids = _MADE_ID.fullmatch(facts.task_id) is not None
            entry = {
                "row": self._rows,
                "file": number,
                "place": row.where,
                "text": _hash(facts.text),
                "asked": _hash(facts.asked),
                "answer": hash(facts.answer or ""),
                "id": facts.task_id,
                "is_task": facts.is_task,
            }
            entries.append(entry)
            self._rows += 1
        if entries:
            self._database.from_arrow(pa.Table.from_pylist(entries)).insert_into("rows")
        if self._on_rows is not None:
            self._on_rows(len(entries))

    def _add_pictures(self, row: Row, number: int) -> None:
        name = self._names[number]
        pictures, unreadable = pictures_of(row.values)
        if pictures:
            self.report.pictures[name] = self.report.pictures.get(name, 0) + len(pictures)
        for digest in dict.fromkeys(pictures):
            here = (number, f"{row.where} of {name}")
            first, where = self._pictures.setdefault(digest, here)
            if first != number:
                self.add(number, "shared picture", row.where, f"has a picture of {where}")
        for problem in unreadable:
            self.add(number, "picture", row.where, problem)
        self.report.different_pictures = len(self._pictures)

    def add_problems_between_rows(self) -> None:
        """Finds ids, questions and lineage that rows share."""
        if self._has_lineage and len(self._files) > 1:
            self._add_grown_apart()
        self._add_shared_ids()
        self._query(_WITHOUT_SYSTEM_PROMPT)
        leaks = f"{_REPEATED.format(column='asked')} WHERE rows.file <> first.file"
        self._add_shared("leakage", leaks)
        again = f"{_REPEATED.format(column='text')} WHERE rows.file = first.file"
        self._add_shared(
            "contradiction",
            f"{again} AND rows.answer <> first.answer",
            ", but has a different answer",
        )
        self._add_shared("duplicate", f"{again} AND rows.answer = first.answer")

    def _add_shared(self, kind: str, query: str, addition: str = "") -> None:
        [(count,)] = self._query(f"SELECT count(*) FROM ({query})")
        some = self._query(f"SELECT row, first FROM ({query}) ORDER BY row LIMIT {_FIRST}")
        for row, first in some:
            self._add_pair(kind, row, f"asks the same as {self._at(first, row)}{addition}")
        if count > len(some):
            self.report.counts[kind] += count - len(some)

    def _add_pair(self, kind: str, row: int, message: str) -> None:
        number, where = self._place(row)
        self.add(number, kind, where, message, row)

    def _add_shared_ids(self) -> None:
        """Adds rows with the id of an earlier row of different content."""
        if self._has_made_ids:
            loose = self._query("SELECT row FROM rows WHERE is_task AND id IS NULL")
            for row, task in self._read_again({row for (row,) in loose}):
                self._query("UPDATE rows SET id = ? WHERE row = ?", [task.task_id, row])
        shared = f"SELECT row, first FROM ({_REPEATED.format(column='id')}) ORDER BY row"
        pairs = self._query(shared)
        rows = {row for pair in pairs for row in pair}
        known = {row: (task.task_id, _digest(task)) for row, task in self._read_again(rows)}
        for row, first in pairs:
            name, content = known[row]
            if content != known[first][1]:
                other = self._at(first, row)
                self._add_pair("id", row, f"has the task_id {name!r} of another task, {other}")

    def _read_again(self, wanted: Collection[int]) -> Iterator[tuple[int, Task]]:
        """Reads these rows again as tasks."""
        if wanted:
            for number, row in enumerate(self._all_rows()):
                if number in wanted:
                    yield number, to_task(row, {})

    def _all_rows(self) -> Iterator[Row]:
        for rows in self._files:
            rows.bad = BadRows(skip=True)
            with suppress(TaskError):  # reported by the first pass
                yield from rows

    def _add_grown_apart(self) -> None:
        """Adds rows that were grown from a row of another file, over any number of generations."""
        rows = [descent_of(row.values) for row in self._all_rows()]
        bounds = self._query("SELECT min(row), max(row) + 1 FROM rows GROUP BY file ORDER BY file")
        for start, end in bounds:
            others = [place for place in range(len(rows)) if not start <= place < end]
            for place, source in descended(rows[start:end], [rows[other] for other in others]):
                row = start + place
                message = f"was grown from {self._at(others[source], row)} (provenance)"
                self._add_pair("leakage", row, message)

    def _place(self, row: int) -> tuple[int, str]:
        """Returns the file of a row, and its location."""
        [(number, where)] = self._query("SELECT file, place FROM rows WHERE row = ?", [row])
        return number, where

    def _at(self, place: int, row: int) -> str:
        """Returns a location, with its file if that is not clear."""
        number, where = self._place(place)
        name = self._names[number]
        own_name = self._names[self._place(row)[0]]
        file = Path(name).name
        is_clear = name == own_name or (file in where and file != Path(own_name).name)
        return where if is_clear else f"{where} of {name}"

    def _query(self, sql: str, values: Sequence[object] = ()) -> list[Any]:
        rows: list[Any] = self._database.execute(sql, list(values)).fetchall()
        return rows


class _FirstProblems(BadRows):
    """Reports the rows that cannot be read."""

    def __init__(self, validation: _Validation, number: int) -> None:
        super().__init__(skip=True)
        self._validation = validation
        self._number = number

    def add(self, where: str, problem: str) -> None:
        self.count += 1
        self._validation.add(self._number, "unreadable", where, problem)


def _hash(text: str | None) -> int | None:
    return None if text is None else hash(text)


def _digest(task: Task) -> bytes:
    """Hashes what a task asks and holds, whatever its id."""
    content = task.model_dump(exclude={"task_id"})
    content["metadata"].pop("provenance", None)
    text = json.dumps(files_by_pixels(content), sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).digest()
