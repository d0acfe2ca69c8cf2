"""Steps of a run: mean rewards, the episodes of one with what their replies were, and what it trained."""

from __future__ import annotations

from typing import TypedDict

from ajet_sdk.protocols import TraceReader
from ajet_tools.trace.queries.base import USAGE_TOKENS, rows

Steps = dict[tuple[str, str | None], dict[int, float | None]]


def rewards_by_step(reader: TraceReader, run_id: str) -> Steps:
    """Split and decoding -> step -> mean reward of the episodes that succeeded, of finished episodes; by step."""
    sql = """
        WITH value AS (SELECT episode_id, sum(value * weight) AS reward FROM rewards GROUP BY ALL)
        SELECT split, decoding, step, avg(reward) FILTER (status = 'succeeded') AS reward
        FROM episodes LEFT JOIN value USING (episode_id) WHERE run_id = $1 AND NOT superseded
        GROUP BY ALL ORDER BY step"""
    by_step: Steps = {}
    for row in rows(reader, sql, run_id):
        by_step.setdefault((row["split"], row["decoding"]), {})[row["step"]] = row["reward"]
    return by_step


class StepEpisode(TypedDict):
    """A finished episode of a step."""

    episode_id: str
    task_id: str
    task: str
    group_id: str
    step: int
    split: str
    decoding: str | None
    status: str
    cause: str | None
    is_success: bool | None
    seconds: float
    reward: float | None
    """None where it failed."""
    output: str | None
    """JSON."""
    watched: dict[str, float]
    """Rewards of weight 0 by name."""
    calls: int
    """The calls of its agents, those without a reply too."""
    tokens: int | None
    """Sampled: of its calls' ids, else of their usage."""
    unread: int
    """Replies with a tool call that cannot be read, cut ones included."""
    cut_calls: int
    """Those of them that ended at the maximum length."""
    cut: int
    """Replies that ended at the maximum length."""
    tool_replies: int
    splits: int
    """Calls with ids that extend no earlier one, beyond the first of each agent."""


def step_episodes(
    reader: TraceReader, run_id: str, split: str | None, step: int | None, decoding: str | None, *, before: bool = False
) -> list[StepEpisode]:
    """The finished episodes of a split, a step and a decoding mode, of any where None; none that a resume rolled back.

    With `before` instead the last earlier attempts at the tasks of the step, each task's of one step.
    """
    of_kind = """run_id = $1 AND NOT superseded AND ($2::VARCHAR IS NULL OR split = $2)
        AND ($4::VARCHAR IS NULL OR decoding = $4)"""
    chosen = f"SELECT * FROM episodes WHERE {of_kind} AND ($3::INTEGER IS NULL OR step = $3)"
    if before:
        chosen = f"""
            SELECT * FROM episodes WHERE {of_kind} AND step < $3 AND task_id IN (SELECT task_id FROM ({chosen}))
            QUALIFY step = max(step) OVER (PARTITION BY task_id)"""
    listed = rows(
        reader,
        f"""
        WITH chosen AS ({chosen}),
        value AS (
            SELECT episode_id, sum(value * weight) AS reward,
              list({{'name': name, 'value': value}}) FILTER (weight = 0) AS watched
            FROM rewards WHERE episode_id IN (SELECT episode_id FROM chosen) GROUP BY ALL),
        called AS (
            SELECT episode_id, count(*) AS calls, coalesce(sum(len(output_ids)), {USAGE_TOKENS})::BIGINT AS tokens,
              count(*) FILTER (response->>'$.choices[0].unread_tool_call' = 'true') AS unread,
              count(*) FILTER (response->>'$.choices[0].unread_tool_call' = 'true' AND finish_reason = 'length')
                AS cut_calls,
              count(*) FILTER (finish_reason = 'length') AS cut,
              count(*) FILTER (json_array_length(response->'$.choices[0].message.tool_calls') > 0) AS tool_replies,
              count(*) FILTER (extends_call_id IS NULL AND output_ids IS NOT NULL)
                - count(DISTINCT agent) FILTER (output_ids IS NOT NULL) AS splits
            FROM calls WHERE phase = 'rollout' AND episode_id IN (SELECT episode_id FROM chosen) GROUP BY ALL)
        SELECT episode_id, task_id, coalesce(task->>'$.main_query', task_id) AS task, group_id, step, split, decoding,
          status, cause, is_success, epoch(ended_at - started_at) AS seconds, output, watched,
          coalesce(calls, 0) AS calls, tokens, coalesce(unread, 0) AS unread,
          coalesce(cut_calls, 0) AS cut_calls, coalesce(cut, 0) AS cut,
          coalesce(tool_replies, 0) AS tool_replies, greatest(coalesce(splits, 0), 0) AS splits,
          CASE WHEN status = 'succeeded' THEN reward END AS reward
        FROM chosen LEFT JOIN value USING (episode_id) LEFT JOIN called USING (episode_id)
        ORDER BY started_at, episode_id""",
        run_id,
        split,
        step,
        decoding,
    )
    return [row | {"watched": {entry["name"]: entry["value"] for entry in row["watched"] or ()}} for row in listed]


class TrainedCall(TypedDict):
    """A call that a step trained on."""

    episode_id: str
    task_id: str
    advantage: float
    """Mean over its trained tokens."""
    response: str
    """JSON."""
    asked: str | None
    """The messages that its prompt adds to an earlier call's, as JSON."""


def trained_calls(reader: TraceReader, run_id: str, step: int) -> list[TrainedCall]:
    """The calls that a step trained on, with what was sampled; nothing where the trainer recorded no advantages."""
    return rows(
        reader,
        """
        WITH pushed AS (
            SELECT call_id, episode_id, list_avg(list_filter(advantages, lambda a: isfinite(a))) AS advantage
            FROM trained WHERE run_id = $1 AND step = $2)
        SELECT episode_id, task_id, advantage, response, messages_suffix AS asked
        FROM pushed JOIN calls USING (call_id, episode_id) JOIN episodes USING (episode_id)
        WHERE advantage IS NOT NULL""",
        run_id,
        step,
    )
