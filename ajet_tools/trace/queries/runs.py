"""Runs: status, metrics and ledger, and panels of metric curves, thinned to the width of the
screen."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from operator import itemgetter
from typing import Literal, TypedDict

from ajet_sdk.protocols import TraceReader
from ajet_sdk.trace.counted import COUNTED
from ajet_sdk.types import OUTCOMES
from ajet_tools.text.clean import one_line
from ajet_tools.trace.queries.base import USAGE_TOKENS, rows
from ajet_tools.trace.queries.filters import Filter

REWARDS: dict[str, str] = {
    "last_train": "mean reward of the last training step",
    "last_val": "mean reward of the last validation, sampled attempts",
    "last_greedy": "mean reward of the last validation, greedy attempts",
    "last_trial": "mean reward of the last step's trials of new tasks",
    "run_mean": "mean reward of the run",
}
"""Descriptions of mean rewards; `run_mean` is for runs without training, or whose episodes name no
decoding mode."""


class FailureCount(TypedDict):
    """Number of episodes that failed with a cause."""

    cause: str
    episodes: int


class RunOverview(TypedDict):
    """A run in a list of runs."""

    run_id: str
    name: str
    backbone: str
    status: str
    started_at: datetime
    ended_at: datetime | None
    error: str | None
    episodes: int
    unsound: int
    """Episodes with a status other than succeeded."""
    last_step: int | None
    last_train: float | None
    """Mean rewards, see `REWARDS`: as logged by the run, or else computed from its episodes."""
    last_val: float | None
    last_greedy: float | None
    last_trial: float | None
    run_mean: float | None
    tokens: int | None
    """Sampled tokens."""
    cpu_seconds: float | None
    """Processor time of the training process; None if none is recorded."""
    causes: list[FailureCount]
    """Causes of failures, most frequent first."""
    rewards: list[float]
    """Mean rewards of the split `reward_of`, by step."""
    reward_of: str | None
    """Training if there are any rewards, else validation, else greedy validation."""
    last_at: datetime | None
    """Time of the last finished episode or logged step."""
    total_steps: int | None
    """None without training, or if the config has no limit."""


class MetricRow(TypedDict):
    """The last value of a metric."""

    name: str
    step: int
    value: float | None
    points: int


class _OfPart(TypedDict, total=False):
    step: int
    kind: str


LedgerPart = Literal["step", "kind"]


class LedgerTotal(_OfPart):
    """Ledger total of an outcome, for a run, a step or a kind of task."""

    outcome: str
    calls: int
    episodes: int
    tokens: int


class Failure(FailureCount):
    """Episodes of a run that failed with a cause."""

    status: str
    share: float
    """Share of all episodes of the run."""
    last_step: int
    example: str
    """Id of the last such episode."""
    error: str | None
    """Error of the example, at most 400 characters."""


def metrics(reader: TraceReader, run_id: str) -> list[MetricRow]:
    """Return the last value of each metric of a run."""
    return rows(
        reader,
        """
        SELECT name, max(step) AS step, arg_max(value, (step, "at")) AS value, count(*) AS points
        FROM metrics WHERE run_id = $1 GROUP BY name ORDER BY name""",
        run_id,
    )


_KIND = """
    SELECT e.episode_id, coalesce(
            e.task->'metadata'->>coalesce(r.config->>'$.ajet.swarm.kind_key', 'kind'),
            nullif(e.task->>'env_type', ''), '') AS kind
    FROM episodes e JOIN runs r USING (run_id)"""
"""The kind of each episode's task, as a swarm server names it."""


def ledger_totals(
    reader: TraceReader,
    run_id: str,
    filter: Filter | None = None,
    *,
    by: LedgerPart | None = None,
) -> list[LedgerTotal]:
    """Return calls and tokens by outcome, trained first, of a run or of the episodes that match a
    filter; also by step or by kind of task."""
    part = f"{by}, " if by else ""
    kinds = ""
    if by == "kind":
        kinds = f"LEFT JOIN ({_KIND}) kinds USING (episode_id)"
    fits = ""
    values = list[object]([run_id])
    if filter is not None:
        fits = (
            "AND episode_id IN (SELECT e.episode_id FROM episodes e WHERE e.run_id = ? AND"
            f" {filter.sql})"
        )
        values += [run_id, *filter.parameters]
    return rows(
        reader,
        f"""
        SELECT {part}outcome, count(DISTINCT call_id) AS calls, count(DISTINCT episode_id) AS episodes,
          sum(tokens)::BIGINT AS tokens
        FROM ledger {kinds} WHERE run_id = ? {fits} GROUP BY {part}outcome
        ORDER BY {part}list_position(?, outcome) DESC""",
        *values,
        list(OUTCOMES),
    )


def with_shares(totals: Sequence[LedgerTotal]) -> list[dict[str, object]]:
    """Return rows of a table, each with its share of all tokens."""
    tokens = sum(row["tokens"] for row in totals) or 1
    return [{**row, "share": f"{row['tokens'] / tokens:.1%}"} for row in totals]


def ledger_by_step(reader: TraceReader, run_id: str) -> dict[int, dict[str, float]]:
    """Return tokens by step, then outcome."""
    by_step: dict[int, dict[str, float]] = {}
    for row in ledger_totals(reader, run_id, by="step"):
        by_step.setdefault(row["step"], {})[row["outcome"]] = row["tokens"]
    return by_step


def overview(reader: TraceReader, run_id: str | None = None) -> list[RunOverview]:
    """Return all runs, newest first, or a single run."""
    listed: list[RunOverview] = rows(
        reader,
        f"""
        WITH ended AS (
            SELECT run_id, step, status, cause, ended_at, reward, split, decoding, superseded,
              split || CASE WHEN decoding = 'greedy' THEN ' greedy' ELSE '' END AS kind
            FROM episodes LEFT JOIN {COUNTED} counted USING (episode_id) WHERE $1::VARCHAR IS NULL OR run_id = $1),
        counted AS (
            SELECT run_id, count(*) AS episodes, count(*) FILTER (status <> 'succeeded') AS unsound,
              max(step) AS last_step, max(ended_at) AS last_episode
            FROM ended GROUP BY run_id),
        failed AS (
            SELECT run_id, coalesce(cause, status) AS cause, count(*) AS episodes FROM ended
            WHERE status <> 'succeeded' GROUP BY ALL),
        causes AS (
            SELECT run_id, list({{'cause': cause, 'episodes': episodes}} ORDER BY episodes DESC, cause) AS causes
            FROM failed GROUP BY run_id),
        rewarded AS (  -- of one kind: training, else validation, else greedy validation
            FROM ended WHERE reward IS NOT NULL AND kind IS DISTINCT FROM 'trial'
            QUALIFY kind = min(kind) OVER (PARTITION BY run_id)),
        by_step AS (SELECT run_id, kind, step, avg(reward) AS reward FROM rewarded GROUP BY ALL),
        own AS (SELECT run_id, kind, list(reward ORDER BY step) AS rewards FROM by_step GROUP BY run_id, kind),
        named AS (
            SELECT run_id, step, reward,
              CASE WHEN backbone IN ('debug', 'run', 'serve', 'trace') OR split = '' THEN 'run_mean'
                WHEN split IN ('train', 'trial') THEN 'last_' || split
                WHEN decoding IS NULL THEN 'run_mean'
                WHEN decoding = 'greedy' THEN 'last_greedy' ELSE 'last_val' END AS name
            FROM ended JOIN runs USING (run_id)
            WHERE reward IS NOT NULL AND NOT superseded
            QUALIFY name = 'run_mean' OR step = max(step) OVER (PARTITION BY run_id, name)),
        means AS (
            SELECT run_id, avg(reward) FILTER (name = 'last_train') AS train,
              avg(reward) FILTER (name = 'last_val') AS val,
              avg(reward) FILTER (name = 'last_greedy') AS greedy,
              avg(reward) FILTER (name = 'last_trial') AS trial,
              avg(reward) FILTER (name = 'run_mean') AS whole
            FROM named GROUP BY run_id),
        logged AS (
            SELECT run_id, name, step, arg_max(value, "at") AS value, max("at") AS logged_at FROM metrics
            WHERE ($1::VARCHAR IS NULL OR run_id = $1) 
              AND name IN ('train/reward', 'val/reward', 'val/greedy_reward') GROUP BY ALL),
        curves AS (
            SELECT run_id, list(value ORDER BY step) FILTER (name = 'train/reward') AS train,
              list(value ORDER BY step) FILTER (name = 'val/reward') AS val,
              max_by(value, step) FILTER (name = 'val/greedy_reward') AS greedy, max(logged_at) AS last_metric
            FROM logged GROUP BY run_id),
        booked AS (
            SELECT run_id, sum(tokens)::BIGINT AS tokens FROM ledger
            WHERE $1::VARCHAR IS NULL OR run_id = $1 GROUP BY run_id),
        spent AS (
            SELECT run_id, sum(value) AS cpu_seconds FROM (
                SELECT run_id, step, arg_max(value, "at") AS value FROM metrics
                WHERE name = 'time/cpu' AND ($1::VARCHAR IS NULL OR run_id = $1) GROUP BY ALL)
            GROUP BY run_id)
        SELECT run_id, name, backbone, status, started_at, ended_at, error, coalesce(episodes, 0) AS episodes,
          coalesce(unsound, 0) AS unsound, last_step,
          coalesce(curves.train[-1], means.train) AS last_train, coalesce(curves.val[-1], means.val) AS last_val,
          coalesce(curves.greedy, means.greedy) AS last_greedy, means.trial AS last_trial, means.whole AS run_mean,
          tokens, cpu_seconds, coalesce(causes, []) AS causes,
          coalesce(curves.train, curves.val, own.rewards, []) AS rewards,
          CASE WHEN curves.train IS NOT NULL THEN 'train' WHEN curves.val IS NOT NULL THEN 'val'
            ELSE kind END AS reward_of,
          greatest(last_episode, last_metric) AS last_at,
          CASE WHEN backbone NOT IN ('debug', 'serve', 'trace')
            THEN TRY_CAST(config->>'$.ajet.trainer_common.total_steps' AS INTEGER) END AS total_steps
        FROM runs LEFT JOIN counted USING (run_id) LEFT JOIN causes USING (run_id) LEFT JOIN curves USING (run_id)
          LEFT JOIN own USING (run_id) LEFT JOIN means USING (run_id) LEFT JOIN booked USING (run_id)
          LEFT JOIN spent USING (run_id)
        WHERE $1::VARCHAR IS NULL OR run_id = $1 ORDER BY started_at DESC, run_id""",
        run_id,
    )
    unbooked = [row["run_id"] for row in listed if row["tokens"] is None and row["episodes"]]
    if unbooked:
        sampled = _sampled(reader, unbooked)
        for row in listed:
            if row["tokens"] is None:
                row["tokens"] = sampled.get(row["run_id"])
    return listed


def steps_of(run: RunOverview) -> str:
    """Format the steps of a run: `12/60`, or `12` if the total is unknown."""
    if run["last_step"] is None:
        if run["total_steps"] is None:
            return ""
        return f"0/{run['total_steps']}"
    if run["total_steps"]:
        return f"{run['last_step']}/{run['total_steps']}"
    return str(run["last_step"])


def seconds_of(run: RunOverview, now: datetime) -> float | None:
    """Return the duration of a run: until its end, until now while running, or until its last event
    if it crashed."""
    end = run["ended_at"] or (now if run["status"] == "running" else run["last_at"])
    if end is None:
        return None
    return max(0.0, (end - run["started_at"]).total_seconds())


def quiet_seconds(run: RunOverview, now: datetime) -> float | None:
    """Return the time since a running run last finished an episode or logged a step; None for an
    ended run."""
    since = run["last_at"] or run["started_at"]
    if run["status"] == "running":
        return (now - since).total_seconds()
    return None


def failures_in_words(run: RunOverview, width: int = 80) -> str:
    """Format the causes of failures, most frequent first: `12 TimeoutError, 3 NoReward`."""
    return one_line(
        ", ".join(f"{cause['episodes']:,} {cause['cause']}" for cause in run["causes"]), width
    )


def _sampled(reader: TraceReader, run_ids: list[str]) -> dict[str, int]:
    """Count the sampled tokens of runs without a ledger, by ids or else by usage."""
    sql = """
        SELECT run_id, {tokens}::BIGINT AS tokens FROM calls JOIN episodes USING (episode_id)
        WHERE list_contains($1, run_id) GROUP BY run_id"""
    sampled: dict[str, int] = {}
    for tokens in ("sum(len(output_ids))", USAGE_TOKENS):  # reads replies only if ids are missing
        missing = [run_id for run_id in run_ids if run_id not in sampled]
        totals = []
        if missing:
            totals = rows(reader, sql.format(tokens=tokens), missing)
        sampled |= {row["run_id"]: row["tokens"] for row in totals if row["tokens"] is not None}
    return sampled


def failures(reader: TraceReader, run_id: str) -> list[Failure]:
    """Return the causes of failed episodes, most frequent first."""
    return rows(
        reader,
        """
        SELECT coalesce(cause, status) AS cause, status, count(*) AS episodes,
          count(*) / (SELECT count(*) FROM episodes WHERE run_id = $1) AS share, max(step) AS last_step,
          arg_max(episode_id, ended_at) AS example, left(arg_max(error, ended_at), 400) AS error
        FROM episodes WHERE run_id = $1 AND status <> 'succeeded' GROUP BY ALL ORDER BY episodes DESC, cause""",
        run_id,
    )


def metric_points(reader: TraceReader, run_id: str) -> dict[str, list[tuple[int, float]]]:
    """Return the values of each metric in order of steps; a step repeated after a resume has its
    last value."""
    table = reader.query(
        """
        SELECT name, step, arg_max(value, "at") AS value FROM metrics WHERE run_id = $1
        GROUP BY name, step ORDER BY name, step""",
        [run_id],
    )
    points: dict[str, list[tuple[int, float]]] = {}
    for name, step, value in zip(
        *(table[column].to_pylist() for column in ("name", "step", "value")), strict=True
    ):
        if value is not None and math.isfinite(value):
            points.setdefault(name, []).append((step, value))
    return points


def staleness(reader: TraceReader, run_id: str) -> list[tuple[int, float]]:
    """Return the mean number of updates by which calls are behind the newest call, by training
    step."""
    step_rows = rows(
        reader,
        """
        SELECT e.step, max(policy_version) - avg(policy_version) AS behind
        FROM calls JOIN episodes e USING (episode_id)
        WHERE e.run_id = $1 AND e.split = 'train' AND trainable AND policy_version IS NOT NULL
        GROUP BY e.step ORDER BY e.step""",
        run_id,
    )
    return [(row["step"], row["behind"]) for row in step_rows]


Points = Sequence[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class Curve:
    """A curve of a panel."""

    label: str
    points: Points

    @property
    def last(self) -> float | None:
        return self.points[-1][1] if self.points else None


@dataclass(frozen=True, slots=True)
class Panel:
    """Curves drawn in one chart."""

    title: str
    curves: tuple[Curve, ...]


_TOGETHER: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    ("reward", (("train", "train/reward"), ("val", "val/reward"), ("greedy", "val/greedy_reward"))),
    ("success", (("train", "train/solved_share"), ("val", "val/solved_share"))),
    ("loss", (("", "train/loss"),)),
    ("KL", (("sampler", "train/sampler_kl"), ("reference", "train/kl"))),
    ("entropy", (("", "train/entropy"),)),
    ("tokens per episode", (("", "tokens_per_episode"),)),
    (
        "tokens/s",
        (("trained", "train/tokens_per_second"), ("sampled", "train/sampled_tokens_per_second")),
    ),
    ("merge ratio", (("", "train/merge_ratio"),)),
    ("versions behind", (("", "staleness"),)),
    ("failed share", (("train", "train/failed_share"), ("val", "val/failed_share"))),
    ("calls per episode", (("train", "train/calls_per_episode"), ("val", "val/calls_per_episode"))),
    ("gradient norm", (("", "train/grad_norm"),)),
    (
        "trainer - sampler log-prob.",
        (("max", "train/logprob_gap_max"), ("mean", "train/logprob_gap_mean")),
    ),
    ("seconds", (("step", "time/step"), ("rollout", "time/rollout"))),
    ("dollars", (("", "cost/dollars"),)),
    (
        "tokens at the service",
        tuple(
            (name, f"cost/{name}_tokens") for name in ("prefilled", "cached", "sampled", "trained")
        ),
    ),
)
"""Titles with (label, metric) pairs; `panels` computes `tokens_per_episode` and `staleness`."""


def panels(reader: TraceReader, run_id: str) -> list[Panel]:
    """Return the panels with points; metrics without a group follow in separate panels."""
    points: dict[str, Points] = {**metric_points(reader, run_id)}
    episodes = dict(points.get("train/episodes", ()))
    sampled = points.get("train/tokens_sampled", ())
    points["tokens_per_episode"] = [
        (step, n / episodes[step]) for step, n in sampled if episodes.get(step)
    ]
    points["staleness"] = staleness(reader, run_id)
    placed = {name for _, lines in _TOGETHER for _, name in lines}
    result = [_panel(title, lines, points) for title, lines in _TOGETHER]
    result += [_panel(name, (("", name),), points) for name in sorted(points) if name not in placed]
    return [panel for panel in result if panel.curves]


_ALWAYS = ("reward", "success")
_LEAST = {"KL": 1e-5, "trainer - sampler log-prob.": 1e-4}
"""Rounding errors by panel; smaller values are noise."""


def is_constant(panel: Panel) -> bool:
    """Whether all curves are flat up to rounding; rewards and success never count as constant."""
    if panel.title in _ALWAYS or max(len(curve.points) for curve in panel.curves) < 2:
        return False
    least = _LEAST.get(panel.title, 0.0)
    for curve in panel.curves:
        values = [value for _, value in curve.points]
        if max(values) - min(values) > max(least, 1e-9 * abs(max(values))):
            return False
    return True


def _panel(title: str, lines: Sequence[tuple[str, str]], points: Mapping[str, Points]) -> Panel:
    return Panel(
        title, tuple(Curve(label, points[name]) for label, name in lines if points.get(name))
    )


def thin(panel: Panel, columns: int) -> Panel:
    """Reduce curves to two points per column, the minimum and maximum of each stretch, so that no
    spike is lost."""
    return replace(
        panel, curves=tuple(replace(c, points=_thin(c.points, columns)) for c in panel.curves)
    )


def _thin(points: Points, columns: int) -> Points:
    if len(points) <= 2 * columns:
        return points
    size = math.ceil(len(points) / max(1, columns))
    thinned: list[tuple[int, float]] = []
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        low = min(stretch, key=itemgetter(1))
        high = max(stretch, key=itemgetter(1))
        thinned += sorted({low, high})
    return thinned
