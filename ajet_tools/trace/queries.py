"""Every SQL statement that the tools ask of a trace, as functions of a reader."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ajet_sdk.errors import QueryError
from ajet_sdk.protocols import TraceReader

__all__ = [
    "Found",
    "call_row",
    "call_rows",
    "episode_ids",
    "find",
    "find_run",
    "latest_episodes",
    "ledger_of_episode",
    "ledger_totals",
    "metrics",
    "run_rows",
]

Kind = Literal["run", "episode", "call"]
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Found:
    """What an id, or the unique beginning of one, stands for."""

    kind: Kind
    id: str


def _rows(reader: TraceReader, sql: str, *parameters: Any) -> list[Row]:
    rows: list[Row] = reader.query(sql, list(parameters)).to_pylist()
    return rows


def run_rows(reader: TraceReader) -> list[Row]:
    """The runs, newest first, with how many episodes each has, how they ended and their mean reward."""
    return _rows(
        reader,
        """
        WITH value AS (SELECT episode_id, sum(value * weight) AS reward FROM rewards GROUP BY ALL),
        counted AS (
            SELECT run_id, count(*) AS episodes, count(*) FILTER (status <> 'succeeded') AS unsound,
              max(step) AS last_step, avg(reward) AS reward
            FROM episodes LEFT JOIN value USING (episode_id) GROUP BY run_id)
        SELECT run_id, name, backbone, status, started_at, ended_at, error, coalesce(episodes, 0) AS episodes,
          coalesce(unsound, 0) AS unsound, last_step, reward
        FROM runs LEFT JOIN counted USING (run_id) ORDER BY started_at DESC, run_id""",
    )


def latest_episodes(
    reader: TraceReader, run_id: str | None = None, *, limit: int = 20, status: str | None = None
) -> list[Row]:
    """The last episodes to end, newest first, with reward, number of calls and sampled tokens."""
    return _rows(
        reader,
        """
        WITH last AS (
            SELECT * FROM episodes WHERE ($1::VARCHAR IS NULL OR run_id = $1) AND ($2::VARCHAR IS NULL OR status = $2)
            ORDER BY ended_at DESC, episode_id LIMIT $3),
        value AS (
            SELECT episode_id, sum(value * weight) AS reward FROM rewards
            WHERE episode_id IN (SELECT episode_id FROM last) GROUP BY ALL),
        called AS (
            SELECT episode_id, count(*) AS calls, sum(len(output_ids))::BIGINT AS tokens FROM calls
            WHERE episode_id IN (SELECT episode_id FROM last) GROUP BY ALL)
        SELECT episode_id, run_id, step, split, task_id, group_id, attempt, status, cause, error, reward,
          coalesce(calls, 0) AS calls, tokens, round(epoch(ended_at - started_at), 2) AS seconds,
          started_at, ended_at, superseded
        FROM last LEFT JOIN value USING (episode_id) LEFT JOIN called USING (episode_id)
        ORDER BY ended_at DESC, episode_id""",
        run_id,
        status,
        limit,
    )


def find(reader: TraceReader, prefix: str, kind: Kind | None = None) -> Found:
    """The run, episode or call (or only a `kind`) whose id begins with `prefix`. Raises QueryError unless it is one."""
    found = _rows(
        reader,
        """
        SELECT DISTINCT kind, id FROM (
            SELECT 'run' AS kind, run_id AS id FROM runs WHERE starts_with(run_id, $1)
            UNION ALL SELECT 'episode', episode_id FROM episodes WHERE starts_with(episode_id, $1)
            UNION ALL SELECT 'episode', episode_id FROM calls WHERE starts_with(episode_id, $1)
            UNION ALL SELECT 'call', call_id FROM calls WHERE starts_with(call_id, $1))
        WHERE $2::VARCHAR IS NULL OR kind = $2 ORDER BY id <> $1, kind = 'call', id LIMIT 9""",
        prefix,
        kind,
    )
    exact = [row for row in found if row["id"] == prefix]
    rows = exact[:1] or found
    if len(rows) == 1:
        return Found(rows[0]["kind"], rows[0]["id"])
    if not rows:
        raise QueryError(f"nothing in this trace has an id that begins with {prefix!r}; `ajet trace ls` lists them")
    several = ", ".join(f"{row['kind']} {row['id']}" for row in rows[:8])
    raise QueryError(f"{prefix!r} begins more than one id: {several}{' and more' if len(rows) > 8 else ''}")


def find_run(reader: TraceReader, prefix: str | None) -> str:
    """The run whose id begins with `prefix`, the newest where None. Raises QueryError where there is none."""
    rows = _rows(
        reader,
        "SELECT run_id FROM runs WHERE starts_with(run_id, $1) ORDER BY started_at DESC LIMIT 9",
        prefix or "",
    )
    ids: list[str] = [row["run_id"] for row in rows]
    if not ids:
        raise QueryError(f"there is no run {prefix!r} in this trace" if prefix else "there is no run in this trace")
    if prefix and len(ids) > 1 and prefix not in ids:
        raise QueryError(f"{prefix!r} begins more than one run: {', '.join(ids[:8])}")
    return prefix if prefix in ids else ids[0]


def call_row(reader: TraceReader, call_id: str) -> Row:
    """One call with its whole prompt and request, and what the ledger says of it."""
    rows = _rows(
        reader,
        """
        SELECT calls_full.*, (SELECT list(outcome || ': ' || tokens) FROM ledger l WHERE l.call_id = $1) AS ledger
        FROM calls_full WHERE call_id = $1""",
        call_id,
    )
    return rows[0]


def call_rows(reader: TraceReader, episode_id: str) -> list[Row]:
    """The calls of an episode in order of completion, each with only what its parent's messages have not."""
    return _rows(
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
    return _rows(
        reader,
        """
        SELECT l.call_id, l.outcome, l.tokens FROM ledger l LEFT JOIN calls c USING (call_id)
        WHERE l.episode_id = $1 ORDER BY c.index, l.outcome""",
        episode_id,
    )


def ledger_totals(reader: TraceReader, run_id: str, *, by_step: bool = False) -> list[Row]:
    """Tokens and calls of a run by outcome, and by step if asked."""
    step = "step, " if by_step else ""
    return _rows(
        reader,
        f"""
        SELECT {step}outcome, count(DISTINCT call_id) AS calls, count(DISTINCT episode_id) AS episodes,
          sum(tokens)::BIGINT AS tokens
        FROM ledger WHERE run_id = $1 GROUP BY {step}outcome ORDER BY {step}tokens DESC, outcome""",
        run_id,
    )


def metrics(reader: TraceReader, run_id: str) -> list[Row]:
    """The last value of each metric of a run."""
    return _rows(
        reader,
        """
        SELECT name, max(step) AS step, arg_max(value, (step, "at")) AS value, count(*) AS points
        FROM metrics WHERE run_id = $1 GROUP BY name ORDER BY name""",
        run_id,
    )


def episode_ids(reader: TraceReader, run_id: str, *, limit: int | None = None) -> Sequence[str]:
    """The episodes of a run that have calls, newest first; those rolled back by a resume are left out."""
    rows = _rows(
        reader,
        """
        SELECT episode_id FROM episodes WHERE run_id = $1 AND NOT superseded
          AND episode_id IN (SELECT episode_id FROM calls) ORDER BY ended_at DESC, episode_id LIMIT $2""",
        run_id,
        limit if limit is not None else 1 << 60,
    )
    return [row["episode_id"] for row in rows]
