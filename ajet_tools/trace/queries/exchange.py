"""Which episodes an export writes."""

from __future__ import annotations

from ajet_sdk.protocols import TraceReader
from ajet_tools.trace.queries.rows import rows

__all__ = ["exported_ids"]


def exported_ids(
    reader: TraceReader, run_id: str | None = None, split: str | None = None, *, rolled_back: bool = False
) -> list[str]:
    """Ids of episodes, oldest first.

    Args:
        run_id: of one run; None: of all.
        split: `train` or `val`; None: both.
        rolled_back: also those that a resume rolled back; and, of all runs, those that have calls and have not ended.
    """
    sql = """
        SELECT episode_id FROM episodes
        WHERE ($1::VARCHAR IS NULL OR run_id = $1) AND ($2::VARCHAR IS NULL OR split = $2) AND ($3 OR NOT superseded)
        ORDER BY started_at, episode_id"""
    found = [row["episode_id"] for row in rows(reader, sql, run_id, split, rolled_back)]
    if rolled_back and run_id is None and split is None:
        sql = """
            SELECT episode_id, min(started_at) AS began FROM calls ANTI JOIN episodes USING (episode_id)
            GROUP BY episode_id ORDER BY began, episode_id"""
        found += [row["episode_id"] for row in rows(reader, sql)]
    return found
