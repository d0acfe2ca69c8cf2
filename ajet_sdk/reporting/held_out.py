"""Analysis of validations: rewards by set of tasks, drops, and whether training carries over.

Two validations are compared by the mean rewards of the same tasks, in pairs, with the interval of
`reporting.paired`: 95 % for all comparisons together (Bonferroni).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import TYPE_CHECKING

from ajet_sdk.reporting.paired import paired
from ajet_sdk.trace.counted import COUNTED, counted_reward
from ajet_sdk.types import Episode, Task

if TYPE_CHECKING:
    from ajet_sdk.protocols import TraceReader

MIN_TASKS = 8
"""Minimum number of tasks for an interval of the mean difference."""
MIN_ATTEMPTS = 16
"""Attempts at a training task, all with the same reward, from which it counts as without signal."""
MANY_ATTEMPTS = 64
"""Unsolved attempts from which a task is likely to be too hard for the model."""
_SHARE = 0.25
"""Share of training tasks without signal above which it is reported."""
_LISTED = 5

_VALIDATED = f"""
    SELECT e.step, e.task_id, avg(r.reward) AS reward,
        avg((e.status = 'succeeded')::DOUBLE) FILTER (NOT coalesce(e.infrastructure, false)) AS sound
    FROM episodes e JOIN {COUNTED} r USING (episode_id)
    WHERE e.run_id = ? AND e.split = 'val' AND coalesce(e.decoding = 'greedy', false) = ?
        AND NOT coalesce(e.superseded, false) AND e.step IN (?, ?)
    GROUP BY ALL"""

_TRAINED = f"""
    SELECT e.task_id, count(*) AS attempts, max(r.reward) - min(r.reward) AS spread,
        bool_or(coalesce(e.is_success, r.reward >= 1 - 1e-9)) AS solved
    FROM episodes e JOIN {COUNTED} r USING (episode_id)
    WHERE e.run_id = ? AND e.split = 'train' AND r.reward IS NOT NULL AND NOT coalesce(e.superseded, false)
    GROUP BY ALL"""


@dataclass(frozen=True)
class Change:
    """Mean rewards of the same tasks at two steps, with the interval of their difference."""

    before: float
    after: float
    low: float
    high: float
    tasks: int

    def __str__(self) -> str:
        return (
            f"{self.before:.3f} → {self.after:.3f} ({self.after - self.before:+.3f}, interval"
            f" {self.low:+.3f} to {self.high:+.3f}, {self.tasks} tasks)"
        )


def compare(
    before: Mapping[str, float], after: Mapping[str, float], comparisons: int = 1
) -> Change | None:
    """Compares rewards of common tasks, by id; None for fewer than `MIN_TASKS`, or too few for an
    interval.

    `comparisons`: the number of simultaneous comparisons, which widens the intervals.
    """
    shared = sorted(before.keys() & after.keys())
    if len(shared) < MIN_TASKS:
        return None
    test = paired([after[task] - before[task] for task in shared], level=1 - 0.05 / comparisons)
    if test.low is None or test.high is None:
        return None
    return Change(
        fmean(before[t] for t in shared),
        fmean(after[t] for t in shared),
        test.low,
        test.high,
        test.n,
    )


def sets_of(tasks: Sequence[Task], keys: Sequence[str]) -> dict[str, set[str]]:
    """Ids of tasks by set; a set `KEY=VALUE` for each value of these metadata keys."""
    sets: dict[str, set[str]] = defaultdict(set)
    for task in tasks:
        for key in keys:
            if (value := task.metadata.get(key)) is not None:
                sets[f"{key}={value}"].add(task.task_id)
    return dict(sorted(sets.items()))


def rewards_by_set(
    name: str,
    episodes: Sequence[Episode],
    sets: Mapping[str, set[str]],
    failure_reward: float | None,
) -> dict[str, float]:
    """Metrics `NAME/SET`: the mean reward of each set's episodes that count, if it has any."""
    rewards: dict[str, list[float]] = {key: [] for key in sets}
    for episode in episodes:
        reward = counted_reward(episode, failure_reward)
        if reward is None:
            continue
        for key, ids in sets.items():
            if episode.task.task_id in ids:
                rewards[key].append(reward)
    return {f"{name}/{key}": fmean(values) for key, values in rewards.items() if values}


def task_rewards(
    trace: TraceReader,
    run_id: str,
    first: int,
    last: int,
    *,
    greedy: bool = False,
    sound: bool = False,
) -> tuple[dict[str, float], dict[str, float]]:
    """Mean reward of each validation task at two steps, of the sampled or the greedy attempts.

    With `sound`, the share of attempts with a reward instead, without infrastructure failures.
    """
    by_step: dict[int, dict[str, float]] = {first: {}, last: {}}
    for row in trace.query(_VALIDATED, [run_id, greedy, first, last]).to_pylist():
        if (value := row["sound" if sound else "reward"]) is not None:
            by_step[row["step"]][row["task_id"]] = value
    return by_step[first], by_step[last]


def dropped(
    before: Mapping[str, float], after: Mapping[str, float], sets: Mapping[str, set[str]]
) -> dict[str, Change]:
    """The sets whose reward fell significantly; "" stands for all tasks."""
    within = {"": before.keys(), **sets}
    fell = {}
    for name, ids in within.items():
        change = compare({t: r for t, r in before.items() if t in ids}, after, len(within))
        if change is not None and change.high < 0:
            fell[name] = change
    return fell


def drop_message(fell: Mapping[str, Change], first: int, metric: str = "held-out reward") -> str:
    """A message about rewards that fell since the first validation, with advice; empty if none
    fell."""
    if not fell:
        return ""
    worst = sorted(fell.items(), key=lambda item: item[1].after - item[1].before)
    listed = "; ".join(
        f"{name or 'all validation tasks'} {change}" for name, change in worst[:_LISTED]
    )
    more = f"; and {len(worst) - _LISTED} more sets" if len(worst) > _LISTED else ""
    return (
        f"{metric} fell since step {first}: {listed}{more}. Mix such tasks into the training tasks,"
        " or lower trainer_common.optim.lr; trainer_common.stop_when: [drop] ends a run here"
    )


def not_carried_over(train: Mapping[int, float], change: Change | None, step: int) -> str:
    """A warning if the training reward rose and the held-out reward did not; else empty.

    `train`: mean training reward by step, at least 6 steps. The held-out reward did not rise if the
    upper end of its interval is below half of the training reward's rise.
    """
    steps = [at for at in sorted(train) if at <= step]
    span = min(8, len(steps) // 2)
    if span < 3 or change is None:
        return ""
    early, late = [train[at] for at in steps[:span]], [train[at] for at in steps[-span:]]
    rise, noise = (
        fmean(late) - fmean(early),
        math.sqrt((stdev(early) ** 2 + stdev(late) ** 2) / span),
    )
    if rise <= 2 * noise or change.high >= rise / 2:
        return ""
    return (
        f"the training reward rose from {fmean(early):.3f} to {fmean(late):.3f} (steps {steps[0]}"
        f" to {steps[-1]}) and the held-out reward did not: {change}. What is learnt does not carry"
        " over: train on more and more varied tasks (`ajet dataset expand`), fewer passes over"
        " them, or teach it with demonstrations first (trainer_common.algorithm: sft)"
    )


def rising(losses: Mapping[int, float]) -> bool:
    """Whether the loss on held-out conversations, by step, was above its lowest at both of the
    newest measurements."""
    values = [loss for _, loss in sorted(losses.items())]
    return len(values) > 2 and min(values[-2:]) > min(values)


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
