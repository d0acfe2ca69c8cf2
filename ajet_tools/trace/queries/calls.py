"""The calls of an episode."""

from __future__ import annotations

from ajet_sdk.protocols import TraceReader
from ajet_tools.trace.queries.rows import Row, rows

__all__ = ["call_row", "call_rows", "ledger_of_episode"]


def call_row(reader: TraceReader, call_id: str) -> Row:
    """One call with its whole prompt and request, and what the ledger says of it."""
    found = rows(
        reader,
        """
        SELECT calls_full.*, (SELECT list(outcome || ': ' || tokens) FROM ledger l WHERE l.call_id = $1) AS ledger
        FROM calls_full WHERE call_id = $1""",
        call_id,
    )
    return found[0]


def call_rows(reader: TraceReader, episode_id: str) -> list[Row]:
    """The calls of an episode in order of completion, each with only what its parent's messages have not."""
    return rows(
        reader,
        """
        SELECT call_id, index, agent, target_tag, trainable, model, policy_version, parent_call_id, prefix_messages,
          messages_suffix, request, response, prefix_len + len(prompt_suffix) AS prompt_tokens,
          len(output_ids) AS output_tokens, finish_reason, phase, error,
          round(epoch(ended_at - started_at), 2) AS seconds
        FROM calls WHERE episode_id = $1 ORDER BY index, started_at""",
        episode_id,
    )


def ledger_of_episode(reader: TraceReader, episode_id: str) -> list[Row]:
    """The ledger entries of an episode, in the order of its calls."""
    return rows(
        reader,
        """
        SELECT l.call_id, l.outcome, l.tokens FROM ledger l LEFT JOIN calls c USING (call_id)
        WHERE l.episode_id = $1 ORDER BY c.index, l.outcome""",
        episode_id,
    )
