"""JSON values as arrays of Arrow, in the types of their columns."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

import polars as pl
import pyarrow as pa

from ajet_sdk.errors import TaskError
from ajet_sdk.tasks.task_rows import decoded
from ajet_tools.dataset.files.columns import ABSENT, Columns, Shape
from ajet_tools.dataset.files.json_columns import arrays_of, encoded, restored, shapes_of
from ajet_tools.dataset.files.values import json_value, values_of

_MOST_COLUMNS = 10_000
_encode = json.JSONEncoder(allow_nan=False).encode


class Misfit(TaskError):
    """A value doesn't fit the type that a table declares."""

    def __init__(self, shape: Shape, path: str, value: object) -> None:
        kind = f"a class label of {shape.labels}" if shape.labels else shape.type
        super().__init__(
            f"{path} is {kind} in {shape.source}, and {value!r:.80} does not fit; write .jsonl, or"
            " change its type"
        )


def table_of(name: str, lines: pl.Series) -> tuple[pa.RecordBatch, Columns]:
    """Converts lines of JSON to a record batch, with types that hold their values."""
    lines = encoded(lines)
    shapes = shapes_of(lines)
    if len(shapes) > _MOST_COLUMNS:
        raise TaskError(
            f"there are more than {_MOST_COLUMNS:,} columns, too many for Parquet; write .jsonl"
        )
    if any(restored(key) != key for key in shapes):
        raise TaskError("the name of a column is not text that UTF-8 can hold; write .jsonl")
    return batch_of(arrays_of(lines, shapes) if shapes else [], Columns(name, shapes), len(lines))


def batch_of(
    arrays: Sequence[pa.Array], columns: Columns, count: int
) -> tuple[pa.RecordBatch, Columns]:
    if not arrays:
        empty = pa.array([{}] * count, pa.struct([]))
        return pa.RecordBatch.from_struct_array(empty), columns
    return pa.RecordBatch.from_arrays(arrays, schema=columns.schema), columns


def lines_of(name: str, values: Sequence[Any]) -> pl.Series:
    """Returns lines of objects with this one key, without it where the value is ABSENT."""
    objects = [{} if value is ABSENT else {name: value} for value in values]
    return encoded(pl.Series("line", [_encode(each) for each in objects], pl.String))


def array_of(values: Sequence[Any], shape: Shape, path: str) -> pa.Array:
    """Converts JSON values to an array. Raises TaskError for a value that doesn't fit."""
    if not shape.source:
        return arrays_of(lines_of(path, values), {path: shape})[0]
    there = [None if value is ABSENT else value for value in values]
    return (
        _objects(there, shape, path) if shape.fields is not None else _declared(there, shape, path)
    )


def _objects(values: Sequence[Any], shape: Shape, path: str) -> pa.Array:
    shapes = shape.fields or {}
    arrays = []
    for value in values:
        if value is not None and (not isinstance(value, Mapping) or value.keys() - shapes.keys()):
            raise Misfit(shape, path, value)
    for name, inner in shapes.items():
        some = [ABSENT if value is None else value.get(name, ABSENT) for value in values]
        arrays.append(array_of(some, inner, f"{path}.{name}"))
    return structs(arrays, shape, [value is None for value in values])


def structs(arrays: Sequence[pa.Array], shape: Shape, nulls: Sequence[bool]) -> pa.StructArray:
    fields = [inner.as_field(name) for name, inner in (shape.fields or {}).items()]
    mask = pa.array(nulls, pa.bool_()) if any(nulls) else None
    return pa.StructArray.from_arrays(arrays, fields=fields, mask=mask)


def _declared(values: Sequence[Any], shape: Shape, path: str) -> pa.Array:
    """Converts to a type that JSON doesn't have: bytes from base64, times from text."""
    kind = shape.type
    try:
        if pa.types.is_temporal(kind):
            return pa.array(values, pa.string()).cast(kind)
        array = pa.array([_native(value, kind) for value in values], kind)
        restored = [json_value(value) for value in array.to_pylist()]
    except (pa.ArrowException, ArithmeticError, ValueError, TypeError, KeyError):
        if len(values) == 1:
            raise Misfit(shape, path, values[0]) from None
        for value in values:  # to name the one that doesn't fit
            _declared([value], shape, path)
        raise
    for value, other in zip(values, restored, strict=True):
        if not _is_same(value, other) or (value is not None and _lacks_label(value, shape)):
            raise Misfit(shape, path, value)
    return array


def _lacks_label(value: Any, shape: Shape) -> bool:
    names = shape.labels
    return isinstance(names, list) and type(value) is int and not -1 <= value < len(names)


def _is_same(value: object, other: object) -> bool:
    if isinstance(value, float) and isinstance(other, float):  # narrow floats round
        return abs(value - other) <= 1e-3 * abs(value)
    if isinstance(value, dict) and isinstance(other, dict):
        return all(_is_same(value.get(name), inner) for name, inner in other.items())
    if isinstance(value, list) and isinstance(other, list):
        return len(value) == len(other) and all(map(_is_same, value, other))
    return isinstance(value, bool) is isinstance(other, bool) and bool(value == other)


def _native(value: Any, kind: pa.DataType) -> object:
    """Converts a JSON value for pyarrow. Raises ValueError, TypeError or KeyError."""
    types = pa.types
    if value is None:
        return None
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
        return base64.b64decode(value, validate=True)
    if types.is_decimal(kind):
        return Decimal(value)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        if not isinstance(value, list):
            raise TypeError("no list")
        return [_native(inner, kind.value_type) for inner in value]
    if types.is_struct(kind):
        fields = {each.name: each.type for each in kind}
        return {name: _native(inner, fields[name]) for name, inner in value.items()}
    return value


def convert(data: pa.RecordBatch, columns: Columns, to: Columns) -> pa.RecordBatch:
    """Converts a record batch to columns that its own were merged into. Raises TaskError."""
    if columns.schema.equals(to.schema, check_metadata=True):
        return data
    try:
        arrays = [
            converted(data.column(name), columns.shapes[name], shape, name)
            if name in columns.shapes
            else pa.nulls(len(data), shape.type)
            for name, shape in to.shapes.items()
        ]
        return batch_of(arrays, to, len(data))[0]
    except (pa.ArrowException, OverflowError) as error:
        raise TaskError(f"these rows cannot be put into one table: {error}") from error


def converted(array: pa.Array, shape: Shape, to: Shape, path: str) -> pa.Array:
    has_new_nulls = to.is_json and to.absent and to.nulls and not (shape.absent and shape.nulls)
    if array.type == to.type and not has_new_nulls:
        if to.labels and not shape.labels:
            return array_of(plain(array, shape, path), to, path)  # checks the numbers
        return array
    if pa.types.is_null(array.type):
        return pa.nulls(len(array), to.type)
    if shape.source and to.source and to.fields is None:
        return array.cast(to.type)
    if shape.fields is not None and to.fields is not None:
        fields = dict(zip(shape.fields, array.flatten(), strict=True))
        arrays = [
            converted(fields[name], shape.fields[name], inner, f"{path}.{name}")
            if name in fields
            else pa.nulls(len(array), inner.type)
            for name, inner in to.fields.items()
        ]
        return structs(arrays, to, array.is_null().to_pylist())
    return array_of(plain(array, shape, path), to, path)


def plain(array: pa.Array, shape: Shape, path: str) -> list[Any]:
    """Returns the JSON values of an array; ABSENT for keys that rows lack."""
    values = [json_value(decoded(value, shape.notes)) for value in values_of(array, path)]
    if not shape.absent:
        return values
    there = array.is_valid().to_pylist()
    return [value if valid else ABSENT for value, valid in zip(values, there, strict=True)]


def new_column(name: str, values: Sequence[Any]) -> tuple[pa.Array, Shape]:
    lines = lines_of(name, values)
    shape = shapes_of(lines).get(name, Shape())
    return arrays_of(lines, {name: shape})[0], shape


def changed_column(
    array: pa.Array, shape: Shape, before: Sequence[Any], after: Sequence[Any], path: str
) -> tuple[pa.Array, Shape]:
    """Returns the column of changed values; those that are the same keep their type and bits."""
    same = [
        old is new or (type(old) is type(new) and bool(old == new))
        for old, new in zip(before, after, strict=True)
    ]
    if all(same):
        return array, shape
    is_object = {type(value) for value in after} <= {dict, type(None)}
    if shape.fields is not None and shape.source and is_object:
        return _changed_object(array, shape, before, after, path)
    if not shape.source:
        return new_column(path, after)
    new = array_of([v for v, is_same in zip(after, same, strict=True) if not is_same], shape, path)
    order = []
    number = len(array)
    for index, is_same in enumerate(same):
        order.append(index if is_same else number)
        number += not is_same
    return pa.concat_arrays([array, new]).take(pa.array(order, pa.int64())), shape


def _changed_object(
    array: pa.Array, shape: Shape, before: Sequence[Any], after: Sequence[Any], path: str
) -> tuple[pa.Array, Shape]:
    old = dict(zip(shape.fields or {}, array.flatten(), strict=True))
    arrays = []
    shapes = {}
    for name in dict.fromkeys((*old, *(key for value in after for key in value or {}))):
        values = [(value or {}).get(name) for value in after]
        if name in old:
            earlier = [(value or {}).get(name) for value in before]
            inner = (shape.fields or {})[name]
            column, shapes[name] = changed_column(
                old[name], inner, earlier, values, f"{path}.{name}"
            )
        else:
            column, shapes[name] = new_column(name, values)
        arrays.append(column)
    new_shape = Shape(fields=shapes, source=shape.source)
    return structs(arrays, new_shape, [value is None for value in after]), new_shape


def not_finite(data: pa.RecordBatch) -> list[str]:
    """Returns the columns that have NaN or an infinity."""
    return [
        name for name, array in zip(data.schema.names, data.columns, strict=True) if _is_odd(array)
    ]


def _is_odd(array: pa.Array) -> bool:
    import pyarrow.compute as pc

    if pa.types.is_struct(array.type):
        return any(map(_is_odd, array.flatten()))
    if pa.types.is_list(array.type):
        return _is_odd(array.flatten())
    if not pa.types.is_floating(array.type):
        return False
    return bool(pc.any(pc.invert(pc.is_finite(array))).as_py())
