"""Collects facts about rows for `validate`: kinds of values, and whether they are tasks.

Columns of a block answer for most rows; the others are read.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import polars as pl

from ajet_sdk.errors import TaskError
from ajet_sdk.tasks.questions import SYSTEM, text_of, truth_of, without_system
from ajet_sdk.tasks.row_names import INNER, is_answer, is_reply
from ajet_sdk.tasks.task_rows import to_task
from ajet_tools.dataset.curation.forms import CUES, given_away, may_give_away, normalize
from ajet_tools.dataset.files.blocks import QUERIES, Irregular, LineBlock, Row, encodable
from ajet_tools.dataset.files.lines import Structure, asking, kind_at, kind_in, kinds_of, structures
from ajet_tools.dataset.files.values import kind_of
from ajet_tools.dataset.prompts import repeated, wording
from ajet_tools.dataset.similarity.text import normals

if TYPE_CHECKING:
    from ajet_sdk.types import Task

_ANSWERS = [("metadata", "answer"), ("answer",)]
"""Where answers are read by columns; a row with another is read as a whole."""
WANTED = [*QUERIES, ("task_id",), *_ANSWERS]
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
_NESTED = {"object", "list"}
_Mask = npt.NDArray[np.bool_]
"""Marks rows of a block."""


@dataclass(frozen=True)
class BlockFacts:
    kinds: list[tuple[int, dict[str, str], int]]
    """Each combination of kinds by path, with the index of its first row and its number of rows."""
    problems: list[tuple[int, str, str]]
    """Row index, kind of problem and message, in row order."""
    tasks: pl.DataFrame
    """A frame with a row each: `text` (the normalized question with its context), `asked` (the same
    without a system prompt), `id` (the explicit task id) and `answer`, each null if missing;
    `is_task` is false for an invalid task.
    """


def facts_of(block: LineBlock) -> BlockFacts:
    """Collects facts from columns, and from rows where columns can't decide."""
    try:
        columns = _Columns(block)
    except Irregular:
        return facts_of_rows(block)
    kinds = []
    for structure, indices in columns.groups:
        if structure is None:
            rows = zip(indices.tolist(), block.rows(indices), strict=True)
            kinds += [(index, kinds_of(row.values), 1) for index, row in rows]
        else:
            kinds.append((int(indices[0]), kinds_of(structure, kind_in), len(indices)))
    kinds.sort(key=lambda entry: entry[0])
    masks = columns.unclear, columns.answered_oddly, columns.given_away()
    return BlockFacts(kinds, *_read_rows(block, columns.tasks(), *masks))


def facts_of_rows(block: LineBlock) -> BlockFacts:
    """Collects the same facts from rows only."""
    kinds = [(index, kinds_of(row.values), 1) for index, row in enumerate(block.rows())]
    each, nothing = (
        np.ones(len(block), bool),
        [_nothing(block) for _ in range(4)],
    )  # changed in place
    return BlockFacts(kinds, *_read_rows(block, nothing, each, ~each, each))


def _nothing(block: LineBlock) -> pl.Series:
    return pl.repeat(None, len(block), dtype=pl.String, eager=True)


def _blank(column: pl.Series) -> _Mask:
    blank = (column < "!") | (column >= "\x80")  # a quick test of the first character
    some = blank.fill_null(True).arg_true()
    is_blank = ~column.gather(some).str.contains(r"[^\s\x1c-\x1f]").fill_null(False)
    return pl.repeat(False, len(column), eager=True).scatter(some, is_blank).to_numpy()


@functools.cache
def _wording() -> str:
    """Returns a pattern that matches any run of words of our prompts."""
    return "|".join(map(re.escape, wording()))


class _Columns:
    """The columns of a block whose line structures determine the kinds of values."""

    def __init__(self, block: LineBlock) -> None:
        """Raises Irregular if polars or DuckDB can't parse a line."""
        self.groups = structures(block.lines)
        known = [structure for structure, _ in self.groups if structure is not None]
        if not known:
            raise Irregular
        kinds = {path: {kind_at(structure, path) for structure in known} for path in WANTED}
        self._block = block
        self._columns = block.columns(
            [p for p, some in kinds.items() if some != {"null"} and not some & _NESTED]
        )
        self._forms = normals(block.texts, normalize)
        self.unclear = np.ones(len(block), bool)
        """Rows that have to be read to decide whether they are tasks."""
        self.answered_oddly = np.zeros(len(block), bool)
        """Rows whose answer is a list, an object or a float."""
        self._inner = np.zeros(len(block), bool)
        self._signs = np.full(len(block), "", "U1")
        blank: dict[str, _Mask] = {}
        """Marks blank values, by column."""
        for structure, indices in self.groups:
            name = (
                asking(structure) if structure is not None and self._is_plain(structure) else None
            )
            if structure is None or name is None or (name,) not in self._columns:
                continue
            if name not in blank:
                blank[name] = _blank(self._columns[(name,)])
            self.unclear[indices] = blank[name][indices]
            inner = kind_at(structure, ("metadata", "answer")) != "null"
            kind = kind_at(structure, ("metadata", "answer") if inner else ("answer",))
            self._inner[indices] = inner
            self._signs[indices] = _SIGNS.get(kind, "")
            self.answered_oddly[indices] = kind not in ("null", *_SIGNS) or _answers_elsewhere(
                structure
            )
            if kind == "text":  # a blank one is none
                column = self._columns[("metadata", "answer") if inner else ("answer",)]
                self.answered_oddly[indices] |= _blank(column)[indices]

    def _is_plain(self, structure: Structure) -> bool:
        """Whether columns suffice to read the task and its answers."""
        return all(
            kind_in(structure[name]) in kinds for name, kinds in _PLAIN.items() if name in structure
        ) and all(
            path in self._columns or kind_at(structure, path) in ("null", *_NESTED)
            for path in [("task_id",), *_ANSWERS]
        )

    def tasks(self) -> list[pl.Series]:
        """Returns `text`, `asked`, `id` and `answer` of the tasks that columns can represent."""
        ids, inner, top = (
            self._columns.get(path) for path in (("task_id",), ("metadata", "answer"), ("answer",))
        )
        ids = (
            _nothing(self._block)
            if ids is None
            else pl.select(pl.when(ids != "").then(ids)).to_series()
        )
        if inner is None or top is None:
            answer = _nothing(self._block) if inner is top else top if inner is None else inner
        else:
            answer = pl.select(
                pl.when(pl.Series(self._inner)).then(inner).otherwise(top)
            ).to_series()
        signs = pl.Series(self._signs)
        return [
            self._forms,
            _asked_forms(self._block, self._forms),
            ids,
            pl.select(pl.when(signs != "").then(signs + answer)).to_series(),
        ]

    def given_away(self) -> _Mask:
        """Marks rows that may contain their answer or repeat a prompt."""
        answers = [self._columns[path] for path in _ANSWERS if path in self._columns]
        wording_runs = _wording()
        # a joint pattern is as fast as either of the two, and few texts match
        marked = self._forms.str.contains(f"{CUES}|{wording_runs}").fill_null(False)
        suspects = may_give_away(
            self._block.texts,
            self._forms,
            marked,
            [answer for answer in answers if answer.null_count() < len(answer)],
        )
        some = marked.arg_true()
        suspects = suspects.scatter(
            some.filter(self._forms.gather(some).str.contains(wording_runs)), True
        )
        for structure, indices in self.groups:
            if structure is None or not self._is_plain(structure) or _answers_elsewhere(structure):
                suspects = suspects.scatter(indices, True)
        return suspects.to_numpy()


def _read_rows(
    block: LineBlock, known: Sequence[pl.Series], tasks: _Mask, answers: _Mask, suspects: _Mask
) -> tuple[list[tuple[int, str, str]], pl.DataFrame]:
    """Returns problems and tasks, after reading the masked rows for values that columns can't
    give."""
    problems: list[tuple[int, str, str]] = []
    task_fields: list[tuple[str | None, str | None, str | None, str | None]] = []
    is_task, odd = np.ones(len(block), bool), list[str | None]()
    indices = np.flatnonzero(tasks | answers | suspects)
    for index, row in zip(indices.tolist(), block.rows(indices), strict=True):
        if suspects[index] and (excerpt := given_away(row.values)) is not None:
            problems.append((index, "given away", f"contains its answer: {excerpt}"))
        if suspects[index] and (excerpt := repeated(text_of(row.values), wording())) is not None:
            problems.append((index, "prompt", f"repeats words of a generation prompt: {excerpt}"))
        if tasks[index]:
            task = _task(row)
            if not isinstance(task, tuple):
                own_id = (
                    encodable(task.task_id) if row.values.get("task_id") not in (None, "") else None
                )
                task_fields.append((*_asked(row.values), own_id, _answer(row.values)))
            else:
                problems.append((index, *task))
                is_task[index] = False
                task_fields.append((*_asked(row.values), None, _answer(row.values)))
        elif answers[index]:
            odd.append(_answer(row.values))
    rows = np.flatnonzero(tasks)
    columns = [
        c.scatter(rows, pl.Series([f[i] for f in task_fields], dtype=pl.String))
        for i, c in enumerate(known)
    ]
    columns[3] = columns[3].scatter(
        np.flatnonzero(answers & ~tasks), pl.Series(odd, dtype=pl.String)
    )
    frame = pl.DataFrame(dict(zip(("text", "asked", "id", "answer"), columns, strict=True)))
    return problems, frame.with_columns(is_task=pl.Series(is_task))


def _task(row: Row) -> Task | tuple[str, str]:
    """Returns the task of a row, or the kind of problem and a message."""
    try:
        task = to_task(row, {})
    except TaskError as error:
        return "no task", str(error).removeprefix(f"{row.where}: ").removeprefix(f"{row.where} ")
    if not (task.main_query.strip() or task.init_messages or task.env_type):
        columns = ", ".join(row.values)
        return "asks nothing", f"has no main_query and no init_messages; it has {columns} (--map)"
    return task


def _answers_elsewhere(structure: Structure) -> bool:
    """Whether an answer may be in other fields than `_ANSWERS`."""
    names: list[tuple[str, ...]] = [(name,) for name in structure]
    for outer in INNER:
        inner = structure.get(outer)
        names += [(outer, name) for name in inner] if isinstance(inner, dict) else []
    return any(
        (is_answer(path[-1]) or is_reply(path[-1])) and path not in _ANSWERS for path in names
    )


def _asked_forms(block: LineBlock, forms: pl.Series) -> pl.Series:
    """Returns the normalized questions without system prompts."""
    some = block.texts.str.contains(SYSTEM, literal=True).arg_true()
    if not len(some):
        return forms
    asked = [normalize(without_system(text)) for text in block.texts.gather(some)]
    return forms.clone().scatter(some, pl.Series(asked, dtype=pl.String))


def _asked(values: Mapping[str, object]) -> tuple[str | None, str | None]:
    """Returns the normalized question with its context, and the same without a system prompt."""
    text = text_of(values)
    if not text.strip():
        return None, None
    return encodable(normalize(text)), encodable(normalize(without_system(text)))


def _answer(values: Mapping[str, object]) -> str | None:
    """Returns the answer, prefixed with a letter for its kind."""
    value = truth_of(values)
    if value is None:
        return None
    sign = _SIGNS.get(kind_of(value), _OTHER)
    text = str(value) if sign == "s" else json.dumps(value, sort_keys=True, default=str)
    return encodable(sign + text)
