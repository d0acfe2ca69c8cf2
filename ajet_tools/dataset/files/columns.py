"""The type of each column of rows, in a table.

Text, numbers and booleans are columns of that type. The columns that trainers read are nested, as
`datasets` and TRL expect them. Everything else is JSON text (the type JSON): objects, lists, mixed
values, integers beside floats and text with half a surrogate pair, so that each comes back as it
was. Types that a table declares stay as they are, with the features of Hugging Face's `datasets`.

A key that some rows lack is null in their rows; `KEY` in the schema's metadata lists such keys and
JSON text, and `ajet_sdk.tasks.task_rows` decodes the rows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypedDict

import pyarrow as pa

from ajet_sdk.errors import TaskError
from ajet_sdk.tasks.task_rows import KEY

NESTED = ("messages", "prompt", "completion", "chosen", "rejected")
"""The columns that trainers read."""
JSON = pa.json_(pa.string())
ABSENT = type("_Absent", (), {})()
"""The value of a key that the row lacks."""
FEATURES = b"huggingface"
_PLAIN = (pa.string(), pa.int64(), pa.float64(), pa.bool_(), pa.null(), JSON)


class Flags(TypedDict):
    absent: bool
    nulls: bool


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
    source: str | None = None
    """The table that declares a type which JSON values don't have."""
    declared: pa.Field | None = None
    feature: object = None
    """The feature of `datasets`."""

    @classmethod
    def of_field(
        cls, column: pa.Field, notes: Mapping[str, Any], feature: object, source: str
    ) -> Shape:
        """Returns the shape of a column of a table."""
        kind = column.type
        known = cls(absent=bool(notes.get("absent")), declared=column, feature=feature)
        if kind == JSON or "json" in notes:
            return replace(known, leaf=JSON, declared=None)
        if pa.types.is_struct(kind) and kind.num_fields:
            below = notes.get("fields", {})
            inner = _fields_of(feature)
            fields = {
                each.name: cls.of_field(
                    each, below.get(each.name, {}), inner.get(each.name), source
                )
                for each in kind
            }
            is_declared = any(each.source for each in fields.values())
            return replace(known, fields=fields, source=source if is_declared else None)
        if pa.types.is_list(kind) and is_plain(kind):
            item = cls.of_field(kind.value_field, notes.get("item", {}), None, source)
            return replace(known, item=item)
        if is_plain(kind):
            return replace(known, leaf=None if pa.types.is_null(kind) else kind)
        return replace(known, leaf=kind, source=source)

    @property
    def is_json(self) -> bool:
        return bool(self.leaf == JSON)

    @property
    def is_empty(self) -> bool:
        """Whether all values are null."""
        return self.leaf is None and self.fields is None and self.item is None

    @cached_property
    def type(self) -> pa.DataType:
        if self.declared is not None:
            return self.declared.type
        if self.fields is not None:
            return pa.struct([shape.as_field(name) for name, shape in self.fields.items()])
        if self.item is not None:
            return pa.list_(self.item.type)
        return pa.null() if self.leaf is None else self.leaf

    def as_field(self, name: str) -> pa.Field:
        if self.declared is None:
            return pa.field(name, self.type)
        nullable = self.declared.nullable or self.absent or self.nulls
        return self.declared.with_name(name).with_nullable(nullable)

    @property
    def labels(self) -> Any:
        """The names of class labels, also of those in lists and objects."""
        return _labels(self.feature)

    @cached_property
    def notes(self) -> dict[str, Any]:
        """What a reader has to decode."""
        notes: dict[str, Any] = {"absent": True} if self.absent else {}
        if self.is_json:
            return {**notes, "json": True}
        below = {name: shape.notes for name, shape in (self.fields or {}).items() if shape.notes}
        if below:
            notes["fields"] = below
        if self.item is not None and self.item.notes:
            notes["item"] = self.item.notes
        return notes


def is_plain(kind: pa.DataType) -> bool:
    """Whether JSON values have this type."""
    if pa.types.is_list(kind):
        return is_plain(kind.value_type)
    if pa.types.is_struct(kind):
        return all(is_plain(each.type) for each in kind)
    return kind in _PLAIN


@dataclass(eq=False)
class Columns:
    """The columns of rows, and the metadata of their table."""

    name: str
    shapes: Mapping[str, Shape]
    metadata: Mapping[bytes, bytes] = field(default_factory=dict)

    @classmethod
    def of_schema(cls, name: str, schema: pa.Schema) -> Columns:
        """Reads the columns of a table. Raises TaskError for duplicate names."""
        if len(set(schema.names)) < len(schema.names):
            raise TaskError(f"{name}: two columns have the same name: {', '.join(schema.names)}")
        metadata = schema.metadata or {}
        notes = json.loads(metadata[KEY]).get("fields", {}) if KEY in metadata else {}
        features = _features(metadata) or {}
        shapes = {
            column.name: Shape.of_field(
                column, notes.get(column.name, {}), features.get(column.name), name
            )
            for column in schema
        }
        return cls(name, shapes, metadata)

    @cached_property
    def notes(self) -> dict[str, Any]:
        below = {name: shape.notes for name, shape in self.shapes.items() if shape.notes}
        return {"fields": below} if below else {}

    @cached_property
    def schema(self) -> pa.Schema:
        metadata = {name: value for name, value in self.metadata.items() if name != KEY}
        if _features(metadata) is not None:
            noted = json.loads(metadata[FEATURES])
            noted["info"]["features"] = {name: _noted(shape) for name, shape in self.shapes.items()}
            metadata[FEATURES] = json.dumps(noted).encode()
        if self.notes:
            metadata[KEY] = json.dumps(self.notes).encode()
        fields = [shape.as_field(name) for name, shape in self.shapes.items()]
        return pa.schema(fields, metadata or None)

    def lost_in_text(self) -> dict[str, str]:
        """Returns the columns that text can't represent fully, with their types: bytes, times,
        labels."""
        lost = {
            name: str(shape.type)
            for name, shape in self.shapes.items()
            if _is_beyond_json(shape.type)
        }
        for name, shape in self.shapes.items():
            if shape.labels:
                lost[name] = f"class label of {shape.labels}"
        return lost


def merged(first: Columns, second: Columns) -> Columns:
    """Merges columns so that rows of both fit. Raises TaskError for declared types that don't."""
    if first is second:
        return first
    shapes = merged_shapes(first.shapes, second.shapes)
    if shapes == first.shapes and second.metadata.keys() <= first.metadata.keys():
        return first
    return Columns(first.name, shapes, {**second.metadata, **first.metadata})


def merged_shapes(
    first: Mapping[str, Shape], second: Mapping[str, Shape], *, exact: bool = True
) -> dict[str, Shape]:
    """Merges shapes; unless `exact`, integers and floats are floats (`json_columns.shapes_of`)."""
    names = dict.fromkeys((*first, *second))
    return {name: _merge(first.get(name), second.get(name), name, exact) for name in names}


def _merge(a: Shape | None, b: Shape | None, path: str, exact: bool) -> Shape:
    if a is None or b is None:
        there = b if a is None else a
        assert there is not None
        return _with_flags(there, Flags(absent=True, nulls=there.nulls), path)
    if a == b:
        return a
    flags = Flags(absent=a.absent or b.absent, nulls=a.nulls or b.nulls)
    if a.is_empty or b.is_empty:
        return _with_flags(b if a.is_empty else a, flags, path)
    _check_labels(a, b, path)
    if a.type == b.type:
        return _with_flags(a if a.declared else b, flags, path)
    is_declared = a.source is not None and b.source is not None
    if (
        a.fields is not None
        and b.fields is not None
        and (is_declared or not (a.source or b.source))
    ):
        fields = {
            name: _merge(a.fields.get(name), b.fields.get(name), f"{path}.{name}", exact)
            for name in dict.fromkeys((*a.fields, *b.fields))
        }
        return Shape(fields=fields, source=a.source, **flags)
    if is_declared:
        return Shape(_wider(a, b, path), source=a.source, feature=a.feature, **flags)
    if a.source or b.source:  # values that don't fit the type are refused when they are converted
        return replace(a if a.source else b, **flags)
    if a.item is not None and b.item is not None:
        return Shape(item=_merge(a.item, b.item, f"{path}.", exact), **flags)
    if {a.leaf, b.leaf} == {pa.int64(), pa.float64()} and not exact:
        return Shape(pa.float64(), **flags)
    return Shape(JSON, **flags)


def _with_flags(shape: Shape, flags: Flags, path: str) -> Shape:
    is_outer = "." not in path and path not in NESTED
    if flags["absent"] and flags["nulls"] and is_outer and not shape.source:
        return Shape(JSON, **flags)  # a null is no missing key
    return replace(shape, **flags)


def _wider(a: Shape, b: Shape, path: str) -> pa.DataType:
    """Returns the type that holds two declared types, if they differ in their width only."""
    if _family(a.type) == _family(b.type):
        try:
            schemas = [pa.schema([("", shape.type)]) for shape in (a, b)]
            return pa.unify_schemas(schemas, promote_options="permissive").types[0]
        except pa.ArrowException:
            pass
    raise TaskError(
        f"{path} is {a.type} in {a.source} and {b.type} in {b.source}, which do not fit one type;"
        " write .jsonl, or convert the values first"
    )


def _check_labels(a: Shape, b: Shape, path: str) -> None:
    if a.labels and b.labels and a.labels != b.labels:
        raise TaskError(
            f"{path} is a class label of {a.labels} in {a.source or 'one table'} and of {b.labels}"
            f" in {b.source or 'another'}: the same number means different labels. Make them the"
            " same first"
        )


_FAMILIES = (
    pa.types.is_integer,
    pa.types.is_floating,
    pa.types.is_decimal,
    lambda kind: pa.types.is_string(kind) or pa.types.is_large_string(kind),
    lambda kind: pa.types.is_binary(kind) or pa.types.is_large_binary(kind),
)


def _family(kind: pa.DataType) -> object:
    for number, is_of_family in enumerate(_FAMILIES):
        if is_of_family(kind):
            return number
    return kind


def _is_beyond_json(kind: pa.DataType) -> bool:
    types = pa.types
    if types.is_dictionary(kind) or types.is_list(kind) or types.is_large_list(kind):
        return _is_beyond_json(kind.value_type)
    if types.is_fixed_size_list(kind):
        return _is_beyond_json(kind.value_type)
    if types.is_struct(kind):
        return any(_is_beyond_json(each.type) for each in kind)
    is_text = types.is_string(kind) or types.is_large_string(kind) or kind == JSON
    is_number = types.is_integer(kind) or types.is_floating(kind)
    return not (is_text or is_number or types.is_boolean(kind) or types.is_null(kind))


def _fields_of(feature: object) -> Mapping[str, object]:
    """Returns the features of an object's fields; features with a type of their own, such as
    images, have none."""
    is_object = isinstance(feature, dict) and not isinstance(feature.get("_type"), str)
    return feature if isinstance(feature, dict) and is_object else {}


def _features(metadata: Mapping[bytes, bytes]) -> Mapping[str, Any] | None:
    """Returns the features of `datasets`; None if there are none, or in another format."""
    try:
        features = json.loads(metadata[FEATURES])["info"]["features"]
    except (KeyError, ValueError, TypeError):
        return None
    return features if isinstance(features, dict) else None


def _labels(feature: object) -> Any:
    if isinstance(feature, list):
        return [names for inner in feature if (names := _labels(inner))]
    if not isinstance(feature, dict):
        return None
    if feature.get("_type") == "ClassLabel":
        return feature.get("names")
    return {name: names for name, inner in feature.items() if (names := _labels(inner))}


def _noted(shape: Shape) -> object:
    if shape.fields is not None and (shape.feature is None or _fields_of(shape.feature)):
        return {name: _noted(inner) for name, inner in shape.fields.items()}
    return _feature(shape.type) if shape.feature is None else shape.feature


def _feature(kind: pa.DataType) -> object:
    if pa.types.is_struct(kind):
        return {each.name: _feature(each.type) for each in kind}
    if pa.types.is_list(kind):
        return [_feature(kind.value_type)]
    if kind == JSON:
        return {"dtype": "string", "_type": "Value"}
    names = {"double": "float64", "float": "float32", "halffloat": "float16"}
    return {"dtype": names.get(str(kind), str(kind)), "_type": "Value"}
