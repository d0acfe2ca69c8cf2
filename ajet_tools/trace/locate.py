"""Which trace is meant: a file, an experiment's directory, or the newest one below a directory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from ajet_sdk.errors import QueryError, TraceError, TraceVersionError
from ajet_sdk.protocols import TraceReader
from ajet_sdk.trace.live import owner_of
from ajet_sdk.trace.reader import open_trace, trace_files
from ajet_tools.trace.queries.ids import find_run

__all__ = ["is_live", "open_located", "open_named"]

_DEPTH = 6
_SKIPPED = frozenset({"node_modules", "__pycache__", "site-packages", "checkpoint"})


def open_located(path: Path | None = None) -> tuple[TraceReader, Path]:
    """Open the trace at `path`, or the newest one below it (below the current directory where no path is given).

    Returns the reader and what it reads. Raises TraceError where there is none.
    """
    start = path or Path()
    if not start.is_dir() or (path is not None and any(start.glob("*.duckdb"))):
        return open_trace(start), start
    foreign: TraceVersionError | None = None
    for file in sorted(_below(start, _DEPTH), key=_changed, reverse=True):
        try:
            return open_trace(file), file
        except TraceVersionError as error:
            foreign = foreign or error
    if foreign:
        raise foreign
    raise TraceError(
        f"there is no trace below {start.resolve()}: run an agent first (`ajet run agent.py:solve ...`), or name a "
        "file or an experiment directory"
    )


def open_named(name: str | None = None) -> tuple[TraceReader, Path, str | None]:
    """Open what a person names: a file, a directory, or the beginning of a run's id in a trace below here.

    Returns the reader, what it reads, and the run where one was named. Raises TraceError where nothing fits.
    """
    if name is None or Path(name).exists():
        return *open_located(None if name is None else Path(name)), None
    unread: TraceError | None = None
    for file in sorted(_below(Path(), _DEPTH), key=_changed, reverse=True):
        try:
            reader = open_trace(file)
            return reader, file, find_run(reader, name)
        except QueryError:
            reader.close()
        except TraceError as error:
            unread = unread or error
    if unread:
        raise unread
    raise TraceError(
        f"{name} is no file or directory, and no trace below {Path().resolve()} has a run whose id begins so; "
        "`ajet trace ls` lists the newest"
    )


def is_live(path: Path) -> bool:
    """Whether a process writes one of the trace's files now."""
    try:
        return any(owner_of(file) for file in trace_files(path))
    except TraceError:
        return False


def _below(directory: Path, depth: int) -> Iterator[Path]:
    try:
        entries = list(os.scandir(directory))
    except OSError:
        return
    for entry in entries:
        if entry.name.endswith(".duckdb") and entry.is_file():
            yield Path(entry.path)
        elif depth and entry.is_dir(follow_symlinks=False) and not _skipped(entry.name):
            yield from _below(Path(entry.path), depth - 1)


def _skipped(name: str) -> bool:
    return name.startswith(".") or name in _SKIPPED


def _changed(file: Path) -> float:
    """When a trace was last written to: new rows go to the log beside the file first."""
    log = file.with_name(file.name + ".wal")
    return max(part.stat().st_mtime for part in (file, log) if part.exists())
