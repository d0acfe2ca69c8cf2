"""Analysis of validations: rewards by set of tasks, and drops.

Two validations are compared by the mean rewards of the same tasks, in pairs, with the interval of
`reporting.paired`: 95 % for all comparisons together (Bonferroni).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

from ajet_sdk.reporting.paired import paired
from ajet_sdk.trace.counted import COUNTED, counted_reward
from ajet_sdk.types import Episode, Task

if TYPE_CHECKING:
    from ajet_sdk.protocols import TraceReader

MIN_TASKS = 8
"""Minimum number of tasks for an interval of the mean difference."""
_LISTED = 5

_VALIDATED = f"""
    SELECT e.step, e.task_id, avg(r.reward) AS reward,
        avg((e.status = 'succeeded')::DOUBLE) FILTER (NOT coalesce(e.infrastructure, false)) AS sound
    FROM episodes e JOIN {COUNTED} r USING (episode_id)
    WHERE e.run_id = ? AND e.split = 'val' AND coalesce(e.decoding = 'greedy', false) = ?
        AND NOT coalesce(e.superseded, false) AND e.step IN (?, ?)
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
    if len(worst) > _LISTED:
        more = f"; and {len(worst) - _LISTED} more sets"
    else:
        more = ""
    return (
        f"{metric} fell since step {first}: {listed}{more}. Mix such tasks into the training tasks,"
        " or lower trainer_common.optim.lr; trainer_common.stop_when: [drop] ends a run here"
    )


def rising(losses: Mapping[int, float]) -> bool:
    """Whether the loss on held-out conversations, by step, was above its lowest at both of the
    newest measurements."""
    values = [loss for _, loss in sorted(losses.items())]
    return len(values) > 2 and min(values[-2:]) > min(values)
