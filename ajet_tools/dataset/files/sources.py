"""Finds the data files of a path and opens them."""

from __future__ import annotations

import bz2
import gzip
import io
import logging
import lzma
import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from glob import glob
from itertools import takewhile
from pathlib import Path
from typing import Any, BinaryIO

import polars as pl
import pyarrow as pa

from ajet_sdk.errors import ConfigError, TaskError
from ajet_sdk.tasks.json_rows import bounded
from ajet_sdk.tasks.task_rows import by_split, partitions

log = logging.getLogger("ajet.dataset")
_TEXT = (".jsonl", ".json", ".csv", ".tsv")
_TABLES = (".parquet", ".arrow", ".feather", ".ipc")
_PACKED = {b"\x1f\x8b": ".gz", b"BZh": ".bz2", b"\xfd7zXZ": ".xz", b"\x28\xb5\x2f\xfd": ".zst"}
"""First bytes of compressed files."""
SUFFIXES = (*_TEXT, *_TABLES, *(text + packed for packed in _PACKED.values() for text in _TEXT))
NOT_DATA = ("rejected", "quarantine")
"""Names of splits that hold what is no data."""
_NOT_ROWS = ("dataset_info", "dataset_dict", "dataset_infos", "state")


def files_of(path: str | Path) -> list[Path | str]:
    """Returns the files of a path, in order; `-` for stdin. Raises ConfigError if there are
    none."""
    return list(columns_of(path))


def columns_of(path: str | Path) -> Mapping[Path | str, dict[str, object]]:
    """Returns the files of a path, each with the columns that partition directories such as
    `label=dog/` define."""
    if str(path) == "-":
        return {"-": {}}
    folder, files = _find(path)
    known = partitions(folder, files)
    return {file: known[file] for file in files}


def _find(path: str | Path) -> tuple[Path, list[Path]]:
    """Returns the files of a path, and the directory that contains them."""
    file = Path(path).expanduser()
    if file.is_file():
        return file.parent, [file]
    if file.is_dir():
        return file, _files_of_split(file, None)
    if matching := sorted(name for name in glob(str(file)) if name.endswith(SUFFIXES)):  # noqa: PTH207  # also absolute
        folder = Path(*takewhile(lambda part: not re.search(r"[*?[]", part), file.parts))
        return folder, list(map(Path, matching))
    before, colon, split = str(path).rpartition(":")
    folder = Path(before).expanduser()
    if colon and folder.is_dir():
        return folder, _files_of_split(folder, split)
    raise ConfigError(
        f"there is no {path}; name a .jsonl, .parquet or .csv file, a directory, a pattern, or -"
    )


def splits_of(folder: Path) -> dict[str, list[Path]]:
    """Returns the files of a directory by split (`by_split`)."""
    named = []
    for file in sorted(folder.rglob("*")):
        is_hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)
        stem = unpacked_name(file.name).rpartition(".")[0]
        is_data = file.name.endswith(SUFFIXES) and stem not in _NOT_ROWS
        if is_data and not is_hidden and file.is_file():
            named.append((file, stem))
    return by_split(folder, named)


def _files_of_split(folder: Path, split: str | None) -> list[Path]:
    known = splits_of(folder)
    if not known:
        kinds = f"{', '.join((*_TEXT, *_TABLES))}; text also packed: {', '.join(_PACKED.values())}"
        raise ConfigError(f"{folder} contains no data files ({kinds})")
    if split is None and len(known) == 1:
        [split] = known
    elif split is None:
        split = "train"
        others = ", ".join(f"{folder}:{name}" for name in sorted(known) if name != split)
        if split in known:
            log.info("%s: reading the split train; other splits: %s", folder, others)
    if split not in known:
        names = ", ".join(f"{folder}:{name}" for name in sorted(known))
        raise ConfigError(f"{folder} has no split {split!r}; name one of: {names}")
    return known[split]


def is_table(file: Path) -> bool:
    """Whether the file format has typed columns."""
    return file.name.endswith(_TABLES)


def is_duckdb(file: Path) -> bool:
    """Whether a file is a database, such as a trace."""
    with file.open("rb") as stream:
        return stream.read(12)[8:] == b"DUCK"


@contextmanager
def open_text(file: Path, *, cut: bool = False) -> Iterator[Any]:
    """Opens a file and decompresses it. Reading a line above the size limit raises TaskError, or
    cuts the line."""
    with file.open("rb", buffering=0) as stream:
        yield bounded(unpacked(stream, named=file.name), file.name, cut=cut)


def unpacked(stream: BinaryIO, *, named: str = "") -> Any:
    """Decompresses a stream if its first bytes or its name indicate compression."""
    stream = io.BufferedReader(stream, 1 << 20)  # type: ignore[type-var]
    start = stream.peek(6)
    for begins, suffix in _PACKED.items():
        if not (start.startswith(begins) or named.endswith(suffix)):
            continue
        if suffix == ".zst":
            return io.BufferedReader(pa.CompressedInputStream(stream, "zstd"))
        openers: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
        return openers[suffix](stream, "rb")
    return stream


def unpacked_name(name: str) -> str:
    """Removes the suffix of a compressed file."""
    for suffix in _PACKED.values():
        if name.endswith(suffix):
            return name.removesuffix(suffix)
    return name


@contextmanager
def explain_errors(file: object) -> Iterator[None]:
    """Raises errors of the system, Arrow or polars as a TaskError that names the file."""
    try:
        yield
    except pl.exceptions.PolarsError as error:
        raise TaskError(f"cannot read {file}: {str(error).partition(chr(10))[0]}") from error
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        why = getattr(error, "strerror", None) or error
        raise TaskError(f"cannot read {file}: {why}") from error
    except pa.ArrowException as error:
        raise TaskError(f"cannot read {getattr(file, 'name', file)}: {error}") from error
