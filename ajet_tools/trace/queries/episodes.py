"""Episodes of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ajet_sdk.protocols import TraceReader
from ajet_tools.trace.queries.rows import Row, rows

if TYPE_CHECKING:
    from ajet_tools.trace.filters import Filter

__all__ = ["episode_ids", "ledger_of"]


def episode_ids(reader: TraceReader, run_id: str, *, filter: Filter | None = None) -> Sequence[str]:
    """The episodes of a run that have calls and fit a filter, newest first; without those that a resume rolled back."""
    fits, values = (filter.sql, filter.parameters) if filter else ("true", ())
    found = rows(
        reader,
        f"""
        SELECT e.episode_id FROM episodes e WHERE e.run_id = ? AND NOT e.superseded AND {fits}
          AND e.episode_id IN (SELECT episode_id FROM calls) ORDER BY e.ended_at DESC, e.episode_id""",
        run_id,
        *values,
    )
    return [row["episode_id"] for row in found]


def ledger_of(reader: TraceReader, run_id: str, filter: Filter, *, by_step: bool = False) -> list[Row]:
    """Tokens and calls by outcome, and by step if asked, of the episodes of a run that fit a filter."""
    step = "step, " if by_step else ""
    return rows(
        reader,
        f"""
        SELECT {step}outcome, count(DISTINCT call_id) AS calls, count(DISTINCT episode_id) AS episodes,
          sum(tokens)::BIGINT AS tokens
        FROM ledger WHERE run_id = ? AND episode_id IN (
          SELECT e.episode_id FROM episodes e WHERE e.run_id = ? AND {filter.sql})
        GROUP BY {step}outcome ORDER BY {step}tokens DESC, outcome""",
        run_id,
        run_id,
        *filter.parameters,
    )
