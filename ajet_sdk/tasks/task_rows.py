"""Converts rows of datasets to tasks, and decodes the rows of ajet's Parquet files.

Columns of a table have one type and a value in each row, unlike rows of a dataset. `ajet dataset`
writes values of several types as JSON text, and missing keys as null, and lists both under `KEY` in
the schema's metadata: a tree of
`{"json": true, "absent": true, "fields": {name: tree}, "item": tree}`.
"""

from __future__ import annotations

import base64
import difflib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from ajet_sdk.errors import TaskError
from ajet_sdk.pictures import url_of
from ajet_sdk.tasks.row_names import QUERY_COLUMNS

if TYPE_CHECKING:
    from ajet_sdk.types import Json, JsonView, Task

_TYPES = "ajet_sdk.types"
"""Loaded to create a task: pydantic's models take a tenth of a second, and commands on rows need
none."""

FIELDS = ("main_query", "init_messages", "task_id", "env_type", "metadata")

SPLITS = (
    "train",
    "training",
    "validation",
    "valid",
    "val",
    "dev",
    "test",
    "testing",
    "eval",
    "evaluation",
)
"""File names that determine the split in any directory."""
SHARD = re.compile(r"-\d+(-of-\d+)?$")
_NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
_WHOLE = re.compile(rf"0|-?[1-9]\d{{0,17}}|{_NO_VALUE}")


@dataclass(frozen=True)
class Row:
    """A row with its location (`train.jsonl line 3`)."""

    where: str
    values: object


def to_task(row: Row, mapping: Mapping[str, str]) -> Task:
    """Converts a row to a task.

    Columns with the name of a field of Task set it, mapped columns set their targets, the first of
    `QUERY_COLUMNS` becomes the main query, and all other columns the metadata. Raises TaskError.
    """
    from pydantic import ValidationError

    Task = import_module(_TYPES).Task
    if isinstance(row.values, Task):
        return row.values  # type: ignore[no-any-return]
    if not isinstance(row.values, Mapping):
        raise TaskError(
            f"{row.where}: a task must be an object with keys (got {type(row.values).__name__})"
        )
    values = {str(name): _plain(value) for name, value in row.values.items()}
    fields: dict[str, object] = {
        name: values[name] for name in FIELDS if values.get(name) is not None
    }
    metadata = fields.pop("metadata", {})
    if not isinstance(metadata, dict):
        raise TaskError(f"{row.where}: metadata must be an object (got {type(metadata).__name__})")
    metadata = {**{name: value for name, value in values.items() if name not in FIELDS}, **metadata}
    for column, target in mapping.items():
        if column not in values:
            near = difflib.get_close_matches(column, values, n=1, cutoff=0.6)
            meant = f" (did you mean {near[0]!r}?)" if near else ""
            there = ", ".join(values) or "none"
            raise TaskError(
                f"{row.where} has no column {column!r} for {target}{meant}; it has {there}"
            )
        _put(fields, metadata, target, values[column], row.where)
    if "main_query" not in fields:
        query = next(
            (values[name] for name in QUERY_COLUMNS if isinstance(values.get(name), str)), ""
        )
        fields["main_query"] = query
    if not any(
        (fields["main_query"], fields.get("init_messages"), fields.get("task_id"), metadata)
    ):
        raise TaskError(
            f"{row.where} is empty; a task needs a main_query, messages, an id or metadata"
        )
    if isinstance(fields.get("task_id"), int):
        fields["task_id"] = str(fields["task_id"])
    try:
        return Task(**fields, metadata=metadata)  # type: ignore[no-any-return]
    except ValidationError as error:
        item = error.errors(include_url=False)[0]
        place = ".".join(str(step) for step in item["loc"])
        raise TaskError(
            f"{row.where}: {place}: {item['msg'].lower()} (got {item['input']!r:.80})"
        ) from None


def _put(
    fields: dict[str, object], metadata: dict[str, object], target: str, value: object, where: str
) -> None:
    root, _, name = target.partition(".")
    if root == "metadata" and name:
        metadata[name] = value
    elif target in FIELDS and target != "metadata":
        fields[target] = value
    else:
        raise TaskError(
            f"{where}: task_reader.field_mapping maps to {target!r}; it may map to main_query,"
            " init_messages, task_id, env_type or metadata.NAME"
        )


_SCALARS = (str, int, float, bool, type(None))


def _plain(value: object) -> object:
    """Converts a value to JSON: pictures to data URLs, other bytes to base64, times and decimals to
    text."""
    if isinstance(value, _SCALARS):
        return value
    picture = url_of(value)
    if picture is not None:
        return picture
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return str(value)


KEY = b"ajet.encoding"


def decoder(schema: Any) -> Callable[[Json], Json]:
    """Returns a decoder of pyarrow's rows; of other programs' files, only columns of
    the type JSON are decoded."""
    text = (schema.metadata or {}).get(KEY)
    fields = {
        field.name: {"json": True} for field in schema if str(field.type) == "extension<arrow.json>"
    }
    if text is not None:
        fields |= json.loads(text).get("fields", {})
    if not fields:
        return lambda row: row
    return lambda row: decoded(row, {"fields": fields})  # type: ignore[no-any-return]


def decoded(value: Any, tree: JsonView) -> Any:
    """The original value of an encoded one."""
    if value is None:
        return None
    if tree.get("json"):
        return json.loads(value)
    if "item" in tree:
        return [decoded(item, tree["item"]) for item in value]
    if "fields" not in tree:
        return value
    fields = tree["fields"]
    result = {}
    for name, inner in value.items():
        below = fields.get(name)
        if below is None:
            result[name] = inner
        elif inner is not None or not below.get("absent"):
            result[name] = decoded(inner, below)
    return result


def by_split(folder: Path, files: Iterable[tuple[Path, str]]) -> dict[str, list[Path]]:
    """Groups files by split: `train.jsonl`, `train-00000-of-00002.parquet`, `train/…`, also below
    `data/`.

    With several configurations the split includes its name: `main/train` for
    `main/train-00000-of-00001.parquet`. Of the directories of partitions (`label=dog/`, see
    `partitions`) only `split=test/` sets a split. `files` are those of the folder, in order, each
    with its name without a suffix.
    """
    known: dict[str, list[Path]] = {}
    for file, stem in files:
        above = file.relative_to(folder).parts[:-1]
        name = SHARD.sub("", stem)
        inside = [part for part in above if "=" not in part][-1:]
        if columns := dict(part.split("=", 1) for part in above if "=" in part):
            name = columns.get("split") or (name if name in SPLITS else "train")
        if inside and inside[0] != "data":
            if name in SPLITS and inside[0] not in SPLITS:
                name = f"{inside[0]}/{name}"
            else:
                name = inside[0]
        known.setdefault(name, []).append(file)
    alone = len({name.partition("/")[0] for name in known}) == 1
    if alone:
        return {name.partition("/")[2] or name: some for name, some in known.items()}
    return known


def partitions(folder: Path, files: Iterable[Path]) -> dict[Path, dict[str, object]]:
    """Columns of files from directories such as `label=dog/level=2/`, as Hive and Spark write them.

    A column of whole numbers has numbers, any other text.
    """
    above = {file: file.relative_to(folder).parts[:-1] for file in files}
    named = {
        file: [part.split("=", 1) for part in parts if "=" in part] for file, parts in above.items()
    }
    known = {file: {name: unquote(value) for name, value in pairs} for file, pairs in named.items()}
    texts = {
        name
        for values in known.values()
        for name, value in values.items()
        if not _WHOLE.fullmatch(value)
    }

    def value(name: str, text: str) -> Any:
        return None if text == _NO_VALUE else text if name in texts else int(text)

    return {
        file: {name: value(name, text) for name, text in values.items()}
        for file, values in known.items()
    }
