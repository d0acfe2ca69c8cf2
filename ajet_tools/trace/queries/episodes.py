"""Episodes of a run.

What two runs are compared by: one row for each of their episodes.

Which episodes an export writes.

What people said of an episode.

The episodes that belong together: those of one group, which is one position of a task in a batch, or of a batch.

Episodes that have calls and no end: they run, or were cut off.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ajet_sdk.protocols import TraceReader
from ajet_tools.trace.queries.base import Row, rows

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


def last_steps(reader: TraceReader, run_id: str) -> dict[tuple[str, str | None], int]:
    """The last step at which a run has finished episodes of a split and a decoding mode."""
    sql = """
        SELECT split, decoding, max(step) AS step FROM episodes WHERE run_id = $1 AND NOT superseded
        GROUP BY split, decoding"""
    return {(row["split"], row["decoding"]): row["step"] for row in rows(reader, sql, run_id)}


def episode_facts(
    reader: TraceReader, run_id: str, split: str | None, step: int | None, decoding: str | None = None
) -> list[Row]:
    """The finished episodes of a run, or those of a split, a step and a decoding mode.

    The reward is None where the episode failed. Episodes rolled back by a resume are left out.
    """
    return rows(
        reader,
        """
        WITH chosen AS (
            SELECT * FROM episodes WHERE run_id = $1 AND NOT superseded
              AND ($2::VARCHAR IS NULL OR split = $2) AND ($3::INTEGER IS NULL OR step = $3)
              AND ($4::VARCHAR IS NULL OR decoding = $4)),
        value AS (
            SELECT episode_id, sum(value * weight) AS reward FROM rewards
            WHERE episode_id IN (SELECT episode_id FROM chosen) GROUP BY ALL),
        called AS (
            SELECT episode_id, count(*) AS calls, sum(len(output_ids))::BIGINT AS tokens FROM calls
            WHERE phase = 'rollout' AND episode_id IN (SELECT episode_id FROM chosen) GROUP BY ALL)
        SELECT episode_id, task_id, split, decoding, status, cause, is_success, coalesce(calls, 0) AS calls, tokens,
          CASE WHEN status = 'succeeded' THEN reward END AS reward,
          epoch(ended_at - started_at) AS seconds
        FROM chosen LEFT JOIN value USING (episode_id) LEFT JOIN called USING (episode_id)
        ORDER BY started_at, episode_id""",
        run_id,
        split,
        step,
        decoding,
    )


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


def feedback_rows(reader: TraceReader, episode_id: str, call_id: str | None = None) -> list[Row]:
    """The feedback on an episode and its calls, newest first; only that on one call where it is named."""
    return rows(
        reader,
        """
        SELECT * FROM feedback WHERE episode_id = $1 AND ($2::VARCHAR IS NULL OR call_id = $2)
        ORDER BY "at" DESC, feedback_id""",
        episode_id,
        call_id,
    )


def attempts_of(reader: TraceReader, episode_id: str) -> list[str]:
    """The attempts of an episode's group, by attempt; itself alone where it has none.

    Those that a resume rolled back stand with each other, and not among those that took their place.
    """
    matches = rows(
        reader,
        """
        SELECT e.episode_id FROM episodes e, (FROM episodes WHERE episode_id = $1) AS one
        WHERE e.run_id = one.run_id AND e.step = one.step AND e.split = one.split
          AND (e.group_id = one.group_id AND e.group_id <> '' AND e.superseded = one.superseded
               OR e.episode_id = $1)
        ORDER BY e.attempt, e.started_at, e.episode_id""",
        episode_id,
    )
    return [row["episode_id"] for row in matches] or [episode_id]


def step_of(reader: TraceReader, episode_id: str) -> list[str]:
    """The episodes of an episode's step, of the same split; of those that a resume rolled back as `attempts_of`."""
    matches = rows(
        reader,
        """
        SELECT e.episode_id FROM episodes e, (FROM episodes WHERE episode_id = $1) AS one
        WHERE e.run_id = one.run_id AND e.step = one.step AND e.split = one.split AND e.superseded = one.superseded
        ORDER BY e.started_at, e.episode_id""",
        episode_id,
    )
    return [row["episode_id"] for row in matches] or [episode_id]


_MOST = 1000


def unended_rows(reader: TraceReader, run_id: str | None) -> list[Row]:
    """The last 1,000 of them, newest first, with the columns of a listing: what is not known before the end is None.

    `of_all` counts those that there are, the same in each row.
    A call does not say of which run it is: with `run_id`, those that began after that run did.
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
