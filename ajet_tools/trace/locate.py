"""Resolves command-line arguments to traces: a file, a directory tree, or the id or name of a run
or episode."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ajet_sdk.errors import TraceError
from ajet_sdk.protocols import TraceReader
from ajet_sdk.trace.below import in_and_below
from ajet_sdk.trace.owner import settled_owners
from ajet_sdk.trace.reader import Trace, open_trace, trace_files

_LOG = logging.getLogger("ajet.trace")


class Named(NamedTuple):
    """A trace, and optionally a run or episode in it, named on the command line."""

    reader: Trace
    where: Path
    """Path of its files."""
    id: str | None
    """Id or name to look up in the trace; None if only a path was given, or nothing."""


def located_files(path: Path | None = None) -> list[Path]:
    """Return the files read by `open_located`."""
    reader = _open(path)
    reader.close()
    return reader.files()


def _open(path: Path | None) -> Trace:
    reader = open_trace(path or Path())
    for reason in reader.skipped.values():
        _LOG.warning("Left out: %s", reason)
    return reader


def open_located(path: Path | None = None) -> tuple[Trace, Path]:
    """Open a trace file, or all traces in and below a directory (by default the current one) as a
    single trace.

    Returns the reader and the path of its files. Skipped files are logged. Raises TraceError if
    there are no files.
    """
    reader = _open(path)
    files = reader.files()
    directories = {file.parent for file in files}
    if path is not None and not path.is_dir():
        return reader, path
    if path is None and len(files) == 1:
        return reader, files[0]
    return reader, directories.pop() if len(directories) == 1 else path or Path()


def open_named(name: str | None = None, path: Path | None = None) -> Named:
    """Open a path, or the traces at `path` that should have a run, episode or call with this id or
    name.

    Raises TraceError if there are no files, or for a missing path.
    """
    if name is None:
        return Named(*open_located(path), None)
    as_path = Path(name)
    if as_path.is_file() or (as_path.is_dir() and in_and_below(as_path)):
        return Named(*open_located(as_path), None)
    # a mistyped path is no id
    if os.sep in name or name.endswith(".duckdb"):
        raise TraceError(
            f"there is no {'trace below' if as_path.exists() else 'file or directory'} {name}"
        )
    return Named(*open_located(path), name)


@dataclass(frozen=True, slots=True)
class State:
    """State of a trace's files, which changes with every write."""

    live: bool
    files: tuple[tuple[str, int, int], ...] = ()
    """Path, size and modification time of each file and its write-ahead log."""


def state_of(path: Path, reader: TraceReader | None = None) -> State:
    """Return the state of a trace, without asking a running process; an open reader saves the
    search for files."""
    stamps = []
    try:
        if isinstance(reader, Trace):
            files = reader.files()
        else:
            files = trace_files(path)
    except TraceError:
        return State(live=False)
    for file in files:
        for part in (file, file.with_name(f"{file.name}.wal")):
            try:
                about = part.stat()
            except OSError:  # no log, or a file being replaced
                continue
            stamps.append((str(part), about.st_size, about.st_mtime_ns))
    return State(bool(settled_owners(files)), tuple(stamps))
