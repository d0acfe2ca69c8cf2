"""Parsed records of importers, and the trace file they are written to."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType

from pydantic import ValidationError

from ajet_sdk.dialects.message_parts import content_text
from ajet_sdk.errors import TraceError, TraceLocked
from ajet_sdk.samples.prefixes import place_all
from ajet_sdk.trace.database import open_to_write, transaction
from ajet_sdk.trace.digests import amending
from ajet_sdk.trace.owner import owner_of, retract
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Episode, Feedback, LedgerEntry, Metric, Run, Task, Trained
from ajet_tools.text.clean import visible

_CHUNK = 64
"""Episodes in memory."""


class Sink:
    """Writes parsed records to a trace. Records whose ids exist already are skipped and counted.

    Raises TraceLocked if a live run owns the file.
    """

    def __init__(self, path: Path) -> None:
        owner = owner_of(path)
        if owner is not None:
            raise TraceLocked(
                f"{path} is being written by a run (pid {owner.pid}); import into another file, or"
                " wait until the run has ended"
            )
        self.path = path
        self.episodes = self.calls = self.already = 0
        self._writer = TraceWriter(path)
        self._waiting: list[tuple[Parsed, Episode]] = []
        self._superseded: list[str] = []
        self._runs = set(self._column("SELECT run_id FROM runs"))
        self._measured = set(self._column("SELECT DISTINCT run_id FROM metrics"))

    def put(self, parsed: Parsed) -> None:
        if parsed.run is not None and parsed.run.run_id not in self._runs:
            self._writer.put(parsed.run)
            self._runs.add(parsed.run.run_id)
        self._writer.put(
            *(metric for metric in parsed.metrics if metric.run_id not in self._measured)
        )
        if parsed.episode is not None:
            self._waiting.append((parsed, parsed.episode))
            if len(self._waiting) >= _CHUNK:
                self._flush()

    def __enter__(self) -> Sink:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if kind is None:
            self._flush()
        self._writer.close()
        if kind is None and self._superseded:
            self._mark_superseded()

    def _column(self, sql: str, *parameters: object) -> list[str]:
        return list(self._writer.query(sql, parameters).column(0).to_pylist())

    def _known(self, table: str, column: str, ids: list[str]) -> set[str]:
        sql = (
            f"SELECT DISTINCT {column} FROM {table} WHERE {column} IN (SELECT unnest(?::VARCHAR[]))"
        )
        return set(self._column(sql, ids))

    def _flush(self) -> None:
        """Write a chunk and wait for it, so that little is buffered, and the next chunk finds its
        ids."""
        chunk = self._waiting
        self._waiting = []
        if not chunk:
            return
        ended = self._known("episodes", "episode_id", [episode.episode_id for _, episode in chunk])
        calls = self._known(
            "calls", "call_id", [call.call_id for _, episode in chunk for call in episode.calls]
        )
        for parsed, episode in chunk:
            self._put_episode(parsed, episode, ended, calls)
        if not self._writer.flush(None):
            raise TraceError(f"the import could not be written to {self.path}; see the log")

    def _put_episode(
        self, parsed: Parsed, episode: Episode, ended: set[str], calls: set[str]
    ) -> None:
        fresh = [call for call in place_all(episode.calls) if call.call_id not in calls]
        if episode.episode_id in ended or (not parsed.ended and not fresh):
            self.already += 1
            return
        self._writer.put(*fresh)
        if parsed.ended:
            self._writer.put(episode)
            ended.add(episode.episode_id)
        calls.update(call.call_id for call in fresh)
        self._writer.put(*parsed.ledger, *parsed.feedback, *parsed.trained)
        self.episodes += 1
        self.calls += len(fresh)
        if parsed.superseded:
            self._superseded.append(episode.episode_id)

    def _mark_superseded(self) -> None:
        connection = open_to_write(self.path)
        try:
            named = "list_contains(?, episode_id)"
            with (
                transaction(connection),
                amending(connection, "episodes", named, [self._superseded]),
            ):
                connection.execute(
                    f"UPDATE episodes SET superseded = true WHERE {named}", [self._superseded]
                )
        finally:
            connection.close()
            retract(self.path, writes=True)


UNKNOWN_TIME = datetime(1970, 1, 1, tzinfo=timezone.utc)
"""Time of records without one."""


@dataclass(frozen=True)
class Parsed:
    """A run, metrics or an episode of a source."""

    run: Run | None = None
    metrics: tuple[Metric, ...] = ()
    episode: Episode | None = None
    ended: bool = True
    """False for an unfinished episode, of which only the calls are known."""
    superseded: bool = False
    ledger: tuple[LedgerEntry, ...] = ()
    feedback: tuple[Feedback, ...] = ()
    trained: tuple[Trained, ...] = ()
    where: str = ""
    """File and row."""
    guessed: bool = False
    """The source has no mask: tokens with an advantage count as sampled."""


def first_error(error: ValidationError) -> str:
    """Format the first error of a validation, with its field."""
    first = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"


def stable_id(*parts: object) -> str:
    """Derive an id that is the same in every import of a source."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        if isinstance(part, bytes):
            raw = part
        else:
            raw = str(part).encode("utf-8", "replace")
        digest.update(len(raw).to_bytes(8, "little") + raw)
    return digest.hexdigest()


def text_of(value: object) -> str | None:
    """Convert a value to text; None if it is empty."""
    return None if value in (None, "") else str(value)


def task_of(
    messages: object,
    metadata: Mapping[str, object],
    episode_id: str,
    fields: Mapping[str, object] | None = None,
) -> Task:
    """Make a task of the last question, the messages before it, and metadata; equal contents give
    equal tasks.

    Without question and metadata the task is unique to the episode. `fields` are task fields known
    from the source.
    """
    listed = []
    if isinstance(messages, list):
        listed = [m for m in messages if isinstance(m, Mapping)]
    at = max((i for i, m in enumerate(listed) if m.get("role") == "user"), default=None)
    asked = ""
    if at is not None:
        asked = visible(content_text(listed[at].get("content")))
    before = [] if at is None else listed[: at + 1]
    history = []
    if any(m.get("role") == "assistant" for m in before):
        history = [dict(m) for m in before]
    known = fields or ({} if asked or metadata else {"task_id": stable_id("task", episode_id)})
    return Task.model_validate(
        {"main_query": asked, "init_messages": history, "metadata": dict(metadata), **known}
    )
