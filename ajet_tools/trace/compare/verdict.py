"""Judges whether a run improved, by its first and last validation.

A difference counts if it exceeds two standard errors of both means, over the episode rewards of a
step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypedDict

from ajet_sdk.protocols import TraceReader
from ajet_sdk.trace.counted import COUNTED
from ajet_tools.trace.compare.advice import warning_signs
from ajet_tools.trace.queries.base import rows
from ajet_tools.trace.queries.runs import RunOverview

MOVED = ("learned", "learned?", "worse", "collapsed")
"""Verdicts of unfinished runs; others have their status instead."""
KINDS = ("validation", "greedy validation", "training")
"""Rewards to judge a run by: the first kind with two steps."""
SURE = 2.0
"""Standard errors of a significant difference."""
_COLLAPSED = 0.1
"""A run collapsed if at most this share of the first reward is left."""
_UNTRAINED = ("debug", "run", "serve", "trace")
_SIGNS = ("train/reward", "train/answer_chars", "train/phrase_share")


class Point(TypedDict):
    """Mean reward of a step's episodes, and its squared standard error, infinite for a single
    episode."""

    step: int
    mean: float
    square_error: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """Verdict on a run, with the rewards behind it."""

    word: str
    """In MOVED, `no change`, `unclear`, `trained`, `not trained`, `scored`, `all failed`, or the
    status of a run that has not finished."""
    kind: str = ""
    """In KINDS; empty for a run without rewards at two steps."""
    first: Point | None = None
    last: Point | None = None
    best: Point | None = None

    @property
    def gain(self) -> float | None:
        if self.first is None or self.last is None:
            return None
        return self.last["mean"] - self.first["mean"]


def verdicts(reader: TraceReader, runs: Sequence[RunOverview]) -> dict[str, Verdict]:
    """Return the verdicts on runs, by id."""
    points = _points(reader, [run["run_id"] for run in runs])
    signs = _signs(reader, [run["run_id"] for run in runs])
    sql = (
        "SELECT run_id, coalesce(sum(tokens) FILTER (outcome = 'trained'), 0)::BIGINT AS n FROM"
        " ledger GROUP BY 1"
    )
    trained = {row["run_id"]: row["n"] for row in rows(reader, sql)}
    by_run = {}
    for run in runs:
        run_id = run["run_id"]
        verdict = _verdict(run, points.get(run_id, {}), trained.get(run_id), run_id in signs)
        unfinished = run["status"] != "finished" and verdict.word not in MOVED
        by_run[run_id] = replace(verdict, word=run["status"]) if unfinished else verdict
    return by_run


def _verdict(
    run: RunOverview, points: Mapping[str, list[Point]], trained: int | None, suspect: bool
) -> Verdict:
    kind = next((kind for kind in KINDS if len(points.get(kind, ())) > 1), "")
    if run["episodes"] and run["unsound"] == run["episodes"]:
        return Verdict("all failed")
    # their steps are no updates
    if run["backbone"] in _UNTRAINED:
        return Verdict("scored")
    if not kind:
        return Verdict("not trained" if trained == 0 else "trained" if trained else "scored")
    steps = points[kind]
    first = steps[0]
    last = steps[-1]
    best = max(steps, key=lambda point: point["mean"])
    gain = last["mean"] - first["mean"]
    noise = SURE * math.sqrt(first["square_error"] + last["square_error"])
    word = "no change"
    # whatever moved was not the training
    if trained == 0:
        word = "not trained"
    elif math.isinf(noise):  # a single episode
        word = "unclear"
    elif gain > noise:
        word = "learned?" if suspect else "learned"
    elif gain < -noise:
        if last["mean"] <= _COLLAPSED * first["mean"]:
            word = "collapsed"
        else:
            word = "worse"
    return Verdict(word, kind, first, last, best)


def _points(reader: TraceReader, run_ids: Sequence[str]) -> dict[str, dict[str, list[Point]]]:
    listed = rows(
        reader,
        f"""
        WITH logged AS (  -- logged steps are complete
            SELECT run_id, split_part(name, '/', 1) AS split, max(step) AS upto FROM metrics
            WHERE name IN ('train/reward', 'val/reward', 'val/greedy_reward') GROUP BY ALL),
        steps AS (
            SELECT run_id, step, avg(reward) AS mean, coalesce(var_samp(reward) / count(*), 'Infinity') AS square_error,
              CASE WHEN split = 'train' THEN 'training' WHEN decoding = 'greedy' THEN 'greedy validation'
                ELSE 'validation' END AS kind
            FROM episodes JOIN {COUNTED} counted USING (episode_id) JOIN runs USING (run_id)
              LEFT JOIN logged USING (run_id, split)
            WHERE step <= coalesce(upto, step) AND reward IS NOT NULL AND NOT superseded
              AND (split = 'val' OR coalesce(config->>'$.ajet.trainer_common.algorithm.adv_estimator', '') NOT IN
                ('sft', 'dpo'))  -- their training rewards are those of the dataset
              AND split IN ('train', 'val') AND list_contains($1, run_id)
            GROUP BY ALL)
        SELECT run_id, kind, list({{'step': step, 'mean': mean, 'square_error': square_error}} ORDER BY step) AS points
        FROM steps GROUP BY ALL""",
        run_ids,
    )
    points: dict[str, dict[str, list[Point]]] = {}
    for row in listed:
        points.setdefault(row["run_id"], {})[row["kind"]] = row["points"]
    return points


def _signs(reader: TraceReader, run_ids: Sequence[str]) -> set[str]:
    """Return the ids of runs with signs of reward hacking."""
    history: dict[str, dict[str, dict[int, float]]] = {}
    for row in rows(
        reader,
        """
        SELECT run_id, name, step, arg_max(value, "at") AS value FROM metrics
        WHERE list_contains($1, run_id) AND (list_contains($2, name) OR starts_with(name, 'train/held_out_'))
        GROUP BY ALL HAVING value IS NOT NULL""",
        run_ids,
        _SIGNS,
    ):
        history.setdefault(row["run_id"], {}).setdefault(row["name"], {})[row["step"]] = row[
            "value"
        ]
    return {run_id for run_id, of in history.items() if warning_signs(of)}
