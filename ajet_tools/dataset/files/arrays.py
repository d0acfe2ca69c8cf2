"""Builds, converts and changes Arrow arrays, each with a place that describes its encoding."""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal, InvalidOperation
from itertools import accumulate
from typing import Any

import polars as pl
import pyarrow as pa

from ajet_sdk.errors import TaskError
from ajet_sdk.tasks.task_rows import decoded
from ajet_tools.dataset.files.places import DEEPEST, MOST_FIELDS, Columns, Flags, Place
from ajet_tools.dataset.files.values import json_value, values_of

_MOST_COLUMNS = 10_000
EXACT = 1 << 53
_encode = json.JSONEncoder(allow_nan=False).encode
ABSENT = type("_Absent", (), {})()
"""The row lacks the key."""
NOWHERE = type("_Nowhere", (), {})()
"""The row lacks the parent object."""


class Misfit(TaskError):
    """A value does not fit the declared type of a table."""

    def __init__(self, place: Place, path: str, value: object) -> None:
        kind = f"a class label of {place.labels}" if place.labels else place.type
        super().__init__(
            f"{path} is {kind} in {place.table}, and {value!r:.80} does not fit; write .jsonl, or"
            " change its type"
        )
        self.path = path


def infer(name: str, rows: Sequence[Mapping[str, object]]) -> tuple[pa.RecordBatch, Columns]:
    """Converts rows of JSON values to a record batch, with types that hold them without loss."""
    array, row = _infer_objects(rows, {}, "")
    if len(row.fields or {}) > _MOST_COLUMNS:
        raise TaskError(
            f"there are more than {_MOST_COLUMNS:,} columns, too many for Parquet; write .jsonl"
        )
    columns = Columns(name, row)
    return batch_of(array, columns, len(rows)), columns


def batch_of(array: pa.StructArray, columns: Columns, count: int) -> pa.RecordBatch:
    if not len(columns.schema):
        return pa.RecordBatch.from_struct_array(pa.array([{}] * count, pa.struct([])))
    return pa.RecordBatch.from_arrays(array.flatten(), schema=columns.schema)


def _infer(values: Sequence[object], path: str) -> tuple[pa.Array, Place]:
    seen_types = set(map(type, values))
    flags = Flags(absent=type(ABSENT) in seen_types, nulls=type(None) in seen_types)
    types = seen_types - {type(ABSENT), type(NOWHERE), type(None)}
    there: Sequence[Any] = (
        _without(values) if type(ABSENT) in seen_types or type(NOWHERE) in seen_types else values
    )
    deep = path.count(".") >= DEEPEST
    if not types and not (flags["absent"] and flags["nulls"]):
        return pa.nulls(len(values)), Place(**flags)
    try:
        if flags["absent"] and flags["nulls"]:
            pass
        elif types == {dict} and not deep:
            converted = _infer_objects(there, flags, path)
            if converted[1].fields and len(converted[1].fields) <= MOST_FIELDS:
                return converted
        elif types == {list} and not deep:
            array, item = _infer(
                [element for value in there if value is not None for element in value], f"{path}."
            )
            lengths = [0 if value is None else len(value) for value in there]
            return _lists(array, lengths, [value is None for value in there]), Place(
                item=item, **flags
            )
        elif types == {bool}:
            return pa.array(there, pa.bool_()), Place(pa.bool_(), **flags)
        elif types == {str}:
            return pa.array(there, pa.string()), Place(pa.string(), **flags)
        elif types <= {int, float}:
            numbers = [value for value in there if type(value) is int]
            large = bool(numbers) and max(-min(numbers), max(numbers)) > EXACT
            if types == {int}:
                return pa.array(there, pa.int64()), replace(Place(pa.int64(), **flags), large=large)
            if not large and not any(type(value) is float and math.isinf(value) for value in there):
                return pa.array(there, pa.float64()), Place(pa.float64(), **flags)
    except (
        UnicodeEncodeError,
        OverflowError,
        pa.ArrowException,
    ):  # lone surrogate, more than 64 bits
        pass
    try:
        return _json_text(values), Place(json=True, **flags)
    except ValueError as error:
        raise TaskError(
            f"{path} has a number that is larger than any float, such as 1e400; write .jsonl"
        ) from error


def _without(values: Sequence[object]) -> list[object]:
    return [None if value is ABSENT or value is NOWHERE else value for value in values]


def _json_text(values: Sequence[object]) -> pa.StringArray:
    return pa.array(
        [None if v is ABSENT or v is NOWHERE else _encode(v) for v in values], pa.string()
    )


def _infer_objects(
    values: Sequence[Mapping[str, object] | None], flags: Flags, path: str
) -> tuple[pa.Array, Place]:
    names = dict.fromkeys(name for value in values if value is not None for name in value)
    try:
        "".join(names).encode()
    except UnicodeEncodeError:
        if path:
            raise
        raise TaskError(
            "the name of a column is not text that UTF-8 can hold; write .jsonl"
        ) from None
    if len(names) > (MOST_FIELDS if path else _MOST_COLUMNS + 1):
        names = dict.fromkeys(list(names)[: _MOST_COLUMNS + 1]) if not path else {}
    fields = {
        name: _infer(
            [NOWHERE if value is None else value.get(name, ABSENT) for value in values],
            _below(path, name),
        )
        for name in names
    }
    places = {name: place for name, (_, place) in fields.items()}
    return objects(fields, [value is None for value in values]), Place(fields=places, **flags)


def _below(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def objects(fields: Mapping[str, tuple[pa.Array, Place]], nulls: Sequence[bool]) -> pa.StructArray:
    if not fields:
        return pa.array([None if null else {} for null in nulls], pa.struct([]))
    return pa.StructArray.from_arrays(
        [array for array, _ in fields.values()],
        fields=[place.as_field(name) for name, (_, place) in fields.items()],
        mask=pa.array(nulls, pa.bool_()) if any(nulls) else None,
    )


def _lists(items: pa.Array, lengths: Sequence[int], nulls: Sequence[bool]) -> pa.ListArray:
    ends = pa.array(accumulate(lengths, initial=0), pa.int32())
    return pa.ListArray.from_arrays(
        ends, items, mask=pa.array(nulls, pa.bool_()) if any(nulls) else None
    )


def with_statistics(data: pa.RecordBatch, columns: Columns) -> Columns:
    """Returns the columns, updated with the nulls and large integers of a record batch."""
    fields = {
        name: _updated(data.column(i), place)
        for i, (name, place) in enumerate(columns.fields.items())
    }
    if fields == columns.fields:
        return columns
    return Columns(columns.name, replace(columns.row, fields=fields), columns.metadata, columns.own)


def _updated(array: pa.Array, place: Place, above: int = 0) -> Place:
    import pyarrow.compute as pc

    nulls = place.nulls or (array.null_count > above and not place.absent and not place.is_json)
    large = place.large
    if place.leaf == pa.int64() and not large and len(array) > array.null_count:
        low, high = pc.min_max(array).as_py().values()
        large = max(-low, high) > EXACT
    fields = place.fields
    if fields and not place.is_json:
        inner = zip(fields.items(), array.flatten(), strict=True)
        fields = {
            name: _updated(inner_array, child, array.null_count)
            for (name, child), inner_array in inner
        }
    if (nulls, large, fields) == (place.nulls, place.large, place.fields):
        return place
    return replace(place, nulls=nulls, large=large, fields=fields)


def not_finite(data: pa.RecordBatch) -> list[str]:
    """Returns the columns of a record batch that contain NaN or infinity."""
    import pyarrow.compute as pc

    def holds(array: pa.Array) -> bool:
        if pa.types.is_struct(array.type) or pa.types.is_list(array.type):
            return any(
                map(holds, array.flatten() if pa.types.is_struct(array.type) else [array.flatten()])
            )
        return bool(
            pa.types.is_floating(array.type) and pc.any(pc.invert(pc.is_finite(array))).as_py()
        )

    return [
        name for name, array in zip(data.schema.names, data.columns, strict=True) if holds(array)
    ]


def convert(data: pa.RecordBatch, columns: Columns, to: Columns) -> pa.RecordBatch:
    """Converts a record batch to columns that its own were merged into. Raises Misfit."""
    if columns is to or columns.schema.equals(to.schema, check_metadata=True):
        return data
    arrays = {
        name: (data.column(i), place) for i, (name, place) in enumerate(columns.fields.items())
    }
    try:
        converted = [
            (
                _converted(*arrays[name], place, name)
                if name in arrays
                else pa.nulls(len(data), place.type)
            )
            for name, place in to.fields.items()
        ]
        return pa.RecordBatch.from_arrays(converted, schema=to.schema)
    except (pa.ArrowException, OverflowError) as error:
        raise TaskError(f"these rows cannot be put into one table: {error}") from error


def _check_labels(array: pa.Array, to: Place, path: str) -> None:
    """Raises Misfit for a number without a label."""
    odd = pl.Series(array).drop_nulls().cast(pl.Int128)
    odd = odd.filter(~odd.is_between(-1, len(to.labels or ()) - 1))
    if len(odd):
        raise Misfit(to, path, odd[0])


def _converted(array: pa.Array, place: Place, to: Place, path: str) -> pa.Array:
    if to.labels and not place.labels and pa.types.is_integer(array.type):
        _check_labels(array, to, path)
    if array.type == to.type and _encoding(place) == _encoding(to):
        return array
    if to.is_json:
        return _json_text(_plain(array, place, path))
    if place.is_empty:
        return pa.nulls(len(array), to.type)
    if to.fields is not None and place.fields is not None and not place.is_json:
        old = dict(zip(place.fields, array.flatten(), strict=True))
        fields = {
            name: (_converted(old[name], place.fields[name], target, _below(path, name))
                   if name in old else pa.nulls(len(array), target.type), target)
            for name, target in to.fields.items()
        }  # fmt: skip
        return objects(fields, array.is_null().to_pylist())
    if to.item is not None and not place.is_json:
        inner = place.item or Place.declared(place.type.value_field, {}, None, "")
        lengths = [length or 0 for length in array.value_lengths().to_pylist()]
        return _lists(
            _converted(array.flatten(), inner, to.item, path), lengths, array.is_null().to_pylist()
        )
    if (place.table or not to.table) and not place.is_json and place.fields is None:
        return array.cast(to.type)
    return _parse(_without(_plain(array, place, path)), to, path)


def _encoding(place: Place) -> tuple[object, ...]:
    return (
        place.is_json,
        {name: _encoding(inner) for name, inner in (place.fields or {}).items()},
        (_encoding(place.item) if place.item is not None else None),
    )


def _plain(array: pa.Array, place: Place, path: str) -> list[object]:
    values = json_value([decoded(value, place.notes) for value in values_of(array, path)])
    if not place.absent or (place.nulls and not place.is_json):
        return values  # type: ignore[no-any-return]
    there = array.is_valid().to_pylist()
    return [value if valid else ABSENT for value, valid in zip(values, there, strict=True)]


def change(
    data: pa.RecordBatch,
    columns: Columns,
    before: Sequence[Mapping[str, object]],
    after: Sequence[Mapping[str, object]],
) -> tuple[pa.RecordBatch, Columns]:
    """Builds a record batch from the rows of `after`; values unchanged since `before` keep their
    types.

    Raises Misfit if a new value does not fit a declared type.
    """
    whole = (
        pa.StructArray.from_arrays(data.columns, fields=list(data.schema))
        if data.num_columns
        else None
    )
    array, row = _changed_objects(whole, columns.row, before, after, "")
    changed_columns = Columns(columns.name, row, columns.metadata)
    if list(changed_columns.fields.items()) == list(columns.fields.items()):
        changed_columns = columns
    return batch_of(array, changed_columns, len(after)), changed_columns


def _changed(
    array: pa.Array, place: Place, before: Sequence[object], after: Sequence[object], path: str
) -> tuple[pa.Array, Place]:
    same = [
        old is new or new is NOWHERE or (type(old) is type(new) and bool(old == new))
        for old, new in zip(before, after, strict=True)
    ]
    if all(same):
        return array, place
    types = set(map(type, after))
    if (
        place.fields is not None
        and types <= {dict, type(None), type(ABSENT), type(NOWHERE)}
        and not place.is_json
    ):
        return _changed_objects(array, place, before, after, path)
    if place.is_natural:
        return _infer(after, path)
    parsed = _parse(
        _without([value for value, is_kept in zip(after, same, strict=True) if not is_kept]),
        place,
        path,
    )
    order, new = list[int](), len(array)
    for index, is_kept in enumerate(same):
        order.append(index if is_kept else new)
        new += not is_kept
    flags = Flags(absent=type(ABSENT) in types, nulls=type(None) in types)
    return pa.concat_arrays([array, parsed]).take(pa.array(order, pa.int64())), replace(
        place, **flags
    )


def _changed_objects(
    array: pa.Array, place: Place, before: Sequence[object], after: Sequence[object], path: str
) -> tuple[pa.Array, Place]:
    old = dict(zip(place.fields or {}, array.flatten() if array is not None else (), strict=True))
    changed_fields = {}
    for name in dict.fromkeys(
        name for value in after if isinstance(value, Mapping) for name in value
    ):
        new = [
            value.get(name, ABSENT) if isinstance(value, Mapping) else NOWHERE for value in after
        ]
        if name in old:
            had = [
                value.get(name, ABSENT) if isinstance(value, Mapping) else NOWHERE
                for value in before
            ]
            changed_fields[name] = _changed(
                old[name], (place.fields or {})[name], had, new, _below(path, name)
            )
        else:
            changed_fields[name] = _infer(new, _below(path, name))
    fields = {name: inner for name, (_, inner) in changed_fields.items()}
    nulls = [not isinstance(value, Mapping) for value in after]
    flags = Flags(absent=any(v is ABSENT for v in after), nulls=any(v is None for v in after))
    changed = replace(place, fields=fields, **flags)
    if changed.feature is not None and changed.type != place.type:
        changed = replace(changed, feature=None)
    return objects(changed_fields, nulls if path else [False] * len(after)), changed


def _parse(values: Sequence[object], place: Place, path: str) -> pa.Array:
    """Converts JSON values to a declared type. Raises Misfit at the first that does not fit."""
    type_ = place.type
    try:
        if pa.types.is_temporal(type_):
            return pa.array(values, pa.string()).cast(type_)
        array = pa.array([_native(value, type_) for value in values], type_)
        back: Iterable[object] = map(json_value, array.to_pylist())
    except (pa.ArrowException, ValueError, TypeError, KeyError, OverflowError, InvalidOperation):
        if len(values) == 1:
            raise Misfit(place, path, values[0]) from None
        for value in values:
            _parse([value], place, path)
        raise Misfit(place, path, values[0]) from None
    for value, restored in zip(values, back, strict=True):
        if not _same(value, restored):
            raise Misfit(place, path, value)
    return array


def _same(value: object, restored: object) -> bool:
    if isinstance(value, float) and isinstance(restored, float):  # narrow floats round
        return abs(value - restored) <= 1e-3 * abs(value)
    if isinstance(value, bool) is not isinstance(restored, bool):
        return False
    if isinstance(value, dict) and isinstance(restored, dict):
        return all(_same(value.get(name), inner) for name, inner in restored.items())
    if isinstance(value, list) and isinstance(restored, list):
        return len(value) == len(restored) and all(map(_same, value, restored))
    return bool(value == restored)


def _native(value: Any, type_: pa.DataType) -> object:
    """Converts a value for pyarrow. Raises ValueError, TypeError or KeyError."""
    if value is None:
        return None
    if (
        pa.types.is_binary(type_)
        or pa.types.is_large_binary(type_)
        or pa.types.is_fixed_size_binary(type_)
    ):
        try:
            return base64.b64decode(value, validate=True)
        except binascii.Error as error:
            raise ValueError(str(error)) from error
    if pa.types.is_decimal(type_):
        return Decimal(value)
    if (
        pa.types.is_list(type_)
        or pa.types.is_large_list(type_)
        or pa.types.is_fixed_size_list(type_)
    ):
        if not isinstance(value, list):
            raise TypeError("no list")
        return [_native(inner, type_.value_type) for inner in value]
    if pa.types.is_struct(type_):
        if not isinstance(value, dict):
            raise TypeError("no object")
        fields = {type_.field(i).name: type_.field(i).type for i in range(type_.num_fields)}
        return {name: _native(inner, fields[name]) for name, inner in value.items()}
    return value
