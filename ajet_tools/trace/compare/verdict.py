"""Whether a run improved: the first and the last validation of each run, and what stands behind the difference.

A difference counts where it exceeds two standard errors of both means, each over the rewards of one step's episodes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypedDict

from ajet_sdk.protocols import TraceReader
from ajet_sdk.reporting.notices import discarded, unstable, warning_signs
from ajet_tools.text.clean import counted
from ajet_tools.trace.queries.base import rows
from ajet_tools.trace.queries.runs import RunOverview, failures_in_words, ledger_by_step, metric_points

MOVED = ("learned", "learned?", "worse", "collapsed")
"""Verdicts that a run can have before it has finished; without one, its status is the word."""
KINDS = ("validation", "greedy validation", "training")
"""What a run is judged by: the first of these that it has at two steps."""
_SURE = 2.0
"""Standard errors of a difference that chance seldom reaches."""
_COLLAPSED = 0.1
"""Share of the first reward that is left at most of one that collapsed."""
_UNTRAINED = ("debug", "run", "serve", "trace")
_FACTOR = 1.5
"""By which the length of replies, or the calls of an episode, change to be mentioned."""
_SIGNS = ("train/reward", "train/answer_chars", "train/phrase_share")


class Point(TypedDict):
    """The rewards of a step's episodes: their mean, and the square of its standard error; infinite for one episode."""

    step: int
    mean: float
    square_error: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a run went, in a word, with what it is judged by."""

    word: str
    """Of MOVED, or `no change`, `unclear`, `trained`, `not trained`, `scored`, or the status of an unfinished run."""
    kind: str = ""
    """Of KINDS; empty for a run without rewards at two steps."""
    first: Point | None = None
    last: Point | None = None
    best: Point | None = None

    @property
    def gain(self) -> float | None:
        return None if self.first is None or self.last is None else self.last["mean"] - self.first["mean"]


def verdicts(reader: TraceReader, runs: Sequence[RunOverview]) -> dict[str, Verdict]:
    """The verdict of each run, by its id."""
    points = _points(reader, [run["run_id"] for run in runs])
    signs = _signs(reader, [run["run_id"] for run in runs])
    trained = _trained(reader)
    told = {}
    for run in runs:
        run_id = run["run_id"]
        verdict = _verdict(run, points.get(run_id, {}), trained.get(run_id), run_id in signs)
        unfinished = run["status"] != "finished" and verdict.word not in MOVED
        told[run_id] = replace(verdict, word=run["status"]) if unfinished else verdict
    return told


def _verdict(run: RunOverview, points: Mapping[str, list[Point]], trained: int | None, suspect: bool) -> Verdict:
    kind = next((kind for kind in KINDS if len(points.get(kind, ())) > 1), "")
    if run["backbone"] in _UNTRAINED:
        return Verdict("scored")
    if not kind:
        return Verdict("not trained" if trained == 0 else "trained" if trained else "scored")
    steps = points[kind]
    first, last, best = steps[0], steps[-1], max(steps, key=lambda point: point["mean"])
    gain, noise = last["mean"] - first["mean"], _SURE * math.sqrt(first["square_error"] + last["square_error"])
    word = "no change"
    if trained == 0:
        word = "not trained"
    elif math.isinf(noise):  # an episode at a step
        word = "unclear"
    elif gain > noise:
        word = "learned?" if suspect else "learned"
    elif gain < -noise:
        word = "collapsed" if last["mean"] <= _COLLAPSED * first["mean"] else "worse"
    return Verdict(word, kind, first, last, best)


def _points(reader: TraceReader, run_ids: Sequence[str]) -> dict[str, dict[str, list[Point]]]:
    listed = rows(
        reader,
        """
        WITH value AS (SELECT episode_id, sum(value * weight) AS reward FROM rewards GROUP BY ALL),
        logged AS (  -- a step that is logged is complete
            SELECT run_id, split_part(name, '/', 1) AS split, max(step) AS upto FROM metrics
            WHERE name IN ('train/reward', 'val/reward', 'val/greedy_reward') GROUP BY ALL),
        steps AS (
            SELECT run_id, step, avg(reward) AS mean, coalesce(var_samp(reward) / count(*), 'Infinity') AS square_error,
              CASE WHEN split = 'train' THEN 'training' WHEN decoding = 'greedy' THEN 'greedy validation'
                ELSE 'validation' END AS kind
            FROM episodes JOIN value USING (episode_id) JOIN runs USING (run_id) LEFT JOIN logged USING (run_id, split)
            WHERE step <= coalesce(upto, step) AND episodes.status = 'succeeded' AND NOT superseded
              AND (split = 'val' OR coalesce(config->>'$.ajet.trainer_common.algorithm.adv_estimator', '') NOT IN
                ('sft', 'dpo'))  -- whose training rewards are those of the rows
              AND split IN ('train', 'val') AND list_contains($1, run_id)
            GROUP BY ALL)
        SELECT run_id, kind, list({'step': step, 'mean': mean, 'square_error': square_error} ORDER BY step) AS points
        FROM steps GROUP BY ALL""",
        run_ids,
    )
    points: dict[str, dict[str, list[Point]]] = {}
    for row in listed:
        points.setdefault(row["run_id"], {})[row["kind"]] = row["points"]
    return points


def _signs(reader: TraceReader, run_ids: Sequence[str]) -> set[str]:
    """Runs whose reward rose while something says that the work did not get better."""
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
        history.setdefault(row["run_id"], {}).setdefault(row["name"], {})[row["step"]] = row["value"]
    return {run_id for run_id, of in history.items() if warning_signs(of)}


def _trained(reader: TraceReader) -> dict[str, int]:
    """Tokens that were trained on, of the runs that have a ledger."""
    sql = (
        "SELECT run_id, coalesce(sum(tokens) FILTER (outcome = 'trained'), 0)::BIGINT AS n FROM ledger GROUP BY run_id"
    )
    return {row["run_id"]: row["n"] for row in rows(reader, sql)}


def reasons(reader: TraceReader, run: RunOverview, verdict: Verdict) -> list[str]:
    """The reasons for a verdict, the most important first: a sentence each."""
    history = {name: dict(points) for name, points in metric_points(reader, run["run_id"]).items()}
    return [
        *([f"{failures_in_words(run)} ({run['unsound']:,} of {counted(run['episodes'], 'episode')})"]
          if run["unsound"] else []),
        *warning_signs(history).values(),
        *_untrained_steps(reader, run["run_id"]),
        *_moved(history),
        *unstable(history).values(),
        *_past_best(verdict),
        *([f"try a lower trainer_common.optim.lr (steps had up to {max(history['train/lr'].values()):.3g})"]
          if verdict.word == "collapsed" and history.get("train/lr") else []),
    ]  # fmt: skip


def _past_best(verdict: Verdict) -> Iterator[str]:
    best, last = verdict.best, verdict.last
    if best is None or last is None or best["step"] == last["step"]:
        return
    if best["mean"] - last["mean"] > _SURE * math.sqrt(best["square_error"] + last["square_error"]):
        yield f"{verdict.kind} was best at step {best['step']}: {best['mean']:.3f}"


def _untrained_steps(reader: TraceReader, run_id: str) -> Iterator[str]:
    by_step = ledger_by_step(reader, run_id)
    without = [step for step, of in by_step.items() if of.get("zero_advantage") and not of.get("trained")]
    if without:
        yield f"{_steps(without)}: all attempts at a task had the same reward, so that nothing was trained"
    if lost := discarded(sum(map(Counter, by_step.values()), Counter[str]())):
        yield lost


def _steps(steps: Sequence[int]) -> str:
    """`step 4`, `steps 2 to 8`, `5 of steps 2 to 12`."""
    first, last = min(steps), max(steps)
    if first == last:
        return f"step {first}"
    return f"steps {first} to {last}" if last - first + 1 == len(steps) else f"{len(steps)} of steps {first} to {last}"


def _moved(history: Mapping[str, Mapping[int, float]]) -> Iterator[str]:
    """How an episode changed from the first to the last training step."""
    sampled, episodes = history.get("train/tokens_sampled", {}), history.get("train/episodes", {})
    lengths = {step: value / episodes[step] for step, value in sampled.items() if episodes.get(step)}
    for about, values in (
        ("tokens of an episode", lengths),
        ("calls of an episode", history.get("train/calls_per_episode", {})),
    ):
        if len(values) > 1:
            a, b = values[min(values)], values[max(values)]
            if min(a, b) > 0 and max(a, b) >= _FACTOR * min(a, b):
                yield f"{about}: {a:.3g} → {b:.3g}"
