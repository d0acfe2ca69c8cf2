"""Blocks of some thousand rows in their stored form: lines of JSON, or a record batch of a table.

Commands that select rows pass the lines, or the rows of Arrow, on unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any

import polars as pl
import pyarrow as pa

from ajet_sdk.errors import TaskError
from ajet_sdk.tasks.questions import text_of
from ajet_sdk.tasks.task_rows import Row as TaskRow
from ajet_tools.dataset.files.arrays import batch_of, changed_column, new_column, structs, table_of
from ajet_tools.dataset.files.columns import ABSENT, Columns, Shape
from ajet_tools.dataset.files.json_columns import TooLarge
from ajet_tools.dataset.files.values import objects_of

ROWS = 8192
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)
_ESCAPING = json.JSONEncoder(allow_nan=False)


@dataclass(frozen=True)
class Row(TaskRow):
    """A row of a dataset and its location, such as `seeds.jsonl line 7`."""

    values: dict[str, Any]
    stored: Stored | None = field(default=None, compare=False, repr=False)
    """The row in its table, from which `Writer.write` takes the types; None if it was read from
    text."""


@dataclass(frozen=True)
class Stored:
    """The location of a row in a table."""

    block: TableBlock
    index: int

    @property
    def columns(self) -> Columns:
        return self.block.table


@dataclass
class LineBlock:
    """Rows as lines, each a JSON object."""

    name: str
    lines: pl.Series
    """Stripped lines."""
    places: Sequence[int] | Sequence[str]
    """Line numbers in the file, from 1; or the location of each row as text."""

    def __len__(self) -> int:
        return len(self.lines)

    def where(self, index: int) -> str:
        place = self.places[index]
        return place if isinstance(place, str) else f"{self.name} line {place}"

    def rows(self) -> Iterator[Row]:
        for index, line in enumerate(self.lines.to_list()):
            yield Row(self.where(index), json.loads(line))

    @cached_property
    def texts(self) -> list[str]:
        """What each row asks."""
        return [text_of(row.values) for row in self.rows()]

    def with_columns(self, values: Mapping[str, object]) -> LineBlock:
        """Adds fields with a constant value, except where a row has them."""
        rows = (Row(row.where, {**row.values, **values, **row.values}) for row in self.rows())
        return _block_of(rows, self.name)

    def take(self, indices: Sequence[int]) -> LineBlock:
        places: Any = [self.places[index] for index in indices]
        return LineBlock(self.name, self.lines.gather(list(indices)), places)

    def without_rows(self) -> LineBlock:
        """Returns a block that only knows where its rows are."""
        return replace(self, lines=self.lines.clear())


@dataclass
class TableBlock:
    """Rows in the columns of a table."""

    name: str
    table: Columns
    data: pa.RecordBatch
    first: int = 1
    """Number of its first row in the file, from 1."""

    def __len__(self) -> int:
        return int(self.data.num_rows)

    def where(self, index: int) -> str:
        return f"{self.name} row {self.first + index}"

    def rows(self) -> Iterator[Row]:
        for index, values in enumerate(objects_of(self.data, self.table)):
            yield Row(self.where(index), values, Stored(self, index))

    @cached_property
    def texts(self) -> list[str]:
        return [text_of(row.values) for row in self.rows()]

    def take(self, indices: Sequence[int]) -> TableBlock:
        return replace(self, data=self.data.take(pa.array(indices, pa.int64())))

    def without_rows(self) -> TableBlock:
        return replace(self, data=self.data.slice(0, 0))

    def changed(self, values: Sequence[Mapping[str, object]]) -> TableBlock:
        """Replaces the values of its rows; those that are the same keep their type. Raises
        Misfit."""
        before = objects_of(self.data, self.table)
        shapes: dict[str, Shape] = {}
        arrays: list[pa.Array] = []
        for name in dict.fromkeys(name for row in values for name in row):
            after = [row.get(name, ABSENT) for row in values]
            if name in self.table.shapes:
                array, shape = changed_column(
                    self.data.column(name),
                    self.table.shapes[name],
                    [row.get(name, ABSENT) for row in before],
                    after,
                    name,
                )
            else:
                array, shape = new_column(name, after)
            arrays.append(array)
            shapes[name] = shape
        columns = Columns(self.name, shapes, self.table.metadata)
        data, columns = batch_of(arrays, columns, len(self))
        return replace(self, table=columns, data=data)

    def with_columns(self, values: Mapping[str, object]) -> TableBlock:
        """Adds columns with a constant value, except those that exist."""
        columns = self._columns()
        for name, value in values.items():
            if name not in columns:
                array, shape = new_column(name, [value])
                columns[name] = shape, array.take(pa.array([0] * len(self), pa.int64()))
        return self._with(columns)

    def renamed(self, mapping: Mapping[str, str]) -> TableBlock | None:
        """Renames columns as `--map` says; None where a row has to be read for it."""
        before = self._columns()
        columns = {name: column for name, column in before.items() if name not in mapping}
        for name, target in mapping.items():
            root, _, inner = target.partition(".")
            if root == "metadata":
                outer = columns.get("metadata")
                if outer is not None and outer[0].fields is None:
                    return None
                columns["metadata"] = _with_field(outer, inner, before[name])
            else:
                columns[target] = before[name]
        return self._with(columns)

    def selected(self, names: Sequence[str]) -> TableBlock:
        return self._with({name: self._columns()[name] for name in names})

    def opened(self) -> TableBlock:
        """Adds the fields of `metadata` as columns."""
        columns = self._columns()
        inner = _fields(columns["metadata"]) if "metadata" in columns else {}
        return self._with({**inner, **columns})

    def _columns(self) -> dict[str, _Column]:
        return {name: (shape, self.data.column(name)) for name, shape in self.table.shapes.items()}

    def _with(self, columns: Mapping[str, _Column]) -> TableBlock:
        shapes = {name: shape for name, (shape, _) in columns.items()}
        data, table = batch_of(
            [array for _, array in columns.values()],
            Columns(self.name, shapes, self.table.metadata),
            len(self),
        )
        return replace(self, table=table, data=data)


Block = LineBlock | TableBlock
_Column = tuple[Shape, pa.Array]


def _fields(column: _Column) -> dict[str, _Column]:
    shape, array = column
    if shape.fields is None:
        return {}
    pairs = zip(shape.fields.values(), array.flatten(), strict=True)
    return dict(zip(shape.fields, pairs, strict=True))


def _with_field(outer: _Column | None, name: str, column: _Column) -> _Column:
    fields = {**(_fields(outer) if outer else {}), name: column}
    source = next((shape.source for shape, _ in fields.values() if shape.source), None)
    shape = Shape(fields={name: inner for name, (inner, _) in fields.items()}, source=source)
    return shape, structs([array for _, array in fields.values()], shape, [False] * len(column[1]))


def json_line(value: object) -> bytes:
    """Encodes a value as a line of JSON. Lone surrogates, which UTF-8 can't encode, are escaped."""
    try:
        return (_ENCODER.encode(value) + "\n").encode()
    except UnicodeEncodeError:
        return (_ESCAPING.encode(value) + "\n").encode()


def encodable(text: str) -> str:
    """Escapes halves of surrogate pairs, which UTF-8 can't hold."""
    return text.encode("utf-8", "backslashreplace").decode()


def blocks_of(rows: Iterable[Row], name: str) -> Iterator[LineBlock]:
    """Groups rows into blocks of lines."""
    remaining = iter(rows)
    while some := list(islice(remaining, ROWS)):
        yield _block_of(some, name)


def _block_of(rows: Iterable[Row], name: str) -> LineBlock:
    pairs = [(json_line(row.values)[:-1].decode(), row.where) for row in rows]
    lines = pl.Series("line", [line for line, _ in pairs], pl.String)
    return LineBlock(name, lines, [where for _, where in pairs])


def as_lines(block: Block) -> LineBlock:
    return block if isinstance(block, LineBlock) else _block_of(block.rows(), block.name)


def as_table(block: Block) -> TableBlock:
    """Converts lines to a table, with types that hold their values. Raises TaskError for a row
    that no table holds."""
    if isinstance(block, TableBlock):
        return block
    try:
        data, columns = table_of(block.name, block.lines)
    except TooLarge as error:
        raise TaskError(f"{block.where(error.index)}: {error}") from error
    return TableBlock(block.name, columns, data)
