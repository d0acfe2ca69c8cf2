"""Which traces are meant: a file, all in and below a directory, or what an id or a name stands for."""

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
    """A trace, and a run or episode in it, as named on the command line."""

    reader: Trace
    where: Path
    """Where its files lie."""
    id: str | None
    """The id or name to look for in it; None where nothing was named, or a path was."""


def located_files(path: Path | None = None) -> list[Path]:
    """The files of the traces at `path`, as `open_located` reads them."""
    reader = _open(path)
    reader.close()
    return reader.files()


def _open(path: Path | None, read_only: bool = False) -> Trace:
    reader = open_trace(path or Path(), read_only=read_only)
    for reason in reader.skipped.values():
        _LOG.warning("Left out: %s", reason)
    return reader


def open_located(path: Path | None = None, read_only: bool = False) -> tuple[Trace, Path]:
    """Open the traces at `path` (below the current directory where None) as one: a file, or all in and below a folder.

    Returns the reader and where its files lie. What is left out is logged. `read_only` as of `open_trace`. Raises
    TraceError where there is nothing to read.
    """
    reader = _open(path, read_only)
    files = reader.files()
    directories = {file.parent for file in files}
    if path is not None and not path.is_dir():
        return reader, path
    if path is None and len(files) == 1:
        return reader, files[0]
    return reader, directories.pop() if len(directories) == 1 else path or Path()


def open_named(name: str | None = None, path: Path | None = None, *, read_only: bool = False) -> Named:
    """Open what a person names: a path, or, in the traces at `path`, a run, an episode or a call by its id or name.

    What is given as `path` alone may be the name. Raises TraceError where there is nothing to read, or where a path is
    named that is not there.
    """
    if name is None and path is not None and not path.exists():
        name, path = str(path), None
    if name is None:
        return Named(*open_located(path, read_only), None)
    place = Path(name)
    if place.is_file() or (place.is_dir() and in_and_below(place)):
        return Named(*open_located(place, read_only), None)
    if os.sep in name or name.endswith(".duckdb"):
        raise TraceError(f"there is no {'trace below' if place.exists() else 'file or directory'} {name}")
    return Named(*open_located(path, read_only), name)


@dataclass(frozen=True, slots=True)
class State:
    """What differs once a trace has been written to; to know it no run is asked."""

    live: bool
    files: tuple[tuple[str, int, int], ...] = ()
    """Path, bytes and time of change of each file and its log."""


def state_of(path: Path, reader: TraceReader | None = None) -> State:
    """How a trace stands now; a reader of it knows its files already."""
    stamps = []
    try:
        files = reader.files() if isinstance(reader, Trace) else trace_files(path)
    except TraceError:
        return State(live=False)
    for file in files:
        for part in (file, file.with_name(f"{file.name}.wal")):
            try:
                about = part.stat()
            except OSError:  # no log, or a file that has just been replaced
                continue
            stamps.append((str(part), about.st_size, about.st_mtime_ns))
    return State(bool(settled_owners(files)), tuple(stamps))
