"""Limits of trace files by age, size and number, and deletion of files beyond them."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from ajet_sdk.errors import ConfigError
from ajet_sdk.trace.owner import owners

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_SIZES = {
    "": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
}


def age(text: str, of: str) -> timedelta:
    """Parses `30d`, `12h`, `2w`, `45m`, `10s`. Raises ConfigError with the option's name `of`."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smhdw])\s*", text.lower())
    if not match:
        raise ConfigError(f"{of} takes a number with s, m, h, d or w, such as 30d (got {text!r})")
    return timedelta(seconds=float(match[1]) * _UNITS[match[2]])


def size(text: str, of: str) -> int:
    """Parses `500MB`, `2GiB`, `1000000` to bytes. Raises ConfigError with the option's name
    `of`."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?b|)\s*", text.lower())
    if not match or match[2] not in _SIZES:
        raise ConfigError(f"{of} takes a number with kB, MB or GB, such as 500MB (got {text!r})")
    return int(float(match[1]) * _SIZES[match[2]])


@dataclass(frozen=True)
class Limits:
    """Limits of a file, or of the files in a directory; None: no limit."""

    age: timedelta | None = None
    size: int | None = None
    """Size in bytes."""
    files: int | None = None

    @classmethod
    def of(cls, texts: str | Sequence[str], name: str, *, files: bool = True) -> Limits:
        """Parses `30d`, `2GB`, with `files` also `100 files`, or several. Raises ConfigError with
        the parameter."""
        limits: dict[str, timedelta | int] = {}
        limit: timedelta | int
        for text in (
            texts if isinstance(texts, Sequence) and not isinstance(texts, str) else [texts]
        ):
            try:
                if files and (match := re.fullmatch(r"\s*(\d+)\s*files\s*", str(text))):
                    kind = "files"
                    limit = int(match[1])
                elif re.search(r"b\s*$", str(text).lower()):
                    kind = "size"
                    limit = size(str(text), name)
                else:
                    kind = "age"
                    limit = age(str(text), name)
            except (ConfigError, OverflowError):
                if files:
                    takes = '"30d", "2GB" or "100 files"'
                else:
                    takes = '"30d" or "2GB"'
                raise ConfigError(
                    f"{name} takes {takes}, or a list of them (got {text!r})"
                ) from None
            if not limit:
                raise ConfigError(f"{name} is a limit above 0 (got {text!r})")
            limits[kind] = limit
        return cls(**limits)  # type: ignore[arg-type]

    def reached(self, path: Path, age: float) -> bool:
        """Whether a file of the given age in seconds reaches a limit."""
        return (self.age is not None and age >= self.age.total_seconds()) or (
            self.size is not None and bytes_of(path) >= self.size
        )


def bytes_of(path: Path) -> int:
    """Size of a trace file with its WAL; 0 if there is none."""
    total = 0
    for part in (path, log_of(path)):
        try:
            total += part.stat().st_size
        except FileNotFoundError:
            continue
    return total


def log_of(path: Path) -> Path:
    """DuckDB's WAL of a file."""
    return path.with_name(path.name + ".wal")


def delete_beyond(limits: Limits, directory: Path, prefix: str) -> list[Path]:
    """Delete the oldest trace files whose names start with `prefix`, until one more fits the
    limits.

    Files being written stay. The age is that of the last change. Returns the deleted files.
    """
    written = {owner.trace for owner in owners(directory.resolve()) if owner.alive}
    traces = []
    for path in directory.glob("*.duckdb"):
        with suppress(FileNotFoundError):  # another process deletes too
            traces += [(path.stat().st_mtime, path)] if path.name.startswith(prefix) else []
    total = sum(bytes_of(path) for _, path in traces)
    number = len(traces) + 1
    deleted = list[Path]()
    for changed, path in sorted(traces):
        expired = limits.age is not None and time.time() - changed > limits.age.total_seconds()
        too_many = limits.files is not None and number > limits.files
        if path.name in written or not (
            expired or too_many or (limits.size is not None and total > limits.size)
        ):
            continue
        total = total - bytes_of(path)
        number = number - 1
        path.unlink(missing_ok=True)
        log_of(path).unlink(missing_ok=True)
        deleted.append(path)
    return deleted
