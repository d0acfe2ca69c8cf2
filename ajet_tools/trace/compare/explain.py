"""What changed at a step of a run, against the step or validation before: sentences with figures and episodes.

Two means are said to differ where they lie three standard errors and a tenth of their size apart; tasks are compared in
pairs, with the interval of `paired`. A metric of a step is one number without a spread: it changed where it moved by a
fifth, and by no less than `_METRICS` says. What did not change is left out.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean

from ajet_sdk.errors import QueryError
from ajet_sdk.protocols import TraceReader
from ajet_sdk.reporting.gap import GAPS, LARGE_GAP, gap_by_cause, gap_message
from ajet_sdk.reporting.notices import discarded, unstable, warning_signs
from ajet_sdk.trace.reader import episodes
from ajet_tools.text.clean import counted, one_line
from ajet_tools.trace.compare.attempts import ComparedAttempt, Divergence, align, attempt_of
from ajet_tools.trace.compare.diff import paired
from ajet_tools.trace.compare.suspects import Finding, differ, pushed, suspects
from ajet_tools.trace.queries.runs import ledger_totals, metric_points
from ajet_tools.trace.queries.steps import StepEpisode, Steps, rewards_by_step, step_episodes, trained_calls
from ajet_tools.trace.queries.tokens import EpisodeFacts
from ajet_tools.trace.splits import by_cause, splits_of

_KINDS = (("train", None), ("val", "sampled"), ("val", "greedy"), ("val", None))
"""What of a step is explained: training, and the first kind of validation that it has."""
_TASKS = 3
"""Tasks that fell, and that rose, of which attempts are compared."""
_SPLIT_EPISODES = 50
_EXCERPT = 24
_ID = 12
_SHOWN = 3
_METRICS = {
    "train/entropy": ("entropy", 0.02),
    "train/logprob_gap_mean": ("the gap between the log-probabilities of trainer and sampler", 0.01),
    "train/sampler_kl": ("KL between sampler and trainer", 0.002),
    "train/kl": ("KL to the reference model", 0.002),
    "train/clip_share": ("the share of clipped tokens", 0.01),
    "train/staleness": ("staleness (updates between sampling and training)", 0.25),
    "train/grad_norm": ("the gradient norm", 0.05),
}
"""Metric -> what it is, and its least change."""
_RELATIVE = 0.2

_Measure = Callable[[StepEpisode], "float | None"]
_MEASURES: tuple[tuple[str, str, _Measure], ...] = (
    ("length", "sampled tokens per episode", lambda e: e["tokens"]),
    ("calls", "calls per episode", lambda e: e["calls"]),
    ("tools", "tool-calling replies per episode", lambda e: e["tool_replies"]),
    ("cut", "replies per episode that end at the maximum length", lambda e: e["cut"]),
    ("unread", "tool calls per episode that cannot be parsed", lambda e: e["unread"]),
    ("splits", "splits of timelines per episode", lambda e: e["splits"]),
)


@dataclass(frozen=True)
class StepChange:
    """Training or a validation at a step, against the one before."""

    split: str
    decoding: str | None
    step: int
    before: int
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class Explanation:
    run_id: str
    step: int
    chosen: str
    """Why this step, where none was named."""
    changes: tuple[StepChange, ...]


def lines_of(explanation: Explanation) -> list[str]:
    """An explanation as lines of text."""
    chosen = f": the {explanation.chosen}" if explanation.chosen else ""
    lines = [f"run {explanation.run_id}, step {explanation.step}{chosen}"]
    for change in explanation.changes:
        kind = "training" if change.split == "train" else f"validation, {change.decoding or 'unknown decoding'}"
        lines += ["", f"{kind}: step {change.step} against step {change.before}"]
        for finding in change.findings:
            lines.append(f"{'    ' if finding.kind == 'task' else '  '}{finding.text}")
            if finding.episodes and finding.kind != "task":
                more = len(finding.episodes) - _SHOWN
                ids = ", ".join(id[:_ID] for id in finding.episodes[:_SHOWN])
                lines.append(f"      episodes {ids}{f' and {more:,} more' if more > 0 else ''}")
        if not change.findings:
            lines.append("  nothing changed")
    return lines


def explain(reader: TraceReader, run_id: str, step: int | None = None, trace: Path | None = None) -> Explanation:
    """What changed at a step; by default at that with the largest change of reward.

    `trace` is where the trace lies, to look for the tokenizer. Raises QueryError where the run has no such step, or
    none before it.
    """
    by_step = rewards_by_step(reader, run_id)
    chosen = ""
    if step is None:
        step, chosen = _largest_change(run_id, by_step)
    changes: list[StepChange] = []
    for split, decoding in _KINDS:
        steps = [at for at in _of_kind(by_step, split, decoding) if at <= step]
        if len(steps) > 1 and steps[-1] == step and not (split == "val" and any(c.split == "val" for c in changes)):
            changes.append(_change(reader, run_id, split, decoding, steps, trace))
    if not changes:
        there = sorted({at for of in by_step.values() for at in of})
        has = f"its steps are {there[0]} to {there[-1]}" if there else "it has no finished episode"
        raise QueryError(
            f"run {run_id} has nothing at step {step} and before it to compare ({has}); `ajet trace diff` compares runs"
        )
    return Explanation(run_id, step, chosen, tuple(changes))


def _of_kind(by_step: Steps, split: str, decoding: str | None) -> Mapping[int, float | None]:
    """The mean rewards of a split and decoding; of all decodings where None and the split is training."""
    of = [s for kind, s in by_step.items() if kind[0] == split and (split == "train" or kind[1] == decoding)]
    return dict(sorted((step, reward) for steps in of for step, reward in steps.items()))


def _largest_change(run_id: str, by_step: Steps) -> tuple[int, str]:
    """The step of the largest change of the training reward, else of validation's."""
    for split, decoding in _KINDS:
        known = [(at, r) for at, r in _of_kind(by_step, split, decoding).items() if r is not None]
        if len(known) > 1:
            (_, a), (at, b) = max(pairwise(known), key=lambda pair: abs(pair[1][1] - pair[0][1]))
            kind = "training" if split == "train" else f"{decoding or ''} validation".strip()
            return at, f"largest change of the mean reward in {kind}: {a:.3g} → {b:.3g}"
    raise QueryError(
        f"run {run_id} has no two steps with rewards to compare; `ajet trace diff` compares it with another run"
    )


def _change(
    reader: TraceReader, run_id: str, split: str, decoding: str | None, steps: Sequence[int], trace: Path | None
) -> StepChange:
    first, earlier, step = steps[0], steps[-2], steps[-1]
    before, after = (step_episodes(reader, run_id, split, at, decoding) for at in (earlier, step))
    start = before if first == earlier else step_episodes(reader, run_id, split, first, decoding)
    attempted = step_episodes(reader, run_id, split, step, decoding, before=True)
    metrics = {name: dict(points) for name, points in metric_points(reader, run_id).items()}
    findings = [*_reward(before, after)]
    if split == "train" and differ(_rewards(before), _rewards(after)):
        findings += _update(metrics, earlier)
    findings += [*_tasks(reader, attempted, after), *(_signal(before, after) if split == "train" else ())]
    findings += [*_failures(before, after), *_measures(before, after), *_split_causes(reader, before, after, trace)]
    if split == "train":
        findings += [*_metrics(reader, run_id, metrics, earlier, step), *_ledger(reader, run_id, earlier, step)]
    findings += suspects(start, after, first)
    if split == "train":
        findings += [*_notices(metrics, step), *pushed(trained_calls(reader, run_id, step))]
    return StepChange(split, decoding, step, earlier, tuple(findings))


def _rewards(attempts: Sequence[StepEpisode]) -> list[float]:
    return [e["reward"] for e in attempts if e["reward"] is not None]


def _reward(before: Sequence[StepEpisode], after: Sequence[StepEpisode]) -> Iterator[Finding]:
    a, b = _rewards(before), _rewards(after)
    if a and b and fmean(a) != fmean(b):
        chance = "" if differ(a, b) else ", which chance may explain"
        text = f"mean reward {fmean(a):.3g} → {fmean(b):.3g} ({len(a):,} and {counted(len(b), 'episode')}){chance}"
        yield Finding("reward", text, fmean(a), fmean(b))


_Metrics = Mapping[str, Mapping[int, float]]


def _update(metrics: _Metrics, before: int) -> Iterator[Finding]:
    """The update that lies between two steps."""
    listed = [
        f"{about} {metrics[name][before]:.3g}"
        for name, about in (("train/lr", "learning rate"), ("train/grad_norm", "gradient norm"))
        if before in metrics.get(name, {})
    ]
    if listed:
        yield Finding("update", f"the update in between is that of step {before}: {', '.join(listed)}")


def _tasks(reader: TraceReader, before: Sequence[StepEpisode], after: Sequence[StepEpisode]) -> Iterator[Finding]:
    """Tasks that fell and rose since they were last attempted, and where the attempts of the largest part."""
    a, b = _by_task(before), _by_task(after)
    changes = {task_id: fmean(_rewards(b[task_id])) - fmean(_rewards(a[task_id])) for task_id in a if task_id in b}
    fell, rose = ([task for task, by in changes.items() if sign * by > 1e-9] for sign in (-1, 1))
    if not changes:
        yield from _apart(reader, b)
    if not fell and not rose:
        return
    test, steps = paired(list(changes.values())), sorted({e["step"] for of in a.values() for e in of})
    interval = "too few tasks for an interval"
    if test.low is not None and test.high is not None:
        interval = f"{100 * (test.level or 0):.0f} % interval {test.low:+.3g} to {test.high:+.3g}"
    since = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    yield Finding(
        "tasks",
        f"of {counted(len(changes), 'task')} attempted before ({since}), {len(fell)} fell and {len(rose)} rose: mean "
        f"change {test.mean:+.3g}, {interval}",
        test.low,
        test.high,
        tuple(e["episode_id"] for task in fell + rose for e in b[task]),
    )
    pairs = []
    for tasks, (better, worse) in ((fell, (a, b)), (rose, (b, a))):
        for task_id in sorted(tasks, key=lambda task: (-abs(changes[task]), task))[:_TASKS]:
            pairs.append((max(better[task_id], key=_worth), min(worse[task_id], key=_worth)))
    for best, worst, text in _partings(reader, pairs):
        x, y = (fmean(_rewards(side[best["task_id"]])) for side in (a, b))
        ids = worst["episode_id"], best["episode_id"]
        yield Finding("task", f'"{one_line(best["task"], 60)}" {x:.3g} → {y:.3g}: {text}', x, y, ids)


def _worth(episode: StepEpisode) -> float:
    return episode["reward"] or 0.0


def _apart(reader: TraceReader, by_task: Mapping[str, Sequence[StepEpisode]]) -> Iterator[Finding]:
    """Where the best and the worst attempt at a task of this step part."""
    pairs = [(max(attempts, key=_worth), min(attempts, key=_worth)) for attempts in by_task.values()]
    pairs.sort(key=lambda pair: _worth(pair[1]) - _worth(pair[0]))
    for best, worst, text in _partings(reader, [pair for pair in pairs[:_TASKS] if _worth(pair[0]) > _worth(pair[1])]):
        ids = worst["episode_id"], best["episode_id"]
        yield Finding("task", f'"{one_line(best["task"], 60)}": {text}', _worth(worst), _worth(best), ids)


def _by_task(episodes: Sequence[StepEpisode]) -> dict[str, list[StepEpisode]]:
    by_task: dict[str, list[StepEpisode]] = defaultdict(list)
    for episode in episodes:
        if episode["reward"] is not None:
            by_task[episode["task_id"]].append(episode)
    return by_task


def _partings(
    reader: TraceReader, pairs: Sequence[tuple[StepEpisode, StepEpisode]]
) -> Iterator[tuple[StepEpisode, StepEpisode, str]]:
    """Pairs of a best and a worst attempt, and where they part."""
    ids = list(dict.fromkeys(e["episode_id"] for pair in pairs for e in pair))
    whole = episodes(reader, episode_ids=ids) if ids else []
    attempts = {e.episode_id: attempt_of(EpisodeFacts(e, True, {}, {}, None), {}) for e in whole}
    for best, worst in pairs:
        a, b = attempts[best["episode_id"]], attempts[worst["episode_id"]]
        named = " and ".join(
            f"{e['episode_id'][:_ID]} (reward {e['reward']:.3g}, step {e['step']})" for e in (best, worst)
        )
        place = align(a, b)
        if place is None:
            yield best, worst, f"{named} are the same to the end, and were judged differently"
            continue
        token = "" if place.token is None else f"token {place.token} ("
        where = f"{token}message {place.message}{')' if token else ''}"
        yield best, worst, f"{named} part at {where}: {_excerpt(a, place)} and {_excerpt(b, place)}"


def _excerpt(attempt: ComparedAttempt, place: Divergence) -> str:
    if place.message >= len(attempt.messages):
        return "the end"
    message = attempt.messages[place.message]
    text = message.text[max(0, place.character - _EXCERPT // 2) : place.character + _EXCERPT]
    return f'{message.role} "{one_line(text, 2 * _EXCERPT)}"'


def _signal(before: Sequence[StepEpisode], after: Sequence[StepEpisode]) -> Iterator[Finding]:
    """Groups whose attempts all have the same reward."""
    sides = [_groups(before), _groups(after)]
    same = [[float(max(_rewards(g)) - min(_rewards(g)) <= 1e-8) for g in groups] for groups in sides]
    if not differ(*same):
        return
    without = [group for group, alike in zip(sides[1], same[1], strict=True) if alike]
    values = Counter(f"{group[0]['reward']:.3g}" for group in without)
    listed = ", ".join(f"{count} of reward {value}" for value, count in values.most_common(3))
    yield Finding(
        "signal",
        f"{len(without)} of {counted(len(sides[1]), 'group')} gave every attempt the same reward and trained nothing "
        f"({listed}); {sum(map(int, same[0]))} of {len(sides[0])} before" if without else
        f"every group has attempts with different rewards; {sum(map(int, same[0]))} of {len(sides[0])} had none before",
        fmean(same[0]),
        fmean(same[1]),
        tuple(group[0]["episode_id"] for group in without),
    )  # fmt: skip


def _groups(episodes: Sequence[StepEpisode]) -> list[list[StepEpisode]]:
    groups: dict[str, list[StepEpisode]] = defaultdict(list)
    for episode in episodes:
        if episode["reward"] is not None:
            groups[episode["group_id"]].append(episode)
    return [group for group in groups.values() if len(group) > 1]


def _failures(before: Sequence[StepEpisode], after: Sequence[StepEpisode]) -> Iterator[Finding]:
    causes = [
        ["" if e["status"] == "succeeded" else e["cause"] or e["status"] for e in side] for side in (before, after)
    ]
    for cause in sorted({*causes[0], *causes[1]} - {""}):
        a, b = ([float(c == cause) for c in side] for side in causes)
        if not (sum(b) and not sum(a)) and not differ(a, b):
            continue
        was = f"{int(sum(a))} of {len(a)} before" if sum(a) else "a new cause"
        text = f"{int(sum(b))} of {counted(len(b), 'episode')} failed with {one_line(cause, 60)} ({was})"
        ids = tuple(e["episode_id"] for e, c in zip(after, causes[1], strict=True) if c == cause)
        yield Finding("failures", text, fmean(a) if a else None, fmean(b) if b else None, ids)


def _measures(before: Sequence[StepEpisode], after: Sequence[StepEpisode]) -> Iterator[Finding]:
    for kind, name, measure in _MEASURES:
        a, b = ([float(v) for e in side if (v := measure(e)) is not None] for side in (before, after))
        if differ(a, b):
            sign = 1 if fmean(b) > fmean(a) else -1
            known = [e for e in after if measure(e) is not None]
            behind = sorted(known, key=lambda e: -sign * (measure(e) or 0.0))
            ids = tuple(e["episode_id"] for e in behind if sign * (measure(e) or 0.0) > sign * fmean(a))
            yield Finding(kind, f"{name}: {fmean(a):.3g} → {fmean(b):.3g}", fmean(a), fmean(b), ids)


def _split_causes(
    reader: TraceReader, before: Sequence[StepEpisode], after: Sequence[StepEpisode], trace: Path | None
) -> Iterator[Finding]:
    """Causes of splits that the step before did not have; calls are merged only where there are splits."""
    ids = [[e["episode_id"] for e in side if e["splits"]][:_SPLIT_EPISODES] for side in (before, after)]
    if not ids[1]:
        return
    splits = [splits_of(reader, of, trace)[0] if of else [] for of in ids]
    known = {split.cause for _, split in splits[0]}
    for row in by_cause([split for _, split in splits[1]]):
        if row["cause"] not in known:
            behind = tuple(dict.fromkeys(id for id, split in splits[1] if split.cause == row["cause"]))
            text = f"{counted(row['splits'], 'split')} of timelines by {row['cause']}, a new cause ({row['hint']})"
            yield Finding("splits", text, 0.0, float(row["splits"]), behind)


def _metrics(reader: TraceReader, run_id: str, metrics: _Metrics, before: int, step: int) -> Iterator[Finding]:
    for name, (about, least) in _METRICS.items():
        values = metrics.get(name, {})
        if before not in values or step not in values:
            continue
        a, b = values[before], values[step]
        if abs(b - a) >= max(least, _RELATIVE * max(abs(a), abs(b))):
            yield Finding(name.removeprefix("train/"), f"{about}: {a:.3g} → {b:.3g}", a, b)
            if name == "train/logprob_gap_mean" and b > LARGE_GAP:
                parts = gap_by_cause(reader.query(GAPS, [run_id, step]).to_pylist())
                if parts:
                    yield Finding("gap", gap_message(parts), a, b)


def _ledger(reader: TraceReader, run_id: str, before: int, step: int) -> Iterator[Finding]:
    """Why more of the sampled tokens were not trained."""
    sides: dict[int, dict[str, float]] = {before: {}, step: {}}
    for row in ledger_totals(reader, run_id, by_step=True):
        if row["step"] in sides:
            sides[row["step"]][row["outcome"]] = row["tokens"]
    text = discarded(sides[step])
    if text and text.split(":")[0] != discarded(sides[before]).split(":")[0]:
        yield Finding("ledger", text)


def _notices(metrics: _Metrics, step: int) -> Iterator[Finding]:
    """What the run's notices say of the steps up to this one."""
    history = {name: {at: value for at, value in of.items() if at <= step} for name, of in metrics.items()}
    for name, text in {**warning_signs(history), **unstable(history)}.items():
        suspect = name.startswith(("train/held_out", "train/phrase", "train/answer"))
        yield Finding("suspect" if suspect else "notice", text)
