"""Judges whether a run improved, by its first and last validation, and gives reasons.

A difference counts if it exceeds two standard errors of both means, over the episode rewards of a
step.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypedDict

from ajet_sdk.protocols import TraceReader
from ajet_sdk.reporting.metrics import discarded, unstable
from ajet_sdk.trace.counted import COUNTED
from ajet_tools.text.clean import counted
from ajet_tools.trace.compare.advice import warning_signs
from ajet_tools.trace.compare.explain import explain
from ajet_tools.trace.compare.setup import judge_change, setup_changes
from ajet_tools.trace.queries.base import rows
from ajet_tools.trace.queries.episodes import rewards_by_step
from ajet_tools.trace.queries.runs import (
    RunOverview,
    failures_in_words,
    ledger_by_step,
    metric_points,
)

MOVED = ("learned", "learned?", "worse", "collapsed")
"""Verdicts of unfinished runs; others have their status instead."""
KINDS = ("validation", "greedy validation", "training")
"""Rewards to judge a run by: the first kind with two steps."""
_SURE = 2.0
"""Standard errors of a significant difference."""
_COLLAPSED = 0.1
"""A run collapsed if at most this share of the first reward is left."""
_UNTRAINED = ("debug", "run", "serve", "trace")
_FACTOR = 1.5
"""Least factor of a mentioned change of tokens or calls per episode."""
_DROPPED = ("worse", "collapsed")
_DECODINGS = {"validation": "sampled", "greedy validation": "greedy"}
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
        return (
            None
            if self.first is None or self.last is None
            else self.last["mean"] - self.first["mean"]
        )


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
    if run["backbone"] in _UNTRAINED:
        return Verdict("scored")
    if not kind:
        return Verdict("not trained" if trained == 0 else "trained" if trained else "scored")
    steps = points[kind]
    first, last, best = steps[0], steps[-1], max(steps, key=lambda point: point["mean"])
    gain, noise = (
        last["mean"] - first["mean"],
        _SURE * math.sqrt(first["square_error"] + last["square_error"]),
    )
    word = "no change"
    if trained == 0:
        word = "not trained"
    elif math.isinf(noise):  # a single episode
        word = "unclear"
    elif gain > noise:
        word = "learned?" if suspect else "learned"
    elif gain < -noise:
        word = "collapsed" if last["mean"] <= _COLLAPSED * first["mean"] else "worse"
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


def reasons(reader: TraceReader, run: RunOverview, verdict: Verdict) -> list[str]:
    """Return the reasons for a verdict, one sentence each, most important first."""
    history = {name: dict(points) for name, points in metric_points(reader, run["run_id"]).items()}
    by_step = ledger_by_step(reader, run["run_id"])
    texts = []
    if verdict.word in _DROPPED:
        texts += _cause_of_drop(reader, run["run_id"], verdict)
    if run["unsound"]:
        texts.append(
            f"{failures_in_words(run)} ({run['unsound']:,} of"
            f" {counted(run['episodes'], 'episode')})"
        )
    texts += warning_signs(history).values()
    without = [
        step for step, of in by_step.items() if of.get("zero_advantage") and not of.get("trained")
    ]
    if without:
        texts.append(
            f"{_steps(without)}: all attempts at a task had the same reward, so that nothing was"
            " trained"
        )
    if lost := discarded(sum(map(Counter, by_step.values()), Counter[str]())):
        texts.append(lost)
    texts += [*_moved(history), *unstable(history).values()]
    best, last = verdict.best, verdict.last
    if (
        best
        and last
        and best["mean"] - last["mean"]
        > _SURE * math.sqrt(best["square_error"] + last["square_error"])
    ):
        texts.append(f"{verdict.kind} was best at step {best['step']}: {best['mean']:.3f}")
    changed = _setup_changed(reader, run["run_id"], verdict)
    texts += changed
    if verdict.word == "collapsed" and history.get("train/lr") and not changed:
        texts.append(
            "try a lower trainer_common.optim.lr (steps had up to"
            f" {max(history['train/lr'].values()):.3g})"
        )
    return texts


def _cause_of_drop(reader: TraceReader, run_id: str, verdict: Verdict) -> list[str]:
    """Return the most likely causes of the largest drop between two steps, as one line."""
    kind = ("train" if verdict.kind == "training" else "val", _DECODINGS.get(verdict.kind))
    rewards = {
        step: reward
        for (split, decoding), steps in rewards_by_step(reader, run_id).items()
        if split == kind[0] and kind[1] in (None, decoding)
        for step, reward in steps.items()
        if reward is not None
    }
    drops = [(rewards[at] - rewards[before], at) for before, at in pairwise(sorted(rewards))]
    if not drops or min(drops)[0] >= 0:
        return []
    _, step = min(drops)
    changes = explain(reader, run_id, step).changes
    return [f"step {step}, {change.headline}" for change in changes if change.split == kind[0]]


def _setup_changed(reader: TraceReader, run_id: str, verdict: Verdict) -> list[str]:
    """Return what else changed between the best and the last step, so that the updates are not
    blamed for it."""
    best, last = verdict.best, verdict.last
    if not best or not last or best["step"] == last["step"]:
        return []
    texts: list[str] = []
    for split in ("train", "val"):
        judge = judge_change(reader, run_id, split, last["step"])
        if judge.is_evident:
            texts.append(
                f"the judge changed: {counted(judge.changed, 'equal answer')} got other rewards"
            )
        for finding in setup_changes(reader, run_id, split, None, best["step"], last["step"]):
            texts.append(f"changed between steps {best['step']} and {last['step']}: {finding.text}")
    return list(dict.fromkeys(texts))


def _steps(steps: Sequence[int]) -> str:
    """Format steps: `step 4`, `steps 2 to 8`, `5 of steps 2 to 12`."""
    first, last = min(steps), max(steps)
    if first == last:
        return f"step {first}"
    return (
        f"steps {first} to {last}"
        if last - first + 1 == len(steps)
        else f"{len(steps)} of steps {first} to {last}"
    )


def _moved(history: Mapping[str, Mapping[int, float]]) -> Iterator[str]:
    """Compare the lengths of episodes at the first and last training step."""
    sampled, episodes = history.get("train/tokens_sampled", {}), history.get("train/episodes", {})
    lengths = {
        step: value / episodes[step] for step, value in sampled.items() if episodes.get(step)
    }
    for about, values in (
        ("tokens of an episode", lengths),
        ("calls of an episode", history.get("train/calls_per_episode", {})),
    ):
        if len(values) > 1:
            a, b = values[min(values)], values[max(values)]
            if min(a, b) > 0 and max(a, b) >= _FACTOR * min(a, b):
                yield f"{about}: {a:.3g} → {b:.3g}"
