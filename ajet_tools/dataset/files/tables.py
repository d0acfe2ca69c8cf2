"""Rows out of files of any kind a dataset comes in, one at a time, each with its place.

JSON lines (also one JSON document, also `.gz`), Parquet, Arrow, CSV, a directory in the Hugging Face layout, and stdin
(`-`). A row that cannot be read is told by file and line. Memory is constant: the longest row, or one batch of a table.
"""

from __future__ import annotations

import gzip
import io
import logging
import re
import sys
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from glob import glob
from pathlib import Path
from typing import Any, BinaryIO

from ajet_sdk.errors import ConfigError, TaskError
from ajet_sdk.tasks.json_rows import BadRows, json_rows
from ajet_sdk.tasks.rows import FIELDS, QUERY_COLUMNS, decoder
from ajet_tools.dataset.files.delimited import csv_rows
from ajet_tools.dataset.files.stored import Batch, Stored, Table, json_value, rows_of
from ajet_tools.dataset.files.writer import Writer

__all__ = ["BadRows", "Row", "Writer", "files_of", "read", "splits_of", "tables_of", "text_of"]

log = logging.getLogger("ajet.dataset")

SUFFIXES = (
    ".jsonl",
    ".json",
    ".jsonl.gz",
    ".json.gz",
    ".parquet",
    ".arrow",
    ".feather",
    ".ipc",
    ".csv",
    ".csv.gz",
    ".tsv",
    ".tsv.gz",
)
_NOT_ROWS = ("dataset_info", "dataset_dict", "dataset_infos", "state")
_SHARD = re.compile(r"-\d+(-of-\d+)?$")
_TABLE_BATCH = 1024
_TABLE_BUFFER = 1 << 20


@dataclass(frozen=True)
class Row:
    """One row of a dataset, and where it stands: `seeds.jsonl line 7`."""

    where: str
    values: dict[str, Any]
    stored: Stored | None = field(default=None, compare=False, repr=False)
    """The row in its table, which `Writer.write` takes the types from; None where it was read from text."""


def read(
    path: str | Path,
    *,
    mapping: Mapping[str, str] | None = None,
    skip_bad: bool = False,
    bad: BadRows | None = None,
) -> Iterator[Row]:
    """The rows of a file, of a directory (its `train` split; `DIR:NAME` is another), or of stdin (`-`).

    Args:
        path: what to read; its suffix says the format, and stdin is JSON lines, or Parquet or CSV by its look.
        mapping: column -> main_query, init_messages, task_id, env_type or metadata.NAME; the column is renamed.
        skip_bad: leave out rows that cannot be read, instead of raising at the first.
        bad: counts them and keeps the first few; give one to know of them.

    Values are as JSON has them: bytes are base64, times text, NaN null. Raises TaskError, with file and line, for a bad
    row and for a file that cannot be read; ConfigError where there is none.
    """
    bad = bad if bad is not None else BadRows(skip=skip_bad)
    for file in files_of(path):
        yield from read_file(file, mapping=mapping, bad=bad)


def read_file(file: Path | str, *, mapping: Mapping[str, str] | None, bad: BadRows) -> Iterator[Row]:
    """The rows of one of `files_of`."""
    _check_mapping(mapping or {})
    for where, values, batch in _rows(file, bad):
        if not isinstance(values, dict):
            bad.add(where, f"is no object with keys but {kind_of(values)}")
            continue
        problem = _missing(values, mapping) if mapping else None
        if problem:
            bad.add(where, problem)
            continue
        named = _rename(values, mapping) if mapping else values
        yield Row(where, named, _stored(batch, named, mapping) if batch is not None else None)


def _stored(place: tuple[Batch, int], values: Mapping[str, Any], mapping: Mapping[str, str] | None) -> Stored:
    batch, index = place
    return Stored(batch.mapped(mapping) if mapping else batch, index, values)


def tables_of(path: str | Path, mapping: Mapping[str, str] | None = None) -> list[Table]:
    """What the tables among the files of a path say of their columns; nothing of text, and of stdin.

    A `Writer` that is told of them writes the columns even where no row is left.
    """
    found = []
    for file in files_of(path):
        if isinstance(file, Path) and is_table(file):
            with explain_errors(file), _explain_table_errors(file.name):
                batch = Batch.empty(Table.of(file.name, _schema(file)))
                found.append((batch.mapped(mapping) if mapping else batch).table)
    return found


def text_of(values: Mapping[str, Any]) -> str:
    """What a row asks, for comparing it with others: its query, else its last user message, else all its strings."""
    for name in QUERY_COLUMNS:
        value = values.get(name)
        if isinstance(value, str) and value.strip():
            return value
    for name in ("init_messages", "messages", "prompt", "conversations"):
        if found := _last_user(values.get(name)):
            return found
    return "\n".join(_strings({k: v for k, v in values.items() if k not in ("task_id", "id", "provenance")}))


def _last_user(messages: Any) -> str:
    for message in reversed(messages if isinstance(messages, list) else []):
        if isinstance(message, dict) and message.get("role", message.get("from")) in ("user", "human"):
            return "\n".join(_strings(message.get("content", message.get("value"))))
    return ""


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner)


# Which files


_STDIN = "-"


def files_of(path: str | Path) -> list[Path | str]:
    """The files that a path means, in order; `-` for stdin. Raises ConfigError where there is none to read."""
    if str(path) == _STDIN:
        return [_STDIN]
    file = Path(path).expanduser()
    if file.is_file():
        return [file]
    if file.is_dir():
        return list(_files_of_split(file, None))
    if matching := sorted(one for one in glob(str(file)) if one.endswith(SUFFIXES)):  # noqa: PTH207  # also absolute
        return [Path(one) for one in matching]
    folder, colon, split = str(path).rpartition(":")
    if colon and Path(folder).expanduser().is_dir():
        return list(_files_of_split(Path(folder).expanduser(), split))
    raise ConfigError(
        f"there is no {path}; name a .jsonl, .parquet or .csv file, a directory, a glob pattern, or - for stdin"
    )


def splits_of(folder: Path) -> dict[str, list[Path]]:
    """A directory's splits: `train.jsonl`, `train-00000-of-00002.parquet`, `train/…`, also under `data/`."""
    known: dict[str, list[Path]] = {}
    for file in sorted(p for p in folder.rglob("*") if p.name.endswith(SUFFIXES) and p.is_file()):
        inside = file.relative_to(folder).parts
        stem = file.name.removesuffix(".gz").rpartition(".")[0]
        if stem in _NOT_ROWS or any(part.startswith(".") for part in inside):
            continue
        name = inside[-2] if len(inside) > 1 and inside[-2] != "data" else _SHARD.sub("", stem)
        known.setdefault(name, []).append(file)
    return known


def _files_of_split(folder: Path, split: str | None) -> list[Path]:
    known = splits_of(folder)
    if not known:
        raise ConfigError(f"{folder} contains no data files ({', '.join(SUFFIXES)})")
    if split is None and len(known) > 1 and "train" in known:
        others = ", ".join(f"{folder}:{name}" for name in sorted(known) if name != "train")
        log.info("%s: reading the split train; other splits: %s", folder, others)
    if split is None:
        split = "train" if "train" in known else next(iter(known)) if len(known) == 1 else ""
    if split not in known:
        names = ", ".join(f"{folder}:{name}" for name in sorted(known))
        raise ConfigError(f"{folder} has no split {split or 'train'!r}; name one of: {names}")
    return known[split]


# What stands in them


_Read = tuple[str, Any, tuple[Batch, int] | None]
"""The place of a row, its values, and where a table holds it."""


def _rows(file: Path | str, bad: BadRows) -> Iterator[_Read]:
    if isinstance(file, str):
        yield from _stdin_rows(bad)
        return
    if is_table(file):
        yield from _table_rows(file, file.name)
        return
    with explain_errors(file), open_text(file) as stream:
        yield from _text_rows(stream, file.name.removesuffix(".gz"), bad)


def is_table(file: Path) -> bool:
    """It has types and columns of its own."""
    return file.name.endswith((".parquet", ".arrow", ".feather", ".ipc"))


@contextmanager
def open_text(file: Path) -> Iterator[Any]:
    """The bytes of a file, unpacked where its name says that it is packed."""
    with file.open("rb") as stream:
        if file.name.endswith(".gz"):
            with gzip.open(stream, "rb") as unpacked:
                yield unpacked
        else:
            yield stream


@contextmanager
def explain_errors(file: Any) -> Iterator[None]:
    """An error of the system as a TaskError that names the file."""
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:
        raise TaskError(f"cannot read {file}: {getattr(error, 'strerror', None) or error}") from error


@contextmanager
def _explain_table_errors(name: str) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except pa.ArrowException as error:
        raise TaskError(f"cannot read {name}: {error}") from error


def _text_rows(stream: BinaryIO, name: str, bad: BadRows) -> Iterator[_Read]:
    if name.endswith((".csv", ".tsv")):
        for where, values in csv_rows(stream, name, bad):
            yield where, values, None
    else:
        for row in json_rows(stream, name, bad, strict=True):
            yield row.where, row.value, None


def _stdin_rows(bad: BadRows) -> Iterator[_Read]:
    stream = io.BufferedReader(sys.stdin.buffer, 1 << 20)  # type: ignore[type-var]
    start = stream.peek(4)[:4096].removeprefix(b"\xef\xbb\xbf").lstrip()
    if start.startswith(b"PAR1"):
        import pyarrow as pa

        yield from _table_rows(pa.BufferReader(stream.read()), "stdin")
    elif start[:1] in (b"{", b"[", b""):
        yield from _text_rows(stream, "stdin", bad)
    else:
        yield from _text_rows(stream, "stdin.csv" if b"," in start.partition(b"\n")[0] else "stdin", bad)


def _table_rows(source: Any, name: str) -> Iterator[_Read]:
    number = 0
    for batch in table_batches(source, name):
        decode = decoder(batch.table.schema)
        for index, values in enumerate(rows_of(batch.data, name)):
            number += 1
            yield f"{name} row {number}", json_value(decode(values)), (batch, index)


def table_batches(source: Any, name: str = "", most: int = _TABLE_BATCH) -> Iterator[Batch]:
    """The rows of a table as they are stored, at most `most` of Parquet at a time."""
    name, table = name or source.name, None
    with explain_errors(source), _explain_table_errors(name):
        for schema, data in _batches(source, name, most):
            if table is None or not table.schema.equals(schema, check_metadata=True):
                table = Table.of(name, schema)
            yield Batch(table, data)


def _schema(file: Path) -> Any:
    import pyarrow.parquet as pq

    if file.name.endswith(".parquet"):
        return pq.read_schema(file, memory_map=False)
    with _arrow_batches(file) as (schema, _):
        return schema


def _batches(source: Any, name: str, most: int) -> Iterator[tuple[Any, Any]]:
    import pyarrow.parquet as pq

    if isinstance(source, Path) and not name.endswith(".parquet"):
        with _arrow_batches(source) as (schema, batches):
            for batch in batches:
                yield schema, batch
        return
    table = pq.ParquetFile(source, memory_map=False, buffer_size=_TABLE_BUFFER, pre_buffer=False)
    for group in range(table.num_row_groups):  # all at once, pyarrow reads ahead by more the larger the file is
        for batch in table.iter_batches(most, row_groups=[group]):
            yield table.schema_arrow, batch


@contextmanager
def _arrow_batches(source: Path) -> Iterator[tuple[Any, Iterator[Any]]]:
    import pyarrow as pa

    with source.open("rb") as file:
        try:
            opened = pa.ipc.open_stream(file)
            batches = iter(opened)
        except pa.ArrowInvalid:  # the file format, which can be read from any place, instead of the stream format
            opened = whole = pa.ipc.open_file(source)
            batches = (whole.get_batch(index) for index in range(whole.num_record_batches))
        yield opened.schema, batches


def kind_of(value: Any) -> str:
    """What a value is, as an error says it."""
    names = {str: "text", list: "a list", bool: "true or false", int: "a number", float: "a number"}
    return "null" if value is None else names.get(type(value), type(value).__name__)


def _check_mapping(mapping: Mapping[str, str]) -> None:
    for column, target in mapping.items():
        root, _, name = target.partition(".")
        if not (root == "metadata" and name) and (target not in FIELDS or target == "metadata"):
            raise ConfigError(
                f"{column!r} is mapped to {target!r}; a column becomes main_query, init_messages, task_id, env_type "
                "or metadata.NAME"
            )


def _missing(values: Mapping[str, Any], mapping: Mapping[str, str]) -> str | None:
    lacking = next(((column, target) for column, target in mapping.items() if column not in values), None)
    if lacking is None:
        return None
    return f"has no column {lacking[0]!r} for {lacking[1]}; it has {', '.join(values) or 'none'}"


def _rename(values: Mapping[str, Any], mapping: Mapping[str, str]) -> dict[str, Any]:
    """The row with its columns renamed."""
    made = {name: value for name, value in values.items() if name not in mapping}
    for column, target in mapping.items():
        root, _, name = target.partition(".")
        if root == "metadata":
            metadata = made.get("metadata")
            made["metadata"] = {**(metadata if isinstance(metadata, dict) else {}), name: values[column]}
        else:
            made[target] = values[column]
    return made
