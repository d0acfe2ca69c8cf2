"""Reads tasks from a Hugging Face dataset: a local directory by pyarrow, or a name by
`datasets`."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from ajet_sdk.config.config import Config
from ajet_sdk.errors import ConfigError, MissingExtra, MissingResource, TaskError
from ajet_sdk.tasks.jsonl import json_rows
from ajet_sdk.tasks.row_pictures import with_files
from ajet_sdk.tasks.task_rows import Row, by_split, decoder, partitions

log = logging.getLogger("ajet.tasks")

SECTION = "task_reader.huggingface_dat_repo"
SUFFIXES = (".parquet", ".arrow", ".jsonl", ".json")


def read_huggingface(config: Config) -> tuple[Iterator[Row], Iterator[Row]]:
    """Reads training and validation rows of `task_reader.huggingface_dat_repo`."""
    repo = config.task_reader.huggingface_dat_repo
    if repo.dataset_path is None:
        raise ConfigError(
            f"{SECTION}.dataset_path is not set; give a Hugging Face name or a directory"
        )
    path = config.resolve(repo.dataset_path)
    local = path.exists()
    if not local and (
        path.is_absolute()
        or repo.dataset_path.startswith((".", "~"))
        or repo.dataset_path.count("/") > 1
    ):
        raise MissingResource(
            f"{SECTION}.dataset_path: there is no directory {path}"
            f" ({config.origin(SECTION + '.dataset_path')})"
        )
    if local and repo.dataset_name and (path / repo.dataset_name).is_dir():
        path = path / repo.dataset_name

    def rows(split: str) -> Iterator[Row]:
        if local:
            return _local_rows(path, split)
        return _hub_rows(repo.dataset_path or "", repo.dataset_name, split)

    training = rows(repo.training_split)
    is_set = config.is_set(f"{SECTION}.validation_split")
    if repo.validation_split is None or (path.is_file() and not is_set):  # a file is one split
        return training, iter(())
    try:
        return training, rows(repo.validation_split)
    except (TaskError, MissingResource) as error:
        if is_set:
            raise
        log.warning(
            "%s, so there are no validation tasks. Set %s.validation_split to another split",
            error,
            SECTION,
        )
        return training, iter(())


def path_rows(path: Path, name: str) -> Iterator[Row]:
    """Reads rows from a file, from a directory's split `train`, or from a dataset on the hub.

    Raises TaskError, and MissingResource if the hub doesn't provide it.
    """
    if path.exists():
        return _local_rows(path, "train")
    if path.suffix in SUFFIXES or name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise TaskError(f"there is no file {name}; Hugging Face datasets are named owner/name")
    return _hub_rows(name, None, "train")


def _local_rows(path: Path, split: str) -> Iterator[Row]:
    files = [path] if path.is_file() else _files(path, split)
    columns = partitions(path if path.is_dir() else path.parent, files)
    rows = (
        (file, json_rows(file) if file.suffix in (".json", ".jsonl") else _table_rows(file))
        for file in files
    )
    return (_with_columns(row, columns[file]) for file, of_file in rows for row in of_file)


def _files(folder: Path, split: str) -> list[Path]:
    files = sorted(p for p in folder.rglob("*") if p.suffix in SUFFIXES and p.is_file())
    known = by_split(
        folder,
        ((p, p.stem) for p in files if p.stem not in ("dataset_info", "state", "dataset_dict")),
    )
    if split not in known:
        raise TaskError(
            f"{folder} has no split {split!r}; it has {', '.join(sorted(known)) or 'no data files'}"
        )
    return known[split]


def _with_columns(row: Row, columns: dict[str, object]) -> Row:
    if columns and isinstance(row.values, dict):
        return replace(row, values={**columns, **row.values})
    return row


def _table_rows(file: Path) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        if file.suffix == ".parquet":
            batches = pq.ParquetFile(file).iter_batches()
        else:
            batches = _arrow(file)
        number = 0
        for batch in batches:
            decode = decoder(batch.schema)
            for values in batch.to_pylist():
                number += 1
                row = with_files(decode(values), file.parent)
                yield Row(f"{file.name} row {number}", row)
    except (pa.ArrowInvalid, OSError) as error:
        raise TaskError(f"cannot read {file}: {error}") from error


def _arrow(file: Path) -> Iterator[Any]:
    import pyarrow as pa

    try:
        return iter(pa.ipc.open_stream(file))
    except pa.ArrowInvalid:  # the file format with random access instead of the stream format
        reader = pa.ipc.open_file(file)
        return (reader.get_batch(index) for index in range(reader.num_record_batches))


def _hub_rows(repo: str, name: str | None, split: str) -> Iterator[Row]:
    try:
        import datasets
    except ImportError:
        raise MissingExtra("datasets", "datasets") from None
    try:
        dataset = datasets.load_dataset(repo, name, split=split)
    except Exception as error:  # the library raises a dozen kinds, among them network errors
        raise MissingResource(
            f"cannot load split {split!r} of the dataset {repo!r}: {type(error).__name__}: {error}."
            f" Without a network, download it elsewhere and set {SECTION}.dataset_path to its"
            " directory"
        ) from error
    return (Row(f"{repo} {split} row {number}", values) for number, values in enumerate(dataset, 1))
