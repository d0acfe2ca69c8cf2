"""Rows, one by one and in blocks of some thousand: columns of a table, and lines of JSON.

Commands that select rows pass lines and columns on unchanged.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ajet_sdk.errors import TaskError
from ajet_sdk.tasks.questions import text_of
from ajet_sdk.tasks.task_rows import Row as TaskRow
from ajet_tools.dataset.files.columns import (
    LINE,
    LINES,
    described_field,
    feature_of,
    notes_of,
)
from ajet_tools.dataset.files.values import objects_of

ROWS = 8192
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

    def __len__(self) -> int:
        return int(self.data.num_rows)

    @property
    def is_text(self) -> bool:
        return list(self.data.schema.names) == [LINE]

    def where(self, index: int) -> str:
        place = self.places[index]
        return place if isinstance(place, str) else f"{self.name} {self.unit} {place}"

    def values(self) -> Iterator[dict[str, Any]]:
        """Yields each row as JSON values."""
        if self.is_text:
            yield from map(json.loads, self.data.column(LINE).to_pylist())
            return
        for values in objects_of(self.data, self.name):
            line = values.pop(LINE, None)
            yield values if line is None else {**values, **json.loads(line)}

    def rows(self) -> Iterator[Row]:
        for index, values in enumerate(self.values()):
            yield Row(self.where(index), values, self.data.schema)

    @cached_property
    def texts(self) -> list[str]:
        """What each row asks."""
        return [text_of(values) for values in self.values()]

    def take(self, indices: Sequence[int]) -> Block:
        """Returns the rows at these indices, in this order."""
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
                arrays.append(self._converted(column))
            else:
                arrays.append(pa.nulls(len(self), column.type))
        return replace(self, data=_batch(arrays, schema, len(self)))

    def _converted(self, column: pa.Field) -> pa.Array:
        try:
            return self.data.column(column.name).cast(column.type)
        except pa.ArrowException as error:
            raise TaskError(f"{self.name}: {column.name} is not {column.type}: {error}") from error

    def _lines(self, *, except_for: Collection[str]) -> pa.Array:
        if self.is_text:
            return self.data.column(LINE)
        names = self.data.schema.names
        others = self.data.select(
            [name for name in names if name == LINE or name not in except_for]
        )
        rows = replace(self, data=others).values()
        return pa.array([text_of_json(values) for values in rows], pa.string())

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
        lines = []
        for values in rows:
            others = {name: value for name, value in values.items() if name not in names}
            lines.append(text_of_json(others))
        arrays.append(pa.array(lines, pa.string()))
        schema = pa.schema([*fields, LINES.field(LINE)], self.data.schema.metadata)
        return replace(self, data=_batch(arrays, schema, len(self)))

    def with_columns(self, values: Mapping[str, object]) -> Block:
        """Adds keys with a constant value, except where a row has them."""
        if self.is_text:
            rows = [{**row, **values, **row} for row in self.values()]
            return self.changed(rows, ())
        data = self.data
        for name, value in values.items():
            if name not in data.schema.names:
                kind = pa.int64() if isinstance(value, int) else pa.string()
                array = pa.array([value] * len(self), kind)
                data = data.append_column(pa.field(name, array.type), array)
        return replace(self, data=data)

    def renamed(self, mapping: Mapping[str, str]) -> Block:
        """Renames columns as `--map` says: `metadata.NAME` becomes a field of that object."""
        columns = self._columns()
        for name, target in mapping.items():
            column = columns.pop(name)
            root, _, inner = target.partition(".")
            if root == "metadata":
                columns[root] = _with_field(columns.get(root), inner, column)
            else:
                columns[target] = column
        return self._with(columns)

    def opened(self) -> Block:
        """Adds the fields of a nested `metadata` as columns, which follow those before it."""
        columns = self._columns()
        metadata = columns.get("metadata")
        if metadata is None or not pa.types.is_struct(metadata[1].type):
            return self
        return self._with({**_fields(metadata), **columns})

    def _columns(self) -> dict[str, _Column]:
        pairs = zip(self.data.schema, self.data.columns, strict=True)
        return dict(zip(self.data.schema.names, pairs, strict=True))

    def _with(self, columns: Mapping[str, _Column]) -> Block:
        fields = [column.with_name(name) for name, (column, _) in columns.items()]
        schema = pa.schema(fields, self.data.schema.metadata)
        arrays = [array for _, array in columns.values()]
        return replace(self, data=_batch(arrays, schema, len(self)))


_Column = tuple[pa.Field, pa.Array]


def _batch(arrays: Sequence[pa.Array], schema: pa.Schema, count: int) -> pa.RecordBatch:
    if not arrays:
        return pa.RecordBatch.from_struct_array(pa.array([{}] * count, pa.struct([])))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _fields(column: _Column) -> dict[str, _Column]:
    """Returns the fields of objects as columns."""
    field_of_all, array = column
    notes = notes_of(field_of_all).get("fields", {})
    features = feature_of(field_of_all) or {}
    fields = {}
    for inner, values in zip(array.type, array.flatten(), strict=True):
        known = described_field(inner, notes.get(inner.name, {}), features.get(inner.name))
        fields[inner.name] = (known, values)
    return fields


def _with_field(outer: _Column | None, name: str, column: _Column) -> _Column:
    fields = _fields(outer) if outer is not None else {}
    fields[name] = column
    types = [inner.with_name(key).with_metadata(None) for key, (inner, _) in fields.items()]
    array = pa.StructArray.from_arrays([values for _, values in fields.values()], fields=types)
    notes = {key: below for key, (inner, _) in fields.items() if (below := notes_of(inner))}
    features = {key: feature_of(inner) for key, (inner, _) in fields.items()}
    feature = features if all(features.values()) else None
    return described_field(
        pa.field("metadata", array.type), {"fields": notes} if notes else {}, feature
    ), array


def can_rename(block: Block, mapping: Mapping[str, str]) -> bool:
    """Whether all of these are columns of a table, and `metadata` is an object if there is one."""
    schema = block.data.schema
    if not mapping.keys() <= set(schema.names) or LINE in schema.names:
        return False
    into_metadata = any(target.startswith("metadata.") for target in mapping.values())
    if not into_metadata or "metadata" not in schema.names or "metadata" in mapping:
        return True
    return bool(pa.types.is_struct(schema.field("metadata").type))


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
    array = pa.array(lines, pa.string()) if not isinstance(lines, pa.Array) else lines
    return Block(name, pa.RecordBatch.from_arrays([array], schema=LINES), places)
