"""What people said of an episode."""

from __future__ import annotations

from ajet_sdk.protocols import TraceReader
from ajet_tools.trace.queries.rows import Row, rows

__all__ = ["feedback_rows"]


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
