"""Where an import goes: a trace file of its own or one that has others' runs; nothing comes into it twice."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from ajet_sdk.errors import TraceError, TraceLocked
from ajet_sdk.trace.database import open_to_write
from ajet_sdk.trace.live import owner_of, retract
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Metric, Run
from ajet_tools.trace.imports.parsed import Parsed

__all__ = ["Sink"]

_CHUNK = 64


class Sink:
    """Writes what was parsed. Records that the file has already, by their ids, are left as they are and counted.

    Raises TraceLocked where a live run owns the file.
    """

    def __init__(self, path: Path) -> None:
        owner = owner_of(path)
        if owner is not None:
            raise TraceLocked(
                f"{path} is being written by a run (pid {owner.pid}); import into another file, or wait for its end"
            )
        self.path = path
        self.episodes = self.calls = self.already = 0
        self._writer = TraceWriter(path)
        self._waiting: list[Parsed] = []
        self._superseded: list[str] = []
        self._runs = set(self._column("SELECT run_id FROM runs"))
        self._measured = set(self._column("SELECT DISTINCT run_id FROM metrics"))

    def put(self, parsed: Parsed) -> None:
        """Queue one thing."""
        if parsed.run is not None:
            self._put_run(parsed.run)
        self._put_metrics(parsed.metrics)
        if parsed.episode is not None:
            self._waiting.append(parsed)
            if len(self._waiting) >= _CHUNK:
                self._flush()

    def close(self) -> None:
        """Write what is left."""
        self._flush()
        self._writer.close()
        if self._superseded:
            _mark(self.path, self._superseded)

    def __enter__(self) -> Sink:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self._writer.close()

    def _put_run(self, run: Run) -> None:
        if run.run_id not in self._runs:
            self._writer.put(run)
            self._runs.add(run.run_id)

    def _put_metrics(self, metrics: Sequence[Metric]) -> None:
        fresh = [metric for metric in metrics if metric.run_id not in self._measured]
        self._writer.put(*fresh)

    def _column(self, sql: str, *parameters: Any) -> list[Any]:
        return list(self._writer.query(sql, parameters).column(0).to_pylist())

    def _known(self, table: str, column: str, ids: list[str]) -> set[str]:
        sql = f"SELECT DISTINCT {column} FROM {table} WHERE {column} IN (SELECT unnest(?::VARCHAR[]))"
        return set(self._column(sql, ids))

    def _flush(self) -> None:
        """Put a chunk and wait until it is in the file: what waits stays small, and the next chunk sees it."""
        chunk, self._waiting = self._waiting, []
        if not chunk:
            return
        found = [parsed.episode for parsed in chunk if parsed.episode is not None]
        ended = self._known("episodes", "episode_id", [episode.episode_id for episode in found])
        calls = self._known("calls", "call_id", [call.call_id for episode in found for call in episode.calls])
        for parsed in chunk:
            self._put_episode(parsed, ended, calls)
        if not self._writer.flush(None):
            raise TraceError(f"the import could not be written to {self.path}: see the log")

    def _put_episode(self, parsed: Parsed, ended: set[str], calls: set[str]) -> None:
        episode = parsed.episode
        if episode is None:
            return
        fresh = [call for call in episode.calls if call.call_id not in calls]
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


def _mark(path: Path, episode_ids: list[str]) -> None:
    """Note which episodes were rolled back by a resume of their run."""
    connection = open_to_write(path)
    try:
        sql = "UPDATE episodes SET superseded = true WHERE episode_id IN (SELECT unnest(?::VARCHAR[]))"
        connection.execute(sql, [episode_ids])
    finally:
        connection.close()
        retract(path, writes=True)
