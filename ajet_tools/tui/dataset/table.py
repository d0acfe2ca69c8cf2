"""The table of a review's rows: columns, pages, marks, search hits, status line."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypedDict

from rich.text import Text
from textual.binding import Binding, BindingType

from ajet_sdk.tasks.questions import answer_of, text_of
from ajet_tools.dataset.files.values import value_at
from ajet_tools.dataset.review.review import Only, Review
from ajet_tools.text.clean import one_line
from ajet_tools.tui.widgets.lines import PartsLine
from ajet_tools.tui.widgets.listing import ListingTable
from ajet_tools.tui.widgets.listing_rows import Column, Rows, step_to

_WIDEST = 16
_MORE = 3
"""Maximum number of columns for other fields."""
_CUT = 400
_EDGES = 7
"""Cells of a table beside its columns."""
Values = Mapping[str, object]


class NumberedRow(TypedDict):
    """A row with its number in the file, from 0."""

    number: int
    values: Values


def pick_columns(
    rows: Sequence[Values], marks: Callable[[int], str | None], width: int
) -> list[Column[NumberedRow]]:
    """Choose the columns for sample rows that fit into `width` cells: question, answer, short and
    varied fields.

    `marks` returns the decision on a row.
    """

    def tone(row: NumberedRow) -> str:
        return {"accepted": "good", "rejected": "bad"}.get(marks(row["number"]) or "", "")

    def of(values: Callable[[Values], str]) -> Callable[[NumberedRow], str]:
        return lambda row: values(row["values"])

    columns: list[Column[NumberedRow]] = [
        Column("row", "row", 7, lambda row: f"{row['number'] + 1:,}", right=True),
        Column(
            "question",
            "question",
            36,
            of(lambda values: text_of(values)[:_CUT]),
            most=500,
            tone=tone,
        ),
    ]
    if any(answer_of(row) is not None for row in rows):
        columns.append(
            Column(
                "answer",
                "answer",
                max(8, _width(map(_format_answer, rows), 20)),
                of(_format_answer),
                tone=tone,
            )
        )
    others: list[Column[NumberedRow]] = []
    if any(map(source_of, rows)):
        others.append(
            Column("made", "made by", max(7, _width(map(source_of, rows), _WIDEST)), of(source_of))
        )
    if any(map(verification_of, rows)):
        tones = {"yes": "good", "no": "bad"}
        verified = of(verification_of)
        others.append(
            Column(
                "verified", "verified", 8, verified, tone=lambda row: tones.get(verified(row), "")
            )
        )
    for path, width_of_path in _paths(rows):
        text = of(lambda values, path=path: _format_cell(value_at(values, path)))  # type: ignore[misc]
        others.append(Column(path, path.rpartition(".")[2], width_of_path, text))
    for column in others:
        if sum(picked.width + 1 for picked in columns) + column.width + _EDGES <= width:
            columns.append(column)
    return columns


def _format_answer(values: Values) -> str:
    return _format_cell(answer_of(values))


def source_of(values: Values) -> str:
    """Return the origin of a row from its provenance: the strategy of `expand`, or else the
    source."""
    provenance = values.get("provenance")
    strategy = value_at(provenance, "parameters.strategy")
    return _format_cell(strategy or value_at(provenance, "source"))


def verification_of(values: Values) -> str:
    """Return the verification in the provenance: yes, no, or an empty text."""
    value = value_at(values.get("provenance"), "verdict.ok")
    return {True: "yes", False: "no"}.get(value, "") if isinstance(value, bool) else ""


def _format_cell(value: object) -> str:
    return "" if value is None else one_line(value, 60)


def _paths(rows: Sequence[Values]) -> Iterator[tuple[str, int]]:
    """Yield short fields that differ between rows, with their widths."""
    seen: dict[str, list[object]] = {}
    for row in rows:
        for path, value in _short_fields(row):
            seen.setdefault(path, []).append(value)
    count = 0
    for path, values in seen.items():
        texts = {_format_cell(value) for value in values}
        width = max(map(len, texts))
        if count < _MORE and width <= _WIDEST and len(texts) > 1 and 2 * len(values) > len(rows):
            count += 1
            yield path, max(width, len(path.rpartition(".")[2]))


def _short_fields(row: Values) -> Iterator[tuple[str, object]]:
    for name, value in row.items():
        if name in ("task_id", "id", "provenance", "answer") or value is None:
            continue
        if name == "metadata" and isinstance(value, Mapping):
            plain = {
                key: inner for key, inner in value.items() if isinstance(inner, str | int | float)
            }
            yield from (
                (f"metadata.{key}", inner) for key, inner in plain.items() if key != "answer"
            )
        elif isinstance(value, str | int | float) and value != text_of(row):
            yield name, value


def _width(texts: Iterable[str], most: int) -> int:
    return min(most, max(map(len, texts), default=0))


_SAMPLED_ROWS = 200
"""Number of rows from which columns are chosen."""

_SIGNS = {"accepted": "✓", "rejected": "✗"}


class RowsTable(ListingTable):
    """A listing of rows; the key `a` accepts."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("a", "screen.mark('accepted')", "Accept"),
        Binding("ctrl+a", "all", "Select all, or none", show=False),
    ]

    def __init__(self, review: Review) -> None:
        super().__init__((), self._fetch_page)
        self.review = review

    async def _fetch_page(self, rows: ShownRows, offset: int, limit: int) -> Sequence[NumberedRow]:
        numbers = rows.numbers[offset : offset + limit]
        fetched = await asyncio.to_thread(self.review.rows, numbers)
        return [
            {"number": number, "values": row.values}
            for number, row in zip(numbers, fetched, strict=True)
        ]

    def choose_columns(self) -> None:
        """Choose the columns for the first rows and the width of the screen."""
        rows = [row.values for row in self.review.spool.rows(range(_SAMPLED_ROWS))]
        columns = pick_columns(rows, self.review.mark_of, self.app.size.width)
        blind = self.review.sample_size is not None
        self.columns = tuple(
            column for column in columns if not (blind and column.name == "verified")
        )

    @property
    def numbers(self) -> list[int]:
        """Selected rows, or the row under the cursor."""
        ids = self.selected or ({self.cursor_id} if self.cursor_id else set())
        return sorted(int(id) for id in ids)

    @property
    def number(self) -> int | None:
        return int(self.cursor_id) if self.cursor_id is not None else None

    def show_marks(self, hits: SearchHits | None) -> None:
        """Mark rows by ✓ or ✗, followed by ~ for a hit or * for an edit."""
        signs = {}
        hit_numbers = set(hits.numbers) if hits is not None else set()
        for number in {*hit_numbers, *self.review.decisions}:
            decision = self.review.decisions.get(number)
            mark = _SIGNS.get(decision.mark or "", " ") if decision is not None else " "
            edited = "*" if decision is not None and decision.values is not None else " "
            signs[str(number)] = mark + ("~" if number in hit_numbers else edited)
        self.set_marks(signs)


@dataclass(frozen=True)
class SearchHits:
    """A search text and the numbers of the matching rows."""

    needle: str
    numbers: list[int]

    def step(self, rows: Rows, cursor: int, by: int) -> int | None:
        """Return the position of the next hit (`by` 0: from the cursor on; -1: the previous),
        wrapping around."""
        places = [at for number in self.numbers if (at := rows.position(str(number))) is not None]
        return step_to(places, cursor, by)

    def __str__(self) -> str:
        return f"{len(self.numbers):,} have {one_line(self.needle, 30)!r}"


class ShownRows:
    """`Rows` of a `ListingTable` by number; the id of a row is its number as text."""

    def __init__(self, numbers: Sequence[int], *, rising: bool = True) -> None:
        """Create rows; `numbers` are sorted unless `rising` is false (a sample)."""
        self.numbers, self._rising = numbers, rising

    @property
    def count(self) -> int:
        return len(self.numbers)

    def ids(self, start: int = 0, stop: int | None = None) -> list[str]:
        return [str(number) for number in self.numbers[start:stop]]

    def position(self, id: str, /) -> int | None:
        """Return the position of a row, or None."""
        if not self._rising:
            return self.numbers.index(int(id)) if int(id) in self.numbers else None
        at = bisect_left(self.numbers, int(id))
        return at if at < len(self.numbers) and self.numbers[at] == int(id) else None


class ReviewStatus(PartsLine):
    """Shows position, decisions, filter and search."""

    def __init__(self, review: Review) -> None:
        super().__init__()
        self.review = review

    def update_status(
        self, table: ListingTable, busy: str, filter_text: str, only: Only, hits: SearchHits | None
    ) -> None:
        marks, sampled, sample = self.review.marks, self.review.sampled, ""
        if sampled is not None:
            labelled = sum(self.review.mark_of(number) is not None for number in sampled)
            sample = f"random sample: {labelled:,} of {len(sampled):,} labelled"
        parts = [
            self._describe_position(table, narrowed=bool(filter_text) or only != "all"),
            "" if self.review.loaded else "reading",
            busy,
            f"{len(table.selected):,} selected" if table.selected else "",
            *(
                f"{marks[name]:,} {name}"
                for name in ("accepted", "rejected", "edited")
                if marks[name]
            ),
            "not saved" if self.review.unsaved else "",
            sample,
            f"only {only}" if only != "all" else "",
            one_line(filter_text, 60),
            str(hits) if hits is not None else "",
        ]
        self.show(Text(part) for part in parts if part)

    def _describe_position(self, table: ListingTable, *, narrowed: bool) -> str:
        of = f" (of {len(self.review.spool):,})" if narrowed else ""
        if table.count:
            return f"{table.cursor + 1:,} of {table.count:,}{of}"
        if narrowed:
            return f"no row matches{of}"
        return "no rows" if self.review.loaded else ""
