"""The rows of files as tables for SQL: objects and lists are nested, so that `metadata.level` is a
column."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pyarrow as pa

from ajet_sdk.errors import ConfigError
from ajet_tools.dataset.files.blocks import Block
from ajet_tools.dataset.files.columns import LINE, LINES, mapped_type, notes_of
from ajet_tools.dataset.files.json_columns import (
    Shape,
    column_value,
    encoded,
    identifier,
    merged,
    pointer,
    shapes_of,
)
from ajet_tools.dataset.files.rows import Rows

RAW = "json of ajet"
"""A field of objects with their JSON, so that a result of SQL holds them as they were."""


class QueryTables:
    """The tables of the blocks of some rows, all with the same columns."""

    def __init__(self, rows: Rows, mentioned: str | None, *, raw: bool = False) -> None:
        """Reads all rows, to find the columns. Raises ConfigError if the names of two differ by
        their case only.

        Args:
            rows: the rows.
            mentioned: the query; a column that it does not mention is left out. None: all.
            raw: objects have a field `RAW`, and mixed values are JSON.
        """
        self._rows = rows
        self._mentioned = mentioned
        self.declared: list[pa.Field] = []
        """Columns of tables that are not JSON."""
        for column in rows.schema:
            is_json = column.name == LINE or notes_of(column).get("json")
            if not is_json and self._has(column.name):
                self.declared.append(column)
        self._schema = pa.schema(self.declared)
        self._shapes: dict[str, Shape] = {}
        """All other columns."""
        if len(self.declared) < len(rows.schema):
            self._schema = self._schema.append(LINES.field(LINE))
            for number, block in enumerate(rows.blocks()):
                lines = encoded(self._select(block).column(LINE))
                found = shapes_of(lines, exact=False, mentioned=mentioned)
                self._shapes = merged(self._shapes, found, exact=False) if number else found
        self.names = [*(column.name for column in self.declared), *self._shapes]
        known: dict[str, str] = {}
        for name in self.names:
            other = known.setdefault(name.casefold(), name)
            if other != name:
                raise ConfigError(f"SQL has a single column for {name!r} and {other!r} (use --map)")
        self._expressions: list[str] = []
        for number, column in enumerate(self.declared):
            self._expressions.append(f"c{number} AS {identifier(column.name)}")
        for name, shape in self._shapes.items():
            if raw:
                value = _with_json(name, shape)
            elif shape.is_json:  # mixed values are compared as text, without quotes
                value = f"json_extract_string(line, {pointer(name)})"
            else:
                value = column_value(name, shape)
            self._expressions.append(f"{value} AS {identifier(name)}")

    def _has(self, name: str) -> bool:
        return self._mentioned is None or name.casefold() in self._mentioned

    def paths(self) -> list[str]:
        """Returns the names of all columns and of the fields within them."""
        whole = self if self._mentioned is None else QueryTables(self._rows, None)
        names: list[str] = []
        for column in whole.declared:
            names += _paths_of_type(column.name, column.type)
        for name, shape in whole._shapes.items():
            names += _paths_of_shape(name, shape)
        return names

    def blocks(self) -> Iterator[Block]:
        """Yields the blocks of rows; without rows an empty one."""
        is_empty = True
        for block in self._rows.blocks():
            yield block
            is_empty = False
        if is_empty:
            yield self._rows.empty()

    def relation(self, connection: Any, block: Block, **more: pa.Array) -> Any:
        """Returns the columns of a block as a relation of DuckDB, and further ones before them."""
        arrays = dict(more)
        data = self._select(block)
        for number, column in enumerate(self.declared):
            array = data.column(column.name)
            arrays[f"c{number}"] = array.cast(mapped_type(column.type, _known_to_duckdb))
        if self._shapes:
            arrays["line"] = encoded(data.column(LINE))
        if not arrays:
            arrays["no column"] = pa.nulls(len(block))  # a table without columns has no rows
        columns = ", ".join([*more, *self._expressions])
        return connection.from_arrow(pa.table(arrays)).project(columns or "*")

    def _select(self, block: Block) -> pa.RecordBatch:
        names = [name for name in block.data.schema.names if name == LINE or self._has(name)]
        return replace(block, data=block.data.select(names)).fitted(self._schema).data


def _with_json(name: str, shape: Shape) -> str:
    """Returns the expression of a column, where objects, and those of lists, have a field `RAW`."""
    value = f"json_extract(line, {pointer(name)})"
    nested = column_value(name, shape)
    if shape.is_json:
        return f"CAST({nested} AS JSON)"
    if shape.fields is not None:
        with_json = f'struct_insert({nested}, "{RAW}" := {value}::VARCHAR)'
    elif shape.item is not None and shape.item.fields is not None:
        pairs = f"list_zip({nested}, json_extract({value}, '$[*]')::VARCHAR[])"
        with_json = f'list_transform({pairs}, lambda x: struct_insert(x[1], "{RAW}" := x[2]))'
    else:
        return nested
    return f"CASE WHEN {nested} IS NOT NULL THEN {with_json} END"


def _known_to_duckdb(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_decimal256(kind):
        return pa.string()
    if pa.types.is_float16(kind):
        return pa.float32()
    if pa.types.is_dictionary(kind):
        return mapped_type(kind.value_type, _known_to_duckdb)
    return kind


def _paths_of_type(path: str, kind: pa.DataType) -> Iterator[str]:
    yield path
    if pa.types.is_struct(kind):
        for inner in kind:
            yield from _paths_of_type(f"{path}.{inner.name}", inner.type)


def _paths_of_shape(path: str, shape: Shape) -> Iterator[str]:
    yield path
    for name, inner in (shape.fields or {}).items():
        yield from _paths_of_shape(f"{path}.{name}", inner)
