"""Two episodes or two runs beside each other: where they part, and what each is worth."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from ajet_sdk.errors import QueryError
from ajet_sdk.protocols import TraceReader
from ajet_sdk.reporting.paired import Paired, paired
from ajet_sdk.samples.prefixes import common_prefix, common_start
from ajet_sdk.samples.timelines import merge
from ajet_sdk.trace.reader import calls_of, episodes
from ajet_sdk.types import Episode
from ajet_tools.text.clean import flat_keys
from ajet_tools.trace.compare.attempts import ComparedMessage, compared_messages
from ajet_tools.trace.compare.changes import Finding, by_task, changes_of_tasks, failures, measures, rewards
from ajet_tools.trace.decoding import recorded_config
from ajet_tools.trace.queries.steps import StepEpisode, Steps, rewards_by_step, step_episodes

_IDENTITY = ("ajet.experiment_name", "ajet.experiment_dir")


@dataclass(frozen=True)
class DiffPart:
    """A part of two conversations: equal in both, or replaced."""

    same: bool
    a: tuple[ComparedMessage, ...]
    b: tuple[ComparedMessage, ...]


@dataclass(frozen=True)
class EpisodeDiff:
    """Two episodes."""

    a: Episode
    b: Episode
    parts: tuple[DiffPart, ...]
    """Both conversations from start to end."""
    shared_tokens: int | None
    """How many tokens their first timelines have in common from the start; None where one has no ids."""

    @property
    def first_difference(self) -> DiffPart | None:
        return next((part for part in self.parts if not part.same), None)

    @property
    def same_messages(self) -> int:
        return sum(len(part.a) for part in self.parts if part.same)

    def rewards(self) -> list[dict[str, object]]:
        """The rewards of both by name and agent, summed."""
        sides = [_rewards(episode) for episode in (self.a, self.b)]
        return [{"reward": name, "a": sides[0].get(name), "b": sides[1].get(name)} for name in {**sides[0], **sides[1]}]


def _rewards(episode: Episode) -> dict[str, float]:
    totals: dict[str, float] = {}
    for reward in episode.rewards:
        name = f"{reward.name} of {reward.agent}" if reward.agent else reward.name
        totals[name] = totals.get(name, 0.0) + reward.value * reward.weight
    return totals


def episode_at(reader: TraceReader, episode_id: str) -> Episode:
    """An episode, ended or not."""
    matches = episodes(reader, episode_ids=[episode_id], superseded=True)
    if matches:
        return matches[0]
    return Episode(episode_id=episode_id, calls=tuple(calls_of(reader, episode_id)), status="aborted", error="no end")


def diff_episodes(a: Episode, b: Episode) -> EpisodeDiff:
    """Align what was said in two episodes, message by message, as the viewer compares attempts."""
    said_a, said_b = compared_messages(a.calls), compared_messages(b.calls)
    keys_a, keys_b = ([(message.role, message.agent, message.text) for message in side] for side in (said_a, said_b))
    matcher = difflib.SequenceMatcher(None, keys_a, keys_b, autojunk=False)
    parts = tuple(DiffPart(op == "equal", said_a[i1:i2], said_b[j1:j2]) for op, i1, i2, j1, j2 in matcher.get_opcodes())
    return EpisodeDiff(a, b, parts, _shared_tokens(a, b))


_BEFORE, _SHOWN = 400, 8000
"""Characters of a text before its first difference, and of all of it, that are compared line by line."""


def text_diff(a: str, b: str) -> list[str]:
    """Two texts line by line around their first difference, `-` as in the first and `+` as in the second."""
    start = max(0, common_start(a, b) - _BEFORE)
    pieces = (f"{'…' if start else ''}{text[start : start + _SHOWN]}" for text in (a, b))
    before, after = ([f"  {line}" for line in piece.splitlines()] for piece in pieces)
    lines = list(difflib.unified_diff(before, after, lineterm="", n=2))[3:]
    return ["…" if line.startswith("@@") else line for line in lines]


def _shared_tokens(a: Episode, b: Episode) -> int | None:
    first = [merge([call for call in side.calls if call.phase == "rollout"]).timelines[:1] for side in (a, b)]
    if not all(first):
        return None
    return common_prefix(first[0][0].token_ids, first[1][0].token_ids)


# Runs

_KINDS: tuple[tuple[str, str | None], ...] = (
    ("val", "sampled"), ("val", "greedy"), ("val", None), ("train", "sampled"), ("train", "greedy"), ("train", None),
    ("trial", "sampled"), ("trial", None),
)  # fmt: skip
"""What runs are compared by, the best first."""


@dataclass(frozen=True)
class RunSide:
    """One of two runs, over the episodes that are compared."""

    run_id: str
    split: str | None
    step: int | None
    decoding: str | None
    facts: tuple[StepEpisode, ...]

    @property
    def of(self) -> str:
        """The splits and decoding modes that its means are over."""
        return " and ".join(sorted({" ".join(filter(None, (f["split"], f["decoding"]))) for f in self.facts}))

    @property
    def solved(self) -> float | None:
        """The share of episodes that solved their task, of those that were judged; as the judge said, else by a
        reward of at least 1."""
        judged = [(reward, f["is_success"]) for f in self.facts if (reward := f["reward"]) is not None]
        solved = [reward >= 1 - 1e-9 if success is None else success for reward, success in judged]
        return sum(solved) / len(solved) if solved else None

    @property
    def failures(self) -> Counter[str]:
        return Counter(str(f["cause"] or f["status"]) for f in self.facts if f["status"] != "succeeded")

    def mean(self, name: Literal["reward", "calls", "tokens", "seconds"]) -> float | None:
        values = [float(value) for fact in self.facts if (value := fact[name]) is not None]
        return sum(values) / len(values) if values else None

    def by_task(self) -> dict[str, float]:
        """The mean reward of each task that has one."""
        return {task_id: fmean(rewards(attempts)) for task_id, attempts in by_task(self.facts).items()}


@dataclass(frozen=True)
class RunDiff:
    """Two runs."""

    a: RunSide
    b: RunSide
    tasks: tuple[tuple[str, float, float], ...]
    """Tasks that both have a reward for: id, mean reward in a, in b."""
    only_a: int
    only_b: int
    test: Paired | None
    """Of b - a by task; None where no task is in both."""
    changes: tuple[Finding, ...]
    """Of behaviour, and where attempts at the tasks that changed most part."""
    config: tuple[tuple[str, object, object], ...]
    """Keys whose recorded values differ."""


At = int | Literal["last"] | None
"""A step; None: that of the last validation, or all of training."""


def diff_runs(
    a: tuple[TraceReader, str],
    b: tuple[TraceReader, str],
    *,
    split: str | None = None,
    steps: tuple[At, At] = (None, None),
    decoding: str | None = None,
) -> RunDiff:
    """Compare two runs, or steps of runs, by the tasks that they share.

    By default by the last validation where both have one (its sampled attempts, else its greedy ones), else by all of
    training where both have that, else by every episode. Of a step, by what both have at theirs. Raises QueryError
    where one has no episode to compare, or where sampled and greedy attempts would be mixed.
    """
    there = [rewards_by_step(*side) for side in (a, b)]
    both = [kind for kind in _KINDS if all(_has(of, kind, at) for of, at in zip(there, steps, strict=True))]
    fitting = [(s, d) for s, d in both if split in (None, s) and decoding in (None, d)]
    if fitting:
        split, decoding = fitting[0]
    sides = []
    for (reader, run_id), of, wanted in zip((a, b), there, steps, strict=True):
        last = [max(in_step) for (s, d), in_step in of.items() if split in (None, s) and decoding in (None, d)]
        at = max(last, default=None) if wanted == "last" or (wanted is None and split == "val") else wanted
        facts = tuple(step_episodes(reader, run_id, split, at, decoding))
        kinds = {(fact["split"], fact["decoding"]) for fact in facts}
        if len(kinds) > 1:
            known = dict.fromkeys(f"run {id} has {_by_kind(of)}" for (_, id), of in zip((a, b), there, strict=True))
            raise QueryError(f"there is nothing of one kind on both sides: {', and '.join(known)}")
        if not facts:
            where = "".join(f" {word}" for word in (split, decoding) if word)
            where = f" of{where}" if where else ""
            where += "" if at is None else f" at step {at}"
            known_steps = {at for (s, _), in_step in of.items() if split in (None, s) for at in in_step}
            listed = f"; it has {_listed(known_steps)}" if known_steps else ""
            raise QueryError(f"run {run_id} has no finished episode{where} to compare{listed}")
        sides.append(RunSide(run_id, split, at, decoding, facts))
    means = [side.by_task() for side in sides]
    shared = [task_id for task_id in means[0] if task_id in means[1]]
    tasks = tuple((task_id, means[0][task_id], means[1][task_id]) for task_id in shared)
    before, after = (side.facts for side in sides)
    readers = list(dict.fromkeys((a[0], b[0])))
    parted = [change for change in changes_of_tasks(readers, before, after) if change.kind == "task"]
    return RunDiff(
        sides[0],
        sides[1],
        tasks,
        len(means[0]) - len(shared),
        len(means[1]) - len(shared),
        paired([after - before for _, before, after in tasks]) if tasks else None,
        (*parted, *failures(before, after), *measures(before, after)),
        tuple(_config_changes(recorded_config(*a), recorded_config(*b))),
    )


def _has(steps: Steps, kind: tuple[str, str | None], at: At) -> bool:
    return kind in steps and (not isinstance(at, int) or at in steps[kind])


def _by_kind(steps: Steps) -> str:
    """`train sampled at steps 1, 2; val greedy at steps 2`."""
    kinds = {" ".join(filter(None, kind)): in_step for kind, in_step in steps.items()}
    return "; ".join(f"{kind} at {_listed(in_step)}" for kind, in_step in sorted(kinds.items()))


def _listed(steps: Iterable[int]) -> str:
    known = sorted(steps)
    return f"steps {', '.join(map(str, known[:12]))}{' …' if len(known) > 12 else ''}"


def _config_changes(a: Mapping[str, object], b: Mapping[str, object]) -> Iterator[tuple[str, object, object]]:
    flat_a, flat_b = dict(flat_keys(a)), dict(flat_keys(b))
    for key in sorted({*flat_a, *flat_b}):
        if key not in _IDENTITY and flat_a.get(key) != flat_b.get(key):
            yield key, flat_a.get(key), flat_b.get(key)
