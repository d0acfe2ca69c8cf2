"""Reasons for the verdict on a run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from ajet_sdk.protocols import TraceReader
from ajet_sdk.reporting.notices import discarded, unstable
from ajet_tools.text.clean import counted
from ajet_tools.trace.compare.advice import warning_signs
from ajet_tools.trace.compare.explain import explain
from ajet_tools.trace.compare.setup import judge_change, setup_changes
from ajet_tools.trace.compare.verdict import SURE, Verdict
from ajet_tools.trace.queries.episodes import rewards_by_step
from ajet_tools.trace.queries.runs import (
    RunOverview,
    failures_in_words,
    ledger_by_step,
    metric_points,
)

_FACTOR = 1.5
"""Least factor of a mentioned change of tokens or calls per episode."""
_DROPPED = ("worse", "collapsed")
_DECODINGS = {"validation": "sampled", "greedy validation": "greedy"}


def reasons(reader: TraceReader, run: RunOverview, verdict: Verdict) -> list[str]:
    """Return the reasons for a verdict, one sentence each, most important first."""
    reader = reader.of_run(run["run_id"])
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
    best = verdict.best
    last = verdict.last
    if (
        best
        and last
        and best["mean"] - last["mean"]
        > SURE * math.sqrt(best["square_error"] + last["square_error"])
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
    rewards: dict[int, float] = {}
    for (split, decoding), steps in rewards_by_step(reader, run_id).items():
        if split == kind[0] and kind[1] in (None, decoding):
            rewards |= {step: reward for step, reward in steps.items() if reward is not None}
    drops = [(rewards[at] - rewards[before], at) for before, at in pairwise(sorted(rewards))]
    if not drops or min(drops)[0] >= 0:
        return []
    _, step = min(drops)
    changes = explain(reader, run_id, step).changes
    return [f"step {step}, {change.headline}" for change in changes if change.split == kind[0]]


def _setup_changed(reader: TraceReader, run_id: str, verdict: Verdict) -> list[str]:
    """Return what else changed between the best and the last step, so that the updates are not
    blamed for it."""
    best = verdict.best
    last = verdict.last
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
    first = min(steps)
    last = max(steps)
    if first == last:
        return f"step {first}"
    if last - first + 1 == len(steps):
        return f"steps {first} to {last}"
    return f"{len(steps)} of steps {first} to {last}"


def _moved(history: Mapping[str, Mapping[int, float]]) -> Iterator[str]:
    """Compare the lengths of episodes at the first and last training step."""
    sampled = history.get("train/tokens_sampled", {})
    episodes = history.get("train/episodes", {})
    lengths = {
        step: value / episodes[step] for step, value in sampled.items() if episodes.get(step)
    }
    for about, values in (
        ("tokens of an episode", lengths),
        ("calls of an episode", history.get("train/calls_per_episode", {})),
    ):
        if len(values) > 1:
            a = values[min(values)]
            b = values[max(values)]
            if min(a, b) > 0 and max(a, b) >= _FACTOR * min(a, b):
                yield f"{about}: {a:.3g} → {b:.3g}"
