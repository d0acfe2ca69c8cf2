"""Selects the trace files to read in a directory and below it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from ajet_sdk.errors import NotATrace, TraceError, TraceLocked, TraceVersionError
from ajet_sdk.trace.database import unborn
from ajet_sdk.trace.owner import Owner

_DEPTH = 6
_SKIPPED = frozenset({"node_modules", "__pycache__", "site-packages", "checkpoint"})


def in_and_below(directory: Path, depth: int = _DEPTH) -> list[Path]:
    """The DuckDB files in a directory and up to `depth` levels below it."""
    return sorted(_walk(directory, depth))


def distinct(files: Iterable[Path]) -> list[Path]:
    """Removes duplicates, with links resolved."""
    places: dict[Path, str] = {}
    by_path: dict[str, Path] = {}
    for file in files:
        directory = file.parent
        if (
            directory not in places
        ):  # once per directory, since resolving checks every step of a path
            places[directory] = os.path.realpath(directory)
        if file.is_symlink():
            path = os.path.realpath(file)
        else:
            path = f"{places[directory]}/{file.name}"
        by_path[path] = file
    return list(by_path.values())


def _walk(directory: Path, depth: int) -> Iterator[Path]:
    try:
        entries = sorted(os.scandir(directory), key=lambda entry: entry.name)
    except OSError:  # a directory without permission, or gone
        return
    for entry in entries:
        path = directory / entry.name
        if entry.name.startswith(".") or entry.name in _SKIPPED:
            continue
        if entry.name.endswith(".duckdb") and entry.is_file():
            if not unborn(path):
                yield path
        elif depth and entry.is_dir(follow_symlinks=False):
            yield from _walk(path, depth - 1)


def is_part(file: Path) -> bool:
    """Whether a file has the name of a process's file of a run, which belongs together with those
    beside it."""
    return file.stem == "trace" or file.name.startswith("trace-")


def readable(
    files: Sequence[Path],
    owned: Mapping[Path, Owner],
    named: Sequence[Path],
    near: Sequence[Path],
    looked: Mapping[Path, list[str] | TraceError],
) -> tuple[list[Path], dict[Path, str]]:
    """Selects the files to read together; also returns the reasons for leaving out the others.

    `looked` has the runs of each file at rest, or its error. The files `trace.duckdb` and
    `trace-*.duckdb` of a directory are parts of its runs. A run that occurs again is a copy and
    counted once: where it was recorded, else where it was last written; live runs are no copies.
    Other databases are ignored unless named. Raises TraceError if no file is left, if one of
    `named` is a broken trace, or one of `near` (in a named directory) is locked.
    """
    files_read: list[Path] = []
    skipped: dict[Path, str] = {}
    failure: TraceError | None = None
    file_of_run: dict[str, Path] = {}
    beside: dict[Path, list[Path]] = {}
    for file in files:
        beside.setdefault(file.parent if is_part(file) else file, []).append(file)
    close = {*named, *near}
    first = {file.parent for file in close}
    alone = set(files)
    order = sorted(
        beside,
        key=lambda path: (
            path not in alone,
            beside[path][0].parent in first,
            max(map(_changed, beside[path])),
        ),
        reverse=True,
    )
    for path in order:
        runs: dict[Path, list[str]] = {}
        ids: list[str] | TraceError
        for file in beside[path]:
            if file not in owned:
                ids = looked[file]
            elif file not in close and owned[file].writes and not owned[file].url:
                ids = TraceError(
                    f"{file} is being written by process {owned[file].pid}, which cannot be queried"
                )
            else:
                ids = []  # unknown: its owner isn't asked
            if not isinstance(ids, TraceError):
                runs[file] = ids
                continue
            # a broken file hides no other; one that is asked for by its name, or that may open in a
            # moment, is an error
            is_asked = file in named and not isinstance(ids, TraceVersionError)
            if is_asked or (file in close and isinstance(ids, TraceLocked)):
                raise ids
            failure = failure or ids
            if not isinstance(ids, NotATrace) or file in named or path != file:
                skipped[file] = str(ids)
        copied = next((run for ids in runs.values() for run in ids if run in file_of_run), None)
        for file, ids in runs.items():
            if copied is None:
                files_read.append(file)
                file_of_run |= dict.fromkeys(ids, file)
            else:
                skipped[file] = (
                    f"{file}: run {copied} is also in {file_of_run[copied]}, and is counted there"
                )
    if failure and not files_read:
        raise failure
    return sorted(files_read), skipped


def _changed(file: Path) -> float:
    """Time of the last write to a trace or its WAL file."""
    return max(
        (
            part.stat().st_mtime
            for part in (file, file.with_name(f"{file.name}.wal"))
            if part.exists()
        ),
        default=0,
    )
