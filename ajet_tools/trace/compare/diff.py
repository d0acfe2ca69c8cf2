"""Compares two episodes or two runs: first differences, rewards, behaviour and configs."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from ajet_sdk.errors import QueryError
from ajet_sdk.pictures import keyed
from ajet_sdk.protocols import TraceReader
from ajet_sdk.reporting.paired import Paired, paired
from ajet_sdk.samples.prefixes import common_prefix, common_start
from ajet_sdk.samples.timelines import merge
from ajet_sdk.trace.reader import calls_of, episodes
from ajet_sdk.types import Call, Episode
from ajet_tools.text.clean import flat_keys
from ajet_tools.trace.compare.attempts import ComparedMessage, compared_messages
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

_IDENTITY = ("ajet.experiment_name", "ajet.experiment_dir")


@dataclass(frozen=True)
class DiffPart:
    """A part of two conversations, equal or replaced."""

    same: bool
    a: tuple[ComparedMessage, ...]
    b: tuple[ComparedMessage, ...]


@dataclass(frozen=True)
class EpisodeDiff:
    """Difference of two episodes."""

    a: Episode
    b: Episode
    parts: tuple[DiffPart, ...]
    """Both conversations from start to end."""
    shared_tokens: int | None
    """Length of the common prefix of their first timelines, in tokens; None without ids."""

    @property
    def first_difference(self) -> DiffPart | None:
        return next((part for part in self.parts if not part.same), None)

    @property
    def same_messages(self) -> int:
        return sum(len(part.a) for part in self.parts if part.same)

    @property
    def other_settings(self) -> list[str]:
        """Names of what is no message and differs between the first requests of both, such as
        `tools`."""
        requests = [_settings(side.calls) for side in (self.a, self.b)]
        return sorted(
            name
            for name in {*requests[0], *requests[1]}
            if requests[0].get(name) != requests[1].get(name)
        )

    def rewards(self) -> list[dict[str, object]]:
        """Return the total rewards of both, by name and agent."""
        totals: dict[str, dict[str, float]] = {}
        for side, episode in (("a", self.a), ("b", self.b)):
            for reward in episode.rewards:
                if reward.agent:
                    name = f"{reward.name} of {reward.agent}"
                else:
                    name = reward.name
                of = totals.setdefault(name, {})
                of[side] = of.get(side, 0.0) + reward.value * reward.weight
        return [{"reward": name, "a": of.get("a"), "b": of.get("b")} for name, of in totals.items()]


def _settings(calls: Sequence[Call]) -> dict[str, object]:
    """Return what a first request of the agent holds besides messages; empty without requests."""
    first = next((call for call in calls if call.phase == "rollout"), None)
    if first is None:
        return {}
    request = {name: value for name, value in first.request.items() if name != "messages"}
    return {**request, "model": first.model}


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


def diff_episodes(a: Episode, b: Episode) -> EpisodeDiff:
    """Align the conversations of two episodes, message by message."""
    sides = [compared_messages(side.calls) for side in (a, b)]
    keys = [[(message.role, message.agent, message.text) for message in side] for side in sides]
    matcher = difflib.SequenceMatcher(None, keys[0], keys[1], autojunk=False)
    parts = [
        DiffPart(op == "equal", sides[0][i:j], sides[1][k:m])
        for op, i, j, k, m in matcher.get_opcodes()
    ]
    first = [
        merge([call for call in side.calls if call.phase == "rollout"]).timelines[:1]
        for side in (a, b)
    ]
    shared = None
    if all(first):
        ids = [keyed(side[0].token_ids, side[0].pictures) for side in first]
        shared = common_prefix(ids[0], ids[1])
    return EpisodeDiff(a, b, tuple(parts), shared)


_BEFORE = 400
_SHOWN = 8000
"""Compared characters before the first difference, and in all."""


def text_diff(a: str, b: str) -> list[str]:
    """Compare two texts line by line around their first difference; `-` marks the first text, `+`
    the second."""
    start = max(0, common_start(a, b) - _BEFORE)
    excerpts = (f"{'…' if start else ''}{text[start : start + _SHOWN]}" for text in (a, b))
    before, after = ([f"  {line}" for line in excerpt.splitlines()] for excerpt in excerpts)
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
    """One of two runs, with the compared episodes."""

    run_id: str
    split: str | None
    step: int | None
    decoding: str | None
    facts: tuple[StepEpisode, ...]

    @property
    def of(self) -> str:
        """Splits and decoding modes of the compared episodes."""
        return " and ".join(
            sorted({" ".join(filter(None, (f["split"], f["decoding"]))) for f in self.facts})
        )

    @property
    def solved(self) -> float | None:
        """Share of judged episodes that solved their task: `is_success`, or else a reward of at
        least 1."""
        judged = [
            (reward, f["is_success"]) for f in self.facts if (reward := f["reward"]) is not None
        ]
        solved = [reward >= 1 - 1e-9 if success is None else success for reward, success in judged]
        return fmean(solved) if solved else None

    @property
    def failures(self) -> Counter[str]:
        return Counter(
            str(f["cause"] or f["status"]) for f in self.facts if f["status"] != "succeeded"
        )

    def mean(self, name: Literal["reward", "calls", "tokens", "seconds"]) -> float | None:
        """Return the mean over the episodes that have a value."""
        values = [float(value) for fact in self.facts if (value := fact[name]) is not None]
        return fmean(values) if values else None

    def by_task(self) -> dict[str, float]:
        """Return the mean reward of each rewarded task."""
        return {
            task_id: fmean(rewards(attempts)) for task_id, attempts in by_task(self.facts).items()
        }


@dataclass(frozen=True)
class RunDiff:
    """Difference of two runs."""

    a: RunSide
    b: RunSide
    tasks: tuple[tuple[str, float, float], ...]
    """Tasks rewarded in both: id, mean reward in a, mean reward in b."""
    only_a: int
    only_b: int
    test: Paired | None
    """Paired comparison b - a by task; None without common tasks."""
    changes: tuple[Finding, ...]
    """Changes of behaviour, and first differences of attempts at tasks with large changes."""
    config: tuple[tuple[str, object, object], ...]
    """Config keys with different values."""


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
    both = [
        kind
        for kind in _KINDS
        if all(
            kind in of and (not isinstance(at, int) or at in of[kind])
            for of, at in zip(there, steps, strict=True)
        )
    ]
    fitting = [(s, d) for s, d in both if split in (None, s) and decoding in (None, d)]
    if fitting:
        split, decoding = fitting[0]
    sides = []
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
        facts = tuple(step_episodes(reader, run_id, split, at, decoding))
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
            known_steps = {
                at for (s, _), in_step in of.items() if split in (None, s) for at in in_step
            }
            if known_steps:
                listed = f"; it has {_listed(known_steps)}"
            else:
                listed = ""
            raise QueryError(f"run {run_id} has no finished episode{where} to compare{listed}")
        sides.append(RunSide(run_id, split, at, decoding, facts))
    means = [side.by_task() for side in sides]
    shared = [task_id for task_id in means[0] if task_id in means[1]]
    tasks = tuple((task_id, means[0][task_id], means[1][task_id]) for task_id in shared)
    before, after = (side.facts for side in sides)
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
    config = [(key, config_a.get(key), config_b.get(key)) for key in keys]
    return RunDiff(
        sides[0],
        sides[1],
        tasks,
        len(means[0]) - len(shared),
        len(means[1]) - len(shared),
        paired([after - before for _, before, after in tasks]) if tasks else None,
        (*setup, *parted, *failures(before, after), *measures(before, after)),
        tuple(entry for entry in config if entry[1] != entry[2]),
    )


def _by_kind(steps: Steps) -> str:
    """Format steps by kind: `train sampled at steps 1, 2; val greedy at steps 2`."""
    kinds = {" ".join(filter(None, kind)): in_step for kind, in_step in steps.items()}
    return "; ".join(f"{kind} at {_listed(in_step)}" for kind, in_step in sorted(kinds.items()))


def _listed(steps: Iterable[int]) -> str:
    known = sorted(steps)
    return f"steps {', '.join(map(str, known[:12]))}{' …' if len(known) > 12 else ''}"
