"""A journal of records that are not yet in the trace file: lines of JSON beside it."""

from __future__ import annotations

import fcntl
import glob
import json
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args

import numpy as np
from pydantic import ValidationError

from ajet_sdk.pictures import Picture, picture_at
from ajet_sdk.trace.encoding import Record, scrub
from ajet_sdk.trace.pictures import PREFIX, Replacing, StoredPictures, may_refer, resolved
from ajet_sdk.types import Call, Feedback, LedgerEntry, Metric, Run, Trained, new_id

IDS = {
    "runs": "run_id",
    "episodes": "episode_id",
    "calls": "call_id",
    "ledger": "concat_ws('/', run_id, step, call_id, outcome)",
    "trained": "concat_ws('/', 'trained', run_id, step, call_id)",
    "metrics": "concat_ws('/', 'metric', run_id, step, name)",
    "feedback": "feedback_id",
}
"""Tables of the records in a journal, with the SQL of their ids (`id_of`)."""

_PICTURE = "picture"
_KINDS = {kind.__name__: kind for kind in get_args(Record)}


class Journal:
    """The journal of a writer, `TRACE.PID-ID.journal`, locked while its process lives.

    `synced`: records survive a crash of the machine, not only of the process. Raises OSError if it
    cannot be written.
    """

    def __init__(self, trace: Path, *, synced: bool) -> None:
        self.path = trace.with_name(f"{trace.name}.{os.getpid()}-{new_id()[:8]}.journal")
        begun = self.path.with_suffix(".new")
        begun.touch(0o600, exist_ok=False)
        self._file = begun.open("ab", buffering=0)
        self._syncs = synced
        fcntl.flock(self._file, fcntl.LOCK_EX)
        begun.rename(self.path)  # it appears locked
        directory = os.open(self.path.parent, os.O_RDONLY)
        os.fsync(directory)
        os.close(directory)
        self.size = 0
        """Size in bytes."""
        self._writing = threading.Lock()
        self._syncing = threading.Lock()
        self._appended = self._synced = 0
        self._pictures = StoredPictures()
        """Those in the journal, which has each of them once."""

    def append(self, records: Sequence[Record]) -> None:
        """Write records and, if synced, wait for the disk; concurrent threads share one sync."""
        texts = [json.dumps(_line(record), default=_plain) for record in records]
        with self._writing:
            if self._file.closed:  # by another thread, after these records were written
                return
            lines = []
            for text in texts:
                lines += self._without_pictures(text) if may_refer(text) else [text]
            text = "".join(f"\n{line}" for line in lines)  # a torn line ends at the next one
            self.size += self._file.write(text.encode()) or 0
            self._appended += 1
            turn = self._appended
        if not self._syncs:
            return
        with self._syncing:
            if self._synced < turn and not self._file.closed:
                last = self._appended
                getattr(os, "fdatasync", os.fsync)(
                    self._file.fileno()
                )  # fdatasync doesn't write the file's times
                self._synced = last

    def _without_pictures(self, line: str) -> list[str]:
        """A line with references, after lines with the pictures that are not in the journal."""
        replacing = Replacing(self._pictures)
        replaced = json.dumps(replacing.value(json.loads(line)))
        added = replacing.added.values()
        self._pictures.settle(added)
        return [*(json.dumps({_PICTURE: picture.url}) for picture in added), replaced]

    def clear(self) -> None:
        """Delete all records, which are in the trace file."""
        with self._writing:
            self._file.truncate(0)
            self._pictures.clear()
            self.size = 0

    def remove(self) -> None:
        with self._writing, self._syncing:
            self.path.unlink(missing_ok=True)
            self._file.close()


def _line(record: Record) -> dict[str, object]:
    return {type(record).__name__: scrub(record.model_dump())}


def _plain(value: object) -> object:
    return value.tolist() if isinstance(value, np.ndarray) else str(value)


def left_behind(directory: Path, trace: str | None = None) -> Iterator[Path]:
    """Journals without a living writer, of a trace file or of all files in a directory."""
    for path in sorted(directory.glob(f"{'*' if trace is None else glob.escape(trace)}.*.journal")):
        try:
            with path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # locked, or gone
            continue
        yield path


def trace_of(journal: Path) -> Path:
    """The trace file of a journal."""
    return journal.with_suffix("").with_suffix("")


def id_of(record: Record) -> str:
    """What tells a record from all others of a trace."""
    if isinstance(record, Run):
        return record.run_id
    if isinstance(record, Call):
        return record.call_id
    if isinstance(record, LedgerEntry):
        return f"{record.run_id}/{record.step}/{record.call_id}/{record.outcome}"
    if isinstance(record, Trained):
        return f"trained/{record.run_id}/{record.step}/{record.call_id}"
    if isinstance(record, Metric):
        return f"metric/{record.run_id}/{record.step}/{record.name}"
    if isinstance(record, Feedback):
        return record.feedback_id
    return record.episode_id


def records_of(journal: Path) -> list[Record]:
    """Reads the records of a journal, except for one that was cut off by a kill or a full disk."""
    records: list[Record] = []
    pictures: dict[str, Picture] = {}
    for line in journal.read_bytes().split(b"\n"):
        try:
            entry = json.loads(line or b"{}")
            if _PICTURE in entry:
                picture = picture_at(entry[_PICTURE])
                pictures[picture.digest] = picture
                continue
            if PREFIX.encode() in line:
                entry = resolved(entry, pictures)
            records += [_KINDS[kind].model_validate(fields) for kind, fields in entry.items()]
        except (ValueError, ValidationError):
            continue
    return records
