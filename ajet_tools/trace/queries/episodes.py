"""Episodes of a run."""

from __future__ import annotations

from collections.abc import Sequence

from ajet_sdk.protocols import TraceReader
from ajet_tools.trace.queries.rows import Row, rows

__all__ = ["episode_ids", "latest_episodes"]


def latest_episodes(
    reader: TraceReader, run_id: str | None = None, *, limit: int = 20, status: str | None = None
) -> list[Row]:
    """The last episodes to end, newest first, with reward, number of calls and sampled tokens."""
    return rows(
        reader,
        """
        WITH last AS (
            SELECT * FROM episodes WHERE ($1::VARCHAR IS NULL OR run_id = $1) AND ($2::VARCHAR IS NULL OR status = $2)
            ORDER BY ended_at DESC, episode_id LIMIT $3),
        value AS (
            SELECT episode_id, sum(value * weight) AS reward FROM rewards
            WHERE episode_id IN (SELECT episode_id FROM last) GROUP BY ALL),
        called AS (
            SELECT episode_id, count(*) AS calls, sum(len(output_ids))::BIGINT AS tokens FROM calls
            WHERE episode_id IN (SELECT episode_id FROM last) GROUP BY ALL)
        SELECT episode_id, run_id, step, split, task_id, group_id, attempt, status, cause, error, reward,
          coalesce(calls, 0) AS calls, tokens, round(epoch(ended_at - started_at), 2) AS seconds,
          started_at, ended_at, superseded
        FROM last LEFT JOIN value USING (episode_id) LEFT JOIN called USING (episode_id)
        ORDER BY ended_at DESC, episode_id""",
        run_id,
        status,
        limit,
    )


def episode_ids(reader: TraceReader, run_id: str, *, limit: int | None = None) -> Sequence[str]:
    """The episodes of a run that have calls, newest first; those rolled back by a resume are left out."""
    found = rows(
        reader,
        """
        SELECT episode_id FROM episodes WHERE run_id = $1 AND NOT superseded
          AND episode_id IN (SELECT episode_id FROM calls) ORDER BY ended_at DESC, episode_id LIMIT $2""",
        run_id,
        limit if limit is not None else 1 << 60,
    )
    return [row["episode_id"] for row in found]
