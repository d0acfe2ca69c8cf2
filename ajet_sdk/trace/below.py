"""Which of the files in a directory and below it are traces to read as one list: nobody named each of them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import duckdb

from ajet_sdk.errors import TraceError, TraceVersionError
from ajet_sdk.trace.database import explain, unborn
from ajet_sdk.trace.gathered import AT_ONCE, attach
from ajet_sdk.trace.live import Owner

__all__ = ["in_and_below", "readable"]


_DEPTH = 6
_SKIPPED = frozenset({"node_modules", "__pycache__", "site-packages", "checkpoint"})


def in_and_below(directory: Path, depth: int = _DEPTH) -> list[Path]:
    """The DuckDB files in a directory and, so many levels deep, below it."""
    return sorted(_walk(directory, depth))


def _walk(directory: Path, depth: int) -> Iterator[Path]:
    try:
        entries = list(os.scandir(directory))
    except OSError:  # a directory that may not be looked into, or is gone
        return
    for entry in entries:
        if entry.name.endswith(".duckdb") and entry.is_file():
            if not (entry.name.startswith(".") or unborn(directory / entry.name)):
                yield directory / entry.name
        elif depth and entry.is_dir(follow_symlinks=False) and not _passed_over(entry.name):
            yield from _walk(directory / entry.name, depth - 1)


def _passed_over(name: str) -> bool:
    return name.startswith(".") or name in _SKIPPED


def readable(
    files: Sequence[Path], owned: Mapping[Path, Owner], near: Sequence[Path]
) -> tuple[list[Path], dict[Path, str]]:
    """The files that can be read together, and why each of the others is left out.

    A run that is there in two directories is a copy: it is counted once, where it was written to last. Raises
    TraceError where none is left, or where one of `near` (named, or in a directory that was) is a trace and broken.
    """
    found: list[Path] = []
    skipped: dict[Path, str] = {}
    failure: TraceError | None = None
    held: dict[str, Path] = {}
    beside: dict[Path, list[Path]] = {}
    for file in files:
        beside.setdefault(file.parent, []).append(file)
    first = {file.parent for file in near}
    order = sorted(beside, key=lambda d: (d in first, max(map(_changed, beside[d]))), reverse=True)
    with duckdb.connect() as connection:
        for directory in order:
            runs = _runs_together(connection, [file for file in beside[directory] if file not in owned])
            for file in beside[directory]:
                if file in runs:
                    continue
                try:
                    runs[file] = _runs(connection, file, owned.get(file), deep=file not in near)
                except TraceError as error:
                    if file in near and not isinstance(error, TraceVersionError):
                        raise
                    failure = failure or error
                    skipped[file] = str(error)
            copied = next((run for ids in runs.values() for run in ids if run in held), None)
            for file, ids in runs.items():
                if copied is None:
                    found.append(file)
                    held |= dict.fromkeys(ids, file)
                else:
                    skipped[file] = f"{file}: run {copied} is in {held[copied]} too, and is counted there"
    if failure and not found:
        raise failure
    return sorted(found), skipped


def _runs_together(connection: duckdb.DuckDBPyConnection, files: Sequence[Path]) -> dict[Path, list[str]]:
    """The runs of files at rest, many at a time; without those of which one cannot be read."""
    runs: dict[Path, list[str]] = {}
    for start in range(0, len(files), AT_ONCE):
        part = dict(enumerate(files[start : start + AT_ONCE]))
        try:
            versions = attach(connection, part)
            sources = [f"SELECT {i}, run_id FROM t{i}.runs" for i, file in part.items() if versions[file]]
            runs |= {file: [] for file in part.values()}
            for i, run in connection.execute(" UNION ALL ".join(sources)).fetchall() if sources else []:
                runs[part[i]].append(run)
        except (duckdb.Error, TraceError):  # then each by itself tells which it was
            runs = {file: ids for file, ids in runs.items() if file not in part.values()}
        finally:
            for i in part:
                connection.execute(f"DETACH DATABASE IF EXISTS t{i}")
    return runs


def _runs(connection: duckdb.DuckDBPyConnection, file: Path, owner: Owner | None, *, deep: bool) -> list[str]:
    """The runs of a file at rest; a live one is no copy. Raises TraceError where it cannot be read."""
    if owner is not None:
        if deep and owner.writes and not owner.url:
            raise TraceError(f"{file} is being written by process {owner.pid}, which answers no queries")
        return []
    try:
        version = attach(connection, {0: file})[file]
        return [row[0] for row in connection.execute("SELECT run_id FROM t0.runs").fetchall()] if version else []
    except duckdb.Error as error:
        raise explain(file, error) from error
    finally:
        connection.execute("DETACH DATABASE IF EXISTS t0")


def _changed(file: Path) -> float:
    """When a trace was last written to: new rows go to the log beside the file first."""
    return max(
        (part.stat().st_mtime for part in (file, file.with_name(f"{file.name}.wal")) if part.exists()), default=0
    )
