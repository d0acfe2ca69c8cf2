"""The rows of files as tables for SQL: objects and lists are nested, so that `metadata.level` is a
column."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import reduce

import polars as pl
import pyarrow as pa

from ajet_sdk.errors import ConfigError
from ajet_tools.dataset.files.arrays import new_column
from ajet_tools.dataset.files.blocks import Block, LineBlock, as_lines
from ajet_tools.dataset.files.columns import JSON, NESTED, Shape, merged, merged_shapes
from ajet_tools.dataset.files.json_columns import (
    RAW,
    encoded,
    json_array,
    restored,
    shapes_of,
    table_of_lines,
    value_to_compare,
    value_with_json,
)
from ajet_tools.dataset.files.tables import read_blocks, tables_of


@dataclass(frozen=True)
class QueryTables:
    """The tables of the blocks of a path, all with the same columns."""

    path: str
    mentioned: str | None
    """The query; a column that it does not mention is left out."""
    raw: bool
    """Objects have a field with their JSON, so that a result holds them as they were."""
    shapes: Mapping[str, Shape]
    """The columns that are JSON in the file."""
    schema: pa.Schema

    @classmethod
    def of_path(cls, path: str, mentioned: str | None, *, raw: bool = False) -> QueryTables:
        """Reads the columns. Raises ConfigError if the names of two differ by their case only."""
        types: dict[str, pa.DataType] = {}
        tables = tables_of(path)
        if tables:
            for name, shape in reduce(merged, tables).shapes.items():
                if mentioned is None or name.casefold() in mentioned:
                    types[name] = _fitting(shape.type)
        shapes: dict[str, Shape] = {}
        for number, block in enumerate(read_blocks(path)):
            lines = _json_of(block, mentioned)
            found = {} if lines is None else shapes_of(lines, exact=False, mentioned=mentioned)
            shapes = merged_shapes(shapes, found, exact=False) if number else found
        for column in _nested(pl.Series([], dtype=pl.String), shapes, raw=raw):
            types[column[0]] = column[1].type
        names = {name.casefold(): name for name in types}
        for name in types:
            if names[name.casefold()] != name:
                raise ConfigError(
                    f"SQL has a single column for {name!r} and {names[name.casefold()]!r} (use"
                    " --map)"
                )
        if raw and not types and mentioned is not None:  # a table without columns has no rows
            return cls.of_path(path, None, raw=raw)
        return cls(path, mentioned, raw, shapes, pa.schema(list(types.items())))

    def paths(self) -> list[str]:
        """Returns the names of all columns and of the fields within them."""
        whole = QueryTables.of_path(self.path, None) if self.mentioned is not None else self
        return [path for column in whole.schema for path in _paths(column, "")]

    def batches(self) -> Iterator[pa.RecordBatch]:
        for block in read_blocks(self.path):
            yield pa.RecordBatch.from_arrays(self.columns(block), schema=self.schema)

    def columns(self, block: Block) -> list[pa.Array]:
        arrays: dict[str, pa.Array] = {}
        if not isinstance(block, LineBlock):
            arrays = dict(zip(block.data.schema.names, block.data.columns, strict=True))
        lines = _json_of(block, self.mentioned)
        if lines is not None and self.shapes:
            arrays |= dict(_nested(lines, self.shapes, raw=self.raw))
        return [
            arrays[column.name].cast(column.type)
            if column.name in arrays
            else pa.nulls(len(block), column.type)
            for column in self.schema
        ]


def _json_of(block: Block, mentioned: str | None) -> pl.Series | None:
    """Returns the rows as lines; of a table the columns that are JSON; None without any."""
    if isinstance(block, LineBlock):
        return encoded(block.lines)
    names = [
        name
        for name, shape in block.table.shapes.items()
        if shape.notes and (mentioned is None or name.casefold() in mentioned)
    ]
    if not names:
        return None
    return encoded(as_lines(block.selected(names)).lines)


def _nested(
    lines: pl.Series, shapes: Mapping[str, Shape], *, raw: bool
) -> Iterator[tuple[str, pa.Array]]:
    if not shapes:
        return
    table = table_of_lines(lines, shapes, value_with_json if raw else value_to_compare)
    for name, column in zip(shapes, table.columns, strict=True):
        array = column.chunk(0) if column.num_chunks else pa.array([], column.type)
        yield name, array


def _fitting(kind: pa.DataType) -> pa.DataType:
    """Returns a type that DuckDB has."""
    if pa.types.is_decimal256(kind):
        return pa.string()
    if pa.types.is_float16(kind):
        return pa.float32()
    if pa.types.is_dictionary(kind):
        return _fitting(kind.value_type)
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_fitting(field.type)) for field in kind])
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_fitting(kind.value_type)))
    return kind


def _paths(column: pa.Field, before: str) -> Iterator[str]:
    yield before + column.name
    if pa.types.is_struct(column.type):
        for field in column.type:
            yield from _paths(field, f"{before}{column.name}.")


def stored_column(name: str, array: pa.Array) -> tuple[pa.Array, Shape] | None:
    """Returns a column of a result as it is stored, if it has the JSON of its objects."""
    kind = array.type
    if pa.types.is_struct(kind) and kind.get_field_index(RAW) >= 0:
        texts = array.field(RAW).to_pylist()
    elif (
        pa.types.is_list(kind)
        and pa.types.is_struct(kind.value_type)
        and kind.value_type.get_field_index(RAW) >= 0
    ):
        texts = [
            None if items is None else f"[{', '.join(item[RAW] for item in items)}]"
            for items in array.to_pylist()
        ]
    else:
        return None
    if name in NESTED:
        values = [None if text is None else json.loads(restored(text)) for text in texts]
        return new_column(name, values)
    return json_array(pa.array(texts, pa.string()), name), Shape(JSON)
