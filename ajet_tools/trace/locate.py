"""Which trace is meant: a file, an experiment's directory, or the newest one below a directory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ajet_sdk.errors import QueryError, TraceError, TraceVersionError
from ajet_sdk.protocols import TraceReader
from ajet_sdk.trace.live import owner_of
from ajet_sdk.trace.reader import open_trace, trace_files
from ajet_tools.trace.queries.ids import find_run

__all__ = ["State", "is_live", "open_located", "open_named", "state_of"]

_DEPTH = 6
_SKIPPED = frozenset({"node_modules", "__pycache__", "site-packages", "checkpoint"})


def open_located(path: Path | None = None, *, copied: bool = False) -> tuple[TraceReader, Path]:
    """Open the trace at `path`, or the newest one below it (below the current directory where no path is given).

    Returns the reader and what it reads. Raises TraceError where there is none.
    """
    start = path or Path()
    if not start.is_dir() or (path is not None and any(start.glob("*.duckdb"))):
        return open_trace(start, copied=copied), start
    foreign: TraceVersionError | None = None
    for found in _newest_first(start):
        try:
            return open_trace(found, copied=copied), found
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
    for found in _newest_first(Path()):
        try:
            reader = open_trace(found)
            return reader, found, find_run(reader, name)
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


@dataclass(frozen=True, slots=True)
class State:
    """What differs once a trace has been written to; to know it no run is asked."""

    live: bool
    files: tuple[tuple[str, int, int], ...] = ()
    """Name, bytes and time of change of each file and its log."""


def state_of(path: Path) -> State:
    """How a trace stands now."""
    found = []
    try:
        files = trace_files(path)
    except TraceError:
        return State(live=False)
    for file in files:
        for part in (file, _log(file)):
            try:
                about = part.stat()
            except OSError:  # no log, or a file that has just been replaced
                continue
            found.append((part.name, about.st_size, about.st_mtime_ns))
    return State(any(owner_of(file) for file in files), tuple(found))


def is_live(path: Path) -> bool:
    """Whether a process writes one of the trace's files now."""
    try:
        return any(owner_of(file) for file in trace_files(path))
    except TraceError:
        return False


def _newest_first(directory: Path) -> list[Path]:
    """The traces below a directory; those files of one directory that processes of one run write are one."""
    files = sorted(_below(directory, _DEPTH), key=_changed, reverse=True)
    return list(dict.fromkeys(file.parent if _is_part(file) else file for file in files))


def _is_part(file: Path) -> bool:
    """A process's own file, or the file of a run that has such beside it, or may still get them."""
    if file.name == "trace.duckdb":
        return any(file.parent.glob("trace-*.duckdb")) or owner_of(file) is not None
    return file.name.startswith("trace-")


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
    return max(part.stat().st_mtime for part in (file, _log(file)) if part.exists())


def _log(file: Path) -> Path:
    return file.with_name(file.name + ".wal")
