"""Runs: status, metrics, ledger, and the curves of metrics, grouped into panels and thinned to the screen's width."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from operator import itemgetter
from typing import TYPE_CHECKING, TypedDict

from ajet_sdk.protocols import TraceReader
from ajet_sdk.types import OUTCOMES
from ajet_tools.text.clean import one_line
from ajet_tools.trace.queries.base import USAGE_TOKENS, rows

if TYPE_CHECKING:
    from ajet_tools.trace.queries.filters import Filter

REWARDS: dict[str, str] = {
    "last_train": "mean reward of the last training step",
    "last_val": "mean reward of the last validation, sampled attempts",
    "last_greedy": "mean reward of the last validation, greedy attempts",
    "last_trial": "mean reward of the last step's trials of new tasks",
    "run_mean": "mean reward of the run",
}
"""Mean reward -> what it is the mean of; `run_mean` of runs that train nothing, or whose episodes name no decoding."""


class FailureCount(TypedDict):
    """Episodes that failed for one cause."""

    cause: str
    episodes: int


class RunOverview(TypedDict):
    """A run as lists of runs show it."""

    run_id: str
    name: str
    backbone: str
    status: str
    started_at: datetime
    ended_at: datetime | None
    error: str | None
    episodes: int
    unsound: int
    """Episodes that did not succeed."""
    last_step: int | None
    last_train: float | None
    """This and the next four: see `REWARDS`. What the run logged, else the mean of its episodes."""
    last_val: float | None
    last_greedy: float | None
    last_trial: float | None
    run_mean: float | None
    tokens: int | None
    """Sampled."""
    causes: list[FailureCount]
    """Of failures, the most frequent first."""
    rewards: list[float]
    """Mean reward by step, of `reward_of`."""
    reward_of: str | None
    """Training, else validation, else greedy validation."""
    last_at: datetime | None
    """When it last finished an episode or logged a step."""
    total_steps: int | None
    """None where the run trains nothing or its config doesn't say."""


class MetricRow(TypedDict):
    """The last value of a metric."""

    name: str
    step: int
    value: float | None
    points: int


class _OfStep(TypedDict, total=False):
    step: int


class LedgerTotal(_OfStep):
    """The ledger's total of an outcome, for a run or one of its steps."""

    outcome: str
    calls: int
    episodes: int
    tokens: int


class Failure(FailureCount):
    """Episodes of a run that failed for one cause."""

    status: str
    share: float
    """Of all episodes of the run."""
    last_step: int
    example: str
    """The last of these episodes."""
    error: str | None
    """That episode's, at most 400 characters."""


def metrics(reader: TraceReader, run_id: str) -> list[MetricRow]:
    """The last value of each metric of a run."""
    return rows(
        reader,
        """
        SELECT name, max(step) AS step, arg_max(value, (step, "at")) AS value, count(*) AS points
        FROM metrics WHERE run_id = $1 GROUP BY name ORDER BY name""",
        run_id,
    )


def ledger_totals(
    reader: TraceReader, run_id: str, filter: Filter | None = None, *, by_step: bool = False
) -> list[LedgerTotal]:
    """Tokens and calls by outcome, what was trained first, and by step if asked, of a run or the episodes that fit."""
    step = "step, " if by_step else ""
    fits, values = "", list[object]([run_id])
    if filter is not None:
        fits = f"AND episode_id IN (SELECT e.episode_id FROM episodes e WHERE e.run_id = ? AND {filter.sql})"
        values += [run_id, *filter.parameters]
    return rows(
        reader,
        f"""
        SELECT {step}outcome, count(DISTINCT call_id) AS calls, count(DISTINCT episode_id) AS episodes,
          sum(tokens)::BIGINT AS tokens
        FROM ledger WHERE run_id = ? {fits} GROUP BY {step}outcome
        ORDER BY {step}list_position(?, outcome) DESC""",
        *values,
        list(OUTCOMES),
    )


def ledger_by_step(reader: TraceReader, run_id: str) -> dict[int, dict[str, float]]:
    """Step -> outcome -> tokens of a run."""
    by_step: dict[int, dict[str, float]] = {}
    for row in ledger_totals(reader, run_id, by_step=True):
        by_step.setdefault(row["step"], {})[row["outcome"]] = row["tokens"]
    return by_step


def overview(reader: TraceReader, run_id: str | None = None) -> list[RunOverview]:
    """The runs, newest first; only `run_id` where it is given."""
    listed: list[RunOverview] = rows(
        reader,
        """
        WITH value AS (SELECT episode_id, sum(value * weight) AS reward FROM rewards GROUP BY ALL),
        ended AS (
            SELECT run_id, step, status, cause, ended_at, reward, split, decoding, superseded,
              split || CASE WHEN decoding = 'greedy' THEN ' greedy' ELSE '' END AS kind
            FROM episodes LEFT JOIN value USING (episode_id) WHERE $1::VARCHAR IS NULL OR run_id = $1),
        counted AS (
            SELECT run_id, count(*) AS episodes, count(*) FILTER (status <> 'succeeded') AS unsound,
              max(step) AS last_step, max(ended_at) AS last_episode
            FROM ended GROUP BY run_id),
        failed AS (
            SELECT run_id, coalesce(cause, status) AS cause, count(*) AS episodes FROM ended
            WHERE status <> 'succeeded' GROUP BY ALL),
        causes AS (
            SELECT run_id, list({'cause': cause, 'episodes': episodes} ORDER BY episodes DESC, cause) AS causes
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
            WHERE reward IS NOT NULL AND ended.status = 'succeeded' AND NOT superseded
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
            WHERE $1::VARCHAR IS NULL OR run_id = $1 GROUP BY run_id)
        SELECT run_id, name, backbone, status, started_at, ended_at, error, coalesce(episodes, 0) AS episodes,
          coalesce(unsound, 0) AS unsound, last_step,
          coalesce(curves.train[-1], means.train) AS last_train, coalesce(curves.val[-1], means.val) AS last_val,
          coalesce(curves.greedy, means.greedy) AS last_greedy, means.trial AS last_trial, means.whole AS run_mean,
          tokens, coalesce(causes, []) AS causes, coalesce(curves.train, curves.val, own.rewards, []) AS rewards,
          CASE WHEN curves.train IS NOT NULL THEN 'train' WHEN curves.val IS NOT NULL THEN 'val'
            ELSE kind END AS reward_of,
          greatest(last_episode, last_metric) AS last_at,
          CASE WHEN backbone NOT IN ('debug', 'serve', 'trace')
            THEN TRY_CAST(config->>'$.ajet.trainer_common.total_steps' AS INTEGER) END AS total_steps
        FROM runs LEFT JOIN counted USING (run_id) LEFT JOIN causes USING (run_id) LEFT JOIN curves USING (run_id)
          LEFT JOIN own USING (run_id) LEFT JOIN means USING (run_id) LEFT JOIN booked USING (run_id)
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
    """`12/60`, or `12` where the run's config does not say how many there will be."""
    if run["last_step"] is None:
        return "" if run["total_steps"] is None else f"0/{run['total_steps']}"
    return f"{run['last_step']}/{run['total_steps']}" if run["total_steps"] else str(run["last_step"])


def seconds_of(run: RunOverview, now: datetime) -> float | None:
    """How long a run took: to its end, to now while it runs, or to its last sign of life if it was cut off."""
    end = run["ended_at"] or (now if run["status"] == "running" else run["last_at"])
    return None if end is None else max(0.0, (end - run["started_at"]).total_seconds())


def quiet_seconds(run: RunOverview, now: datetime) -> float | None:
    """How long ago a running run last finished an episode or logged a step; None for one that has ended."""
    since = run["last_at"] or run["started_at"]
    return (now - since).total_seconds() if run["status"] == "running" else None


def failures_in_words(run: RunOverview, width: int = 80) -> str:
    """`12 TimeoutError, 3 NoReward`, the most frequent first."""
    return one_line(", ".join(f"{cause['episodes']:,} {cause['cause']}" for cause in run["causes"]), width)


def _sampled(reader: TraceReader, run_ids: list[str]) -> dict[str, int]:
    """Sampled tokens of runs without a ledger, by run: of ids, else by usage."""
    sql = """
        SELECT run_id, {tokens}::BIGINT AS tokens FROM calls JOIN episodes USING (episode_id)
        WHERE list_contains($1, run_id) GROUP BY run_id"""
    sampled: dict[str, int] = {}
    for tokens in ("sum(len(output_ids))", USAGE_TOKENS):  # replies are read only where ids are missing
        missing = [run_id for run_id in run_ids if run_id not in sampled]
        totals = rows(reader, sql.format(tokens=tokens), missing) if missing else []
        sampled |= {row["run_id"]: row["tokens"] for row in totals if row["tokens"] is not None}
    return sampled


def failures(reader: TraceReader, run_id: str) -> list[Failure]:
    """Why episodes of a run failed, the most frequent cause first."""
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
    """Every metric of a run by step, oldest first; a step that was taken again after a resume counts once, the last."""
    table = reader.query(
        """
        SELECT name, step, arg_max(value, "at") AS value FROM metrics WHERE run_id = $1
        GROUP BY name, step ORDER BY name, step""",
        [run_id],
    )
    points: dict[str, list[tuple[int, float]]] = {}
    for name, step, value in zip(*(table[column].to_pylist() for column in ("name", "step", "value")), strict=True):
        if value is not None and math.isfinite(value):
            points.setdefault(name, []).append((step, value))
    return points


def staleness(reader: TraceReader, run_id: str) -> list[tuple[int, float]]:
    """By training step, how many updates its calls are behind the newest call of the step, on average."""
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
    """One curve of a panel."""

    label: str
    points: Points

    @property
    def last(self) -> float | None:
        return self.points[-1][1] if self.points else None


@dataclass(frozen=True, slots=True)
class Panel:
    """Curves that are drawn together."""

    title: str
    curves: tuple[Curve, ...]


_TOGETHER: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    ("reward", (("train", "train/reward"), ("val", "val/reward"), ("greedy", "val/greedy_reward"))),
    ("success", (("train", "train/solved_share"), ("val", "val/solved_share"))),
    ("loss", (("", "train/loss"),)),
    ("KL", (("sampler", "train/sampler_kl"), ("reference", "train/kl"))),
    ("entropy", (("", "train/entropy"),)),
    ("tokens per episode", (("", "tokens_per_episode"),)),
    ("tokens/s", (("trained", "train/tokens_per_second"), ("sampled", "train/sampled_tokens_per_second"))),
    ("merge ratio", (("", "train/merge_ratio"),)),
    ("versions behind", (("", "staleness"),)),
    ("failed share", (("train", "train/failed_share"), ("val", "val/failed_share"))),
    ("calls per episode", (("train", "train/calls_per_episode"), ("val", "val/calls_per_episode"))),
    ("gradient norm", (("", "train/grad_norm"),)),
    ("trainer - sampler log-prob.", (("max", "train/logprob_gap_max"), ("mean", "train/logprob_gap_mean"))),
    ("seconds", (("step", "time/step"), ("rollout", "time/rollout"))),
    ("dollars", (("", "cost/dollars"),)),
    (
        "tokens at the service",
        tuple((name, f"cost/{name}_tokens") for name in ("prefilled", "cached", "sampled", "trained")),
    ),
)
"""Title -> (label, metric); two are worked out here: `tokens_per_episode` and `staleness`."""


def panels(reader: TraceReader, run_id: str) -> list[Panel]:
    """The panels of a run that have points; metrics in no group follow in panels of their own."""
    points: dict[str, Points] = {**metric_points(reader, run_id)}
    points["tokens_per_episode"] = _ratio(points.get("train/tokens_sampled", ()), points.get("train/episodes", ()))
    points["staleness"] = staleness(reader, run_id)
    placed = {name for _, lines in _TOGETHER for _, name in lines}
    result = [_panel(title, lines, points) for title, lines in _TOGETHER]
    result += [_panel(name, (("", name),), points) for name in sorted(points) if name not in placed]
    return [panel for panel in result if panel.curves]


_ALWAYS = ("reward", "success")
_LEAST = {"KL": 1e-5, "trainer - sampler log-prob.": 1e-4}
"""Panel -> values below it are rounding."""


def is_constant(panel: Panel) -> bool:
    """Whether its curves are flat, or nothing but rounding: an outcome that never changes is still worth a look."""
    if panel.title in _ALWAYS or max(len(curve.points) for curve in panel.curves) < 2:
        return False
    least = _LEAST.get(panel.title, 0.0)
    spans = [[value for _, value in curve.points] for curve in panel.curves]
    return all(max(values) - min(values) <= max(least, 1e-9 * abs(max(values))) for values in spans)


def _panel(title: str, lines: Sequence[tuple[str, str]], points: Mapping[str, Points]) -> Panel:
    return Panel(title, tuple(Curve(label, points[name]) for label, name in lines if points.get(name)))


def _ratio(above: Points, below: Points) -> Points:
    by_step = dict(below)
    return [(step, value / by_step[step]) for step, value in above if by_step.get(step)]


def thin(panel: Panel, columns: int) -> Panel:
    """The panel with at most two points a column: of each stretch the lowest and the highest, so no spike is lost."""
    return replace(panel, curves=tuple(replace(c, points=_thin(c.points, columns)) for c in panel.curves))


def _thin(points: Points, columns: int) -> Points:
    if len(points) <= 2 * columns:
        return points
    size = math.ceil(len(points) / max(1, columns))
    thinned: list[tuple[int, float]] = []
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        low, high = min(stretch, key=itemgetter(1)), max(stretch, key=itemgetter(1))
        thinned += sorted({low, high})
    return thinned
