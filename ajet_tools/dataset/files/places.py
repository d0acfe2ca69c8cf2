"""The type of each place of the rows in a table: a column, or a field or list item within it.

A column of a table has one type. Types from several files, or from text, are merged (`merge`).
Declared types stay as they are, with the features of Hugging Face's `datasets`. The schema's
metadata records two more encodings, which `ajet_sdk.tasks.task_rows` reverses on reading:

- a place with values of several types, or that Arrow cannot hold (an empty object, an integer
  beyond 64 bits, lone surrogates, an object with hundreds of keys), is JSON text;
- a key that some rows lack is null there and removed again on reading. If other rows have a true
  null, the place is JSON text, in which `null` differs from a missing key (for a declared type, it
  is null).

An integer among floats becomes the float of the same value.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypedDict

import pyarrow as pa

from ajet_sdk.errors import TaskError
from ajet_sdk.tasks.task_rows import KEY

FEATURES = b"huggingface"
MOST_FIELDS, DEEPEST = 256, 16
"""Objects with more fields, and values nested deeper, are written as JSON text."""


class Flags(TypedDict, total=False):
    """The properties of a place besides its type."""

    absent: bool
    nulls: bool
    large: bool
    nullable: bool


@dataclass(frozen=True)
class Place:
    """A column, field or list item. Without leaf, fields and item, all values are null."""

    leaf: pa.DataType | None = None
    """The Arrow type, except for inferred objects and lists."""
    fields: Mapping[str, Place] | None = None
    item: Place | None = None
    json: bool = False
    """Values are JSON text."""
    absent: bool = False
    """Some rows lack the key."""
    nulls: bool = False
    """Some rows have a null."""
    large: bool = False
    """Some integers are too large for a float."""
    table: str | None = None
    """The file that declares the type; None if it was inferred from values."""
    nullable: bool = True
    metadata: Mapping[bytes, bytes] | None = None
    feature: object = None
    """The feature of `datasets`."""

    @classmethod
    def declared(
        cls, field: pa.Field, notes: Mapping[str, Any], feature: object, table: str
    ) -> Place:
        """Returns the place of a column that a table declares."""
        known = {
            "absent": bool(notes.get("absent")),
            "nullable": field.nullable,
            "metadata": field.metadata,
        }
        if "json" in notes:
            return cls(**known, json=True)
        if "item" in notes:
            return cls(
                **known, item=cls.declared(field.type.value_field, notes["item"], None, table)
            )
        if pa.types.is_struct(field.type):
            below, inner = notes.get("fields", {}), _fields_of(feature)
            some = [field.type.field(i) for i in range(field.type.num_fields)]
            fields = {
                f.name: cls.declared(f, below.get(f.name, {}), inner.get(f.name), table)
                for f in some
            }
            return cls(**known, fields=fields, table=table, feature=feature)
        return cls(**known, leaf=field.type, table=table, feature=feature)

    @cached_property
    def is_json(self) -> bool:
        lacking = self.absent and self.nulls
        return self.json or (
            self.table is None and (lacking or (self.fields is not None and not self.fields))
        )

    @cached_property
    def is_empty(self) -> bool:
        """Whether all values are null."""
        return not self.json and self.leaf is None and self.fields is None and self.item is None

    @cached_property
    def type(self) -> pa.DataType:
        if self.is_json:
            return pa.string()
        if self.fields is not None:
            return pa.struct([place.as_field(name) for name, place in self.fields.items()])
        if self.item is not None:
            return pa.list_(self.item.type)
        return pa.null() if self.leaf is None else self.leaf

    @cached_property
    def is_natural(self) -> bool:
        """Whether JSON values would get the same type, so that JSON holds them without loss."""
        return self.is_json or _is_natural(self.type)

    @property
    def labels(self) -> Sequence[str] | None:
        """The names of the class labels, if the column has them."""
        return (
            _labels(self.feature)
            if isinstance(self.feature, dict) and "_type" in self.feature
            else None
        )

    def as_field(self, name: str) -> pa.Field:
        return pa.field(name, self.type, self.nullable or self.absent or self.nulls, self.metadata)

    @cached_property
    def notes(self) -> dict[str, Any]:
        """The encoding; empty for the usual one."""
        notes: dict[str, Any] = {}
        if self.absent and (self.is_json or not self.nulls):
            notes["absent"] = True
        if self.is_json:
            return {**notes, "json": True}
        if below := {
            name: place.notes for name, place in (self.fields or {}).items() if place.notes
        }:
            notes["fields"] = below
        if self.item is not None and self.item.notes:
            notes["item"] = self.item.notes
        return notes

    @cached_property
    def noted(self) -> object:
        """The `datasets` feature, derived from the type if the file has none."""
        if (
            self.fields is not None
            and not self.is_json
            and (self.feature is None or _fields_of(self.feature))
        ):
            return {name: place.noted for name, place in self.fields.items()}
        return _feature(self.type) if self.feature is None else self.feature


@dataclass(eq=False)
class Columns:
    """The columns of rows and the metadata of their file."""

    name: str
    row: Place
    metadata: Mapping[bytes, bytes] = field(default_factory=dict)
    """The schema's metadata."""
    own: pa.Schema | None = None
    """The file's schema, while the columns are unchanged."""

    @classmethod
    def of(cls, name: str, schema: pa.Schema) -> Columns:
        """Reads the columns of a schema. Raises TaskError for duplicate names."""
        if len(set(schema.names)) < len(schema.names):
            raise TaskError(f"{name}: two columns have the same name: {', '.join(schema.names)}")
        metadata = schema.metadata or {}
        notes = json.loads(metadata[KEY]).get("fields", {}) if KEY in metadata else {}
        features = _features(metadata) or {}
        fields = {
            column.name: Place.declared(
                column, notes.get(column.name, {}), features.get(column.name), name
            )
            for column in schema
        }
        return cls(name, Place(fields=fields, table=name), metadata, schema)

    @cached_property
    def schema(self) -> pa.Schema:
        if self.own is not None:
            return self.own
        metadata = dict(self.metadata)
        if _features(metadata) is not None:
            noted = json.loads(metadata[FEATURES])
            noted["info"]["features"] = {name: place.noted for name, place in self.fields.items()}
            metadata[FEATURES] = json.dumps(noted).encode()
        metadata.pop(KEY, None)
        if notes := self.notes:
            metadata[KEY] = json.dumps(notes).encode()
        return pa.schema(
            [place.as_field(name) for name, place in self.fields.items()], metadata or None
        )

    @property
    def fields(self) -> Mapping[str, Place]:
        return self.row.fields or {}

    @property
    def notes(self) -> dict[str, Any]:
        below = {name: place.notes for name, place in self.fields.items() if place.notes}
        return {"fields": below} if below else {}

    @cached_property
    def as_written(self) -> tuple[object, ...]:
        """All that a file of these columns stores about them."""
        some = {
            name: (place.type, place.notes, place.noted, place.metadata)
            for name, place in self.fields.items()
        }
        return list(some.items()), dict(self.metadata)

    def labels_at(self, path: Sequence[str]) -> list[str]:
        """Returns the names of the class labels at a path (also of a list of labels); empty for
        other columns."""
        place: Place | None = self.row
        for name in path:
            place = (place.fields or {}).get(name) if place is not None else None
        labels = place.labels if place is not None else None
        return list((labels.get("feature") if isinstance(labels, dict) else labels) or ())

    def lost_in_text(self) -> dict[str, str]:
        """Returns the columns that text can't represent fully, with their types: bytes, times,
        labels."""
        lost = {
            name: str(place.type)
            for name, place in self.fields.items()
            if _is_beyond_json(place.type)
        }
        for name, place in self.fields.items():
            if names := _labels(place.feature):
                lost[name] = f"class label of {names}"
        return lost


def merged(some: Sequence[Columns]) -> Columns:
    """Merges columns so that rows of all fit. Raises TaskError if declared types can't be
    merged."""
    result = some[0]
    for columns in some[1:]:
        if columns is not result:
            row = merge(result.row, columns.row)
            if row != result.row or not columns.metadata.keys() <= result.metadata.keys():
                both = Columns(result.name, row, {**columns.metadata, **result.metadata})
                both.own = result.own if both.as_written == result.as_written else None
                result = both
    return result


def merge(first: Place, second: Place, path: str = "") -> Place:
    """Returns the place that holds the values of both."""
    if first == second:
        return first
    flags = Flags(
        absent=first.absent or second.absent,
        nulls=first.nulls or second.nulls,
        large=first.large or second.large,
        nullable=first.nullable or second.nullable,
    )
    if first.is_empty or second.is_empty:
        return replace(second if first.is_empty else first, **flags)
    _check_labels(first, second, path)
    if first.fields is not None and second.fields is not None and not (first.json or second.json):
        return _merge_objects(first, second, path, flags)
    declared, inferred = (first, second) if first.table else (second, first)
    if (
        first.table
        and second.table
        and (common_type := _one_type(first.type, second.type)) is not None
    ):
        return replace(
            first if common_type == first.type else replace(second, leaf=common_type), **flags
        )
    same = declared.type == inferred.type and not (first.is_json or second.is_json)
    if declared.table and not inferred.table and (same or not declared.is_natural):
        return replace(declared, **flags)  # the conversion reports values that do not fit
    if not (first.is_natural and second.is_natural):
        raise TaskError(
            f"{path} is {first.type} in {first.table} and {second.type} in {second.table}, which do"
            " not fit one type; write .jsonl, or convert the values first"
        )
    first, second = _opened(first), _opened(second)
    if first.item is not None and second.item is not None and not (first.json or second.json):
        return Place(item=merge(first.item, second.item, path), **flags)
    if {first.leaf, second.leaf} == {pa.int64(), pa.float64()} and not flags["large"]:
        return Place(pa.float64(), **flags)
    return (
        Place(first.leaf, **flags)
        if first.leaf == second.leaf is not None
        else Place(json=True, **flags)
    )


def _merge_objects(first: Place, second: Place, path: str, flags: Flags) -> Place:
    a, b = first.fields or {}, second.fields or {}
    fields = {}
    for name in (*a, *(name for name in b if name not in a)):
        if name in a and name in b:
            fields[name] = merge(a[name], b[name], f"{path}.{name}" if path else name)
        else:
            fields[name] = replace(a[name] if name in a else b[name], absent=True)
    table = first.table or second.table
    if path and not table and (len(fields) > MOST_FIELDS or path.count(".") >= DEEPEST):
        return Place(json=True, **flags)
    merged_place = Place(fields=fields, table=table, metadata=first.metadata, **flags)
    features = [
        each.feature
        for each in (first, second)
        if each.feature is not None and each.type == merged_place.type
    ]
    return replace(merged_place, feature=features[0]) if features else merged_place


def _opened(place: Place) -> Place:
    """Converts a declared list of a natural type to an inferred one."""
    if place.leaf is None or not pa.types.is_list(place.leaf) or not place.is_natural:
        return place
    return replace(
        place, leaf=None, table=None, item=Place.declared(place.leaf.value_field, {}, None, "")
    )


def _check_labels(first: Place, second: Place, path: str) -> None:
    a, b = _labels(first.feature), _labels(second.feature)
    if a and b and a != b:
        raise TaskError(
            f"{path} is a class label of {a} in {first.table} and of {b} in {second.table}: the"
            " same number means different labels. Make them the same first"
        )


def _one_type(first: pa.DataType, second: pa.DataType) -> pa.DataType | None:
    """Returns the type that holds the values of two types that differ in width only, else None."""
    if first == second:
        return first
    if _family(first) != _family(second):
        return None
    try:
        both = [pa.schema([("", each)]) for each in (first, second)]
        return pa.unify_schemas(both, promote_options="permissive").types[0]
    except pa.ArrowException:
        return None


def _family(type_: pa.DataType) -> str:
    kinds = {
        "int": pa.types.is_integer,
        "float": pa.types.is_floating,
        "decimal": pa.types.is_decimal,
        "text": lambda kind: pa.types.is_string(kind) or pa.types.is_large_string(kind),
        "bytes": lambda kind: pa.types.is_binary(kind) or pa.types.is_large_binary(kind),
    }
    return next((name for name, fits in kinds.items() if fits(type_)), str(type_))


def _is_natural(type_: pa.DataType) -> bool:
    if pa.types.is_list(type_):
        return _is_natural(type_.value_type)
    if pa.types.is_struct(type_):
        return all(_is_natural(type_.field(i).type) for i in range(type_.num_fields))
    return type_ in (pa.string(), pa.int64(), pa.float64(), pa.bool_(), pa.null())


def _is_beyond_json(type_: pa.DataType) -> bool:
    types = pa.types
    if any(
        fits(type_)
        for fits in (
            types.is_dictionary,
            types.is_list,
            types.is_large_list,
            types.is_fixed_size_list,
        )
    ):
        return _is_beyond_json(type_.value_type)
    if types.is_struct(type_):
        return any(_is_beyond_json(type_.field(i).type) for i in range(type_.num_fields))
    known = (
        types.is_string,
        types.is_large_string,
        types.is_integer,
        types.is_floating,
        types.is_boolean,
        types.is_null,
    )
    return not any(fits(type_) for fits in known)


def _fields_of(feature: object) -> Mapping[str, object]:
    """Returns the features of an object's fields; empty for features with a type of their own, such
    as images."""
    return (
        feature if isinstance(feature, dict) and not isinstance(feature.get("_type"), str) else {}
    )


def _features(metadata: Mapping[bytes, bytes]) -> Mapping[str, Any] | None:
    """Returns the `datasets` features, or None if they are missing or in an unknown format."""
    try:
        features = json.loads(metadata[FEATURES])["info"]["features"]
    except (KeyError, ValueError, TypeError):
        return None
    return features if isinstance(features, dict) else None


def _labels(feature: object) -> Any:
    if isinstance(feature, dict) and feature.get("_type") == "ClassLabel":
        return feature.get("names")
    if isinstance(feature, dict):
        return {name: names for name, inner in feature.items() if (names := _labels(inner))}
    return (
        [names for inner in feature if (names := _labels(inner))]
        if isinstance(feature, list)
        else None
    )


def _feature(type_: pa.DataType) -> object:
    if pa.types.is_struct(type_):
        return {type_.field(i).name: _feature(type_.field(i).type) for i in range(type_.num_fields)}
    if pa.types.is_list(type_):
        return [_feature(type_.value_type)]
    names = {"double": "float64", "float": "float32", "halffloat": "float16"}
    return {"dtype": names.get(str(type_), str(type_)), "_type": "Value"}
