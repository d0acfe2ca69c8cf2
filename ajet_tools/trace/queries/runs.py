"""Runs: how each goes, its metrics and its ledger."""

from __future__ import annotations

from ajet_sdk.protocols import TraceReader
from ajet_tools.trace.queries.rows import Row, rows

__all__ = ["ledger_totals", "metrics", "run_rows"]


def run_rows(reader: TraceReader) -> list[Row]:
    """The runs, newest first, with how many episodes each has, how they ended and their mean reward."""
    return rows(
        reader,
        """
        WITH value AS (SELECT episode_id, sum(value * weight) AS reward FROM rewards GROUP BY ALL),
        counted AS (
            SELECT run_id, count(*) AS episodes, count(*) FILTER (status <> 'succeeded') AS unsound,
              max(step) AS last_step, avg(reward) AS reward
            FROM episodes LEFT JOIN value USING (episode_id) GROUP BY run_id)
        SELECT run_id, name, backbone, status, started_at, ended_at, error, coalesce(episodes, 0) AS episodes,
          coalesce(unsound, 0) AS unsound, last_step, reward
        FROM runs LEFT JOIN counted USING (run_id) ORDER BY started_at DESC, run_id""",
    )


def metrics(reader: TraceReader, run_id: str) -> list[Row]:
    """The last value of each metric of a run."""
    return rows(
        reader,
        """
        SELECT name, max(step) AS step, arg_max(value, (step, "at")) AS value, count(*) AS points
        FROM metrics WHERE run_id = $1 GROUP BY name ORDER BY name""",
        run_id,
    )


def ledger_totals(reader: TraceReader, run_id: str, *, by_step: bool = False) -> list[Row]:
    """Tokens and calls of a run by outcome, and by step if asked."""
    step = "step, " if by_step else ""
    return rows(
        reader,
        f"""
        SELECT {step}outcome, count(DISTINCT call_id) AS calls, count(DISTINCT episode_id) AS episodes,
          sum(tokens)::BIGINT AS tokens
        FROM ledger WHERE run_id = $1 GROUP BY {step}outcome ORDER BY {step}tokens DESC, outcome""",
        run_id,
    )
