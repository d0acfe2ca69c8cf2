"""Rows as their table holds them, beside what JSON makes of them: a table that is written of them has their types.

JSON has no word for bytes, times, decimals, dictionaries or the width of a number, and none for what a schema says of a
column (`huggingface`: the names of a class label). So a row that was read from a table knows its Arrow batch and its
place there, and the writer of a table takes from the batch whatever nobody has changed.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from ajet_sdk.errors import TaskError
from ajet_sdk.tasks.rows import KEY

__all__ = ["FEATURES", "Batch", "Stored", "Table", "fields_of", "json_value", "rows_of"]

FEATURES = b"huggingface"

Notes = dict[str, Any]
"""How a place is encoded, as in `ajet_sdk.tasks.rows`."""


@dataclass(frozen=True)
class _Column:
    field: Any
    array: Any
    notes: Notes
    feature: Any


@dataclass(eq=False)
class Table:
    """What a file says of its columns."""

    name: str
    schema: Any
    notes: Mapping[str, Notes] = field(default_factory=dict)
    """By column; empty where it is encoded as any tool would."""
    features: Mapping[str, Any] | None = None
    """What Hugging Face's `datasets` notes of the columns, where it does."""
    is_arranged: bool = False
    """Columns have other names or places than in the file, and the schema's metadata still is the file's."""
    arranged: dict[str, Table] = field(default_factory=dict)
    """The same with columns of other names and places, once made."""

    @classmethod
    def of(cls, name: str, schema: Any) -> Table:
        """Raises TaskError where two columns have one name."""
        if len(set(schema.names)) < len(schema.names):
            raise TaskError(f"{name}: two columns have the same name: {', '.join(schema.names)}")
        metadata = schema.metadata or {}
        notes = json.loads(metadata[KEY]).get("fields", {}) if KEY in metadata else {}
        return cls(name, schema, notes, _features(metadata))

    def beyond_json(self) -> dict[str, str]:
        """Columns whose values JSON has no word for, and their types: bytes, times, decimals."""
        return {one.name: str(one.type) for one in self.schema if _is_beyond_json(one.type)}


def _is_beyond_json(type_: Any) -> bool:
    import pyarrow as pa

    types = pa.types
    if types.is_dictionary(type_):
        return _is_beyond_json(type_.value_type)
    if types.is_list(type_) or types.is_large_list(type_) or types.is_fixed_size_list(type_):
        return _is_beyond_json(type_.value_type)
    if types.is_struct(type_):
        return any(_is_beyond_json(type_.field(i).type) for i in range(type_.num_fields))
    known = (types.is_string, types.is_large_string, types.is_integer, types.is_floating, types.is_boolean,
             types.is_null)  # fmt: skip
    return not any(fits(type_) for fits in known)


def fields_of(feature: Any) -> Mapping[str, Any]:
    """What `datasets` notes of the fields of an object; nothing of an image, say, which has a type of its own."""
    return feature if isinstance(feature, dict) and not isinstance(feature.get("_type"), str) else {}


def _features(metadata: Mapping[bytes, bytes]) -> Mapping[str, Any] | None:
    """None too where they are written as ajet does not know them: then they are no more than bytes to be kept."""
    try:
        found = json.loads(metadata[FEATURES])["info"]["features"]
    except (KeyError, ValueError, TypeError):
        return None
    return found if isinstance(found, dict) else None


@dataclass(eq=False)
class Batch:
    """Some rows of a table."""

    table: Table
    data: Any
    """A `pyarrow.RecordBatch`."""
    _arranged: dict[str, Batch] = field(default_factory=dict)

    @classmethod
    def empty(cls, table: Table) -> Batch:
        import pyarrow as pa

        return cls(table, pa.RecordBatch.from_pylist([], schema=table.schema))

    @property
    def row_bytes(self) -> int:
        """About how long a row is."""
        return int(self.data.nbytes // max(1, self.data.num_rows))

    def mapped(self, mapping: Mapping[str, str]) -> Batch:
        """With the columns renamed as `--map` says."""
        return self._arrange(f"map {sorted(mapping.items())}", lambda columns: _rename(columns, mapping))

    def opened(self) -> Batch:
        """With what stands in `metadata` as columns beside it."""
        return self._arrange("open", _open_metadata)

    def _arrange(self, key: str, layout: Callable[[dict[str, _Column]], dict[str, _Column]]) -> Batch:
        import pyarrow as pa

        if key in self._arranged:
            return self._arranged[key]
        notes, features = self.table.notes, self.table.features or {}
        names = self.data.schema.names
        columns = {
            name: _Column(self.data.schema.field(i), self.data.column(i), notes.get(name, {}), features.get(name))
            for i, name in enumerate(names)
        }
        made = layout(columns)
        table = self.table.arranged.get(key)
        if table is None:
            schema = pa.schema(
                [one.field.with_name(name) for name, one in made.items()], metadata=self.table.schema.metadata
            )
            known = {name: one.feature for name, one in made.items() if one.feature is not None}
            noted = {name: one.notes for name, one in made.items() if one.notes}
            table = Table(self.table.name, schema, noted, None if self.table.features is None else known, True)
            self.table.arranged[key] = table
        arrays = [one.array for one in made.values()]
        batch = Batch(table, pa.RecordBatch.from_arrays(arrays, schema=table.schema))
        self._arranged[key] = batch
        return batch


def _rename(columns: Mapping[str, _Column], mapping: Mapping[str, str]) -> dict[str, _Column]:
    made = {name: column for name, column in columns.items() if name not in mapping}
    for name, target in mapping.items():
        if name not in columns:
            continue
        root, _, inner = target.partition(".")
        if root != "metadata":
            made[target] = columns[name]
            continue
        before = made.pop("metadata", None)
        if before is None or not before.notes.get("json"):
            made["metadata"] = _struct({**(_children(before) if before is not None else {}), inner: columns[name]})
    return made


def _open_metadata(columns: Mapping[str, _Column]) -> dict[str, _Column]:
    return {**(_children(columns["metadata"]) if "metadata" in columns else {}), **columns}


def _children(column: _Column) -> dict[str, _Column]:
    """The fields of a column of objects, each as a column; none of another column."""
    import pyarrow as pa

    if not pa.types.is_struct(column.field.type) or column.notes.get("json"):
        return {}
    notes, features = column.notes.get("fields", {}), fields_of(column.feature)
    arrays = column.array.flatten()
    inner = [column.field.type.field(i) for i in range(len(arrays))]
    return {
        one.name: _Column(one, array, notes.get(one.name, {}), features.get(one.name))
        for one, array in zip(inner, arrays, strict=True)
    }


def _struct(columns: Mapping[str, _Column]) -> _Column:
    import pyarrow as pa

    fields = [one.field.with_name(name).with_nullable(True) for name, one in columns.items()]
    array = pa.StructArray.from_arrays([one.array for one in columns.values()], fields=fields)
    notes = {name: one.notes for name, one in columns.items() if one.notes}
    features = {name: one.feature for name, one in columns.items() if one.feature is not None}
    whole = len(features) == len(columns)
    return _Column(
        pa.field("metadata", array.type), array, {"fields": notes} if notes else {}, features if whole else None
    )


@dataclass(frozen=True)
class Stored:
    """Where a row stands in a table, and the values that JSON makes of it."""

    batch: Batch
    index: int
    values: Mapping[str, Any]

    def opened(self) -> Stored:
        """With what stands in `metadata` as columns beside it."""
        metadata = self.values.get("metadata")
        inner = metadata if isinstance(metadata, Mapping) else {}
        return Stored(self.batch.opened(), self.index, {**inner, **self.values})


def rows_of(data: Any, name: str) -> list[dict[str, Any]]:
    """The rows of a record batch as Python has them; times beyond what Python can hold are text.

    Raises TaskError where such a time stands where it cannot be told from others, such as in a map.
    """
    try:
        return data.to_pylist()  # type: ignore[no-any-return]
    except (ValueError, OverflowError):  # nanoseconds, or the year 30,000
        columns = {column: _values(data.column(i), f"{name}: {column}") for i, column in enumerate(data.schema.names)}
        return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _values(array: Any, name: str) -> list[Any]:
    import pyarrow as pa

    try:
        return array.to_pylist()  # type: ignore[no-any-return]
    except (ValueError, OverflowError) as error:
        there, types = array.is_valid().to_pylist(), pa.types
        if types.is_struct(array.type):
            names = [array.type.field(i).name for i in range(array.type.num_fields)]
            fields = [_values(one, name) for one in array.flatten()]
            rows: list[Any] = [dict(zip(names, values, strict=True)) for values in zip(*fields, strict=True)]
        elif types.is_list(array.type) or types.is_large_list(array.type):
            items, ends = _values(array.flatten(), name), [0]
            for length in array.value_lengths().to_pylist():
                ends.append(ends[-1] + (length or 0))
            rows = [items[start:end] for start, end in pairwise(ends)]
        elif types.is_duration(array.type):
            rows = [str(one) for one in array.cast(pa.int64()).to_pylist()]
        elif types.is_temporal(array.type):
            rows = array.cast(pa.string()).to_pylist()
        else:
            raise TaskError(f"cannot read {name}: {error}") from error
        return [row if valid else None for row, valid in zip(rows, there, strict=True)]


def json_value(value: Any) -> Any:
    """A value as JSON can hold it: bytes as base64, times and decimals as text, NaN as null."""
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): json_value(inner) for name, inner in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, bytes):
        return [json_value(inner) for inner in value]
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)
