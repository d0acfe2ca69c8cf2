"""The calls of an episode, its ledger, rewards and feedback."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TypedDict

from ajet_sdk.protocols import TraceReader
from ajet_sdk.trace.schema import WHOLE_CALLS
from ajet_tools.trace.queries.base import episode_of_call, rows


class CallRow(TypedDict):
    """One call with its whole prompt and request. `request`, `response`, `messages`, `sampling` are JSON texts."""

    call_id: str
    index: int
    agent: str
    target_tag: str
    trainable: bool
    model: str
    policy_version: int | None
    request: str
    response: str
    finish_reason: str | None
    phase: str
    error: str | None
    parent_call_id: str | None
    prefix_messages: int | None
    episode_id: str
    messages: str | None
    prompt_ids: list[int] | None
    output_ids: list[int] | None
    logprobs: list[float] | None
    started_at: datetime
    ended_at: datetime
    request_id: str
    sampling: str
    prefix_len: int | None
    extends_call_id: str | None
    cut_tokens: int | None
    ledger: list[str] | None
    """`outcome: tokens` of each of its entries."""


class LedgerRow(TypedDict):
    """An entry of the ledger."""

    call_id: str
    outcome: str
    tokens: int


class EpisodeRow(TypedDict):
    """An episode that has ended. `task`, `output`, `metrics` and `events` are JSON texts."""

    episode_id: str
    run_id: str
    group_id: str
    attempt: int
    step: int
    split: str
    task_id: str
    task: str
    output: str | None
    status: str
    error: str | None
    cause: str | None
    infrastructure: bool
    is_success: bool | None
    metrics: str
    started_at: datetime
    ended_at: datetime
    superseded: bool
    decoding: str | None
    events: str | None
    seconds: float


class RewardRow(TypedDict):
    """A reward as its judge gave it."""

    name: str
    value: float
    weight: float
    reason: str | None
    agent: str | None
    call_id: str | None


class FeedbackRow(TypedDict):
    """A person's feedback on an episode or a call."""

    feedback_id: str
    call_id: str | None
    author: str
    score: float | None
    comment: str | None
    correction: str | None
    at: datetime


class _EndPulse(TypedDict, total=False):
    booked: int
    """Ledger entries."""
    attempts: int
    """Of its group."""


class Pulse(_EndPulse):
    """Numbers of rows of an episode, two of them only once it has ended. They differ where anything of it does."""

    calls: int
    feedback: int
    running: bool
    """The episode has not ended, and a run is going on."""
    ended: int
    superseded: bool
    of: str | None
    """Its group."""


def call_row(reader: TraceReader, call_id: str) -> CallRow:
    """One call. Raises QueryError where there is none of that id."""
    sql = f"""
        WITH mine AS (SELECT * FROM calls WHERE episode_id = $2)
        SELECT whole.*, (SELECT list(outcome || ': ' || tokens) FROM ledger l WHERE l.call_id = $1) AS ledger
        FROM ({WHOLE_CALLS.format(calls="mine")}) whole WHERE call_id = $1"""
    matches: list[CallRow] = rows(reader, sql, call_id, episode_of_call(reader, call_id))
    return matches[0]


def ledger_of_episode(reader: TraceReader, episode_id: str) -> list[LedgerRow]:
    """The ledger entries of an episode, in the order of its calls."""
    return rows(
        reader,
        """
        SELECT l.call_id, l.outcome, l.tokens FROM ledger l LEFT JOIN calls c USING (call_id)
        WHERE l.episode_id = $1 ORDER BY c.index, l.outcome""",
        episode_id,
    )


def attempt_rewards(reader: TraceReader, episode_ids: Sequence[str]) -> list[float | None]:
    """The reward of each of these episodes, in their order; None where it has none."""
    sql = (
        "SELECT episode_id, sum(value * weight) AS reward FROM rewards WHERE list_contains($1, episode_id) GROUP BY ALL"
    )
    known = {row["episode_id"]: row["reward"] for row in rows(reader, sql, list(episode_ids))}
    return [known.get(episode_id) for episode_id in episode_ids]


def mean_advantage(reader: TraceReader, episode_id: str) -> float | None:
    """Over the tokens of an episode that were trained; None where none was."""
    sql = "SELECT sum(list_sum(advantages)) / sum(len(advantages)) AS mean FROM trained WHERE episode_id = $1"
    [row] = rows(reader, sql, episode_id)
    return None if row["mean"] is None else float(row["mean"])


def episode_row(reader: TraceReader, episode_id: str) -> EpisodeRow | None:
    """An episode; None while it runs."""
    matches = rows(
        reader,
        """
        SELECT *, round(epoch(ended_at - started_at), 2) AS seconds FROM episodes WHERE episode_id = $1
        ORDER BY ended_at DESC LIMIT 1""",
        episode_id,
    )
    return matches[0] if matches else None


def rewards_of(reader: TraceReader, episode_id: str) -> list[RewardRow]:
    """The rewards of an episode."""
    return rows(
        reader, "SELECT name, value, weight, reason, agent, call_id FROM rewards WHERE episode_id = $1", episode_id
    )


def feedback_of(reader: TraceReader, episode_id: str, call_id: str | None = None) -> list[FeedbackRow]:
    """The feedback on an episode and its calls, oldest first; only that on one call where it is named."""
    sql = """
        SELECT feedback_id, call_id, author, score, comment, correction, "at" FROM feedback
        WHERE episode_id = $1 AND ($2::VARCHAR IS NULL OR call_id = $2)
        ORDER BY "at", feedback_id"""
    return rows(reader, sql, episode_id, call_id)


def episode_pulse(reader: TraceReader, episode_id: str) -> Pulse:
    """Whether anything of an episode has changed, cheaply: ledger and group are read only once it has ended."""
    pulse: Pulse
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
    after: _EndPulse
    [after] = rows(
        reader,
        """
        SELECT (SELECT count(*) FROM ledger WHERE episode_id = $1) AS booked,
          (SELECT count(*) FROM episodes WHERE group_id = $2 AND group_id <> '') AS attempts""",
        episode_id,
        pulse["of"],
    )
    return {**pulse, **after, "running": False}
