"""Explains the changes at a step of a run against the previous step or validation, with figures and
example episodes.

Metrics of a step are single numbers without a spread: a change counts from 20 % and the minimum in
`_METRICS`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from ajet_sdk.errors import QueryError
from ajet_sdk.protocols import TraceReader
from ajet_sdk.reporting.notices import discarded, unstable
from ajet_tools.text.clean import counted, one_line
from ajet_tools.text.tables import lasting
from ajet_tools.trace.compare.advice import on_gap, warning_signs
from ajet_tools.trace.compare.changes import (
    Finding,
    apart,
    changes_of_tasks,
    differ,
    failures,
    finding_lines,
    held_out_judges,
    measures,
    rewards,
)
from ajet_tools.trace.compare.selection import Selection, selection, selection_lines
from ajet_tools.trace.compare.setup import headline, judge_change, setup_changes
from ajet_tools.trace.queries.base import grouped
from ajet_tools.trace.queries.episodes import (
    StepEpisode,
    Steps,
    rewards_by_step,
    step_episodes,
    task_totals,
)
from ajet_tools.trace.queries.runs import ledger_by_step, metric_points
from ajet_tools.trace.splits import by_cause, splits_of

_KINDS = (("train", None), ("val", "sampled"), ("val", "greedy"), ("val", None))
"""Explained parts of a step: training, and the first available kind of validation."""
_SPLIT_EPISODES = 50
"""Episodes of a step that are merged to find the causes of splits."""
_METRICS = {
    "train/entropy": ("entropy", 0.02),
    "train/logprob_gap_mean": (
        "the gap between the log-probabilities of trainer and sampler",
        0.01,
    ),
    "train/sampler_kl": ("KL between sampler and trainer", 0.002),
    "train/kl": ("KL to the reference model", 0.002),
    "train/clip_share": ("the share of clipped tokens", 0.01),
    "train/staleness": ("staleness (updates between sampling and training)", 0.25),
    "train/grad_norm": ("the gradient norm", 0.05),
}
"""Names and minimal changes of metrics."""
_RELATIVE = 0.2
_TASKS_NAMED = 3
_TASK_SHOWN = 60


@dataclass(frozen=True)
class StepChange:
    """Changes of training or validation at a step."""

    split: str
    decoding: str | None
    step: int
    before: int
    findings: tuple[Finding, ...]
    headline: str
    """The most likely causes, and what did not change."""


@dataclass(frozen=True)
class Explanation:
    run_id: str
    step: int
    chosen: str
    """Reason for the choice of the step; empty if the user chose it."""
    changes: tuple[StepChange, ...]
    tasks: int
    """Training tasks with an attempt that counts, up to the step; of these `unsolved` never earned
    anything."""
    unsolved: tuple[str, ...]
    tokens: int
    """Sampled tokens of the training, up to the step."""
    cpu_seconds: float = 0.0
    """Processor time of the training process, up to the step; 0 if none is recorded."""
    selection: Selection | None = None
    """How the trained episodes differ from the sampled ones; None if none was trained."""


def lines_of(explanation: Explanation) -> list[str]:
    """Format an explanation as lines of text."""
    chosen = ""
    if explanation.chosen:
        chosen = f": the {explanation.chosen}"
    lines = [f"run {explanation.run_id}, step {explanation.step}{chosen}"]
    for change in explanation.changes:
        if change.split == "train":
            kind = "training"
        else:
            kind = f"validation, {change.decoding or 'unknown decoding'}"
        lines += ["", f"{kind}: step {change.step} against step {change.before}"]
        lines.append(f"  {change.headline}")
        lines += finding_lines(change.findings)
        if not change.findings:
            lines.append("  nothing changed")
    return [*lines, *_totals(explanation)]


def _totals(explanation: Explanation) -> Iterator[str]:
    """Format what holds for all steps so far."""
    if explanation.tasks:
        unsolved = len(explanation.unsolved)
        named = ", ".join(
            f'"{one_line(task, _TASK_SHOWN)}"' for task in explanation.unsolved[:_TASKS_NAMED]
        )
        more = ""
        if unsolved > _TASKS_NAMED:
            more = f" and {unsolved - _TASKS_NAMED:,} more"
        listed = f": {named}{more}" if unsolved else ""
        tasks = counted(explanation.tasks, "training task")
        yield ""
        yield f"up to this step {unsolved:,} of {tasks} never earned anything{listed}"
    if explanation.selection is not None:
        yield from selection_lines(explanation.selection)
    if explanation.tokens:
        cpu = explanation.cpu_seconds
        hours = f", {lasting(cpu)} of processor time" if cpu else ""
        yield f"up to this step {counted(explanation.tokens, 'token')} sampled for training{hours}"


def explain(
    reader: TraceReader, run_id: str, step: int | None = None, trace: Path | None = None
) -> Explanation:
    """Explain the changes at a step, by default the step with the largest change of reward.

    `trace` is the path of the trace, to find the tokenizer. Raises QueryError for an unknown or
    first step.
    """
    reader = reader.of_run(run_id)
    by_step = rewards_by_step(reader, run_id)
    chosen = ""
    if step is None:
        step, chosen = _largest_change(run_id, by_step)
    changes: list[StepChange] = []
    for split, decoding in _KINDS:
        steps = [at for at in _of_kind(by_step, split, decoding) if at <= step]
        if (
            len(steps) > 1
            and steps[-1] == step
            and not (split == "val" and any(c.split == "val" for c in changes))
        ):
            changes.append(_change(reader, run_id, split, decoding, steps, trace))
    if not changes:
        there = sorted(set[int]().union(*by_step.values()))
        if there:
            has = f"its steps are {there[0]} to {there[-1]}"
        else:
            has = "it has no finished episode"
        raise QueryError(
            f"run {run_id} has nothing at step {step} and before it to compare ({has}); `ajet trace"
            " diff` compares runs"
        )
    totals = task_totals(reader, run_id, step)
    judged = [row for row in totals if row["solved"] is not None]
    unsolved = tuple(row["task"] for row in judged if not row["solved"])
    tokens = sum(row["tokens"] for row in totals)
    cpu = dict(metric_points(reader, run_id).get("time/cpu", ()))
    return Explanation(
        run_id,
        step,
        chosen,
        tuple(changes),
        tasks=len(judged),
        unsolved=unsolved,
        tokens=tokens,
        cpu_seconds=math.fsum(value for at, value in cpu.items() if at <= step),
        selection=selection(reader, run_id, step),
    )


def _of_kind(by_step: Steps, split: str, decoding: str | None) -> Mapping[int, float | None]:
    """Return mean rewards by step of a split and decoding mode; for training, of all modes."""
    rewards_of_kind: dict[int, float | None] = {}
    for kind, steps in by_step.items():
        if kind[0] == split and (split == "train" or kind[1] == decoding):
            rewards_of_kind |= steps
    return dict(sorted(rewards_of_kind.items()))


def _largest_change(run_id: str, by_step: Steps) -> tuple[int, str]:
    """Return the step with the largest change of the training reward, or else of the validation
    reward."""
    for split, decoding in _KINDS:
        known = [(at, r) for at, r in _of_kind(by_step, split, decoding).items() if r is not None]
        if len(known) > 1:
            (_, a), (at, b) = max(pairwise(known), key=lambda pair: abs(pair[1][1] - pair[0][1]))
            if split == "train":
                kind = "training"
            else:
                kind = f"{decoding or ''} validation".strip()
            return at, f"largest change of the mean reward in {kind}: {a:.3g} → {b:.3g}"
    raise QueryError(
        f"run {run_id} has no two steps with rewards to compare; `ajet trace compare` compares it with"
        " another run"
    )


def _change(
    reader: TraceReader,
    run_id: str,
    split: str,
    decoding: str | None,
    steps: Sequence[int],
    trace: Path | None,
) -> StepChange:
    first = steps[0]
    earlier = steps[-2]
    step = steps[-1]
    before, after = (step_episodes(reader, run_id, split, at, decoding) for at in (earlier, step))
    if first == earlier:
        start = before
    else:
        start = step_episodes(reader, run_id, split, first, decoding)
    attempted = step_episodes(reader, run_id, split, step, decoding, before=True)
    metrics = {name: dict(points) for name, points in metric_points(reader, run_id).items()}
    findings = [*_reward(before, after)]
    moved = list(measures(before, after))
    # an update explains nothing if nothing moved
    if split == "train" and (moved or differ(rewards(before), rewards(after))):
        findings += _update(metrics, earlier)
    if split == "val" and differ(rewards(before), rewards(after)):
        findings += _updates(metrics, earlier, step)
    # a task that nobody attempted before has no reward to compare with
    findings += changes_of_tasks([reader], attempted, after) if attempted else apart(reader, after)
    findings += [*(_signal(before, after) if split == "train" else ())]
    findings += [*failures(before, after), *moved, *_split_causes(reader, before, after, trace)]
    if split == "train":
        findings += [
            *_metrics(reader, run_id, metrics, earlier, step),
            *_ledger(reader, run_id, earlier, step),
        ]
    findings += held_out_judges(start, after, first)
    setup = list(setup_changes(reader, run_id, split, decoding, earlier, step))
    judge = judge_change(reader, run_id, split, step)
    has_moved = differ(rewards(before), rewards(after))
    summary = headline(setup, judge, findings, step, has_moved)
    if judge.is_evident:
        text = (
            f"the judge: {counted(judge.changed, 'answer')} got another reward than an equal answer"
            " before"
        )
        setup.insert(0, Finding("judge", text, 0.0, float(judge.changed), judge.episodes))
    findings = [*setup, *findings]
    if split == "train":
        history: dict[str, dict[int, float]] = {}
        for name, values in metrics.items():
            history[name] = {at: value for at, value in values.items() if at <= step}
        for name, text in {**warning_signs(history), **unstable(history)}.items():
            suspect = name.startswith(("train/held_out", "train/phrase", "train/answer"))
            if setup and not suspect:
                continue  # these signs blame the update, and something else changed
            findings.append(Finding("suspect" if suspect else "notice", text))
    return StepChange(split, decoding, step, earlier, tuple(findings), summary)


def _reward(before: Sequence[StepEpisode], after: Sequence[StepEpisode]) -> Iterator[Finding]:
    a = rewards(before)
    b = rewards(after)
    if a and b and fmean(a) != fmean(b):
        chance = "" if differ(a, b) else ", which chance may explain"
        text = (
            f"mean reward {fmean(a):.3g} → {fmean(b):.3g} ({len(a):,} and"
            f" {counted(len(b), 'episode')}){chance}"
        )
        yield Finding("reward", text, fmean(a), fmean(b))


_Metrics = Mapping[str, Mapping[int, float]]


def _update(metrics: _Metrics, before: int) -> Iterator[Finding]:
    """Describe the update between two steps."""
    listed = [
        f"{about} {metrics[name][before]:.3g}"
        for name, about in (("train/lr", "learning rate"), ("train/grad_norm", "gradient norm"))
        if before in metrics.get(name, {})
    ]
    if listed:
        yield Finding(
            "update", f"the update in between is that of step {before}: {', '.join(listed)}"
        )


def _updates(metrics: _Metrics, before: int, step: int) -> Iterator[Finding]:
    """Count the steps with updates between two validations."""
    trained = [at for at in metrics.get("train/grad_norm", {}) if before < at <= step]
    if trained:
        last = f" to {trained[-1]}" if len(trained) > 1 else ""
        yield Finding(
            "updates",
            f"{counted(len(trained), 'step')} with updates in between: {trained[0]}{last}",
        )


def _signal(before: Sequence[StepEpisode], after: Sequence[StepEpisode]) -> Iterator[Finding]:
    """Compare the numbers of groups with equal rewards."""
    old_groups, groups = _groups(before), _groups(after)
    without = list(filter(_is_alike, groups))
    old = [float(_is_alike(group)) for group in old_groups]
    new = [float(_is_alike(group)) for group in groups]
    if not differ(old, new):
        return
    had = f"{sum(map(int, old))} of {len(old)}"
    values = Counter(f"{group[0]['reward']:.3g}" for group in without)
    listed = ", ".join(f"{count} of reward {value}" for value, count in values.most_common(3))
    yield Finding(
        "signal",
        (
            f"{len(without)} of {counted(len(groups), 'group')} gave every attempt the same reward"
            f" and trained nothing ({listed}); {had} before"
            if without
            else f"every group has attempts with different rewards; {had} had none before"
        ),
        fmean(old),
        fmean(new),
        tuple(group[0]["episode_id"] for group in without),
    )


def _is_alike(group: Sequence[StepEpisode]) -> bool:
    return max(rewards(group)) - min(rewards(group)) <= 1e-8


def _groups(episodes: Sequence[StepEpisode]) -> list[list[StepEpisode]]:
    groups = grouped((e for e in episodes if e["reward"] is not None), lambda e: e["group_id"])
    return [group for group in groups.values() if len(group) > 1]


def _split_causes(
    reader: TraceReader,
    before: Sequence[StepEpisode],
    after: Sequence[StepEpisode],
    trace: Path | None,
) -> Iterator[Finding]:
    """Find new causes of splits; only episodes with splits are merged."""
    old = [e["episode_id"] for e in before if e["splits"]][:_SPLIT_EPISODES]
    new = [e["episode_id"] for e in after if e["splits"]][:_SPLIT_EPISODES]
    if not new:
        return
    known = {split.cause for _, split in splits_of(reader, old, trace)[0]} if old else set[str]()
    splits = splits_of(reader, new, trace)[0]
    for row in by_cause([split for _, split in splits]):
        if row["cause"] not in known:
            behind = tuple(dict.fromkeys(id for id, split in splits if split.cause == row["cause"]))
            text = (
                f"{counted(row['splits'], 'split')} of timelines by {row['cause']}, a new cause"
                f" ({row['hint']})"
            )
            yield Finding("splits", text, 0.0, float(row["splits"]), behind)


def _metrics(
    reader: TraceReader, run_id: str, metrics: _Metrics, before: int, step: int
) -> Iterator[Finding]:
    for name, (about, least) in _METRICS.items():
        values = metrics.get(name, {})
        if before not in values or step not in values:
            continue
        a = values[before]
        b = values[step]
        if abs(b - a) >= max(least, _RELATIVE * max(abs(a), abs(b))):
            yield Finding(name.removeprefix("train/"), f"{about}: {a:.3g} → {b:.3g}", a, b)
            if name == "train/logprob_gap_mean" and (text := on_gap(reader.query, run_id, step, b)):
                yield Finding("gap", text, a, b)


def _ledger(reader: TraceReader, run_id: str, before: int, step: int) -> Iterator[Finding]:
    """Find new reasons why sampled tokens were not trained."""
    by_step = ledger_by_step(reader, run_id)
    text = discarded(by_step.get(step, {}))
    if text and text.split(":")[0] != discarded(by_step.get(before, {})).split(":")[0]:
        yield Finding("ledger", text)
