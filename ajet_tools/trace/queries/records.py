"""Episodes with all that a trace has of them, and what changes when it has more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ajet_sdk.errors import QueryError
from ajet_sdk.protocols import TraceReader
from ajet_sdk.trace.reader import arrays_of, calls_of, episodes
from ajet_sdk.types import Episode, Feedback, LedgerEntry, Trained, now
from ajet_tools.trace.queries.base import among, grouped, rows


@dataclass(frozen=True, eq=False)
class Record:
    """An episode with what was said of it and what became of its tokens, where that was asked for."""

    episode: Episode
    """With its calls. Of an episode that has not ended only these are known, and its run is the newest."""
    ended: bool = True
    feedback: tuple[Feedback, ...] = ()
    ledger: tuple[LedgerEntry, ...] = ()
    trained: tuple[Trained, ...] = ()
    """In the order of steps."""
    superseded: bool = False
    redacted: Mapping[str, int] = field(default_factory=dict)
    """How many values of each kind were replaced in it."""

    @property
    def scores(self) -> dict[str, Trained]:
        """By call, of the last step; none for a call that was not trained, or in a file from before they were kept."""
        return {trained.call_id: trained for trained in self.trained}

    @property
    def advantage(self) -> float | None:
        """The mean over its trained tokens; None where none was trained, or none is known."""
        return mean_of([scores.advantages for scores in self.scores.values()])


def mean_of(values: Sequence[npt.NDArray[np.float32]]) -> float | None:
    """Over every value that is known; None where there is none."""
    known = [array[np.isfinite(array)] for array in values]
    return float(np.concatenate(known).mean()) if any(array.size for array in known) else None


def records_of(
    reader: TraceReader,
    ids: Sequence[str],
    *,
    whole: bool = False,
    feedback: bool = False,
    trained: bool = False,
) -> list[Record]:
    """Records of episodes, in the given order. `whole`: with all that the trace has, and those not ended too."""
    ids = list(dict.fromkeys(ids))
    known = {e.episode_id: e for e in episodes(reader, episode_ids=ids, superseded=True)}
    remarks = _by_episode(reader, Feedback, "feedback", ids, '"at", feedback_id') if feedback or whole else {}
    booked = _by_episode(reader, LedgerEntry, "ledger", ids, "step, call_id, outcome") if whole else {}
    scored = _by_episode(reader, Trained, "trained", ids, "step, call_id") if trained or whole else {}
    condition, named = among("episode_id", ids)
    sql = f"SELECT episode_id FROM episodes WHERE superseded AND {condition}"
    superseded = {row["episode_id"] for row in rows(reader, sql, *named)} if whole else set()
    return [
        Record(
            known.get(episode_id) or _running(reader, episode_id),
            episode_id in known,
            tuple(remarks.get(episode_id, ())),
            tuple(booked.get(episode_id, ())),
            tuple(scored.get(episode_id, ())),
            episode_id in superseded,
        )
        for episode_id in ids
        if episode_id in known or whole
    ]


def known_records(reader: TraceReader, ids: Sequence[str]) -> list[Record]:
    """All that the trace has of each episode. Raises QueryError if it does not have one of them."""
    records = records_of(reader, ids, whole=True)
    for record in records:
        if not record.ended and not record.episode.calls:
            raise QueryError(f"the trace has no episode {record.episode.episode_id}; `ajet trace ls` lists them")
    return records


_Model = TypeVar("_Model", Feedback, LedgerEntry, Trained)


def _by_episode(
    reader: TraceReader, model: type[_Model], table: str, ids: Sequence[str], order: str
) -> dict[str, list[_Model]]:
    condition, named = among("episode_id", ids)
    listed = reader.query(f"SELECT * FROM {table} WHERE {condition} ORDER BY {order}", named)
    columns = [arrays_of(c) if pa.types.is_list(c.type) else c.to_pylist() for c in listed.columns]
    fields = (dict(zip(listed.column_names, values, strict=True)) for values in zip(*columns, strict=True))
    return grouped(map(model.model_validate, fields), lambda record: record.episode_id)


def _running(reader: TraceReader, episode_id: str) -> Episode:
    """An episode of which there are only calls yet, if any: they do not say which run's it is."""
    calls = tuple(calls_of(reader, episode_id))
    newest = rows(reader, "SELECT run_id FROM runs ORDER BY status = 'running' DESC, started_at DESC LIMIT 1")
    return Episode(
        episode_id=episode_id,
        run_id=newest[0]["run_id"] if newest else "",
        calls=calls,
        started_at=min((call.started_at for call in calls), default=now()),
        ended_at=max((call.ended_at for call in calls), default=now()),
    )


def feedback_of(reader: TraceReader, episode_id: str, call_id: str | None = None) -> list[Feedback]:
    """The feedback on an episode and its calls, oldest first; only that on one call where it is named."""
    listed = _by_episode(reader, Feedback, "feedback", [episode_id], '"at", feedback_id').get(episode_id, [])
    return [feedback for feedback in listed if call_id is None or feedback.call_id == call_id]


def attempt_rewards(reader: TraceReader, episode_ids: Sequence[str]) -> list[float | None]:
    """The reward of each of these episodes, in their order; None where it has none."""
    sql = (
        "SELECT episode_id, sum(value * weight) AS reward FROM rewards WHERE list_contains($1, episode_id) GROUP BY ALL"
    )
    known = {row["episode_id"]: row["reward"] for row in rows(reader, sql, list(episode_ids))}
    return [known.get(episode_id) for episode_id in episode_ids]


class Pulse(NamedTuple):
    """Numbers of rows of an episode. They differ where anything of it does."""

    calls: int
    feedback: int
    running: bool
    """The episode has not ended, and a run is going on."""
    ended: int
    superseded: bool
    group_id: str | None
    booked: int = 0
    """Ledger entries; these and the attempts of its group are counted once it has ended."""
    attempts: int = 0


def episode_pulse(reader: TraceReader, episode_id: str) -> Pulse:
    """Whether anything of an episode has changed, cheaply: ledger and group are read only once it has ended."""
    [row] = rows(
        reader,
        """
        SELECT (SELECT count(*) FROM calls WHERE episode_id = $1) AS calls,
          (SELECT count(*) FROM feedback WHERE episode_id = $1) AS feedback,
          (SELECT count(*) > 0 FROM runs WHERE status = 'running') AS running, ended.*
        FROM (SELECT count(*) AS ended, coalesce(bool_or(superseded), false) AS superseded,
                any_value(group_id) AS group_id
              FROM episodes WHERE episode_id = $1) ended""",
        episode_id,
    )
    if not row["ended"]:
        return Pulse(**row)
    [after] = rows(
        reader,
        """
        SELECT (SELECT count(*) FROM ledger WHERE episode_id = $1) AS booked,
          (SELECT count(*) FROM episodes WHERE group_id = $2 AND group_id <> '') AS attempts""",
        episode_id,
        row["group_id"],
    )
    return Pulse(**{**row, **after, "running": False})


def mark_of(reader: TraceReader, *episode_ids: str) -> tuple[int, ...]:
    """How many rows the trace has of some episodes: a cheap way to see that there is something new."""
    sql = " UNION ALL ".join(
        f"SELECT {i} AS i, count(*) AS n FROM {table} WHERE list_contains($1, episode_id)"
        for i, table in enumerate(("calls", "episodes", "rewards", "ledger", "trained"))
    )
    return tuple(row["n"] for row in rows(reader, f"FROM ({sql}) ORDER BY i", list(episode_ids)))
