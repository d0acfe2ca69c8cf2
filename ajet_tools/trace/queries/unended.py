"""Episodes that have calls and no end: they run, or were cut off."""

from __future__ import annotations

from ajet_sdk.protocols import TraceReader
from ajet_tools.trace.queries.rows import Row, rows

__all__ = ["unended_rows"]

_MOST = 1000


def unended_rows(reader: TraceReader, run_id: str | None) -> list[Row]:
    """The last 1,000 of them, newest first, with the columns of a listing: what is not known before the end is None.

    A call does not say of which run it is: with `run_id`, those that began after that run did.
    """
    return rows(
        reader,
        f"""
        SELECT episode_id, $1::VARCHAR AS run_id, NULL AS task_id, NULL AS task, NULL AS attempt, NULL AS group_id,
          NULL AS step, NULL AS split, NULL AS status, NULL AS cause, any_value(error) AS error, NULL AS reward,
          count(*) AS calls, count(*) FILTER (phase = 'rollout') AS turns, count(DISTINCT agent) AS agents,
          sum(len(output_ids))::BIGINT AS tokens, round(epoch(max(ended_at) - min(started_at)), 2) AS seconds,
          min(started_at) AS started_at, NULL AS ended_at, false AS superseded
        FROM calls c WHERE NOT EXISTS (SELECT 1 FROM episodes e WHERE e.episode_id = c.episode_id)
          AND ($1 IS NULL OR started_at >= (SELECT min(started_at) FROM runs WHERE run_id = $1))
        GROUP BY ALL ORDER BY min(started_at) DESC, episode_id LIMIT {_MOST}""",
        run_id,
    )
