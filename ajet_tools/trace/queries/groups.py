"""The attempts that belong together: those of one group, which is one position of a task in a batch."""

from __future__ import annotations

from ajet_sdk.protocols import TraceReader
from ajet_tools.trace.queries.rows import rows

__all__ = ["attempts_of"]


def attempts_of(reader: TraceReader, episode_id: str) -> list[str]:
    """The ids of all attempts of the group of an episode, in the order of attempts; itself alone where it has none."""
    found = rows(
        reader,
        """
        WITH own AS (SELECT run_id, group_id FROM episodes WHERE episode_id = $1)
        SELECT episode_id FROM episodes e, own
        WHERE e.run_id = own.run_id AND e.group_id = own.group_id AND own.group_id <> ''
        ORDER BY attempt, started_at, episode_id""",
        episode_id,
    )
    return [row["episode_id"] for row in found] or [episode_id]
