"""Compares two episodes or two runs: first differences, rewards, behaviour and configs."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from statistics import fmean
from textwrap import indent
from typing import Literal

from ajet_sdk.errors import QueryError
from ajet_sdk.protocols import TraceReader
from ajet_sdk.reporting.paired import Paired, paired
from ajet_sdk.samples.prefixes import common_prefix, common_start
from ajet_sdk.trace.reader import calls_of, episodes
from ajet_sdk.types import Call, Episode
from ajet_tools.text.clean import flat_keys
from ajet_tools.trace.compare.attempts import ComparedMessage, Divergence, align, attempt_of
from ajet_tools.trace.compare.changes import (
    Finding,
    by_task,
    changes_of_tasks,
    failures,
    measures,
    rewards,
)
from ajet_tools.trace.compare.setup import code_changes, differing_values, request_values
from ajet_tools.trace.decoding import recorded_config
from ajet_tools.trace.queries.episodes import StepEpisode, Steps, rewards_by_step, step_episodes
from ajet_tools.trace.queries.records import Record

_IDENTITY = ("ajet.experiment_name", "ajet.experiment_dir")


@dataclass(frozen=True)
class EpisodeFacts:
    """An episode in a comparison."""

    episode_id: str
    run_id: str
    task_id: str
    attempt: int
    step: int
    split: str
    decoding: str | None
    status: str
    cause: str | None
    reward: float | None
    calls: int
    agents: int
    longest_prompt: int | None
    sampled_tokens: int | None
    seconds: float
    output: object


@dataclass(frozen=True)
class RewardPair:
    """A reward of two episodes, by name and agent; None: an episode has none of the name."""

    reward: str
    a: float | None
    b: float | None


@dataclass(frozen=True)
class EpisodeDiff:
    """Difference of two episodes."""

    a: EpisodeFacts
    b: EpisodeFacts
    rewards: Sequence[RewardPair]
    other_settings: Sequence[str]
    """What is no message and differs between the first requests of both, such as `tools`."""
    shared_tokens: int | None
    """Length of the common prefix of their first timelines, in tokens; None without ids."""
    same_messages: int
    first_difference: Divergence | None
    message_a: ComparedMessage | None
    message_b: ComparedMessage | None
    """The messages of the first difference; None: the episode has ended."""


def diff_episodes(a: Episode, b: Episode) -> EpisodeDiff:
    """Align the conversations of two episodes, message by message."""
    first, second = attempt_of(Record(a)), attempt_of(Record(b))
    apart = align(first, second)
    same = len(first.messages) if apart is None else apart.message
    shared = None
    if first.timelines and second.timelines:
        shared = common_prefix(first.timelines[0], second.timelines[0])
    old, new = _settings(a.calls), _settings(b.calls)
    return EpisodeDiff(
        _facts(a),
        _facts(b),
        rewards=_reward_pairs(a, b),
        other_settings=sorted(n for n in {*old, *new} if old.get(n) != new.get(n)),
        shared_tokens=shared,
        same_messages=same,
        first_difference=apart,
        message_a=first.messages[same] if same < len(first.messages) else None,
        message_b=second.messages[same] if same < len(second.messages) else None,
    )


def _facts(episode: Episode) -> EpisodeFacts:
    calls = [call for call in episode.calls if call.phase == "rollout"]
    prompts = [len(call.prompt_ids) for call in calls if call.prompt_ids is not None]
    outputs = [len(call.output_ids) for call in calls if call.output_ids is not None]
    return EpisodeFacts(
        episode_id=episode.episode_id,
        run_id=episode.run_id,
        task_id=episode.task.task_id,
        attempt=episode.attempt,
        step=episode.step,
        split=episode.split,
        decoding=episode.decoding,
        status=episode.status,
        cause=episode.cause,
        reward=episode.reward,
        calls=len(calls),
        agents=len({call.agent for call in calls}),
        longest_prompt=max(prompts, default=None),
        sampled_tokens=sum(outputs) if outputs else None,
        seconds=round((episode.ended_at - episode.started_at).total_seconds(), 3),
        output=episode.output,
    )


def _reward_pairs(a: Episode, b: Episode) -> list[RewardPair]:
    """Return the total rewards of both."""
    totals: dict[str, dict[str, float]] = {}
    for side, episode in (("a", a), ("b", b)):
        for reward in episode.rewards:
            name = f"{reward.name} of {reward.agent}" if reward.agent else reward.name
            total = totals.setdefault(name, {})
            total[side] = total.get(side, 0.0) + reward.value * reward.weight
    return [RewardPair(name, of.get("a"), of.get("b")) for name, of in totals.items()]


def _settings(calls: Sequence[Call]) -> dict[str, object]:
    """Return what a first request of the agent holds besides messages; empty without requests."""
    for call in calls:
        if call.phase == "rollout":
            request = {name: value for name, value in call.request.items() if name != "messages"}
            return {**request, "model": call.model}
    return {}


def episode_at(reader: TraceReader, episode_id: str) -> Episode:
    """Read a finished or unfinished episode."""
    matches = episodes(reader, episode_ids=[episode_id], superseded=True)
    if matches:
        return matches[0]
    return Episode(
        episode_id=episode_id,
        calls=tuple(calls_of(reader, episode_id)),
        status="aborted",
        error="no end",
    )


_BEFORE = 400
_SHOWN = 8000
"""Compared characters before the first difference, and in all."""


def text_diff(a: str, b: str) -> list[str]:
    """Compare two texts line by line around their first difference; `-` marks the first text, `+`
    the second."""
    start = max(0, common_start(a, b) - _BEFORE)
    excerpts = (f"{'…' if start else ''}{text[start : start + _SHOWN]}" for text in (a, b))
    before, after = (indent(excerpt, "  ", lambda _: True).splitlines() for excerpt in excerpts)
    lines = list(difflib.unified_diff(before, after, lineterm="", n=2))[3:]
    return ["…" if line.startswith("@@") else line for line in lines]


# Runs

_KINDS: tuple[tuple[str, str | None], ...] = (
    ("val", "sampled"),
    ("val", "greedy"),
    ("val", None),
    ("train", "sampled"),
    ("train", "greedy"),
    ("train", None),
    ("trial", "sampled"),
    ("trial", None),
)
"""Splits and decoding modes to compare by, in order of preference."""


@dataclass(frozen=True)
class RunSide:
    """One of two runs, by the compared episodes."""

    run_id: str
    split: str | None
    step: int | None
    decoding: str | None
    of: str
    """Splits and decoding modes of the episodes."""
    episodes: int
    reward: float | None
    """A mean over the episodes that have one, as `calls`, `sampled_tokens` and `seconds`."""
    solved: float | None
    """Share of judged episodes that solved their task: `is_success`, or else a reward of at least
    1."""
    calls: float | None
    sampled_tokens: float | None
    seconds: float | None
    failures: Mapping[str, int]


def _side(
    run_id: str,
    split: str | None,
    step: int | None,
    decoding: str | None,
    facts: Sequence[StepEpisode],
) -> RunSide:
    solved = []
    for fact in facts:
        if fact["reward"] is not None:
            success = fact["is_success"]
            solved.append(fact["reward"] >= 1 - 1e-9 if success is None else success)
    kinds = {" ".join(filter(None, (fact["split"], fact["decoding"]))) for fact in facts}
    failed = (str(f["cause"] or f["status"]) for f in facts if f["status"] != "succeeded")
    return RunSide(
        run_id,
        split,
        step,
        decoding,
        of=" and ".join(sorted(kinds)),
        episodes=len(facts),
        reward=_mean(fact["reward"] for fact in facts),
        solved=_mean(solved),
        calls=_mean(fact["calls"] for fact in facts),
        sampled_tokens=_mean(fact["tokens"] for fact in facts),
        seconds=_mean(fact["seconds"] for fact in facts),
        failures=Counter(failed),
    )


def _mean(values: Iterable[float | None]) -> float | None:
    known = [float(value) for value in values if value is not None]
    return fmean(known) if known else None


@dataclass(frozen=True)
class TaskPair:
    """Mean rewards of a task that was rewarded in both runs."""

    task_id: str
    a: float
    b: float
    change: float


@dataclass(frozen=True)
class ConfigPair:
    """A key of the config with different values."""

    key: str
    a: object
    b: object


@dataclass(frozen=True)
class RunDiff:
    """Difference of two runs."""

    a: RunSide
    b: RunSide
    tasks: Sequence[TaskPair]
    tasks_only_in_a: int
    tasks_only_in_b: int
    test: Paired | None
    """Sign-flip permutation test of b - a by task; None without common tasks."""
    changes: Sequence[Finding]
    """Changes of behaviour, and first differences of attempts at tasks with large changes."""
    config: Sequence[ConfigPair]


At = int | Literal["last"] | None
"""A step; None: the last validation, or all of training."""


def diff_runs(
    a: tuple[TraceReader, str],
    b: tuple[TraceReader, str],
    *,
    split: str | None = None,
    steps: tuple[At, At] = (None, None),
    decoding: str | None = None,
) -> RunDiff:
    """Compare two runs, or steps of runs, by their common tasks.

    Compares the last validations if both runs have one (sampled rather than greedy attempts),
    otherwise all training episodes, otherwise all episodes; with steps given, the same kind of
    episodes at those steps. Raises QueryError for a run without such episodes, or if sampled and
    greedy attempts would be mixed.
    """
    a, b = ((reader.of_run(run_id), run_id) for reader, run_id in (a, b))
    there = [rewards_by_step(*side) for side in (a, b)]
    fitting = []
    for kind in _KINDS:
        is_wanted = split in (None, kind[0]) and decoding in (None, kind[1])
        if is_wanted and all(map(_has, there, repeat(kind), steps)):
            fitting.append(kind)
    if fitting:
        split, decoding = fitting[0]
    sides: list[RunSide] = []
    compared: list[Sequence[StepEpisode]] = []
    for (reader, run_id), of, wanted in zip((a, b), there, steps, strict=True):
        last = [
            max(in_step)
            for (s, d), in_step in of.items()
            if split in (None, s) and decoding in (None, d)
        ]
        if wanted == "last" or (wanted is None and split == "val"):
            at = max(last, default=None)
        else:
            at = wanted
        facts = step_episodes(reader, run_id, split, at, decoding)
        kinds = {(fact["split"], fact["decoding"]) for fact in facts}
        if len(kinds) > 1:
            known = dict.fromkeys(
                f"run {id} has {_by_kind(of)}" for (_, id), of in zip((a, b), there, strict=True)
            )
            raise QueryError(f"there is nothing of one kind on both sides: {', and '.join(known)}")
        if not facts:
            where = "".join(f" {word}" for word in (split, decoding) if word)
            where = f" of{where}" if where else ""
            where += "" if at is None else f" at step {at}"
            known_steps = set[int]()
            for (kind_split, _), in_step in of.items():
                if split in (None, kind_split):
                    known_steps.update(in_step)
            listed = ""
            if known_steps:
                listed = f"; it has {_listed(known_steps)}"
            raise QueryError(f"run {run_id} has no finished episode{where} to compare{listed}")
        sides.append(_side(run_id, split, at, decoding, facts))
        compared.append(facts)
    before, after = compared
    old, new = _task_rewards(before), _task_rewards(after)
    tasks: list[TaskPair] = []
    for task_id, reward in old.items():
        if task_id in new:
            tasks.append(TaskPair(task_id, reward, new[task_id], new[task_id] - reward))
    readers = list(dict.fromkeys((a[0], b[0])))
    parted = [
        change for change in changes_of_tasks(readers, before, after) if change.kind == "task"
    ]
    values = [
        request_values(*run, side.split, side.decoding, side.step)
        for run, side in zip((a, b), sides, strict=True)
    ]
    recorded = [recorded_config(*side) for side in (a, b)]
    setup = [*code_changes(*recorded), *differing_values(*values)]
    config_a, config_b = (dict(flat_keys(config)) for config in recorded)
    keys = sorted({*config_a, *config_b}.difference(_IDENTITY))
    config = [ConfigPair(key, config_a.get(key), config_b.get(key)) for key in keys]
    return RunDiff(
        sides[0],
        sides[1],
        tasks=tasks,
        tasks_only_in_a=len(old) - len(tasks),
        tasks_only_in_b=len(new) - len(tasks),
        test=paired([task.change for task in tasks]) if tasks else None,
        changes=[*setup, *parted, *failures(before, after), *measures(before, after)],
        config=[pair for pair in config if pair.a != pair.b],
    )


def _has(steps: Steps, kind: tuple[str, str | None], at: At) -> bool:
    """Whether a run has episodes of a kind, at a step if it is given by its number."""
    return kind in steps and (not isinstance(at, int) or at in steps[kind])


def _task_rewards(facts: Sequence[StepEpisode]) -> dict[str, float]:
    """Return the mean reward of each rewarded task."""
    return {task_id: fmean(rewards(attempts)) for task_id, attempts in by_task(facts).items()}


def _by_kind(steps: Steps) -> str:
    """Format steps by kind: `train sampled at steps 1, 2; val greedy at steps 2`."""
    kinds = {" ".join(filter(None, kind)): in_step for kind, in_step in steps.items()}
    return "; ".join(f"{kind} at {_listed(in_step)}" for kind, in_step in sorted(kinds.items()))


def _listed(steps: Iterable[int]) -> str:
    known = sorted(steps)
    return f"steps {', '.join(map(str, known[:12]))}{' …' if len(known) > 12 else ''}"
