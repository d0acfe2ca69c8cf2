"""What is wrong with a dataset, before a run finds it out: rows that are no task, ids, shapes, duplicates, leakage.

An error is what a run would stop at or learn wrongly from; a warning is what may be meant. Of each row some 400 bytes
are remembered: its id, its text and its answer as digests, and its place.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ajet_sdk.errors import TaskError
from ajet_sdk.tasks.json_rows import BadRows
from ajet_sdk.tasks.rows import Row as TaskRow
from ajet_sdk.tasks.rows import to_task
from ajet_sdk.types import Task
from ajet_tools.dataset.files.hashes import digest_of
from ajet_tools.dataset.files.tables import Row, read, text_of
from ajet_tools.dataset.files.values import kind_of
from ajet_tools.dataset.rows.forms import given_away
from ajet_tools.dataset.similarity.near import Pair, check_threshold, near_pairs
from ajet_tools.dataset.similarity.text import normal

__all__ = ["Problem", "Report", "validate"]

Level = Literal["error", "warning"]

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
    "answer": ("warning", "some tasks have an answer and some have none"),
    "shape": ("warning", "rows have different shapes"),
    "empty": ("error", "a file has no rows"),
}
"""Each kind of problem: how bad it is, and what it means."""

_FIRST = 20


@dataclass(frozen=True)
class Problem:
    """One finding, with the place where it was found."""

    kind: str
    where: str
    message: str

    @property
    def level(self) -> Level:
        return KINDS[self.kind][0]


@dataclass
class Report:
    """What was found. Of each kind the first few problems are kept, and all are counted."""

    rows: dict[str, int] = field(default_factory=dict)
    """By file."""
    counts: Counter[str] = field(default_factory=Counter)
    problems: list[Problem] = field(default_factory=list)

    def add(self, kind: str, where: str, message: str) -> None:
        self.counts[kind] += 1
        if self.counts[kind] <= _FIRST:
            self.problems.append(Problem(kind, where, message))

    @property
    def errors(self) -> int:
        return sum(number for kind, number in self.counts.items() if KINDS[kind][0] == "error")

    @property
    def warnings(self) -> int:
        return self.counts.total() - self.errors


@dataclass(frozen=True, slots=True)
class _Place:
    file: str
    where: str
    content: int
    answer: int


def validate(
    sources: Mapping[str, str], *, mapping: Mapping[str, str] | None = None, near: float | None = None
) -> Report:
    """Look through datasets, which may be splits of one: name -> path. Nothing is raised for what is wrong in them.

    Args:
        sources: what a problem between two of them is told by, and what is read.
        mapping: as in `read`.
        near: also find questions of two files that are at least this similar (0 to 1).
    """
    report, known = Report(), _SeenTasks()
    for name, path in sources.items():
        report.rows[name] = 0
        shape = _Shapes()
        for row in _readable(path, mapping, report):
            report.rows[name] += 1
            shape.add(row)
            if (said := given_away(row.values)) is not None:
                report.add("given away", row.where, f"contains its answer: {said}")
            task = _task(row, report)
            if task is not None:
                known.add(name, row, task, report)
        if report.rows[name]:
            shape.tell(name, report)
        else:
            report.add("empty", name, "has no rows")
    if near is not None:
        _check_near_leakage(sources, mapping, near, report)
    return report


def _readable(path: str, mapping: Mapping[str, str] | None, report: Report) -> Iterable[Row]:
    class FirstProblems(BadRows):
        def add(self, where: str, problem: str) -> None:
            report.add("unreadable", where, problem)

    try:
        yield from read(path, mapping=mapping, bad=FirstProblems(skip=True))
    except TaskError as error:
        report.add("unreadable", path, str(error))


def _task(row: Row, report: Report) -> Task | None:
    try:
        task = to_task(TaskRow(row.where, row.values), {})
    except TaskError as error:
        report.add("no task", row.where, str(error).removeprefix(f"{row.where}: ").removeprefix(f"{row.where} "))
        return None
    if not (task.main_query.strip() or task.init_messages or task.env_type):
        columns = ", ".join(row.values)
        report.add("asks nothing", row.where, f"has no main_query and no init_messages; it has {columns} (--map)")
        return None
    return task


class _SeenTasks:
    """The tasks met so far, by id and by text."""

    def __init__(self) -> None:
        self._by_id: dict[str, _Place] = {}
        self._by_text: dict[int, _Place] = {}

    def add(self, file: str, row: Row, task: Task, report: Report) -> None:
        place = _Place(file, row.where, _digest(_content(task)), _digest(task.metadata.get("answer")))
        of_id = self._by_id.setdefault(task.task_id, place)
        if of_id is not place and of_id.content != place.content:
            report.add("id", row.where, f"has the task_id {task.task_id!r} of another task, {_at(of_id, file)}")
        text = text_of(row.values)
        if not text.strip():
            return
        of_text = self._by_text.setdefault(_text_key(task, text), place)
        if of_text is place:
            return
        if of_text.file != file:
            report.add("leakage", row.where, f"asks the same as {_at(of_text, file)}")
        elif of_text.answer != place.answer:
            report.add("contradiction", row.where, f"asks the same as {_at(of_text, file)}, but has a different answer")
        else:
            report.add("duplicate", row.where, f"asks the same as {_at(of_text, file)}")


def _text_key(task: Task, text: str) -> int:
    """A question, with what was said before it."""
    before = task.init_messages if task.main_query else task.init_messages[:-1]
    return digest_of(f"{text}\n{json.dumps(before, default=str)}" if before else text)


def _content(task: Task) -> Any:
    content = task.model_dump(exclude={"task_id"})
    content["metadata"].pop("provenance", None)
    return content


def _at(place: _Place, file: str) -> str:
    """A place; its file too, where that has the name of another one."""
    told = place.file == file or (Path(place.file).name in place.where and Path(place.file).name != Path(file).name)
    return place.where if told else f"{place.where} of {place.file}"


def _digest(value: Any) -> int:
    text = json.dumps(value, sort_keys=True, default=str)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


class _Shapes:
    """Which keys and kinds of value the rows of a file have, and where one first differs."""

    def __init__(self) -> None:
        self._rows = 0
        self._kinds: dict[str, dict[str, tuple[int, str]]] = {}
        self._lacking: dict[str, str] = {}
        self._first = ""

    def add(self, row: Row) -> None:
        self._rows += 1
        self._first = self._first or row.where
        found = dict(_paths(row.values))
        for path, kind in found.items():
            if path not in self._kinds and len(self._kinds) >= 500:
                continue
            kinds = self._kinds.setdefault(path, {})
            if not kinds and self._rows > 1:
                self._lacking.setdefault(path, self._first)
            number, where = kinds.get(kind, (0, row.where))
            kinds[kind] = (number + 1, where)
        for path in self._kinds.keys() - found.keys():
            self._lacking.setdefault(path, row.where)

    def tell(self, file: str, report: Report) -> None:
        for path, kinds in self._kinds.items():
            told = sorted(((n, kind, where) for kind, (n, where) in kinds.items()), reverse=True)
            if len({kind for _, kind, _ in told} - {"null"}) > 1:
                parts = ", ".join(f"{kind} in {n:,} (first {where})" for n, kind, where in told)
                report.add("shape", file, f"{path} is of several kinds: {parts}")
            number = self._rows - sum(n for n, _, _ in told)
            if not number or path.startswith("provenance"):
                continue
            lacking = f"{number:,} of {self._rows:,} rows, the first {self._lacking[path]}"
            if path in ("answer", "metadata.answer"):
                report.add("answer", file, f"{path} is missing in {lacking}")
            elif 2 * number <= self._rows:
                report.add("shape", file, f"{path} is missing in {lacking}")


def _paths(values: Mapping[str, Any], before: str = "") -> Iterable[tuple[str, str]]:
    for name, value in values.items():
        yield f"{before}{name}", kind_of(value).replace("integer", "number")
        if isinstance(value, dict) and not before:
            yield from _paths(value, f"{name}.")


def _check_near_leakage(
    sources: Mapping[str, str], mapping: Mapping[str, str] | None, least: float, report: Report
) -> None:
    known: list[tuple[str, str]] = []
    for name, path in sources.items():
        rows = [(row.where, normal(text_of(row.values))) for row in read(path, mapping=mapping, skip_bad=True)]
        nearest: dict[int, Pair] = {}
        both = [form for _, form in (*known, *rows)]
        for pair in near_pairs(both, check_threshold(least), across=len(known)) if known else ():
            there = nearest.get(pair.other)
            if pair.similarity < 1 and (there is None or there.similarity < pair.similarity):
                nearest[pair.other] = pair
        exact = {form for _, form in known}
        for number, pair in sorted(nearest.items()):
            if both[number] not in exact:
                where = rows[number - len(known)][0]
                report.add("near leakage", where, f"is {pair.similarity:.0%} similar to {known[pair.one][0]}")
        known += [(f"{where} of {name}", form) for where, form in rows]
