"""Arrow values as JSON values, and lookups by path."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ajet_sdk.errors import TaskError
from ajet_sdk.pictures import url_of
from ajet_sdk.tasks.task_rows import decoded
from ajet_tools.dataset.files.columns import mapped_type, notes_of_all

_POSITION = re.compile(r"[0-9]{1,9}")


def objects_of(data: pa.RecordBatch, name: str) -> list[dict[str, Any]]:
    """Returns the rows of a record batch as JSON values: bytes as base64, times and decimals as
    text, NaN as null. Raises TaskError for a time out of Python's range that has no text."""
    try:
        rows = data.to_pylist()
    except (ValueError, OverflowError):  # nanoseconds, or the year 30,000
        fields = []
        for column in data.schema:
            fields.append(column.with_type(mapped_type(column.type, _time_as_text)))
        try:
            rows = data.cast(pa.schema(fields)).to_pylist()
        except (ValueError, OverflowError) as error:
            raise TaskError(f"cannot read {name}: {error}") from error
    notes = notes_of_all(data.schema)
    if notes:
        rows = [decoded(row, notes) for row in rows]
    return [json_value(row) for row in rows]


def _time_as_text(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_duration(kind):
        return pa.int64()
    return pa.string() if pa.types.is_temporal(kind) else kind


def not_finite(data: pa.RecordBatch) -> list[str]:
    """Returns the columns that have NaN or an infinity."""
    pairs = zip(data.schema.names, data.columns, strict=True)
    return [name for name, array in pairs if _has_not_finite(array)]


def _has_not_finite(array: pa.Array) -> bool:
    if pa.types.is_struct(array.type):
        return any(map(_has_not_finite, array.flatten()))
    if pa.types.is_list(array.type):
        return _has_not_finite(array.flatten())
    if not pa.types.is_floating(array.type):
        return False
    return bool(pc.any(pc.invert(pc.is_finite(array))).as_py())


def json_value(value: object) -> Any:
    """Converts to a JSON value: pictures to data URLs, other bytes to base64, times and decimals to
    text, NaN to null."""
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float):
        return value if value - value == 0 else None
    picture = url_of(value)
    if picture is not None:
        return picture
    if isinstance(value, Mapping):
        return {str(name): json_value(inner) for name, inner in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, bytes):
        return [json_value(inner) for inner in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return str(value)


def as_text(value: object) -> str:
    """Returns text unchanged, and other values as JSON."""
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)


KINDS = {
    "text": "text", "number": "a number", "integer": "a whole number", "bool": "true or false",
    "object": "an object", "list": "a list", "null": "null",
}  # fmt: skip
"""Each kind of value, as messages name it."""
_NAMES = {
    str: "text", bool: "bool", int: "integer", float: "number", list: "list", dict: "object",
    type(None): "null",
}  # fmt: skip


def kind_of(value: object) -> str:
    """Returns the kind of a JSON value, a key of `KINDS`."""
    name = _NAMES.get(type(value))
    if name is None:
        return "object" if isinstance(value, Mapping) else "text"
    return name


def value_at(values: object, path: str) -> Any:
    """Returns the value at a path such as `metadata.answer` or `messages.0.content`, or None."""
    if isinstance(values, Mapping) and path in values:  # also a column with a dot in its name
        return values[path]
    step, _, rest = path.partition(".")
    if isinstance(values, Mapping):
        inner = values.get(step)
    elif isinstance(values, list) and _POSITION.fullmatch(step) and int(step) < len(values):
        inner = values[int(step)]
    else:
        return None
    return value_at(inner, rest) if rest else inner
