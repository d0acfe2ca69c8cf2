"""The calls of an episode, and what was said and booked of them."""

from __future__ import annotations

from ajet_sdk.protocols import TraceReader
from ajet_sdk.trace.schema import WHOLE_CALLS
from ajet_tools.trace.queries.base import Row, episode_of_call, rows


def call_row(reader: TraceReader, call_id: str) -> Row:
    """One call with its whole prompt and request, and what the ledger says of it."""
    sql = f"""
        WITH mine AS (SELECT * FROM calls WHERE episode_id = $2)
        SELECT whole.*, (SELECT list(outcome || ': ' || tokens) FROM ledger l WHERE l.call_id = $1) AS ledger
        FROM ({WHOLE_CALLS.format(calls="mine")}) whole WHERE call_id = $1"""
    matches = rows(reader, sql, call_id, episode_of_call(reader, call_id))
    return matches[0]


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


def episode_row(reader: TraceReader, episode_id: str) -> Row | None:
    """An episode's own row; None while it runs."""
    matches = rows(
        reader,
        """
        SELECT *, round(epoch(ended_at - started_at), 2) AS seconds FROM episodes WHERE episode_id = $1
        ORDER BY ended_at DESC LIMIT 1""",
        episode_id,
    )
    return matches[0] if matches else None


def rewards_of(reader: TraceReader, episode_id: str) -> list[Row]:
    """The rewards of an episode as its judges gave them."""
    return rows(
        reader, "SELECT name, value, weight, reason, agent, call_id FROM rewards WHERE episode_id = $1", episode_id
    )


def feedback_of(reader: TraceReader, episode_id: str) -> list[Row]:
    """What people said of an episode and its calls, oldest first."""
    return rows(
        reader,
        """
        SELECT feedback_id, call_id, author, score, comment, correction, "at" FROM feedback WHERE episode_id = $1
        ORDER BY "at", feedback_id""",
        episode_id,
    )


def episode_pulse(reader: TraceReader, episode_id: str) -> Row:
    """What changes when anything of an episode does; and, before its end, whether a run is going on.

    An episode has calls only until it ends, and no new ones from then on: the other tables are looked at afterwards.
    """
    [pulse] = rows(
        reader,
        """
        SELECT (SELECT count(*) FROM calls WHERE episode_id = $1) AS calls,
          (SELECT count(*) FROM feedback WHERE episode_id = $1) AS feedback,
          (SELECT count(*) > 0 FROM runs WHERE status = 'running') AS running, ended.*
        FROM (SELECT count(*) AS ended, coalesce(bool_or(superseded), false) AS superseded, any_value(group_id) AS of
              FROM episodes WHERE episode_id = $1) ended""",
        episode_id,
    )
    if not pulse["ended"]:
        return pulse
    [after] = rows(
        reader,
        """
        SELECT (SELECT count(*) FROM ledger WHERE episode_id = $1) AS booked,
          (SELECT count(*) FROM episodes WHERE group_id = $2 AND group_id <> '') AS attempts""",
        episode_id,
        pulse["of"],
    )
    return {**pulse, **after, "running": False}
