"""Episodes: of a run, of a group, of a step, those that an export writes, and those that have not ended."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, TypedDict

from ajet_sdk.protocols import TraceReader
from ajet_tools.trace.queries.base import rows

if TYPE_CHECKING:
    from ajet_tools.trace.queries.filters import Filter


def episode_ids(reader: TraceReader, run_id: str, *, filter: Filter | None = None) -> Sequence[str]:
    """The episodes of a run that have calls and fit a filter, newest first; without those that a resume rolled back."""
    fits, values = (filter.sql, filter.parameters) if filter else ("true", ())
    matches = rows(
        reader,
        f"""
        SELECT e.episode_id FROM episodes e WHERE e.run_id = ? AND NOT e.superseded AND {fits}
          AND e.episode_id IN (SELECT episode_id FROM calls) ORDER BY e.ended_at DESC, e.episode_id""",
        run_id,
        *values,
    )
    return [row["episode_id"] for row in matches]


def exported_ids(
    reader: TraceReader, run_id: str | None = None, split: str | None = None, *, rolled_back: bool = False
) -> list[str]:
    """Ids of episodes, oldest first.

    Args:
        run_id: of one run; None: of all.
        split: `train`, `val` or `trial`; None: `train` and `val`.
        rolled_back: also trials and those that a resume rolled back; and, of all runs, those that have calls and have
            not ended.
    """
    sql = """
        SELECT episode_id FROM episodes
        WHERE ($1::VARCHAR IS NULL OR run_id = $1) AND ($3 OR NOT superseded)
          AND CASE WHEN $2::VARCHAR IS NULL THEN $3 OR split IS DISTINCT FROM 'trial' ELSE split = $2 END
        ORDER BY started_at, episode_id"""
    ids = [row["episode_id"] for row in rows(reader, sql, run_id, split, rolled_back)]
    if rolled_back and run_id is None and split is None:
        sql = """
            SELECT episode_id, min(started_at) AS began FROM calls ANTI JOIN episodes USING (episode_id)
            GROUP BY episode_id ORDER BY began, episode_id"""
        ids += [row["episode_id"] for row in rows(reader, sql)]
    return ids


def attempts_of(reader: TraceReader, episode_id: str) -> list[str]:
    """The attempts of an episode's group, by attempt; itself alone where it has none.

    Those that a resume rolled back stand with each other, and not among those that took their place.
    """
    group = "e.group_id = this.group_id AND e.group_id <> '' AND e.superseded = this.superseded"
    same = f"e.step = this.step AND ({group} OR e.episode_id = $1)"
    return _beside(reader, episode_id, same, "e.attempt, e.started_at") or [episode_id]


def compared_with(reader: TraceReader, episode_id: str) -> list[str]:
    """The attempts of an episode's group; where it has none, itself and its task at other steps, the newest first."""
    attempts = attempts_of(reader, episode_id)
    if len(attempts) > 1:
        return attempts
    same = """e.task.task_id = this.task.task_id AND e.decoding IS NOT DISTINCT FROM this.decoding
        AND NOT e.superseded AND e.episode_id <> $1"""
    return attempts + _beside(reader, episode_id, same, "e.step DESC, e.attempt")


def step_of(reader: TraceReader, episode_id: str) -> list[str]:
    """The episodes of an episode's step, of the same split; of those that a resume rolled back as `attempts_of`."""
    same = "e.step = this.step AND e.superseded = this.superseded"
    return _beside(reader, episode_id, same, "e.started_at") or [episode_id]


def _beside(reader: TraceReader, episode_id: str, same: str, order: str) -> list[str]:
    """The episodes of the same run and split as `this` for which a condition holds."""
    sql = f"""
        SELECT e.episode_id FROM episodes e, (FROM episodes WHERE episode_id = $1) AS this
        WHERE e.run_id = this.run_id AND e.split = this.split AND {same} ORDER BY {order}, e.episode_id"""
    return [row["episode_id"] for row in rows(reader, sql, episode_id)]


_MOST = 1000


class ListedEpisode(TypedDict):
    """A row of a listing. What is not known before the end is None in an episode that has not ended."""

    episode_id: str
    run_id: str | None
    task_id: str | None
    task: str | None
    attempt: int | None
    group_id: str | None
    step: int | None
    split: str | None
    decoding: str | None
    status: str | None
    cause: str | None
    error: str | None
    reward: float | None
    calls: int
    turns: int
    """The calls of its agents; `calls` has those of judges too."""
    agents: int
    tokens: int | None
    seconds: float
    started_at: datetime
    ended_at: datetime | None
    superseded: bool


class UnfinishedEpisode(ListedEpisode):
    """An episode that has calls and no end."""

    of_all: int
    """How many there are, listed or not; the same in each row."""


def unended_rows(reader: TraceReader, run_id: str | None) -> list[UnfinishedEpisode]:
    """The last 1,000 episodes that have not ended, newest first.

    A call doesn't name its run: with `run_id`, those that began after that run did.
    """
    since = (
        rows(reader, "SELECT min(started_at) AS at FROM runs WHERE run_id = $1", run_id)[0]["at"] if run_id else None
    )
    return rows(
        reader,
        f"""
        SELECT episode_id, $1::VARCHAR AS run_id, NULL AS task_id, NULL AS task, NULL AS attempt, NULL AS group_id,
          NULL AS step, NULL AS split,
          NULL AS decoding, NULL AS status, NULL AS cause, any_value(error) AS error, NULL AS reward,
          count(*) AS calls, count(*) FILTER (phase = 'rollout') AS turns, count(DISTINCT agent) AS agents,
          sum(len(output_ids))::BIGINT AS tokens, round(epoch(max(ended_at) - min(started_at)), 2) AS seconds,
          min(started_at) AS started_at, NULL AS ended_at, false AS superseded, any_value(of_all) AS of_all
        FROM calls JOIN (
          SELECT episode_id, count(*) OVER () AS of_all FROM calls ANTI JOIN episodes USING (episode_id)
          WHERE {"started_at >= $2" if since else "true"}
          GROUP BY episode_id ORDER BY min(started_at) DESC, episode_id LIMIT {_MOST}) USING (episode_id)
        WHERE {"started_at >= $2" if since else "$2 IS NULL"}
        GROUP BY episode_id ORDER BY min(started_at) DESC, episode_id""",
        run_id,
        since,
    )
