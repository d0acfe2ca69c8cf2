"""The columns of a table, each described by its field of an Arrow schema.

A table of ours notes for its reader which columns are JSON text and which keys some rows lack
(`ajet_sdk.tasks.task_rows`), and `datasets` notes features, such as class labels. Both stand in the
metadata of the schema; here they are moved to the fields, so that they follow a column that is
renamed, left out, or put into another table.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from ajet_sdk.errors import TaskError
from ajet_sdk.tasks.task_rows import KEY

log = logging.getLogger("ajet.dataset")

JSON = pa.json_(pa.string())
LINE = "row of ajet"
"""The column with all other keys of a row, as JSON; of text files it is the only one."""
LINES = pa.schema([pa.field(LINE, pa.string())])
_FEATURES = b"huggingface"
_FEATURE = b"feature of ajet"
_NOTES = b"notes of ajet"


def described(schema: pa.Schema, name: str) -> pa.Schema:
    """Returns the schema of a file, with the notes and features in its fields. Raises TaskError."""
    if len(set(schema.names)) < len(schema.names):
        raise TaskError(f"{name}: two columns have the same name: {', '.join(schema.names)}")
    metadata = dict(schema.metadata or {})
    known = json.loads(metadata.pop(KEY, b"{}")).get("fields", {})
    features = _features(metadata) or {}
    fields = []
    for column in schema:
        notes = _notes(column.type, known.get(column.name, {}))
        kind = mapped_type(column.type, _without_view)
        fields.append(described_field(column.with_type(kind), notes, features.get(column.name)))
    return pa.schema(fields, metadata)


def described_field(column: pa.Field, notes: Mapping[str, Any], feature: Any) -> pa.Field:
    metadata = dict(column.metadata or {})
    if notes:
        metadata[_NOTES] = json.dumps(notes).encode()
    if feature is not None:
        metadata[_FEATURE] = json.dumps(feature).encode()
    return column.with_metadata(metadata or None)


def notes_of(column: pa.Field) -> dict[str, Any]:
    """Returns what a reader has to decode."""
    notes: dict[str, Any] = json.loads((column.metadata or {}).get(_NOTES, b"{}"))
    return notes


def notes_of_all(schema: pa.Schema) -> dict[str, Any]:
    notes = {column.name: notes_of(column) for column in schema}
    fields = {name: below for name, below in notes.items() if below}
    return {"fields": fields} if fields else {}


def feature_of(column: pa.Field) -> Any:
    """Returns the feature of `datasets`, or None."""
    return json.loads((column.metadata or {}).get(_FEATURE, b"null"))


def stored(schema: pa.Schema) -> pa.Schema:
    """Returns the schema for a file: the opposite of `described`."""
    metadata = dict(schema.metadata or {})
    fields = []
    for column in schema:
        own = dict(column.metadata or {})
        own.pop(_NOTES, None)
        own.pop(_FEATURE, None)
        fields.append(column.with_metadata(own or None))
    if _features(metadata) is not None:
        document = json.loads(metadata[_FEATURES])
        document["info"]["features"] = {
            column.name: feature_of(column) or _feature_of_type(column.type) for column in schema
        }
        metadata[_FEATURES] = json.dumps(document).encode()
    notes = notes_of_all(schema)
    if notes:
        metadata[KEY] = json.dumps(notes).encode()
    return pa.schema(fields, metadata or None)


def common(schemas: Sequence[pa.Schema]) -> pa.Schema:
    """Returns the columns that all tables have alike; the keys of others are in `LINE`.

    A column of a type that JSON doesn't have is kept, with nulls where a table lacks it. Raises
    TaskError if such types, or the class labels of a column, differ.
    """
    if not schemas or any(schema.names == [LINE] for schema in schemas):
        return LINES
    columns_by_name: dict[str, list[pa.Field]] = {}
    metadata: dict[bytes, bytes] = {}
    for schema in schemas:
        metadata = {**(schema.metadata or {}), **metadata}
        for column in schema:
            columns_by_name.setdefault(column.name, []).append(column)
    fields = []
    has_others = columns_by_name.pop(LINE, None) is not None
    for columns in columns_by_name.values():
        column = _common_column(columns, is_in_all=len(columns) == len(schemas))
        if column is None:
            has_others = True
        else:
            fields.append(column)
    if has_others:
        fields.append(LINES.field(LINE))
    return pa.schema(fields, metadata)


def _common_column(columns: Sequence[pa.Field], *, is_in_all: bool) -> pa.Field | None:
    """Returns the column for the values of all these; None if JSON is to hold them."""
    _check_labels(columns)
    column = columns[0]
    is_same = all(other.equals(column, check_metadata=True) for other in columns)
    is_declared = any(is_beyond_json(other.type) or labels_of(other) for other in columns)
    if is_same and is_in_all:
        return column
    if not is_declared:
        return None
    try:
        schemas = [pa.schema([other.with_metadata(None)]) for other in columns]
        widest = pa.unify_schemas(schemas, promote_options="permissive").types[0]
    except pa.ArrowException:
        kinds = " and ".join(dict.fromkeys(str(other.type) for other in columns))
        raise TaskError(
            f"{column.name} is {kinds}, which do not fit one type; write .jsonl, or convert the"
            " values first"
        ) from None
    return column.with_type(widest).with_nullable(True)


def _check_labels(columns: Sequence[pa.Field]) -> None:
    labels = [names for names in map(labels_of, columns) if names]
    for other in labels[1:]:
        if other != labels[0]:
            raise TaskError(
                f"{columns[0].name} is a class label of {labels[0]} in one table and of {other} in"
                " another: the same number means different labels. Make them the same first"
            )


def labels_of(column: pa.Field) -> Any:
    """Returns the names of class labels, also of those in lists and objects; empty without any."""
    return _labels(feature_of(column))


def _labels(feature: Any) -> Any:
    if isinstance(feature, list):
        return list(filter(None, map(_labels, feature)))
    if not isinstance(feature, dict):
        return None
    if feature.get("_type") == "ClassLabel":
        return feature.get("names")
    labels = {name: _labels(inner) for name, inner in feature.items()}
    return {name: names for name, names in labels.items() if names}


def lost_in_text(schema: pa.Schema) -> dict[str, str]:
    """Returns the columns that text can't represent fully, with their types: bytes, times,
    labels."""
    lost = {}
    for column in schema:
        labels = labels_of(column)
        if labels:
            lost[column.name] = f"class label of {labels}"
        elif is_beyond_json(column.type):
            lost[column.name] = str(column.type)
    return lost


def warn_of_losses(schema: pa.Schema, name: str, done: str) -> None:
    """Logs which columns of a table text can't represent fully; `done` is "read" or "written"."""
    lost = lost_in_text(schema)
    if lost:
        log.warning(
            "%s has columns of types that JSON does not have: %s. They are %s as text, bytes as"
            " base64, labels by their numbers; write .parquet, of table files alone, to keep them",
            name,
            ", ".join(f"{column} ({what})" for column, what in lost.items()),
            done,
        )


def is_beyond_json(kind: pa.DataType) -> bool:
    """Whether values of a type are no JSON values: bytes, times, decimals."""
    types = pa.types
    if types.is_struct(kind):
        return any(is_beyond_json(inner.type) for inner in kind)
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    if is_list or types.is_dictionary(kind):
        return is_beyond_json(kind.value_type)
    is_text = types.is_string(kind) or types.is_large_string(kind) or kind == JSON
    is_number = types.is_integer(kind) or types.is_floating(kind)
    return not (is_text or is_number or types.is_boolean(kind) or types.is_null(kind))


def _notes(kind: pa.DataType, known: Mapping[str, Any]) -> dict[str, Any]:
    """Adds columns of the type JSON, also of other programs, to what a file notes."""
    notes = dict(known)
    if kind == JSON:
        notes["json"] = True
    elif pa.types.is_struct(kind):
        known_fields = known.get("fields", {})
        fields = {}
        for inner in kind:
            below = _notes(inner.type, known_fields.get(inner.name, {}))
            if below:
                fields[inner.name] = below
        if fields:
            notes["fields"] = fields
    elif pa.types.is_list(kind):
        item = _notes(kind.value_type, known.get("item", {}))
        if item:
            notes["item"] = item
    return notes


def _features(metadata: Mapping[bytes, bytes]) -> Mapping[str, Any] | None:
    """Returns the features of `datasets`; None if there are none, or in another format."""
    try:
        features = json.loads(metadata[_FEATURES])["info"]["features"]
    except (KeyError, ValueError, TypeError):
        return None
    return features if isinstance(features, dict) else None


def _feature_of_type(kind: pa.DataType) -> object:
    if pa.types.is_struct(kind):
        return {inner.name: _feature_of_type(inner.type) for inner in kind}
    if pa.types.is_list(kind):
        return [_feature_of_type(kind.value_type)]
    if kind == JSON:
        return {"dtype": "string", "_type": "Value"}
    names = {"double": "float64", "float": "float32", "halffloat": "float16"}
    return {"dtype": names.get(str(kind), str(kind)), "_type": "Value"}


def mapped_type(kind: pa.DataType, leaf: Callable[[pa.DataType], pa.DataType]) -> pa.DataType:
    """Replaces the types within a type, but for those of objects and lists."""
    types = pa.types
    if types.is_struct(kind):
        return pa.struct([inner.with_type(mapped_type(inner.type, leaf)) for inner in kind])
    if types.is_list(kind):
        return pa.list_(kind.value_field.with_type(mapped_type(kind.value_type, leaf)))
    if types.is_large_list(kind) or types.is_list_view(kind) or types.is_large_list_view(kind):
        return pa.large_list(kind.value_field.with_type(mapped_type(kind.value_type, leaf)))
    return leaf(kind)


def _without_view(kind: pa.DataType) -> pa.DataType:
    """Replaces views of text and bytes, on which Arrow has no `take`."""
    if pa.types.is_string_view(kind):
        return pa.large_string()
    return pa.large_binary() if pa.types.is_binary_view(kind) else kind
