"""Errors of a dataset, found before a run: rows that are not tasks, ids, shapes, duplicates, leakage.

An error is what a run would stop at or learn wrongly from; a warning is what may be meant.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from ajet_sdk.errors import TaskError
from ajet_sdk.tasks.json_rows import BadRows
from ajet_tools.dataset.curation.facts import facts_of
from ajet_tools.dataset.curation.repeats import Tasks
from ajet_tools.dataset.files.blocks import LineBlock, as_lines, text_of
from ajet_tools.dataset.files.tables import read, read_blocks
from ajet_tools.dataset.similarity.near import NearIndex

Level = Literal["error", "warning"]
Place = tuple[int, int, int]
"""The number of a source, of a row among all, and of a problem in it."""

KINDS: dict[str, tuple[Level, str]] = {
    "unreadable": ("error", "a row cannot be read"),
    "no task": ("error", "a row is not a valid task"),
    "asks nothing": ("error", "a task has neither main_query nor init_messages"),
    "id": ("error", "two tasks have the same task_id"),
    "contradiction": ("error", "a question has two answers"),
    "leakage": ("error", "a task is in two files"),
    "near leakage": ("error", "nearly the same question is in two files"),
    "duplicate": ("warning", "a question is repeated in a file"),
    "given away": ("warning", "a question contains its answer"),
    "prompt": ("warning", "a question repeats the prompt that it was generated with"),
    "answer": ("warning", "some tasks have an answer and some have none"),
    "shape": ("warning", "rows have different shapes"),
    "empty": ("error", "a file has no rows"),
}
"""Each kind of problem: how bad it is, and what it means."""

_FIRST = 20


@dataclass(frozen=True)
class Problem:
    """One finding, with the place where it was found."""

    at: Place
    kind: str
    where: str
    message: str

    @property
    def level(self) -> Level:
        return KINDS[self.kind][0]


@dataclass
class Report:
    """The problems. The first few of each kind are kept, and all are counted."""

    rows: dict[str, int] = field(default_factory=dict)
    """By file."""
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
    sources: Mapping[str, str], *, mapping: Mapping[str, str] | None = None, near: float | None = None
) -> Report:
    """Look through datasets, which may be splits of one: name -> path. Nothing is raised for what is wrong in them.

    Args:
        sources: what a problem between two of them is told by, and what is read.
        mapping: as in `read`.
        near: also find questions of two files that are at least this similar (0 to 1).
    """
    report, tasks = Report(), Tasks(_FIRST)
    for number, (name, path) in enumerate(sources.items()):
        shapes, first = _Shapes(), tasks.rows
        tasks.begin(name, path)
        for block in _readable(path, mapping, report, number, tasks):
            facts, start = facts_of(block), tasks.rows
            for index, kinds, times in facts.kinds:
                shapes.add(kinds, block.where(index), times)
            for index, kind, message in facts.problems:
                report.add((number, start + index, _ORDER.index(kind)), kind, block.where(index), message)
            tasks.add(block, facts.tasks)
        report.rows[name] = tasks.rows - first
        end = (number, tasks.rows, len(_ORDER))
        if report.rows[name]:
            for kind, message in shapes.problems():
                report.add(end, kind, name, message)
        else:
            report.add(end, "empty", name, "has no rows")
    others = Counter[str]()
    for row, kind, message in tasks.problems(mapping, others):
        report.add((tasks.file_of(row), row, _ORDER.index(kind)), kind, tasks.where(row), message)
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
    "id",
    "leakage",
    "contradiction",
    "duplicate",
)
"""Of the problems of one row."""


def _readable(
    path: str, mapping: Mapping[str, str] | None, report: Report, number: int, tasks: Tasks
) -> Iterator[LineBlock]:
    class FirstProblems(BadRows):
        def add(self, where: str, problem: str) -> None:
            report.add((number, tasks.rows, 0), "unreadable", where, problem)

    try:
        for block in read_blocks(path, mapping=mapping, bad=FirstProblems(skip=True)):
            yield as_lines(block)
    except TaskError as error:
        report.add((number, tasks.rows, 0), "unreadable", path, str(error))


class _Shapes:
    """Which keys and kinds of value the rows of a file have, and where one first differs."""

    def __init__(self) -> None:
        self._rows = 0
        self._kinds: dict[str, dict[str, tuple[int, str]]] = {}
        self._lacking: dict[str, str] = {}
        self._first = ""

    def add(self, kinds_by_path: Mapping[str, str], where: str, times: int) -> None:
        """So many rows with these kinds, by path; the first of them stands there."""
        is_first, self._first = not self._rows, self._first or where
        self._rows += times
        for path, kind in kinds_by_path.items():
            if path not in self._kinds and len(self._kinds) >= 500:
                continue
            kinds = self._kinds.setdefault(path, {})
            if not kinds and not is_first:
                self._lacking.setdefault(path, self._first)
            number, first = kinds.get(kind, (0, where))
            kinds[kind] = (number + times, first)
        for path in self._kinds.keys() - kinds_by_path.keys():
            self._lacking.setdefault(path, where)

    def problems(self) -> Iterator[tuple[str, str]]:
        for path, kinds in self._kinds.items():
            ranked_kinds = sorted(((n, kind, where) for kind, (n, where) in kinds.items()), reverse=True)
            if len({kind for _, kind, _ in ranked_kinds} - {"null"}) > 1:
                parts = ", ".join(f"{kind} in {n:,} (first {where})" for n, kind, where in ranked_kinds)
                yield "shape", f"{path} is of several kinds: {parts}"
            number = self._rows - sum(n for n, _, _ in ranked_kinds)
            if not number or path.startswith("provenance"):
                continue
            lacking = f"{number:,} of {self._rows:,} rows, the first {self._lacking[path]}"
            if path in ("answer", "metadata.answer"):
                yield "answer", f"{path} is missing in {lacking}"
            elif 2 * number <= self._rows:
                yield "shape", f"{path} is missing in {lacking}"


def _check_near_leakage(
    sources: Mapping[str, str], mapping: Mapping[str, str] | None, least: float, report: Report
) -> None:
    known, end = NearIndex(least), len(sources)
    for name, path in sources.items():
        rows = [(row.where, text_of(row.values)) for row in read(path, mapping=mapping, skip_bad=True)]
        for (where, _), match in zip(rows, known.find_all([text for _, text in rows]), strict=True):
            if match is not None and match.kind == "near":
                report.add((end, 0, 0), "near leakage", where, f"is {match.similarity:.0%} similar to {match.key}")
        for where, text in rows:
            known.add(f"{where} of {name}", text)
