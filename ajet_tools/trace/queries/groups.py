"""The episodes that belong together: those of one group, which is one position of a task in a batch, or of a batch."""

from __future__ import annotations

from ajet_sdk.protocols import TraceReader
from ajet_tools.trace.queries.rows import rows

__all__ = ["attempts_of", "step_of"]


def attempts_of(reader: TraceReader, episode_id: str) -> list[str]:
    """The attempts of an episode's group, by attempt; itself alone where it has none.

    Those that a resume rolled back stand with each other, and not among those that took their place.
    """
    found = rows(
        reader,
        """
        SELECT e.episode_id FROM episodes e, (FROM episodes WHERE episode_id = $1) AS one
        WHERE e.run_id = one.run_id AND e.step = one.step AND e.split = one.split
          AND (e.group_id = one.group_id AND e.group_id <> '' AND e.superseded = one.superseded
               OR e.episode_id = $1)
        ORDER BY e.attempt, e.started_at, e.episode_id""",
        episode_id,
    )
    return [row["episode_id"] for row in found] or [episode_id]


def step_of(reader: TraceReader, episode_id: str) -> list[str]:
    """The episodes of an episode's step, of the same split; of those that a resume rolled back as `attempts_of`."""
    found = rows(
        reader,
        """
        SELECT e.episode_id FROM episodes e, (FROM episodes WHERE episode_id = $1) AS one
        WHERE e.run_id = one.run_id AND e.step = one.step AND e.split = one.split AND e.superseded = one.superseded
        ORDER BY e.started_at, e.episode_id""",
        episode_id,
    )
    return [row["episode_id"] for row in found] or [episode_id]
