"""What two runs are compared by: one row for each of their episodes."""

from __future__ import annotations

from ajet_sdk.protocols import TraceReader
from ajet_tools.trace.queries.rows import Row, rows

__all__ = ["episode_facts", "last_steps"]


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
