"""Rows, one by one and in blocks of some thousand: columns of a table, and lines of JSON.

Commands that select rows pass lines and columns on unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ajet_sdk.errors import TaskError
from ajet_sdk.tasks.questions import text_of
from ajet_sdk.tasks.row_pictures import with_files
from ajet_sdk.tasks.task_rows import Row as TaskRow
from ajet_tools.dataset.files.columns import LINE, LINES
from ajet_tools.dataset.files.values import objects_of

ROWS = 8192
_PICTURE = "image"
"""In the text of each row that names a picture's file, in a column or in a type of part."""
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)
_ESCAPING = json.JSONEncoder(allow_nan=False)


@dataclass(frozen=True)
class Row(TaskRow):
    """A row of a dataset and its location, such as `seeds.jsonl line 7`."""

    values: dict[str, Any]
    schema: pa.Schema = field(default=LINES, compare=False, repr=False)
    """The columns of its table, `LINES` if it was read from text."""


@dataclass(frozen=True)
class Block:
    """Some rows of a file."""

    name: str
    data: pa.RecordBatch
    """Columns; the other keys of each row are JSON in `LINE`."""
    places: Sequence[int] | Sequence[str]
    """Numbers in the file, from 1; or the location of each row as text."""
    unit: str = "line"
    """What the numbers count: a line of text, or a row of a table."""
    directory: Path | None = None
    """That of the file, which the names of pictures' files in the rows are relative to."""

    def __len__(self) -> int:
        return int(self.data.num_rows)

    @property
    def is_text(self) -> bool:
        return list(self.data.schema.names) == [LINE]

    def where(self, index: int) -> str:
        place = self.places[index]
        if isinstance(place, str):
            return place
        return f"{self.name} {self.unit} {place}"

    def values(self) -> Iterator[dict[str, Any]]:
        """Yields each row as JSON values."""
        if self.is_text:
            for line in self.data.column(LINE).to_pylist():
                row = json.loads(line)
                yield with_files(row, self.directory) if _PICTURE in line else row
            return
        for values in objects_of(self.data, self.name):
            line = values.pop(LINE, None)
            row = values if line is None else {**values, **json.loads(line)}
            yield with_files(row, self.directory)

    def rows(self) -> Iterator[Row]:
        for index, values in enumerate(self.values()):
            yield Row(self.where(index), values, self.data.schema)

    @cached_property
    def texts(self) -> list[str]:
        """What each row asks."""
        return [text_of(values) for values in self.values()]

    def take(self, indices: Sequence[int]) -> Block:
        """Returns the rows at these indices, which are in order."""
        if len(indices) == len(self):
            return self
        data = self.data.take(pa.array(indices, pa.int64()))
        places: Any = [self.places[index] for index in indices]
        return replace(self, data=data, places=places)

    def fitted(self, schema: pa.Schema) -> Block:
        """Returns the rows in the columns of a schema; all other keys go to `LINE`.

        Raises TaskError for a value that does not fit.
        """
        if self.data.schema.equals(schema, check_metadata=True):
            return self
        arrays = []
        for column in schema:
            if column.name == LINE:
                arrays.append(self._lines(except_for=schema.names))
            elif column.name in self.data.schema.names:
                try:
                    arrays.append(self.data.column(column.name).cast(column.type))
                except pa.ArrowException as error:
                    raise TaskError(
                        f"{self.name}: {column.name} is not {column.type}: {error}"
                    ) from error
            else:
                arrays.append(pa.nulls(len(self), column.type))
        return replace(self, data=_batch(arrays, schema, len(self)))

    def _lines(self, *, except_for: Collection[str]) -> pa.Array:
        if self.is_text:
            return self.data.column(LINE)
        names = [name for name in self.data.schema.names if name == LINE or name not in except_for]
        return _as_lines(replace(self, data=self.data.select(names)).values())

    def changed(self, rows: Sequence[Mapping[str, object]], new: Collection[str]) -> Block:
        """Returns the block with other values of its rows.

        Columns keep their type and their values, and are null where a row lacks the key. Only those
        named in `new`, and keys that are no columns, get the values of the rows.
        """
        arrays = []
        fields = []
        for column in self.data.schema:
            if column.name in (*new, LINE):
                continue
            array = self.data.column(column.name)
            is_there = [column.name in values for values in rows]
            if not all(is_there):
                places = pc.if_else(pa.array(is_there), pa.array(range(len(self))), None)
                array = array.take(places)
                column = column.with_nullable(True)
            arrays.append(array)
            fields.append(column)
        names = {column.name for column in fields}
        others = []
        for values in rows:
            others.append({name: value for name, value in values.items() if name not in names})
        arrays.append(_as_lines(others))
        schema = pa.schema([*fields, LINES.field(LINE)], self.data.schema.metadata)
        return replace(self, data=_batch(arrays, schema, len(self)))

    def with_columns(self, values: Mapping[str, object]) -> Block:
        """Adds keys with a constant value, except where a row has them."""
        if self.is_text:
            rows = [{**row, **values, **row} for row in self.values()]
            return self.changed(rows, ())
        data = self.data
        for name, value in values.items():
            if name in data.schema.names:
                continue
            kind = pa.int64() if isinstance(value, int) else pa.string()
            array = pa.array([value] * len(self), kind)
            data = data.append_column(pa.field(name, kind), array)
        return replace(self, data=data)

    def renamed(self, mapping: Mapping[str, str]) -> Block:
        """Renames columns of a table."""
        fields = []
        for column in self.data.schema:
            fields.append(column.with_name(mapping.get(column.name, column.name)))
        schema = pa.schema(fields, self.data.schema.metadata)
        return replace(self, data=_batch(self.data.columns, schema, len(self)))


def _as_lines(rows: Iterable[Mapping[str, object]]) -> pa.Array:
    return pa.array([text_of_json(values) for values in rows], pa.string())


def _batch(arrays: Sequence[pa.Array], schema: pa.Schema, count: int) -> pa.RecordBatch:
    if not arrays:  # such a batch has no number of rows of its own
        return pa.RecordBatch.from_struct_array(pa.array([{}] * count, pa.struct([])))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def json_line(value: object) -> bytes:
    """Encodes a value as a line of JSON. Lone surrogates, which UTF-8 can't encode, are escaped."""
    return (text_of_json(value) + "\n").encode()


def text_of_json(value: object) -> str:
    text = _ENCODER.encode(value)
    if text.isascii() or encodable(text) == text:
        return text
    return _ESCAPING.encode(value)


def encodable(text: str) -> str:
    """Escapes halves of surrogate pairs, which UTF-8 can't hold."""
    return text.encode("utf-8", "backslashreplace").decode()


def blocks_of(rows: Iterable[Row], name: str) -> Iterator[Block]:
    """Groups rows into blocks of lines."""
    remaining = iter(rows)
    while some := list(islice(remaining, ROWS)):
        lines = [text_of_json(row.values) for row in some]
        yield block_of_lines(lines, name, [row.where for row in some])


def block_of_lines(
    lines: Sequence[str] | pa.Array, name: str, places: Sequence[int] | Sequence[str]
) -> Block:
    if not isinstance(lines, pa.Array):
        lines = pa.array(lines, pa.string())
    return Block(name, pa.RecordBatch.from_arrays([lines], schema=LINES), places)
