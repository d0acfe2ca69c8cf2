"""Two episodes or two runs beside each other: where they part, and what each is worth.

Paired differences: a sign-flip permutation test of their mean, and the confidence interval that belongs to it.

If two runs do equally well, the difference on a task is as likely to be d as -d; the test counts how many of the 2^n
choices of signs give a mean as far from 0 as the one observed (Fisher 1935, The Design of Experiments, section 21).
The interval is the test turned round: the means of all subsets of the differences cut the line into 2^n parts, each of
which is as likely to hold the true mean, provided that the differences are spread evenly about it (Hartigan 1969,
Using Subsample Values as Typical Values, JASA 64). Up to `EXACT` pairs both are exact, above they are drawn.
"""

from __future__ import annotations

import difflib
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from ajet_sdk.errors import QueryError
from ajet_sdk.protocols import TraceReader
from ajet_sdk.samples.prefixes import common_prefix, common_start
from ajet_sdk.samples.timelines import merge
from ajet_sdk.tokens.template import clean
from ajet_sdk.trace.reader import calls_of, episodes
from ajet_sdk.types import Episode
from ajet_tools.text.clean import flat_keys, reply_of
from ajet_tools.trace.compare.requests import requests_of
from ajet_tools.trace.decoding import recorded_config
from ajet_tools.trace.queries.episodes import EpisodeFact, episode_facts, last_steps

EXACT = 20
"""Pairs up to which every choice of signs is looked at."""

_DRAWS = 20_000

_LEVEL = 0.95

_CHUNK = 500

_Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Paired:
    """The mean of n paired differences. `p`, `low` and `high` are None where n is too small to claim anything."""

    n: int
    mean: float
    p: float | None
    """Two-sided."""
    low: float | None
    high: float | None
    level: float | None
    """Coverage of the interval; slightly above 0.95 if exact."""
    exact: bool
    smallest_p: float
    """The smallest p that n pairs allow; above 0.05, no difference can be significant."""


def paired(differences: Sequence[float], *, seed: int = 0) -> Paired:
    """Test whether the mean of paired differences is 0. `seed` is that of the draws, above `EXACT` pairs.

    Raises ValueError for no differences.
    """
    values = np.asarray(differences, dtype=np.float64)
    n = len(values)
    if not n:
        raise ValueError("there are no pairs to compare")
    exact, smallest = n <= EXACT, 2.0 ** (1 - n)
    mean = float(values.mean())
    if smallest > 1 - _LEVEL:
        return Paired(n, mean, None, None, None, None, exact, smallest)
    sums, sizes = _every_subset(values) if exact else _drawn_subsets(values, seed)
    total = float(values.sum())
    slack = 1e-9 * float(np.abs(values).sum())
    extreme = int((np.abs(2 * sums - total) >= abs(total) - slack).sum())
    p = extreme / len(sums) if exact else (extreme + 1) / (len(sums) + 1)
    means = np.sort(sums[sizes > 0] / sizes[sizes > 0])
    parts = len(means) + 1
    outside = int((1 - _LEVEL) / 2 * parts)
    low, high = float(means[outside - 1]), float(means[len(means) - outside])
    return Paired(n, mean, p, low, high, 1 - 2 * outside / parts, exact, smallest)


def _every_subset(values: _Array) -> tuple[_Array, _Array]:
    """The sum and the size of each of the 2^n subsets."""
    sums, sizes = np.zeros(1), np.zeros(1)
    for value in values:
        sums, sizes = np.concatenate((sums, sums + value)), np.concatenate((sizes, sizes + 1))
    return sums, sizes


def _drawn_subsets(values: _Array, seed: int) -> tuple[_Array, _Array]:
    """The same of subsets drawn evenly from all."""
    draw = np.random.default_rng(seed)
    parts = []
    for _ in range(_DRAWS // _CHUNK):
        chosen = draw.integers(0, 2, (_CHUNK, len(values))).astype(np.float64)
        parts.append((chosen @ values, chosen.sum(axis=1)))
    return np.concatenate([s for s, _ in parts]), np.concatenate([n for _, n in parts])


_IDENTITY = ("ajet.experiment_name", "ajet.experiment_dir")


@dataclass(frozen=True)
class AgentMessage:
    """One message of a conversation, and the call that it was new in."""

    agent: str
    message: Mapping[str, object]
    call_id: str

    @property
    def key(self) -> str:
        """Its content in a canonical form, to compare messages of different clients."""
        return json.dumps([self.agent, clean(self.message)], sort_keys=True, ensure_ascii=False, default=str)


@dataclass(frozen=True)
class DiffPart:
    """A part of two conversations: equal in both, or replaced."""

    same: bool
    a: tuple[AgentMessage, ...]
    b: tuple[AgentMessage, ...]


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
    """Align what was said in two episodes, message by message."""
    said_a, said_b = list(_conversation(a)), list(_conversation(b))
    matcher = difflib.SequenceMatcher(None, [s.key for s in said_a], [s.key for s in said_b], autojunk=False)
    parts = tuple(
        DiffPart(op == "equal", tuple(said_a[i1:i2]), tuple(said_b[j1:j2]))
        for op, i1, i2, j1, j2 in matcher.get_opcodes()
    )
    return EpisodeDiff(a, b, parts, _shared_tokens(a, b))


def _conversation(episode: Episode) -> Iterator[AgentMessage]:
    """Every message once: those that no earlier request had, and the replies."""
    known: dict[str, list[list[str]]] = defaultdict(list)
    for request in requests_of(episode.calls):
        messages = request.body.get("messages")
        if not isinstance(messages, list):
            asked = request.body.get("prompt", request.body.get("input"))
            messages = [] if asked is None else [{"role": "user", "content": asked}]
        entries = [
            AgentMessage(
                request.agent, m if isinstance(m, Mapping) else {"role": "?", "content": m}, request.calls[0].call_id
            )
            for m in messages
        ]
        keys = [message.key for message in entries]
        old = max((common_start(keys, before) for before in known[request.agent]), default=0)
        yield from entries[old:]
        for call in request.calls:
            reply = AgentMessage(request.agent, reply_of(call.response), call.call_id)
            known[request.agent].append([*keys, reply.key])
            yield reply


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
    facts: tuple[EpisodeFact, ...]

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
        rewards: dict[str, list[float]] = defaultdict(list)
        for fact in self.facts:
            if fact["reward"] is not None:
                rewards[fact["task_id"]].append(float(fact["reward"]))
        return {task_id: sum(values) / len(values) for task_id, values in rewards.items()}


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
    config: tuple[tuple[str, object, object], ...]
    """Keys whose recorded values differ."""


def diff_runs(
    a: tuple[TraceReader, str],
    b: tuple[TraceReader, str],
    *,
    split: str | None = None,
    step: int | None = None,
    decoding: str | None = None,
) -> RunDiff:
    """Compare two runs by the tasks that they share.

    By default by the last validation where both have one (its sampled attempts, else its greedy ones), else by all of
    training where both have that, else by every episode. Raises QueryError where one has no episode to compare, or
    where sampled and greedy attempts would be mixed.
    """
    there = [last_steps(*side) for side in (a, b)]
    both = [(s, d) for s, d in _KINDS if all((s, d) in steps for steps in there)]
    fitting = [(s, d) for s, d in both if split in (None, s) and decoding in (None, d)]
    if fitting and (split is not None or step is None):
        split, decoding = fitting[0]
    sides = []
    for (reader, run_id), steps in zip((a, b), there, strict=True):
        last = max((at for (s, d), at in steps.items() if s == split and decoding in (None, d)), default=None)
        at = last if split == "val" and step is None else step
        facts = tuple(episode_facts(reader, run_id, split, at, decoding))
        kinds = {(fact["split"], fact["decoding"]) for fact in facts}
        if len(kinds) > 1:
            mixed = " and ".join(sorted(" ".join(filter(None, kind)) for kind in kinds))
            raise QueryError(f"run {run_id} has episodes of {mixed} there; choose with --split and --decoding")
        if not facts:
            where = "".join(f" {word}" for word in (split, decoding) if word)
            where = f" of{where}" if where else ""
            where += "" if at is None else f" at step {at}"
            raise QueryError(f"run {run_id} has no finished episode{where} to compare")
        sides.append(RunSide(run_id, split, at, decoding, facts))
    rewards = [side.by_task() for side in sides]
    shared = [task_id for task_id in rewards[0] if task_id in rewards[1]]
    tasks = tuple((task_id, rewards[0][task_id], rewards[1][task_id]) for task_id in shared)
    return RunDiff(
        sides[0],
        sides[1],
        tasks,
        len(rewards[0]) - len(shared),
        len(rewards[1]) - len(shared),
        paired([after - before for _, before, after in tasks]) if tasks else None,
        tuple(_config_changes(recorded_config(*a), recorded_config(*b))),
    )


def _config_changes(a: Mapping[str, object], b: Mapping[str, object]) -> Iterator[tuple[str, object, object]]:
    flat_a, flat_b = dict(flat_keys(a)), dict(flat_keys(b))
    for key in sorted({*flat_a, *flat_b}):
        if key not in _IDENTITY and flat_a.get(key) != flat_b.get(key):
            yield key, flat_a.get(key), flat_b.get(key)
