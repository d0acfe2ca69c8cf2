"""Advice on a run in training and afterwards: signs that its reward is not what it seems, tasks that
teach nothing, learning that does not carry over, and a gap between sampler and trainer.

A rising reward may be no improvement: a judge with weight 0 disagrees, answers change in length, or
more of them use the same phrase. Each sign compares the newest steps of a run with the preceding and
the first ones, and applies only if the reward has risen significantly.

A training finds these functions by the entry point `ajet.advice`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import fmean, stdev

import numpy as np

from ajet_sdk.protocols import TraceReader
from ajet_sdk.reporting.advice import Query
from ajet_sdk.reporting.held_out import Change
from ajet_sdk.reporting.notices import STEPS
from ajet_sdk.trace.counted import COUNTED
from ajet_tools.trace.compare.gap import GAPS, LARGE_GAP, gap_by_cause, gap_message

_SURE = 2.0
"""Standard errors above which a difference of means is significant."""
_GROWTH = 1.5
"""Factor of answer length, up or down, that is reported."""
_SPREAD = 0.25
"""Minimum gain of a phrase's share; the share must be twice that."""
MIN_ATTEMPTS = 16
"""Attempts at a training task, all with the same reward, from which it counts as without signal."""
MANY_ATTEMPTS = 64
"""Unsolved attempts from which a task is likely to be too hard for the model."""
_SHARE = 0.25
"""Share of training tasks without signal above which it is reported."""

_TRAINED = f"""
    SELECT e.task_id, count(*) AS attempts, max(r.reward) - min(r.reward) AS spread,
        bool_or(coalesce(e.is_success, r.reward >= 1 - 1e-9)) AS solved
    FROM episodes e JOIN {COUNTED} r USING (episode_id)
    WHERE e.run_id = ? AND e.split = 'train' AND r.reward IS NOT NULL AND NOT coalesce(e.superseded, false)
    GROUP BY ALL"""


def on_gap(query: Query, run_id: str, step: int, gap: float, service: str = "") -> str:
    """A message about the gap between sampler and trainer at a step, `gap` on average; else
    empty."""
    if gap <= LARGE_GAP:
        return ""
    rows = query(GAPS, [run_id, step]).to_pylist()
    if rows:
        return gap_message(gap_by_cause(rows), service)
    return ""


def warning_signs(history: Mapping[str, Mapping[int, float]]) -> dict[str, str]:
    """Warnings about the reward of a run so far, by metric.

    `history`: the values of each metric by step. Empty if the reward has not risen, or after too
    few steps. The comparison with the first steps keeps a sign visible after the reward has stopped
    rising.
    """
    return _signs(history, since_start=False) | _signs(history, since_start=True)


def _signs(history: Mapping[str, Mapping[int, float]], *, since_start: bool) -> dict[str, str]:
    rise = _change(history.get("train/reward", {}), since_start)
    if rise is None or rise[2] < _SURE:
        return {}
    steps = sorted(history["train/reward"])
    first = steps[0 if since_start else -2 * STEPS]
    rose = f"the reward rose from {rise[0]:.3g} to {rise[1]:.3g} (steps {first} to {steps[-1]})"
    signs = {}
    for name, values in history.items():
        change = None
        if name.startswith("train/"):
            change = _change(values, since_start)
        if change is None:
            continue
        before, after, errors = change
        metric = name.removeprefix("train/")
        factor = after / max(before, 1e-9)
        if metric.startswith("held_out_") and errors < -_SURE:
            judge = metric.removeprefix("held_out_")
            signs[name] = (
                f"{rose} while that of judge {judge} (weight 0) fell from {before:.3g} to"
                f" {after:.3g}"
            )
        elif metric == "answer_chars" and errors > _SURE and factor >= _GROWTH:
            signs[name] = (
                f"{rose} while the answers grew from {before:.0f} to {after:.0f} characters"
            )
        elif (
            metric == "answer_chars"
            and errors < -_SURE
            and factor <= 1 / _GROWTH
            and not since_start
        ):
            signs[name] = (
                f"{rose} while the answers shrank from {before:.0f} to {after:.0f} characters"
            )
        elif (
            metric == "phrase_share"
            and errors > _SURE
            and after - before > _SPREAD
            and after > 2 * _SPREAD
        ):
            signs[name] = (
                f"{rose} while the share of answers that contain one phrase rose from {before:.0%}"
                f" to {after:.0%}"
            )
    return signs


def _change(values: Mapping[int, float], since_start: bool) -> tuple[float, float, float] | None:
    """Means of the preceding (or first) span and the newest one, and their difference in standard
    errors; None for too few steps."""
    listed = [values[step] for step in sorted(values)]
    if len(listed) < 2 * STEPS:
        return None
    start = 0 if since_start else -2 * STEPS
    before = np.array(listed[start:][:STEPS])
    after = np.array(listed[-STEPS:])
    error = math.sqrt((before.var(ddof=1) + after.var(ddof=1)) / STEPS)
    difference = float(after.mean() - before.mean())
    if error > 1e-12:
        errors = difference / error
    elif difference:
        errors = math.copysign(math.inf, difference)
    else:
        errors = 0.0
    return float(before.mean()), float(after.mean()), errors


def not_carried_over(train: Mapping[int, float], change: Change | None, step: int) -> str:
    """A warning if the training reward rose and the held-out reward did not; else empty.

    `train`: mean training reward by step, at least 6 steps. The held-out reward did not rise if the
    upper end of its interval is below half of the training reward's rise.
    """
    steps = [at for at in sorted(train) if at <= step]
    span = min(8, len(steps) // 2)
    if span < 3 or change is None:
        return ""
    early = [train[at] for at in steps[:span]]
    late = [train[at] for at in steps[-span:]]
    rise = fmean(late) - fmean(early)
    noise = math.sqrt((stdev(early) ** 2 + stdev(late) ** 2) / span)
    if rise <= 2 * noise or change.high >= rise / 2:
        return ""
    return (
        f"the training reward rose from {fmean(early):.3f} to {fmean(late):.3f} (steps {steps[0]}"
        f" to {steps[-1]}) and the held-out reward did not: {change}. What is learnt does not carry"
        " over: train on more and more varied tasks (`ajet dataset expand`), fewer passes over"
        " them, or teach it with demonstrations first (trainer_common.algorithm: sft)"
    )


def without_signal(trace: TraceReader, run_id: str) -> str:
    """A warning if many training tasks gave every attempt the same reward so far; else empty.

    Counts tasks with at least `MIN_ATTEMPTS` attempts that count.
    """
    rows = [
        row
        for row in trace.query(_TRAINED, [run_id]).to_pylist()
        if row["attempts"] >= MIN_ATTEMPTS
    ]
    same = [row for row in rows if row["spread"] <= 1e-8]
    if len(same) <= _SHARE * len(rows):
        return ""
    always = sum(row["solved"] for row in same)
    beyond = sum(not row["solved"] and row["attempts"] >= MANY_ATTEMPTS for row in same)
    parts = [f"{len(same) - always} never solved", f"{always} always"]
    advice = "`ajet run --out` measures which tasks are solved now and then"
    if beyond:
        parts[0] += f", {beyond} of them in {MANY_ATTEMPTS} attempts and more"
        advice += (
            "; for those that are beyond the model: demonstrations first (adv_estimator: sft), or a"
            " larger model"
        )
    return (
        f"{len(same)} of {len(rows)} training tasks gave every attempt the same reward so far"
        f" ({'; '.join(parts)}), so they teach nothing: {advice}"
    )
