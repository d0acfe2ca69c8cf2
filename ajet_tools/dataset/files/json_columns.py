"""Lines of JSON as columns of a table, by DuckDB.

Half of a surrogate pair, which no text of DuckDB holds, passes through it as a character of a
private area (`encoded`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import polars as pl
import pyarrow as pa

from ajet_sdk.errors import TaskError
from ajet_tools.dataset.files.columns import JSON, NESTED, Flags, Shape

_ESCAPES = re.compile(r"\\u[dD][89abAB]\w\w\\u[dD][c-fC-F]\w\w|\\u[dD][89a-fA-F]\w\w|\\.")
"""Matches pairs of surrogates, halves of them, and all other escapes."""
RAW = "json of ajet"
"""A field of objects with their JSON, so that a result of SQL holds them as they were."""
_PRIVATE = 0x10F800
_IS_PRIVATE = re.compile(f"[{chr(_PRIVATE)}-{chr(_PRIVATE + 0x7FF)}]")
_HUGE = re.compile(r"[0-9][eE]\+?[0-9]{3}|[0-9]{309}")
"""Matches a number that may be larger than any float."""
_INTEGERS = {"BIGINT", "UBIGINT"}
_TYPES = {
    pa.string(): "VARCHAR",
    pa.int64(): "BIGINT",
    pa.float64(): "DOUBLE",
    pa.bool_(): "BOOLEAN",
}
_MOST_FIELDS = 256
_AS_TEXT = ("arguments", "input")
"""The arguments of tool calls: with one type for all tools, each call would get the others'."""


@cache
def connection() -> Any:
    import duckdb

    return duckdb.connect(config={"threads": 1})


def are_objects(lines: pl.Series) -> bool:
    """Whether each line is a JSON object, without what DuckDB takes but JSON doesn't have."""
    # NaN, an infinity, or a comma before a bracket; in a text they are rare enough
    if lines.str.contains(r"(?i)[:,\[]\s*[-+]?(?:nan|inf)|,\s*[}\]]").any():
        return False
    with connection().cursor() as cursor:
        invalid = "count_if(NOT (starts_with(line, '{') AND json_valid(line)))"
        [(count,)] = cursor.from_arrow(_as_arrow(lines)).aggregate(invalid).fetchall()
        return not count


def encoded(lines: pl.Series) -> pl.Series:
    """Replaces halves of surrogate pairs by private characters."""
    some = lines.str.contains(r"\\u[dD][89a-fA-F]").arg_true()
    if not len(some):
        return lines
    texts = [_ESCAPES.sub(_private, line) for line in lines.gather(some)]
    return lines.clone().scatter(some, pl.Series(texts, dtype=pl.String))


def _private(match: re.Match[str]) -> str:
    is_half = len(match[0]) == len(r"\ud800")
    return chr(_PRIVATE + int(match[0][2:], 16) - 0xD800) if is_half else match[0]


def restored(text: str) -> str:
    """Returns JSON text with the halves of surrogate pairs that `encoded` replaced."""
    return _IS_PRIVATE.sub(lambda match: f"\\u{ord(match[0]) - _PRIVATE + 0xD800:04x}", text)


def has_private(array: pa.Array) -> bool:
    """Whether a text has private characters."""
    return pa.types.is_string(array.type) and any(
        _IS_PRIVATE.search(text) for text in array.to_pylist() if text
    )


def with_halves(text: str) -> str:
    """Returns a text with the halves of surrogate pairs that `encoded` replaced."""
    return _IS_PRIVATE.sub(lambda match: chr(ord(match[0]) - _PRIVATE + 0xD800), text)


def _as_arrow(lines: pl.Series) -> pa.Table:
    frame = lines.rename("line").to_frame().with_row_index("number")
    return frame.to_arrow()


def pointer(name: str) -> str:
    """Returns the path of a key as a literal of SQL."""
    escaped = name.replace("~", "~0").replace("/", "~1").replace("'", "''")
    return f"'/{escaped}'"


def shapes_of(
    lines: pl.Series, *, exact: bool = True, mentioned: str | None = None
) -> dict[str, Shape]:
    """Returns the shapes of the columns of lines that `encoded` returned.

    Args:
        exact: as a table stores them: only `NESTED` are nested, integers beside floats are JSON.
            Otherwise as a query wants them: all is nested, and numbers are floats.
        mentioned: only columns whose names occur in this text.
    """
    has_halves = bool(lines.str.contains(_IS_PRIVATE.pattern).any())
    with connection().cursor() as cursor:
        inference = _Inference(cursor, exact=exact, has_halves=has_halves)
        return inference.fields(_as_arrow(lines), nested=not exact, mentioned=mentioned)


@dataclass(frozen=True)
class _Inference:
    cursor: Any
    exact: bool
    has_halves: bool
    """Some texts have private characters."""

    def fields(
        self, rows: pa.Table, *, nested: bool, mentioned: str | None = None
    ) -> dict[str, Shape]:
        """Returns the shapes of the fields of objects."""
        of_rows = self.cursor.from_arrow(rows)
        groups = of_rows.aggregate(
            "json_keys(line) AS keys, min(number) AS first", "json_keys(line)"
        )
        names = dict.fromkeys(name for keys, _ in groups.order("first").fetchall() for name in keys)
        if mentioned is not None:
            names = {name: None for name in names if name.casefold() in mentioned}
        if not names:
            return {}
        types = f"json_type(line, [{', '.join(map(pointer, names))}]) AS types"
        kinds = [f"list(DISTINCT coalesce(types[{i}], 'ABSENT'))" for i in range(1, len(names) + 1)]
        [kinds_of_names] = of_rows.project(types).aggregate(", ".join(kinds)).fetchall()
        return {
            name: self._shape(rows, name, set(kinds), nested=nested)
            for name, kinds in zip(names, kinds_of_names, strict=True)
        }

    def _shape(self, rows: pa.Table, name: str, kinds: set[str], *, nested: bool) -> Shape:
        flags = Flags(absent="ABSENT" in kinds, nulls="NULL" in kinds)
        kinds = kinds - {"ABSENT", "NULL"}
        is_nested = not self.exact or (name not in _AS_TEXT if nested else name in NESTED)
        if is_nested and kinds in ({"ARRAY"}, {"OBJECT"}):
            values = f"json_extract(line, {pointer(name)}) AS line, number"
            there = self.cursor.from_arrow(rows).project(values).filter("json_type(line) <> 'NULL'")
            return self._nested_shape(there.to_arrow_table(), kinds, flags)
        if flags["absent"] and flags["nulls"] and not nested:
            return Shape(JSON, **flags)  # a null is no missing key
        if not kinds:
            return Shape(**flags)
        return Shape(self._leaf(self.cursor.from_arrow(rows), name, kinds), **flags)

    def _nested_shape(self, values: pa.Table, kinds: set[str], flags: Flags) -> Shape:
        if kinds == {"ARRAY"}:
            unnested = "unnest(json_extract(line, '$[*]')) AS line, number"
            items = self.cursor.from_arrow(values).project(unnested).to_arrow_table()
            types = self.cursor.from_arrow(items).aggregate("list(DISTINCT json_type(line))")
            item_kinds = set(types.fetchall()[0][0] or ())
            return Shape(item=self._item_shape(items, item_kinds), **flags)
        fields = self.fields(values, nested=True)
        names = {name.casefold() for name in fields}  # DuckDB does not tell them by their case
        if not fields or len(names) < len(fields) or len(fields) > _MOST_FIELDS:
            return Shape(JSON, **flags)
        return Shape(fields=fields, **flags)

    def _item_shape(self, items: pa.Table, kinds: set[str]) -> Shape:
        if kinds == {"OBJECT"}:
            return self._nested_shape(items, kinds, Flags(absent=False, nulls=False))
        wrapped = self.cursor.from_arrow(items).project("json_object('', line) AS line, number")
        return self._shape(wrapped.to_arrow_table(), "", kinds, nested=True)

    def _leaf(self, rows: Any, name: str, kinds: set[str]) -> pa.DataType:
        text = f"json_extract_string(line, {pointer(name)})"

        def has(condition: str) -> bool:
            return bool(rows.filter(condition).limit(1).fetchall())

        if kinds == {"BOOLEAN"}:
            return pa.bool_()
        if kinds == {"VARCHAR"}:
            is_private = f"regexp_matches({text}, '{_IS_PRIVATE.pattern}')"
            holds_half = self.exact and self.has_halves and has(is_private)
            return JSON if holds_half else pa.string()
        if kinds <= _INTEGERS:
            is_wide = f"{text} IS NOT NULL AND TRY_CAST({text} AS BIGINT) IS NULL"
            return JSON if has(is_wide) else pa.int64()
        if kinds == {"DOUBLE"} or (kinds <= {"DOUBLE", *_INTEGERS} and not self.exact):
            least = 1 if self.exact else 19  # digits of an integer, which a float may not hold
            is_integer = f"regexp_full_match({text}, '-?[0-9]{{{least},}}')"
            is_odd = f"{is_integer} OR isinf(CAST({text} AS DOUBLE))"
            return JSON if has(is_odd) else pa.float64()
        return JSON


def table_of_lines(
    lines: pl.Series, shapes: Mapping[str, Shape], value: Callable[[str, Shape], str]
) -> pa.Table:
    """Returns the columns of lines that `encoded` returned, each by the expression of `value`."""
    with connection().cursor() as cursor:
        values = [f"{value(*column)} AS c{i}" for i, column in enumerate(shapes.items())]
        columns = cursor.from_arrow(_as_arrow(lines)).project(", ".join(values))
        return columns.to_arrow_table().rename_columns(list(shapes)).combine_chunks()


def arrays_of(lines: pl.Series, shapes: Mapping[str, Shape]) -> list[pa.Array]:
    """Returns the columns of lines that `encoded` returned, in the types of a table."""
    arrays = []
    for column, (name, shape) in zip(
        table_of_lines(lines, shapes, column_value).columns, shapes.items(), strict=True
    ):
        array = column.chunk(0) if column.num_chunks else pa.array([], column.type)
        arrays.append(json_array(array, name) if shape.is_json else _typed(array, shape))
    return arrays


def _typed(array: pa.Array, shape: Shape) -> pa.Array:
    if shape.is_empty:
        return pa.nulls(len(array))
    if shape.fields is not None:
        inner = zip(array.flatten(), shape.fields.values(), strict=True)
        fields = [each.as_field(name) for name, each in shape.fields.items()]
        typed = [_typed(values, each) for values, each in inner]
        return pa.StructArray.from_arrays(typed, fields=fields, mask=array.is_null())
    if shape.item is not None:
        items = _typed(array.values, shape.item)
        return pa.ListArray.from_arrays(array.offsets, items, mask=array.is_null())
    if shape.is_json:
        return json_array(array, "")
    return array.cast(shape.type)


def column_value(name: str, shape: Shape) -> str:
    """Returns the expression of a column; JSON is text."""
    text = f"json_extract_string(line, {pointer(name)})"
    value = f"json_extract(line, {pointer(name)})"
    if shape.is_json:
        keeps_null = shape.absent and shape.nulls
        return f"{value}::VARCHAR" if keeps_null else f"nullif({value}::VARCHAR, 'null')"
    if shape.is_empty:
        return text
    if shape.fields is not None or shape.item is not None:
        structure = json.dumps(_structure(shape)).replace("'", "''")
        return f"json_transform({value}, '{structure}')"
    return f"CAST({text} AS {_TYPES[shape.leaf]})" if shape.leaf in _TYPES else text


def value_to_compare(name: str, shape: Shape) -> str:
    """Like `column_value`, but mixed values are their text, without quotes."""
    if shape.is_json:
        return f"json_extract_string(line, {pointer(name)})"
    return column_value(name, shape)


def value_with_json(name: str, shape: Shape) -> str:
    """Like `column_value`, but objects, and those of lists, have a field `RAW`."""
    value = f"json_extract(line, {pointer(name)})"
    nested = column_value(name, shape)
    if shape.fields is not None:
        with_json = f'struct_insert({nested}, "{RAW}" := {value}::VARCHAR)'
    elif shape.item is not None and shape.item.fields is not None:
        pairs = f"list_zip({nested}, json_extract({value}, '$[*]')::VARCHAR[])"
        with_json = f'list_transform({pairs}, lambda x: struct_insert(x[1], "{RAW}" := x[2]))'
    else:
        return nested
    return f"CASE WHEN {nested} IS NOT NULL THEN {with_json} END"


def _structure(shape: Shape) -> Any:
    if shape.fields is not None:
        return {name: _structure(inner) for name, inner in shape.fields.items()}
    if shape.item is not None:
        return [_structure(shape.item)]
    return _TYPES.get(shape.leaf, "JSON")


def json_array(texts: pa.Array, name: str) -> pa.Array:
    values: Sequence[str | None] = texts.to_pylist()
    whole = "".join(filter(None, values))
    if _HUGE.search(whole):
        for index, text in enumerate(values):
            if text and _is_too_large(text):
                raise TooLarge(name, index)
    if _IS_PRIVATE.search(whole):
        texts = pa.array([text and restored(text) for text in values], pa.string())
    return pa.ExtensionArray.from_storage(JSON, texts.cast(pa.string()))


class TooLarge(TaskError):
    """A number that is larger than any float."""

    def __init__(self, name: str, index: int) -> None:
        super().__init__(
            f"{name} has a number that is larger than any float, such as 1e400; write .jsonl"
        )
        self.index = index


def _is_too_large(text: str) -> bool:
    try:
        json.dumps(json.loads(text), allow_nan=False)
    except ValueError:
        return True
    return False
