"""The columns of a table, from rows that are as they were stored and rows that were changed or made."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

from ajet_sdk.errors import TaskError
from ajet_sdk.tasks.rows import KEY, decoded
from ajet_tools.dataset.files.columns import Place, Shape, encoded
from ajet_tools.dataset.files.stored import FEATURES, Table, json_value
from ajet_tools.dataset.files.table_draft import Chunk

__all__ = ["Columns", "Misfit"]


class Misfit(Exception):
    """A value does not fit the type that tables declare at a path."""

    def __init__(self, place: Place, value: Any) -> None:
        super().__init__(place.path)
        self.place, self.value = place, value

    def as_error(self, path: object) -> TaskError:
        one = self.place.declared[0]
        return TaskError(
            f"cannot write {path}: {self.place.path} is {self.place.type} in {one.table}, and {self.value!r:.80} "
            "does not fit; write .jsonl, or change the column's type first"
        )


@dataclass(frozen=True, slots=True)
class _Stored:
    """A value as it is stored."""

    table: int
    index: int


@dataclass(frozen=True, slots=True)
class _ChangedObject:
    """An object that is stored, some of whose fields are as they were (see `table_draft.change`)."""

    table: int
    index: int
    kept: Sequence[str]
    made: Mapping[str, Any]
    inner: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _JsonValue:
    """A value as JSON has it."""

    value: Any


_Cell = _Stored | _ChangedObject | _JsonValue | None
"""None: the row has no such key."""
_Sources = Mapping[int, tuple[Any, Mapping[str, Any]]]
"""The array of a place and how it is encoded, by table."""


class Columns:
    """The Arrow schema for rows of a shape, and chunks of rows as tables of it."""

    def __init__(self, shape: Shape, tables: Sequence[Table]) -> None:
        """`tables` are those that chunks refer to."""
        if "odd" in shape.kinds:
            raise TaskError("the name of a column is not text that UTF-8 can hold; write .jsonl")
        self._shape, self._tables = shape, tables
        self._undeclared: set[str] = set()
        self._arrange()

    def _arrange(self) -> None:
        import pyarrow as pa

        self._row = Place(self._shape, undeclared=self._undeclared)
        self.schema = pa.schema(list(self._row.type), metadata=self._metadata() or None)

    def widen(self, misfit: Misfit, path: object) -> None:
        """The values at a place decide its type from now on. Raises TaskError where rows are stored in that type."""
        if any(one.firm for one in misfit.place.declared) or misfit.place.path in self._undeclared:
            raise misfit.as_error(path) from misfit
        self._undeclared.add(misfit.place.path)
        self._arrange()

    def _metadata(self) -> dict[bytes, bytes]:
        """What tables say of themselves, and what is said of columns as they are now."""
        found: dict[bytes, bytes] = {}
        for table in self._shape.tables:
            for name, text in (table.schema.metadata or {}).items():
                found.setdefault(name, text)
        features = next((one for one in self._shape.tables if one.features is not None), None)
        if features is not None:
            noted = json.loads(features.schema.metadata[FEATURES])
            noted["info"]["features"] = {name: one.feature for name, one in (self._row.children or {}).items()}
            found[FEATURES] = json.dumps(noted).encode()
        found.pop(KEY, None)
        return {**found, KEY: json.dumps(self._row.notes).encode()} if self._row.notes else found

    def table(self, chunk: Chunk) -> Any:
        """A `pyarrow.Table` of the rows. Raises Misfit where a value is of another type than its place."""
        import pyarrow as pa

        sources = {
            number: (pa.StructArray.from_arrays(data.columns, fields=list(data.schema)), {"fields": table.notes})
            for number, data in chunk.stored.items()
            for table in [self._tables[number]]
        }
        cells = [_cell(row) for row in chunk.rows]
        try:
            whole = _struct_array(self._row, cells, sources)
        except (pa.ArrowException, OverflowError) as error:
            raise TaskError(f"these rows cannot be put into one table: {error}") from error
        return pa.Table.from_arrays(whole.flatten(), schema=self.schema)


def _cell(row: Any) -> _Cell:
    if isinstance(row, dict):
        return _JsonValue(row)
    if len(row) == 2:
        return _Stored(*row)
    return _ChangedObject(row[0], row[1], *row[2])


def _array(place: Place, cells: Sequence[_Cell], sources: _Sources) -> Any:
    import pyarrow as pa

    if place.tree is not None:
        values = (None if cell is None else encoded(_value(cell, sources), place.tree) for cell in cells)
        return pa.array(list(values), type=place.type)
    whole = _whole_array(cells, sources)
    if whole is not None and whole.type == place.type:
        return whole
    return _struct_array(place, cells, sources) if place.children is not None else _leaf_array(place, cells, sources)


def _whole_array(cells: Sequence[_Cell], sources: _Sources) -> Any:
    """The array of one table, where the cells are its values in their order; else None."""
    first = cells[0] if cells else None
    if not isinstance(first, _Stored) or first.table not in sources or len(sources[first.table][0]) != len(cells):
        return None
    right = all(
        isinstance(cell, _Stored) and cell.table == first.table and cell.index == i for i, cell in enumerate(cells)
    )
    return sources[first.table][0] if right else None


def _struct_array(place: Place, cells: Sequence[_Cell], sources: _Sources) -> Any:
    import pyarrow as pa

    there = {number: array.is_valid().to_pylist() for number, (array, _) in sources.items()}
    nulls = [_is_null(place, cell, there) for cell in cells]
    arrays = []
    standing = not any(nulls) and _whole_array(cells, sources) is not None
    for name, child in (place.children or {}).items():
        below = _field_sources(name, sources)
        if standing and below and not any(notes.get("absent") for _, notes in below.values()):
            held = cells
        else:
            held = [None if null else _field_cell(cell, name, below) for cell, null in zip(cells, nulls, strict=True)]
        arrays.append(_array(child, held, below))
    mask = pa.array(nulls, pa.bool_()) if any(nulls) else None
    if not arrays:
        return pa.array([None if null else {} for null in nulls], type=place.type)
    return pa.StructArray.from_arrays(arrays, fields=list(place.type), mask=mask)


def _is_null(place: Place, cell: _Cell, there: Mapping[int, Sequence[bool]]) -> bool:
    if isinstance(cell, _Stored):
        return not there[cell.table][cell.index]
    if isinstance(cell, _JsonValue) and cell.value is not None:
        if not isinstance(cell.value, dict):
            raise Misfit(place, cell.value)
        return False
    return not isinstance(cell, _ChangedObject)


def _field_sources(name: str, sources: _Sources) -> dict[int, tuple[Any, Mapping[str, Any]]]:
    """The field of that name, of those tables that have it."""
    found = {}
    for number, (array, notes) in sources.items():
        index = array.type.get_field_index(name)
        if index >= 0:
            found[number] = (array.field(index), notes.get("fields", {}).get(name, {}))
    return found


def _field_cell(cell: _Cell, name: str, sources: _Sources) -> _Cell:
    """The cell of a field, of the cell of its object."""
    if isinstance(cell, _JsonValue):
        return _JsonValue(cell.value[name]) if name in cell.value else None
    if cell is None or cell.table not in sources:
        made = cell.made if isinstance(cell, _ChangedObject) else {}
        return _JsonValue(made[name]) if name in made else None
    kept = isinstance(cell, _Stored) or name in cell.kept
    if kept:
        array, notes = sources[cell.table]
        lacking = notes.get("absent") and not array[cell.index].is_valid
        return None if lacking else _Stored(cell.table, cell.index)
    assert isinstance(cell, _ChangedObject)
    if name in cell.made:
        return _JsonValue(cell.made[name])
    return _ChangedObject(cell.table, cell.index, *cell.inner[name]) if name in cell.inner else None


def _value(cell: _Cell, sources: _Sources) -> Any:
    """The value as JSON has it."""
    if isinstance(cell, _JsonValue) or cell is None:
        return cell.value if cell is not None else None
    array, notes = sources[cell.table]
    stored = json_value(decoded(array[cell.index].as_py(), notes))
    return stored if isinstance(cell, _Stored) else _apply_changes(stored, [cell.kept, cell.made, cell.inner])


def _apply_changes(stored: Mapping[str, Any], by: Sequence[Any]) -> dict[str, Any]:
    kept, made, inner = by
    return {
        **{name: stored[name] for name in kept},
        **made,
        **{name: _apply_changes(stored[name], one) for name, one in inner.items()},
    }


def _leaf_array(place: Place, cells: Sequence[_Cell], sources: _Sources) -> Any:
    """Values of one type, as they are stored; those that were made are turned into it."""
    import pyarrow as pa

    parts, length = [pa.nulls(1, place.type)], 1
    start: dict[int, int] = {}
    for number, (array, _) in sources.items():
        if any(isinstance(cell, _Stored) and cell.table == number for cell in cells):
            parts.append(array if array.type == place.type else array.cast(place.type))
            start[number], length = length, length + len(array)
    order, made = list[int](), list[Any]()
    for cell in cells:
        if isinstance(cell, _Stored):
            order.append(start[cell.table] + cell.index)
        elif isinstance(cell, _JsonValue) and cell.value is not None:
            order.append(length + len(made))
            made.append(cell.value)
        elif isinstance(cell, _ChangedObject):
            raise Misfit(place, _value(cell, sources))
        else:
            order.append(0)
    if made:
        parts.append(_parse(place, made))
    return pa.concat_arrays(parts).take(pa.array(order, pa.int64()))


def _parse(place: Place, values: Sequence[Any]) -> Any:
    """Values as JSON has them, as those of a type. Raises Misfit at the first that is none."""
    import pyarrow as pa

    try:
        if pa.types.is_temporal(place.type):
            return pa.array(values, pa.string()).cast(place.type)
        made = pa.array([_native(value, place.type) for value in values], place.type)
        back: Iterable[Any] = map(json_value, made.to_pylist())
    except (pa.ArrowException, ValueError, TypeError, KeyError, OverflowError, InvalidOperation):
        if len(values) == 1:
            raise Misfit(place, values[0]) from None
        for value in values:
            _parse(place, [value])
        raise Misfit(place, values[0]) from None
    for value, found in zip(values, back, strict=True):
        if not _same(value, found):
            raise Misfit(place, value)
    return made


def _same(value: Any, found: Any) -> bool:
    if isinstance(value, float) and isinstance(found, float):  # a narrow float is the nearest one
        return abs(value - found) <= 1e-3 * abs(value)
    if isinstance(value, bool) is not isinstance(found, bool):
        return False
    if isinstance(value, dict) and isinstance(found, dict):
        return all(_same(value.get(name), one) for name, one in found.items())
    if isinstance(value, list) and isinstance(found, list):
        return len(value) == len(found) and all(map(_same, value, found))
    return bool(value == found)


def _native(value: Any, type_: Any) -> Any:
    """A value as pyarrow takes it for that type. Raises ValueError, TypeError or KeyError."""
    import pyarrow as pa

    if value is None:
        return None
    if pa.types.is_binary(type_) or pa.types.is_large_binary(type_) or pa.types.is_fixed_size_binary(type_):
        try:
            return base64.b64decode(value, validate=True)
        except binascii.Error as error:
            raise ValueError(str(error)) from error
    if pa.types.is_decimal(type_):
        return Decimal(value)
    if pa.types.is_list(type_) or pa.types.is_large_list(type_) or pa.types.is_fixed_size_list(type_):
        if not isinstance(value, list):
            raise TypeError("no list")
        return [_native(one, type_.value_type) for one in value]
    if pa.types.is_struct(type_):
        if not isinstance(value, dict):
            raise TypeError("no object")
        fields = {type_.field(i).name: type_.field(i).type for i in range(type_.num_fields)}
        return {name: _native(one, fields[name]) for name, one in value.items()}
    return value
