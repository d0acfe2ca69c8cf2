"""The columns of the table: what every row asks and answers, and what else tells these rows apart."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ajet_tools.dataset.filter import value_at
from ajet_tools.dataset.tables import text_of
from ajet_tools.dataset.verdict import answer_of
from ajet_tools.trace.text import one_line
from ajet_tools.tui.widgets.listing import Column

__all__ = ["columns_of", "made_by", "verified"]

_WIDEST = 16
_MORE = 3
"""Columns of the rows' own, at most."""
_CUT = 400
_EDGES = 7
"""Cells of a table beside its columns."""

Values = Mapping[str, Any]


def columns_of(rows: Sequence[Values], marks: Callable[[int], str | None], room: int) -> list[Column]:
    """For rows like these, as many as there is room for, in cells.

    `marks` says of a row's number whether it was accepted or rejected.
    """

    def tone(row: Values) -> str:
        return {"accepted": "good", "rejected": "bad"}.get(marks(row["number"]) or "", "")

    def of(values: Callable[[Values], str]) -> Callable[[Values], str]:
        return lambda row: values(row["values"])

    columns = [
        Column("row", "row", 7, lambda row: f"{row['number'] + 1:,}", right=True),
        Column("question", "question", 36, of(_question), most=500, tone=tone),
    ]
    if any(answer_of(row) is not None for row in rows):
        columns.append(Column("answer", "answer", max(8, _width(map(_answer, rows), 20)), of(_answer), tone=tone))
    others = []
    if any(map(made_by, rows)):
        others.append(Column("made", "made by", max(7, _width(map(made_by, rows), _WIDEST)), of(made_by)))
    if any(map(verified, rows)):
        others.append(Column("verified", "verified", 8, of(verified), tone=lambda row: _tone(verified(row["values"]))))
    others += [Column(path, path.rpartition(".")[2], width, of(_at(path))) for path, width in _paths(rows)]
    for column in others:
        if sum(one.width + 1 for one in columns) + column.width + _EDGES <= room:
            columns.append(column)
    return columns


def _tone(said: str) -> str:
    return {"yes": "good", "no": "bad"}.get(said, "")


def _question(values: Values) -> str:
    return text_of(values)[:_CUT]


def _answer(values: Values) -> str:
    return _cell(answer_of(values))


def made_by(values: Values) -> str:
    """How the row came to be, by its provenance: the strategy of `expand`, else the source."""
    provenance = values.get("provenance")
    strategy = value_at(provenance, "parameters.strategy")
    return _cell(strategy or value_at(provenance, "source"))


def verified(values: Values) -> str:
    """Whether the answer was checked, by the provenance: yes, no, or nothing."""
    said = value_at(values.get("provenance"), "verdict.ok")
    return {True: "yes", False: "no"}.get(said, "") if isinstance(said, bool) else ""


def _at(path: str) -> Callable[[Values], str]:
    return lambda values: _cell(value_at(values, path))


def _cell(value: Any) -> str:
    return "" if value is None else one_line(value, 60)


def _paths(rows: Sequence[Values]) -> Iterator[tuple[str, int]]:
    """Short fields of the rows that are not the same everywhere, and how wide they are."""
    seen: dict[str, list[Any]] = {}
    for row in rows:
        for path, value in _short(row):
            seen.setdefault(path, []).append(value)
    found = 0
    for path, values in seen.items():
        told = {_cell(value) for value in values}
        width = max(map(len, told))
        if found < _MORE and width <= _WIDEST and len(told) > 1 and 2 * len(values) > len(rows):
            found += 1
            yield path, max(width, len(path.rpartition(".")[2]))


def _short(row: Values) -> Iterator[tuple[str, Any]]:
    for name, value in row.items():
        if name in ("task_id", "id", "provenance", "answer") or value is None:
            continue
        if name == "metadata" and isinstance(value, Mapping):
            yield from ((f"metadata.{key}", one) for key, one in value.items() if key != "answer" and _plain(one))
        elif _plain(value) and value != text_of(row):
            yield name, value


def _plain(value: Any) -> bool:
    return isinstance(value, str | int | float)


def _width(texts: Iterable[str], most: int) -> int:
    return min(most, max((len(text) for text in texts), default=0))
