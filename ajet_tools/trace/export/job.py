"""An export job: reads and redacts episodes in chunks, counts the output, and writes the target
file."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import BinaryIO, TypeVar

from ajet_sdk.errors import ConfigError, QueryError
from ajet_sdk.protocols import TraceReader
from ajet_sdk.types import Call, Event, Feedback, Reward, Task
from ajet_sdk.whole_file import remove_draft
from ajet_tools.trace.queries.base import rows
from ajet_tools.trace.queries.records import Record, records_of
from ajet_tools.trace.redact import Redactor

CUT = "replies cut at their limit"
_CHUNK = 64
"""Episodes in memory."""
_LOOKUP = 5_000
"""Ids in a query."""
Row = dict[str, object]
_ENCODER = json.JSONEncoder(ensure_ascii=False, default=str, allow_nan=False)


@dataclass
class Job:
    """The records of an export, and counters for its writer."""

    reader: TraceReader
    episode_ids: Sequence[str]
    redact: bool = True
    margin: float = 0.0
    progress: Callable[[int, int], None] | None = None
    trace: Path | None = None
    """Path of the trace, to look for the tokenizer of a run."""
    keep_cut: bool = False
    """Also write replies that were cut at their limit."""
    keep_pictures: bool = False
    """With `redact`: leave pictures as they are."""
    written: set[str] = field(default_factory=set)
    rows: int = 0
    redacted: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)

    def wrote(self, record: Record, rows: int = 1) -> None:
        """Count rows written for an episode."""
        self.written.add(record.episode.episode_id)
        self.rows += rows

    def counted(self, record: Record, rows: Sequence[Row], *, cut: int = 0) -> Sequence[Row]:
        """Counts and returns the rows of an episode; an episode without rows, none of them cut,
        has no chat."""
        if rows:
            self.wrote(record, len(rows))
        elif not cut:
            self.left_out["episodes without a chat reply"] += 1
        self.left_out[CUT] += cut
        return rows

    def no_rows(self, format: str) -> ConfigError:
        """Returns the error of an export without any row."""
        counts = [f"{n:,} {reason}" for reason, n in self.left_out.most_common() if n]
        why = f"; left out: {'; '.join(counts)}" if counts else ""
        return ConfigError(f"{len(self.episode_ids):,} episodes give no row of {format}{why}")

    def records(self, *, whole: bool = False, feedback: bool = False) -> Iterator[Record]:
        """Yield the records in order, with the requested parts; `whole` reads all parts, and
        unfinished episodes too."""
        for units in self._chunks([(episode_id,) for episode_id in self.episode_ids]):
            ids = [episode_id for (episode_id,) in units]
            yield from self._read(ids, whole=whole, feedback=feedback)

    def groups(
        self,
        members: Mapping[tuple[str, str], Sequence[str]] | None = None,
        *,
        feedback: bool = False,
        trained: bool = False,
    ) -> Iterator[list[Record]]:
        """Yield the records by group, with the requested parts; the groups are `members()` unless
        others are given."""
        if members is None:
            members = self.members()
        for units in self._chunks(list(members.values())):
            ids = list(chain.from_iterable(units))
            by_id = {
                r.episode.episode_id: r for r in self._read(ids, feedback=feedback, trained=trained)
            }
            for unit in units:
                yield [by_id[episode_id] for episode_id in unit if episode_id in by_id]

    def members(self) -> dict[tuple[str, str], list[str]]:
        """Group the exported episodes by run and group; an episode without a group has its own id
        as group."""
        groups: dict[tuple[str, str], list[str]] = {}
        for start in range(0, len(self.episode_ids), _LOOKUP):
            part = list(self.episode_ids[start : start + _LOOKUP])
            sql = (
                "SELECT episode_id, run_id, group_id FROM episodes WHERE episode_id IN (SELECT"
                " unnest(?::VARCHAR[]))"
            )
            known = {
                row["episode_id"]: (row["run_id"], row["group_id"])
                for row in rows(self.reader, sql, part)
            }
            for episode_id in part:
                run_id, group_id = known.get(episode_id, ("", ""))
                groups.setdefault((run_id, group_id or episode_id), []).append(episode_id)
        return groups

    def _chunks(self, units: Sequence[Sequence[str]]) -> Iterator[list[Sequence[str]]]:
        """Yield units of ids in chunks of about `_CHUNK` episodes, and report progress."""
        total = sum(map(len, units))
        done = 0
        chunk: list[Sequence[str]] = []
        chunk_size = 0
        for unit in units:
            if chunk and chunk_size + len(unit) > _CHUNK:
                yield chunk
                done += chunk_size
                self._report(done, total)
                chunk = []
                chunk_size = 0
            chunk.append(unit)
            chunk_size += len(unit)
        if chunk:
            yield chunk
        self._report(total, total)

    def _report(self, done: int, total: int) -> None:
        if self.progress:
            self.progress(done, total)

    def _read(self, ids: list[str], **wanted: bool) -> list[Record]:
        """Read and redact records; a chunk that exceeds the size limit of a result is read in
        halves."""
        try:
            records = records_of(self.reader, ids, **wanted)
        except QueryError as error:
            # a live run answers with at most so many bytes
            if len(ids) == 1 or "larger than" not in str(error):
                raise
            half = len(ids) // 2
            return self._read(ids[:half], **wanted) + self._read(ids[half:], **wanted)
        missing = len(set(ids)) - len(records)
        if missing:
            self.left_out["episodes that have not ended"] += missing
        if not self.redact:
            return records
        cleaned = [redacted_record(record, keep_pictures=self.keep_pictures) for record in records]
        for record in cleaned:
            self.redacted.update(record.redacted)
        return cleaned


def redacted_record(record: Record, *, keep_pictures: bool = False) -> Record:
    """Redact the texts of agents, models, judges and people, with the same number for repetitions
    of a value.

    Ids, names, times and numbers are kept. Token ids cannot be redacted: formats with token ids
    omit the episode.
    """
    redactor = Redactor(keep_pictures=keep_pictures)
    episode = record.episode
    changed = {
        "task": _redacted(episode.task, redactor, "main_query", "init_messages", "metadata"),
        "calls": tuple(
            _redacted(c, redactor, "request", "response", "error", "sampling")
            for c in episode.calls
        ),
        "events": tuple(
            _redacted(event, redactor, "arguments", "result", "error") for event in episode.events
        ),
        "output": redactor.value(episode.output),
        "rewards": tuple(_redacted(reward, redactor, "reason") for reward in episode.rewards),
        "error": redactor.value(episode.error),
    }
    feedback = tuple(
        _redacted(entry, redactor, "author", "comment", "correction") for entry in record.feedback
    )
    if not redactor.counts:
        return record
    return replace(
        record,
        episode=episode.model_copy(update=changed),
        feedback=feedback,
        redacted=dict(redactor.counts),
    )


_Written = TypeVar("_Written", Task, Call, Event, Reward, Feedback)


def _redacted(record: _Written, redactor: Redactor, *fields: str) -> _Written:
    return record.model_copy(
        update={name: redactor.value(getattr(record, name)) for name in fields}
    )


@contextmanager
def opened(target: Path | BinaryIO) -> Iterator[BinaryIO]:
    """Open the stream to write to; a file is replaced atomically at the end.

    Raises ConfigError if the path is a trace, or cannot be written.
    """
    if not isinstance(target, Path):
        yield target
        return
    refuse_trace(target)
    draft = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with draft.open("wb") as file:
            yield file
            file.flush()
            # else a crash after the replacement may leave an empty file
            os.fsync(file.fileno())
        draft.replace(target)
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error.strerror or error}") from error
    finally:
        remove_draft(draft)


def refuse_trace(path: Path) -> None:
    """Raise ConfigError if the path is a trace."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        if file.read(12)[8:] == b"DUCK":
            raise ConfigError(
                f"{path} is a trace, which an export never overwrites; choose another file"
            )


def json_line(value: object) -> bytes:
    """Encode a value as a line of JSON in UTF-8; lone surrogates become `?`."""
    return (_ENCODER.encode(value) + "\n").encode("utf-8", "replace")
