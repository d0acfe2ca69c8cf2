"""Finds differences between two sets of episodes, with example episodes.

Two means differ if they are apart by three standard errors and by 10 % of their size. Tasks are
compared in pairs, with the interval of `paired`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from statistics import fmean, pvariance

from ajet_sdk.protocols import TraceReader
from ajet_sdk.reporting.paired import paired
from ajet_sdk.trace.reader import episodes
from ajet_tools.text.clean import counted, one_line
from ajet_tools.trace.compare.attempts import ComparedAttempt, Divergence, align, attempt_of
from ajet_tools.trace.queries.base import grouped
from ajet_tools.trace.queries.episodes import StepEpisode
from ajet_tools.trace.queries.records import Record

LEAST_COUNT = 4
"""Least number of values on each side to compare means."""
_TASKS = 3
"""Tasks with the largest changes, in each direction, whose attempts are compared."""
_EXCERPT = 24
_SHOWN = 3
"""Episodes shown for a finding."""
ID = 12
"""Characters shown of an id."""

_Measure = Callable[[StepEpisode], "float | None"]
_MEASURES: tuple[tuple[str, str, _Measure], ...] = (
    ("length", "sampled tokens per episode", lambda e: e["tokens"]),
    ("calls", "calls per episode", lambda e: e["calls"]),
    ("tools", "tool-calling replies per episode", lambda e: e["tool_replies"]),
    ("cut", "replies per episode that end at the maximum length", lambda e: e["cut"]),
    ("unread", "tool calls per episode that cannot be parsed", lambda e: e["unread"]),
    (
        "cut_call",
        "tool calls per episode that are cut at the maximum length",
        lambda e: e["cut_calls"],
    ),
    ("splits", "splits of timelines per episode", lambda e: e["splits"]),
)


@dataclass(frozen=True)
class Finding:
    """A change at a step."""

    kind: str
    text: str
    """A sentence."""
    before: float | None = None
    after: float | None = None
    episodes: tuple[str, ...] = ()
    """Ids of example episodes, best first."""


def finding_lines(findings: Iterable[Finding]) -> Iterator[str]:
    """Yield a line for each finding, and another with its first episodes."""
    for finding in findings:
        yield f"{'    ' if finding.kind == 'task' else '  '}{finding.text}"
        if finding.episodes and finding.kind != "task":
            more = len(finding.episodes) - _SHOWN
            ids = ", ".join(id[:ID] for id in finding.episodes[:_SHOWN])
            yield f"      episodes {ids}{f' and {more:,} more' if more > 0 else ''}"


def differ(before: Sequence[float], after: Sequence[float]) -> bool:
    """Whether two means differ by three standard errors and by 10 %."""
    if min(len(before), len(after)) < LEAST_COUNT:
        return False
    a = fmean(before)
    b = fmean(after)
    # the variance of a mean, each side with its own
    error = math.sqrt(pvariance(before) / (len(before) - 1) + pvariance(after) / (len(after) - 1))
    return abs(b - a) > max(3 * error, 0.1 * max(abs(a), abs(b)), 1e-9)


def rewards(attempts: Sequence[StepEpisode]) -> list[float]:
    """Return the rewards of attempts that have any."""
    return [e["reward"] for e in attempts if e["reward"] is not None]


def changes_of_tasks(
    readers: Sequence[TraceReader], before: Sequence[StepEpisode], after: Sequence[StepEpisode]
) -> Iterator[Finding]:
    """Find tasks with lower and higher rewards, and the first differences of attempts at those with
    large changes.

    `readers` have the episodes.
    """
    a = by_task(before)
    b = by_task(after)
    changes = {
        task_id: fmean(rewards(b[task_id])) - fmean(rewards(a[task_id]))
        for task_id in a
        if task_id in b
    }
    fell = [task for task, change in changes.items() if change < -1e-9]
    rose = [task for task, change in changes.items() if change > 1e-9]
    if not fell and not rose:
        return
    test = paired(list(changes.values()))
    steps = sorted({episode["step"] for episode in chain(*a.values())})
    interval = "too few tasks for an interval"
    if test.low is not None and test.high is not None:
        interval = f"{100 * (test.level or 0):.0f} % interval {test.low:+.3g} to {test.high:+.3g}"
    if len(steps) == 1:
        since = f"step {steps[0]}"
    else:
        since = f"steps {steps[0]} to {steps[-1]}"
    yield Finding(
        "tasks",
        f"of {counted(len(changes), 'task')} attempted before ({since}), {len(fell)} fell and"
        f" {len(rose)} rose: mean change {test.mean:+.3g}, {interval}",
        test.low,
        test.high,
        tuple(e["episode_id"] for e in chain(*(b[task] for task in fell + rose))),
    )
    pairs = []
    for tasks, (better, worse) in ((fell, (a, b)), (rose, (b, a))):
        for task_id in sorted(tasks, key=lambda task: (-abs(changes[task]), task))[:_TASKS]:
            pairs.append((max(better[task_id], key=_worth), min(worse[task_id], key=_worth)))
    for best, worst, text in _partings(readers, pairs):
        x, y = (fmean(rewards(side[best["task_id"]])) for side in (a, b))
        ids = worst["episode_id"], best["episode_id"]
        yield Finding(
            "task", f'"{one_line(best["task"], 60)}" {x:.3g} → {y:.3g}: {text}', x, y, ids
        )


def _worth(episode: StepEpisode) -> float:
    return episode["reward"] or 0.0


def apart(reader: TraceReader, attempts: Sequence[StepEpisode]) -> Iterator[Finding]:
    """Find the first differences of the best and worst attempts at the same task."""
    pairs = [(max(of, key=_worth), min(of, key=_worth)) for of in by_task(attempts).values()]
    pairs.sort(key=lambda pair: _worth(pair[1]) - _worth(pair[0]))
    spread = [(best, worst) for best, worst in pairs[:_TASKS] if _worth(best) > _worth(worst)]
    for best, worst, text in _partings([reader], spread):
        ids = worst["episode_id"], best["episode_id"]
        yield Finding(
            "task", f'"{one_line(best["task"], 60)}": {text}', _worth(worst), _worth(best), ids
        )


def by_task(attempts: Sequence[StepEpisode]) -> dict[str, list[StepEpisode]]:
    """Group rewarded attempts by task."""
    return grouped((e for e in attempts if e["reward"] is not None), lambda e: e["task_id"])


def _partings(
    readers: Sequence[TraceReader], pairs: Sequence[tuple[StepEpisode, StepEpisode]]
) -> Iterator[tuple[StepEpisode, StepEpisode, str]]:
    """Describe the first difference of each pair of a best and a worst attempt."""
    ids = list(dict.fromkeys(episode["episode_id"] for episode in chain(*pairs)))
    attempts: dict[str, ComparedAttempt] = {}
    for reader in readers if ids else ():  # no ids would read every episode
        for episode in episodes(reader, episode_ids=ids):
            attempts[episode.episode_id] = attempt_of(Record(episode))
    for best, worst in pairs:
        a = attempts[best["episode_id"]]
        b = attempts[worst["episode_id"]]
        named = " and ".join(
            f"{e['episode_id'][:ID]} (reward {e['reward']:.3g}, step {e['step']})"
            for e in (best, worst)
        )
        where = parting(a, b)
        if where is None:
            yield best, worst, f"{named} are the same to the end, and were judged differently"
        else:
            yield best, worst, f"{named} part at {where}"


def parting(a: ComparedAttempt, b: ComparedAttempt) -> str | None:
    """Describe the first difference of two attempts; None if there is none."""
    first = align(a, b)
    if first is None:
        return None
    token = "" if first.token is None else f"token {first.token} ("
    where = f"{token}message {first.message}{')' if token else ''}"
    return f"{where}: {_excerpt(a, first)} and {_excerpt(b, first)}"


def _excerpt(attempt: ComparedAttempt, first: Divergence) -> str:
    if first.message >= len(attempt.messages):
        return "the end"
    message = attempt.messages[first.message]
    return f"{message.role} {excerpt(message.text, first.character)}"


def excerpt(text: str, character: int) -> str:
    """Quote the text around a character on one line."""
    return f'"{one_line(text[max(0, character - _EXCERPT // 2) : character + _EXCERPT], 2 * _EXCERPT)}"'


def _cause(episode: StepEpisode) -> str:
    """Return why an episode failed; empty for a sound one."""
    if episode["status"] == "succeeded":
        return ""
    return episode["cause"] or episode["status"]


def failures(before: Sequence[StepEpisode], after: Sequence[StepEpisode]) -> Iterator[Finding]:
    """Find causes of failure that are new or differ in frequency."""
    old = [_cause(episode) for episode in before]
    new = [_cause(episode) for episode in after]
    for cause in sorted({*old, *new} - {""}):
        a = [float(known == cause) for known in old]
        b = [float(known == cause) for known in new]
        if not (sum(b) and not sum(a)) and not differ(a, b):
            continue
        if sum(a):
            was = f"{int(sum(a))} of {len(a)} before"
        else:
            was = "a new cause"
        text = (
            f"{int(sum(b))} of {counted(len(b), 'episode')} failed with {one_line(cause, 60)}"
            f" ({was})"
        )
        ids = tuple(e["episode_id"] for e, c in zip(after, new, strict=True) if c == cause)
        yield Finding("failures", text, fmean(a) if a else None, fmean(b) if b else None, ids)


def measures(before: Sequence[StepEpisode], after: Sequence[StepEpisode]) -> Iterator[Finding]:
    """Find differences in behaviour: lengths, calls, tools, truncated replies."""
    for kind, name, measure in _MEASURES:
        a = [float(value) for value in map(measure, before) if value is not None]
        values = [(float(v), e) for e in after if (v := measure(e)) is not None]
        b = [value for value, _ in values]
        if differ(a, b):
            sign = 1 if fmean(b) > fmean(a) else -1
            values.sort(key=lambda pair: -sign * pair[0])
            # the episodes beyond the mean before are those that moved it
            ids = tuple(e["episode_id"] for value, e in values if sign * (value - fmean(a)) > 0)
            yield Finding(kind, f"{name}: {fmean(a):.3g} → {fmean(b):.3g}", fmean(a), fmean(b), ids)


def _gamed(judge: str, episode: StepEpisode) -> tuple[float, float]:
    """Order episodes by a low score of a judge and a high reward."""
    return episode["watched"][judge], -_worth(episode)


def held_out_judges(
    start: Sequence[StepEpisode], after: Sequence[StepEpisode], since: int
) -> Iterator[Finding]:
    """Find judges of weight 0 whose score did not rise with the reward since the first step, as
    when the judge that counts is gamed."""
    before = rewards(start)
    now = rewards(after)
    if not differ(before, now) or fmean(now) < fmean(before):
        return
    for name in sorted(set[str]().union(*(episode["watched"] for episode in after))):
        first = [e["watched"][name] for e in start if name in e["watched"]]
        scored = [e for e in after if name in e["watched"]]
        last = [e["watched"][name] for e in scored]
        # it rose with the reward, so nothing is suspect
        if min(len(first), len(last)) < LEAST_COUNT or fmean(last) > fmean(first):
            continue
        scored = [e for e in scored if e["reward"] is not None]
        scored.sort(key=partial(_gamed, name))
        text = (
            f"since step {since} the reward rose from {fmean(before):.3g} to {fmean(now):.3g},"
            f" while the held-out judge {one_line(name, 40)} (weight 0) went from"
            f" {fmean(first):.3g} to {fmean(last):.3g}"
        )
        ids = tuple(e["episode_id"] for e in scored)
        yield Finding("suspect", text, fmean(first), fmean(last), ids)
