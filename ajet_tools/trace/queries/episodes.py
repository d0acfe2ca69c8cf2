"""Episodes of a run, a group or a step, for exports and comparisons, and unfinished episodes."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TypedDict

from ajet_sdk.protocols import TraceReader
from ajet_sdk.trace.counted import COUNTED
from ajet_tools.trace.queries.base import USAGE_TOKENS, rows
from ajet_tools.trace.queries.filters import Filter


def episode_ids(reader: TraceReader, run_id: str, *, filter: Filter | None = None) -> Sequence[str]:
    """Return the ids of a run's episodes with calls that match a filter, newest first, without
    superseded ones."""
    fits, values = (filter.sql, filter.parameters) if filter else ("true", ())
    matches = rows(
        reader,
        f"""
        SELECT e.episode_id FROM episodes e WHERE e.run_id = ? AND NOT e.superseded AND {fits}
          AND e.episode_id IN (SELECT episode_id FROM calls) ORDER BY e.ended_at DESC, e.episode_id""",
        run_id,
        *values,
    )
    return [row["episode_id"] for row in matches]


def exported_ids(
    reader: TraceReader,
    run_id: str | None = None,
    split: str | None = None,
    *,
    rolled_back: bool = False,
) -> list[str]:
    """Return the ids of the episodes to export, oldest first.

    Args:
        run_id: restrict to a run.
        split: `train`, `val` or `trial`; None: `train` and `val`.
        rolled_back: include trials and superseded episodes, and without `run_id` also unfinished episodes with calls.
    """
    sql = """
        SELECT episode_id FROM episodes
        WHERE ($1::VARCHAR IS NULL OR run_id = $1) AND ($3 OR NOT superseded)
          AND CASE WHEN $2::VARCHAR IS NULL THEN $3 OR split IS DISTINCT FROM 'trial' ELSE split = $2 END
        ORDER BY started_at, episode_id"""
    ids = [row["episode_id"] for row in rows(reader, sql, run_id, split, rolled_back)]
    if rolled_back and run_id is None and split is None:
        sql = """
            SELECT episode_id, min(started_at) AS began FROM calls ANTI JOIN episodes USING (episode_id)
            GROUP BY episode_id ORDER BY began, episode_id"""
        ids += [row["episode_id"] for row in rows(reader, sql)]
    return ids


def attempts_of(reader: TraceReader, episode_id: str) -> list[str]:
    """Return the episodes of an episode's group, by attempt; only itself without a group.

    Superseded episodes and their replacements are never mixed.
    """
    group = "e.group_id = this.group_id AND e.group_id <> '' AND e.superseded = this.superseded"
    same = f"e.step = this.step AND ({group} OR e.episode_id = $1)"
    return _beside(reader, episode_id, same, "e.attempt, e.started_at") or [episode_id]


def compared_with(reader: TraceReader, episode_id: str) -> list[str]:
    """Return the attempts of an episode's group; without a group, itself and its task at other
    steps, newest first."""
    attempts = attempts_of(reader, episode_id)
    if len(attempts) > 1:
        return attempts
    same = """e.task.task_id = this.task.task_id AND e.decoding IS NOT DISTINCT FROM this.decoding
        AND NOT e.superseded AND e.episode_id <> $1"""
    return attempts + _beside(reader, episode_id, same, "e.step DESC, e.attempt")


def step_of(reader: TraceReader, episode_id: str) -> list[str]:
    """Return the episodes of an episode's step and split; superseded ones as in `attempts_of`."""
    same = "e.step = this.step AND e.superseded = this.superseded"
    return _beside(reader, episode_id, same, "e.started_at") or [episode_id]


def _beside(reader: TraceReader, episode_id: str, same: str, order: str) -> list[str]:
    """Return the episodes of the same run and split as `this` that satisfy a condition."""
    sql = f"""
        SELECT e.episode_id FROM episodes e, (FROM episodes WHERE episode_id = $1) AS this
        WHERE e.run_id = this.run_id AND e.split = this.split AND {same} ORDER BY {order}, e.episode_id"""
    return [row["episode_id"] for row in rows(reader, sql, episode_id)]


class ListedEpisode(TypedDict):
    """A row of a listing. In an unfinished episode, fields only known at its end are None."""

    episode_id: str
    run_id: str | None
    task_id: str | None
    task: str | None
    attempt: int | None
    group_id: str | None
    step: int | None
    split: str | None
    decoding: str | None
    status: str | None
    cause: str | None
    error: str | None
    reward: float | None
    calls: int
    turns: int
    """Calls of agents; `calls` includes those of judges."""
    agents: int
    tokens: int | None
    seconds: float
    started_at: datetime
    ended_at: datetime | None
    superseded: bool


class UnfinishedEpisode(ListedEpisode):
    """An episode with calls but no end."""

    of_all: int
    """Number of unfinished episodes, listed or not; the same in each row."""


def unended_rows(reader: TraceReader, run_id: str | None) -> list[UnfinishedEpisode]:
    """Return the last 1,000 unfinished episodes, newest first.

    Calls don't name their run: `run_id` selects the episodes that began after the start of the run.
    """
    sql = "SELECT min(started_at) AS at FROM runs WHERE run_id = $1"
    since = rows(reader, sql, run_id)[0]["at"] if run_id else None
    return rows(
        reader,
        f"""
        SELECT episode_id, $1::VARCHAR AS run_id, NULL AS task_id, NULL AS task, NULL AS attempt, NULL AS group_id,
          NULL AS step, NULL AS split,
          NULL AS decoding, NULL AS status, NULL AS cause, any_value(error) AS error, NULL AS reward,
          count(*) AS calls, count(*) FILTER (phase = 'rollout') AS turns, count(DISTINCT agent) AS agents,
          sum(len(output_ids))::BIGINT AS tokens, round(epoch(max(ended_at) - min(started_at)), 2) AS seconds,
          min(started_at) AS started_at, NULL AS ended_at, false AS superseded, any_value(of_all) AS of_all
        FROM calls JOIN (
          SELECT episode_id, count(*) OVER () AS of_all FROM calls ANTI JOIN episodes USING (episode_id)
          WHERE {"started_at >= $2" if since else "true"}
          GROUP BY episode_id ORDER BY min(started_at) DESC, episode_id LIMIT 1000) USING (episode_id)
        WHERE {"started_at >= $2" if since else "$2 IS NULL"}
        GROUP BY episode_id ORDER BY min(started_at) DESC, episode_id""",
        run_id,
        since,
    )


Steps = dict[tuple[str, str | None], dict[int, float | None]]


def rewards_by_step(reader: TraceReader, run_id: str) -> Steps:
    """Return the mean reward of the episodes that count by split and decoding, then step."""
    sql = f"""
        SELECT split, decoding, step, avg(reward) AS reward
        FROM episodes LEFT JOIN {COUNTED} counted USING (episode_id) WHERE run_id = $1 AND NOT superseded
        GROUP BY ALL ORDER BY step"""
    by_step: Steps = {}
    for row in rows(reader, sql, run_id):
        by_step.setdefault((row["split"], row["decoding"]), {})[row["step"]] = row["reward"]
    return by_step


class TaskTotals(TypedDict):
    """The attempts at a training task, from the start of a run to a step."""

    task: str
    solved: bool | None
    """Whether an attempt that counts earned more than 0, or was a success; None if no attempt
    counts."""
    tokens: int
    """Sampled tokens of all attempts, of calls with ids."""


def task_totals(reader: TraceReader, run_id: str, step: int) -> list[TaskTotals]:
    """Return the totals of each training task that has finished attempts, in the order of the
    ids."""
    sql = f"""
        WITH chosen AS (
            SELECT episode_id, task_id, task, is_success, reward
            FROM episodes JOIN {COUNTED} counted USING (episode_id)
            WHERE run_id = $1 AND NOT superseded AND split = 'train' AND step <= $2),
        sampled AS (
            SELECT episode_id, sum(len(output_ids))::BIGINT AS tokens FROM calls
            WHERE phase = 'rollout' AND episode_id IN (SELECT episode_id FROM chosen) GROUP BY episode_id)
        SELECT coalesce(any_value(task->>'$.main_query'), task_id) AS task,
          bool_or(coalesce(is_success, reward > 0)) AS solved, coalesce(sum(tokens), 0)::BIGINT AS tokens
        FROM chosen LEFT JOIN sampled USING (episode_id) GROUP BY task_id ORDER BY task_id"""
    return rows(reader, sql, run_id, step)


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
    """None for an episode that doesn't count."""
    output: str | None
    """JSON."""
    watched: dict[str, float]
    """Rewards of weight 0, by name."""
    calls: int
    """Calls of agents, with or without a reply."""
    tokens: int | None
    """Sampled tokens, from ids or else from usage."""
    unread: int
    """Replies with a tool call that cannot be parsed, truncated ones included."""
    cut_calls: int
    """Replies with a tool call truncated at the maximum length."""
    cut: int
    """Replies truncated at the maximum length."""
    tool_replies: int
    splits: int
    """Calls with ids that extend no earlier call, beyond the first call of each agent."""


def step_episodes(
    reader: TraceReader,
    run_id: str,
    split: str | None,
    step: int | None,
    decoding: str | None,
    *,
    before: bool = False,
) -> list[StepEpisode]:
    """Return the finished episodes of a split, step and decoding mode (None: any), without
    superseded ones.

    With `before`, return the latest earlier attempts at the tasks of the step instead, one step per
    task.
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
            SELECT episode_id,
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
          counted.reward
        FROM chosen LEFT JOIN value USING (episode_id) LEFT JOIN {COUNTED} counted USING (episode_id)
          LEFT JOIN called USING (episode_id)
        ORDER BY started_at, episode_id""",
        run_id,
        split,
        step,
        decoding,
    )
    return [
        row | {"watched": {entry["name"]: entry["value"] for entry in row["watched"] or ()}}
        for row in listed
    ]
