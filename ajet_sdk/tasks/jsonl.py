"""Reads tasks from JSON-lines files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from ajet_sdk.config.config import Config
from ajet_sdk.errors import ConfigError, MissingResource, TaskError
from ajet_sdk.tasks.json_rows import bounded, scan
from ajet_sdk.tasks.row_pictures import with_files
from ajet_sdk.tasks.task_rows import Row

VALIDATION_SET = "validation_set"
"""Metadata key for the name of a validation task's file, if files are named."""


def read_jsonl(config: Config) -> tuple[Iterator[Row], Iterator[Row]]:
    """Reads training and validation rows of `task_reader.jsonl_dataset_file`."""
    files = config.task_reader.jsonl_dataset_file
    if files.training.file_path is None:
        raise ConfigError("task_reader.jsonl_dataset_file.training.file_path is not set")
    training = _existing(config, files.training.file_path, "training")
    validation = files.validation.file_path
    if not validation:
        return json_rows(training), iter(())
    if isinstance(validation, str):
        return json_rows(training), json_rows(_existing(config, validation, "validation"))
    paths = {
        name: _existing(config, text, "validation", f".{name}") for name, text in validation.items()
    }
    return json_rows(training), (
        _in_set(row, name) for name, path in paths.items() for row in json_rows(path)
    )


def _in_set(row: Row, name: str) -> Row:
    """Adds the name of the set to a row's metadata."""
    if not isinstance(row.values, dict):
        return row
    metadata = row.values.get("metadata")
    if "metadata" in row.values and isinstance(metadata, dict):
        return replace(row, values={**row.values, "metadata": {**metadata, VALIDATION_SET: name}})
    return replace(row, values={**row.values, VALIDATION_SET: name})


def _existing(config: Config, text: str, split: str, name: str = "") -> Path:
    path = config.resolve(text)
    if not path.is_file():
        key = f"task_reader.jsonl_dataset_file.{split}.file_path{name}"
        raise MissingResource(f"{key}: there is no file {text} ({config.origin(key)})")
    return path


def _with_files(values: object, path: Path) -> object:
    if isinstance(values, dict):
        return with_files(values, path.parent)
    return values


def json_rows(path: Path) -> Iterator[Row]:
    """Reads rows from JSON lines or a JSON array of objects, skipping blank lines."""
    try:
        with path.open("rb") as file:
            for row in scan(bounded(file, path.name), path.name, strict=True):
                if row.problem is not None:
                    raise TaskError(f"{row.where} {row.problem}")
                if row.number == 1 and isinstance(row.value, list):
                    yield from (
                        Row(f"{path.name} item {i}", _with_files(values, path))
                        for i, values in enumerate(row.value, 1)
                    )
                else:
                    yield Row(row.where, _with_files(row.value, path))
    except OSError as error:
        raise TaskError(f"cannot read {path}: {error.strerror or error}") from error
