"""Which files a path means, and how they are opened."""

from __future__ import annotations

import gzip
import logging
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from glob import glob
from pathlib import Path
from typing import Any

from ajet_sdk.errors import ConfigError, TaskError

__all__ = ["explain_errors", "files_of", "is_table", "open_text", "splits_of"]

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


def files_of(path: str | Path) -> list[Path | str]:
    """The files that a path means, in order; `-` for stdin. Raises ConfigError where there is none to read."""
    if str(path) == "-":
        return ["-"]
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
    """An error of the system, or of Arrow, as a TaskError that names the file."""
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:
        raise TaskError(f"cannot read {file}: {getattr(error, 'strerror', None) or error}") from error
    except ValueError as error:
        if isinstance(error, TaskError) or not type(error).__name__.startswith("Arrow"):
            raise
        raise TaskError(f"cannot read {getattr(file, 'name', file)}: {error}") from error
