"""Lines of JSON as columns of a table, by DuckDB.

Text, numbers and booleans are columns of that type. The columns that trainers read are nested, as
`datasets` and TRL expect them. Everything else is JSON text (the type JSON): objects, lists, mixed
values, integers beside floats, so that each comes back as it was. A key that some rows lack is null
in their rows.

Half of a surrogate pair, which no text of DuckDB holds, passes through it as `MARK` and its digits
(`encoded`). A column with such a text is JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from ajet_sdk.errors import TaskError
from ajet_sdk.trace.scratch import open_scratch
from ajet_tools.dataset.files.columns import JSON, described_field

NESTED = ("messages", "prompt", "completion", "chosen", "rejected")
"""The columns that trainers read."""
MARK = "\U0010f8ff"
"""A character of a private area."""
_MARK_ESCAPED = "\\udbfe\\udcff"
_ESCAPES = re.compile(
    r"\\u[dD][89abAB]\w\w\\u[dD][c-fC-F]\w\w|\\u(?P<half>[dD][89a-fA-F]\w\w)|\\.|" + MARK
)
"""Matches pairs of surrogates, halves of them, all other escapes, and the mark."""
_MARKED = r"\\u[dD][89a-fA-F]|" + MARK
_HUGE = r"[0-9][eE]\+?[0-9]{3}"
"""Matches a number that may be larger than any float."""
_NO_JSON = r"(?i)[:,\[]\s*[-+]?(?:nan|inf)|,\s*[}\]]"
"""Matches what DuckDB reads but JSON doesn't have; also in texts, where it is rare."""
_INTEGERS = {"BIGINT", "UBIGINT"}
_TYPES = {
    pa.string(): "VARCHAR",
    pa.int64(): "BIGINT",
    pa.float64(): "DOUBLE",
    pa.bool_(): "BOOLEAN",
}
_MOST_COLUMNS = 10_000
_MOST_FIELDS = 256
_AS_TEXT = ("arguments", "input")
"""The arguments of tool calls: with one type for all tools, each call would get the others'."""


@dataclass(frozen=True)
class Shape:
    """The values of a column, or of a field or an item within it."""

    leaf: pa.DataType | None = None
    """Their type; None for objects, for lists, and where all are null."""
    fields: Mapping[str, Shape] | None = None
    item: Shape | None = None
    absent: bool = False
    """Some rows lack the key."""
    nulls: bool = False
    """Some rows have a null."""

    @property
    def is_json(self) -> bool:
        return bool(self.leaf == JSON)

    @property
    def is_empty(self) -> bool:
        """Whether all values are null."""
        return self.leaf is None and self.fields is None and self.item is None

    @property
    def notes(self) -> dict[str, Any]:
        """What a reader has to decode."""
        notes: dict[str, Any] = {}
        if self.absent:
            notes["absent"] = True
        if self.is_json:
            notes["json"] = True
        below = {name: shape.notes for name, shape in (self.fields or {}).items() if shape.notes}
        if below:
            notes["fields"] = below
        if self.item is not None and self.item.notes:
            notes["item"] = self.item.notes
        return notes


@cache
def connection() -> Any:
    return open_scratch({"threads": 1})


def identifier(name: str) -> str:
    """Returns the name of a column in SQL."""
    escaped = name.replace('"', '""')
    return f'"{escaped}"'


def pointer(name: str) -> str:
    """Returns the path of a key as a literal of SQL."""
    escaped = name.replace("~", "~0").replace("/", "~1").replace("'", "''")
    return f"'/{escaped}'"


def _matches(lines: pa.Array, pattern: str) -> pl.Series:
    # five times as fast as the regular expressions of Arrow
    return pl.Series(lines).str.contains(pattern)


def are_objects(lines: pa.Array) -> bool:
    """Whether each line is a JSON object, without what DuckDB takes but JSON doesn't have."""
    if _matches(lines, _NO_JSON).any():
        return False
    with connection().cursor() as cursor:
        invalid = "count_if(NOT (starts_with(line, '{') AND json_valid(line)))"
        [(count,)] = cursor.from_arrow(_numbered(lines)).aggregate(invalid).fetchall()
        return not count


def too_large(lines: pa.Array) -> int | None:
    """Returns the index of the first line with a number that is larger than any float, if any."""
    for index in _matches(lines, _HUGE).arg_true():
        try:
            json.dumps(json.loads(lines[index].as_py()), allow_nan=False)
        except ValueError:
            return int(index)
    return None


def encoded(lines: pa.Array) -> pa.Array:
    """Replaces halves of surrogate pairs, which DuckDB refuses."""
    if not _matches(lines, _MARKED).any():
        return lines
    texts = [_ESCAPES.sub(_marked, line) for line in lines.to_pylist()]
    return pa.array(texts, pa.string())


def _marked(match: re.Match[str]) -> str:
    if match["half"]:
        return MARK + match["half"]
    if match[0] == MARK or match[0].lower() == _MARK_ESCAPED:
        return _MARK_ESCAPED.replace("\\u", MARK)
    return match[0]


def restored(text: str) -> str:
    """Returns JSON text as it was before `encoded`."""
    return text.replace(MARK, "\\u")


def _numbered(lines: pa.Array) -> pa.Table:
    return pa.table({"line": lines, "number": np.arange(len(lines))})


def shapes_of(
    lines: pa.Array, *, exact: bool = True, mentioned: str | None = None
) -> dict[str, Shape]:
    """Returns the shapes of the columns of lines that `encoded` returned.

    Args:
        exact: as a table stores them: only `NESTED` are nested, integers beside floats are JSON.
            Otherwise as a query wants them: all is nested, and numbers are floats.
        mentioned: only columns whose names occur in this text.
    """
    if not len(lines):
        return {}
    with connection().cursor() as cursor:
        return _Inference(cursor, exact).fields(
            _numbered(lines), nested=not exact, mentioned=mentioned
        )


@dataclass(frozen=True)
class _Inference:
    cursor: Any
    exact: bool

    def fields(
        self, rows: pa.Table, *, nested: bool, mentioned: str | None = None
    ) -> dict[str, Shape]:
        """Returns the shapes of the fields of objects, in the order of the rows."""
        groups = self.cursor.from_arrow(rows).aggregate(
            "json_keys(line) AS keys, min(number) AS first", "json_keys(line)"
        )
        names: dict[str, None] = {}
        for keys, _ in groups.order("first").fetchall():
            names.update(dict.fromkeys(keys))
        if mentioned is not None:
            names = {name: None for name in names if name.casefold() in mentioned}
        if not names:
            return {}
        # one list of types for each row is faster than a type for each key
        pointers = ", ".join(map(pointer, names))
        types = self.cursor.from_arrow(rows).project(f"json_type(line, [{pointers}]) AS types")
        kinds_of_each = []
        for place in range(1, len(names) + 1):
            kinds_of_each.append(f"list(DISTINCT coalesce(types[{place}], 'ABSENT'))")
        [found] = types.aggregate(", ".join(kinds_of_each)).fetchall()
        shapes = {}
        for name, kinds in zip(names, found, strict=True):
            shapes[name] = self._shape(rows, name, set(kinds), nested=nested)
        return shapes

    def _shape(self, rows: pa.Table, name: str, kinds: set[str], *, nested: bool) -> Shape:
        flags = Shape(absent="ABSENT" in kinds, nulls="NULL" in kinds)
        kinds = kinds - {"ABSENT", "NULL"}
        # whether objects and lists under this key have a type, rather than being JSON
        is_typed = not self.exact or (name not in _AS_TEXT if nested else name in NESTED)
        if kinds in ({"ARRAY"}, {"OBJECT"}) and is_typed:
            values = f"json_extract(line, {pointer(name)}) AS line, number"
            present = self.cursor.from_arrow(rows).project(values)
            present = present.filter("json_type(line) <> 'NULL'").to_arrow_table()
            return self._nested(present, kinds, flags)
        if kinds:
            return replace(flags, leaf=self._leaf(self.cursor.from_arrow(rows), name, kinds))
        return flags

    def _nested(self, values: pa.Table, kinds: set[str], flags: Shape) -> Shape:
        if kinds == {"ARRAY"}:
            unnested = "unnest(json_extract(line, '$[*]')) AS line, number"
            items = self.cursor.from_arrow(values).project(unnested).to_arrow_table()
            return replace(flags, item=self._item(items))
        fields = self.fields(values, nested=True)
        names = {name.casefold() for name in fields}  # DuckDB does not tell them by their case
        if not fields or len(names) < len(fields) or len(fields) > _MOST_FIELDS:
            return replace(flags, leaf=JSON)
        return replace(flags, fields=fields)

    def _item(self, items: pa.Table) -> Shape:
        types = self.cursor.from_arrow(items).aggregate("list(DISTINCT json_type(line))")
        kinds = set(types.fetchall()[0][0] or ())
        if kinds == {"OBJECT"}:
            return self._nested(items, kinds, Shape())
        wrapped = self.cursor.from_arrow(items).project("json_object('', line) AS line, number")
        return self._shape(wrapped.to_arrow_table(), "", kinds, nested=True)

    def _leaf(self, rows: Any, name: str, kinds: set[str]) -> pa.DataType:
        """Returns the type of plain values; JSON for what it does not hold."""
        text = f"json_extract_string(line, {pointer(name)})"
        if kinds == {"BOOLEAN"}:
            return pa.bool_()
        if kinds == {"VARCHAR"}:
            leaf = pa.string()
            misfit = f"contains({text}, '{MARK}')" if self.exact else "false"
        elif kinds <= _INTEGERS:
            leaf = pa.int64()
            misfit = f"{text} IS NOT NULL AND TRY_CAST({text} AS BIGINT) IS NULL"
        elif kinds == {"DOUBLE"} or (kinds <= {"DOUBLE", *_INTEGERS} and not self.exact):
            leaf = pa.float64()
            digits = 1 if self.exact else 19  # of an integer that a float may not hold
            is_integer = f"regexp_full_match({text}, '-?[0-9]{{{digits},}}')"
            misfit = f"{is_integer} OR isinf(CAST({text} AS DOUBLE))"
        else:
            return JSON
        has_misfit = rows.filter(misfit).limit(1).fetchall()
        return JSON if has_misfit else leaf


def merged(
    first: Mapping[str, Shape], second: Mapping[str, Shape], *, exact: bool = True
) -> dict[str, Shape]:
    """Merges the shapes of two blocks of lines; unless `exact`, integers and floats are floats."""
    names = dict.fromkeys((*first, *second))
    return {name: _merge(first.get(name), second.get(name), exact) for name in names}


def _merge(a: Shape | None, b: Shape | None, exact: bool) -> Shape:
    if a is None or b is None:
        present = a or b or Shape()
        return replace(present, absent=True)
    flags = Shape(absent=a.absent or b.absent, nulls=a.nulls or b.nulls)
    if a.is_empty or b.is_empty:
        filled = b if a.is_empty else a
        return replace(filled, absent=flags.absent, nulls=flags.nulls)
    if a.fields is not None and b.fields is not None:
        return replace(flags, fields=merged(a.fields, b.fields, exact=exact))
    if a.item is not None and b.item is not None:
        return replace(flags, item=_merge(a.item, b.item, exact))
    if a.leaf is not None and a.leaf == b.leaf:
        return replace(flags, leaf=a.leaf)
    if {a.leaf, b.leaf} == {pa.int64(), pa.float64()} and not exact:
        return replace(flags, leaf=pa.float64())
    return replace(flags, leaf=JSON)


def for_table(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Returns the shapes of columns of a table. Raises TaskError for those that none holds."""
    if len(shapes) > _MOST_COLUMNS:
        raise TaskError(
            f"there are more than {_MOST_COLUMNS:,} columns, too many for Parquet; write .jsonl"
        )
    if any(MARK in name for name in shapes):
        raise TaskError("the name of a column is not text that UTF-8 can hold; write .jsonl")
    columns = {}
    for name, shape in shapes.items():
        # a null is no missing key, but only JSON text tells them apart
        is_unclear = shape.absent and shape.nulls and name not in NESTED
        columns[name] = replace(shape, leaf=JSON, fields=None) if is_unclear else shape
    return columns


def columns_of(
    lines: pa.Array, shapes: Mapping[str, Shape]
) -> tuple[list[pa.Array], list[pa.Field]]:
    """Returns the columns of lines that `encoded` returned, and their fields."""
    arrays = []
    fields = []
    for column, (name, shape) in zip(table_of(lines, shapes), shapes.items(), strict=True):
        array = _typed(column, shape)
        arrays.append(array)
        fields.append(described_field(pa.field(name, array.type), shape.notes, None))
    return arrays, fields


def table_of(lines: pa.Array, shapes: Mapping[str, Shape]) -> list[pa.Array]:
    """Returns the columns of lines as DuckDB has them; JSON is text."""
    if not shapes:
        return []
    with connection().cursor() as cursor:
        values = [f"{column_value(*each)} AS c{i}" for i, each in enumerate(shapes.items())]
        columns = cursor.from_arrow(_numbered(lines)).project(", ".join(values))
        return [one_chunk(column) for column in columns.to_arrow_table().columns]


def one_chunk(column: pa.ChunkedArray) -> pa.Array:
    if column.num_chunks:
        return pa.concat_arrays(column.chunks)
    return pa.array([], column.type)


def _typed(array: pa.Array, shape: Shape) -> pa.Array:
    if shape.is_empty:
        return pa.nulls(len(array))
    if shape.fields is not None:
        fields = []
        values = []
        for inner, (name, below) in zip(array.flatten(), shape.fields.items(), strict=True):
            values.append(_typed(inner, below))
            fields.append(pa.field(name, values[-1].type))
        return pa.StructArray.from_arrays(values, fields=fields, mask=array.is_null())
    if shape.item is not None:
        items = _typed(array.values, shape.item)
        return pa.ListArray.from_arrays(array.offsets, items, mask=array.is_null())
    if shape.is_json:
        texts = array.cast(pa.string())
        if _matches(texts, MARK).any():
            texts = pc.replace_substring(texts, MARK, "\\u")
        return pa.ExtensionArray.from_storage(JSON, texts)
    return array.cast(shape.leaf)


def column_value(name: str, shape: Shape) -> str:
    """Returns the expression of a column; JSON is text."""
    text = f"json_extract_string(line, {pointer(name)})"
    value = f"json_extract(line, {pointer(name)})"
    if shape.is_json:
        keeps_null = shape.absent and shape.nulls
        if keeps_null:
            return f"{value}::VARCHAR"
        return f"nullif({value}::VARCHAR, 'null')"
    if shape.fields is not None or shape.item is not None:
        structure = json.dumps(_structure(shape)).replace("'", "''")
        return f"json_transform({value}, '{structure}')"
    if shape.leaf in _TYPES:
        return f"CAST({text} AS {_TYPES[shape.leaf]})"
    return text


def _structure(shape: Shape) -> Any:
    if shape.fields is not None:
        return {name: _structure(inner) for name, inner in shape.fields.items()}
    if shape.item is not None:
        return [_structure(shape.item)]
    return _TYPES.get(shape.leaf, "JSON")
