"""Chooses the episodes of a trace that become data: by filter, feedback and failure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ajet_sdk.errors import ConfigError
from ajet_sdk.protocols import TraceReader
from ajet_sdk.trace.schema import OF_VALIDATION
from ajet_sdk.types import Feedback
from ajet_tools.dataset.similarity.held_out import training_ids
from ajet_tools.trace import queries
from ajet_tools.trace.export.demonstrations import worthless
from ajet_tools.trace.queries.base import rows
from ajet_tools.trace.queries.episodes import exported_ids
from ajet_tools.trace.queries.filters import REWARD, parse
from ajet_tools.trace.queries.listing import open_listing


@dataclass(frozen=True)
class Opinion:
    """The combined feedback on an episode. If a person rated the same thing twice, the later rating
    counts."""

    score: float | None = None
    """The mean of the scores; thumbs up is 1, thumbs down 0."""
    correction: Feedback | None = None
    """The latest corrected answer."""
    comments: tuple[str, ...] = ()

    @property
    def kinds(self) -> frozenset[str]:
        """Any of up, down and corrected. A score of exactly 0.5 is neither up nor down."""
        kinds = {"corrected"} if self.correction else set()
        if self.score is not None and self.score != 0.5:
            kinds.add("up" if self.score > 0.5 else "down")
        return frozenset(kinds)


def opinion(feedback: Iterable[Feedback]) -> Opinion:
    """Combines the feedback on an episode."""
    ordered = sorted(feedback, key=lambda entry: (entry.at, entry.feedback_id))
    scores = {
        (f.call_id, f.author or f.feedback_id): f.score for f in ordered if f.score is not None
    }
    corrections = [entry for entry in ordered if entry.correction and entry.correction.strip()]
    return Opinion(
        score=sum(scores.values()) / len(scores) if scores else None,
        correction=corrections[-1] if corrections else None,
        comments=tuple(entry.comment for entry in ordered if entry.comment),
    )


def opinions(reader: TraceReader) -> Mapping[str, Opinion]:
    """Returns the opinion on each episode of a trace; empty without feedback."""
    by_episode: dict[str, list[Feedback]] = defaultdict(list)
    for row in rows(reader, "SELECT * FROM feedback"):
        by_episode[row["episode_id"]].append(Feedback(**row))
    return defaultdict(
        Opinion, {episode_id: opinion(feedback) for episode_id, feedback in by_episode.items()}
    )


FEEDBACK = ("up", "down", "corrected")
Split = Literal["train", "val", "trial"]
_LOOKUP = 5_000  # ids of a query
_FAILED_BELOW = 0.5
"""Rewards below this count as a failure, where nothing better says whether the task was solved."""
KEEP_FAILURES = "--include-failures keeps them"


@dataclass(frozen=True)
class Choice:
    """The conditions on episodes, which are combined by AND."""

    filter: str = ""
    """A filter as in `ajet trace ls --filter`."""
    feedback: Sequence[str] = ()
    """Any of FEEDBACK."""
    failures: bool = False
    """Only failed episodes: by feedback, else by the run's result, else by a low reward."""
    run: str | None = None
    """A unique prefix of a run id; None means all runs."""
    split: Split | None = None
    """None means all but trials."""
    episodes: Sequence[str] = ()
    """Unique prefixes of ids; empty means all episodes."""
    include_validation: bool = False
    """Include validation tasks and near copies; implied by `split` `val`."""
    include_failures: bool = False
    """Include replies and episodes that are no example to follow."""

    def __post_init__(self) -> None:
        for word in self.feedback:
            if word not in FEEDBACK:
                raise ConfigError(f"--feedback must be one of {', '.join(FEEDBACK)} (got {word!r})")

    @property
    def keeps_cut(self) -> bool:
        """Whether replies that were cut at their limit are kept; who names an episode wants it."""
        return self.include_failures or bool(self.episodes)

    @property
    def takes_failures(self) -> bool:
        """Whether conversations that are no example to follow are kept, as with a choice by
        feedback or failure."""
        return self.keeps_cut or bool(self.feedback) or self.failures


@dataclass(frozen=True)
class Chosen:
    """The chosen episodes, oldest first, with facts known without reading the conversations."""

    ids: list[str]
    of: int
    """Number of episodes before the choice."""
    opinions: Mapping[str, Opinion]
    rewards: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    """Episode -> reason for failure, for all episodes."""
    tried: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Task id -> number of episodes and of failures."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Matching episodes of validation tasks, by reason."""
    splits: Mapping[str, str] = field(default_factory=dict)
    """Episode -> its split, if known."""
    worthless: Mapping[str, str] = field(default_factory=dict)
    """Episode -> why it is no example to follow: it earned nothing."""


def choose(
    reader: TraceReader, choice: Choice, *, learns: bool = True, copies: bool = False
) -> Chosen:
    """Chooses episodes.

    Args:
        learns: the result is training data, which has no validation tasks unless they are asked for.
        copies: the result is a copy of the trace, with trials, rolled-back and unfinished episodes.

    Raises FilterError for an invalid filter, QueryError for an unknown run or episode.
    """
    run_id = queries.find_run(reader, choice.run) if choice.run else None
    every = copies or bool(choice.episodes)
    ids = exported_ids(reader, run_id, choice.split, rolled_back=every)
    of = len(ids)
    if choice.episodes:
        named = [queries.find(reader, prefix, "episode").id for prefix in choice.episodes]
        exported = set(ids)
        ids = [episode_id for episode_id in dict.fromkeys(named) if episode_id in exported]
    if choice.filter.strip():
        fitting = set(open_listing(reader, run_id, parse(choice.filter)).ids())
        ids = [episode_id for episode_id in ids if episode_id in fitting]
    left_out = Counter[str]()
    if learns and not (choice.include_validation or choice.split == "val"):
        ids, left_out = training_ids(reader, ids, run_id)
    all_opinions = opinions(reader)
    facts = _facts(reader, ids)
    failed = {
        id: why for id, row in facts.items() if (why := _failure(row, all_opinions[id])) is not None
    }
    attempts = Counter(row["task_id"] for row in facts.values())
    failures = Counter(facts[id]["task_id"] for id in failed)
    tried = {task_id: (count, failures[task_id]) for task_id, count in attempts.items()}
    if choice.feedback:
        ids = [id for id in ids if all_opinions[id].kinds & set(choice.feedback)]
    if choice.failures:
        ids = [id for id in ids if id in failed]
    rewards = {id: row["reward"] for id, row in facts.items() if row["reward"] is not None}
    splits = {id: row["split"] for id, row in facts.items() if row["split"]}
    return Chosen(
        ids,
        of,
        all_opinions,
        rewards=rewards,
        failed=failed,
        tried=tried,
        left_out=left_out,
        splits=splits,
        worthless=_worthless(facts, ids),
    )


def _worthless(facts: Mapping[str, Mapping[str, Any]], ids: Sequence[str]) -> dict[str, str]:
    """Compares the episodes of each run among themselves: another run's judge has another scale."""
    by_run: dict[str, dict[str, float | None]] = defaultdict(dict)
    for episode_id in ids:
        if episode_id in facts:
            row = facts[episode_id]
            by_run[row["run_id"]][episode_id] = row["reward"]
    reasons: dict[str, str] = {}
    for rewards in by_run.values():
        reasons |= worthless(rewards)
    return {episode_id: f"{reason}; {KEEP_FAILURES}" for episode_id, reason in reasons.items()}


def _facts(reader: TraceReader, ids: Sequence[str]) -> dict[str, dict[str, Any]]:
    sql = f"""
        SELECT e.episode_id, e.run_id, e.task_id, e.status, e.cause, e.infrastructure, e.is_success,
          {REWARD} AS reward,
          CASE WHEN {OF_VALIDATION} THEN 'val' WHEN split = 'val' THEN 'train' ELSE split END AS split
        FROM episodes e WHERE e.episode_id IN (SELECT unnest(?::VARCHAR[]))"""
    facts_by_id: dict[str, dict[str, object]] = {}
    for start in range(0, len(ids), _LOOKUP):
        for row in rows(reader, sql, list(ids[start : start + _LOOKUP])):
            facts_by_id[row["episode_id"]] = row
    return {episode_id: facts_by_id[episode_id] for episode_id in ids if episode_id in facts_by_id}


def _failure(row: dict[str, Any], person_opinion: Opinion) -> str | None:
    """Returns why an episode failed, or None. Feedback outranks the reward; infrastructure faults
    don't count."""
    if row["infrastructure"]:
        return None
    if person_opinion.correction is not None:
        return "a person corrected the answer"
    if person_opinion.score is not None and person_opinion.score != 0.5:
        if person_opinion.score < 0.5:
            return "a person gave a thumb down"
        return None
    if row["status"] in ("failed", "timeout"):
        if row["cause"]:
            return f"{row['status']}: {row['cause']}"
        return str(row["status"])
    if row["is_success"] is not None:
        return None if row["is_success"] else "the task was not solved"
    if row["reward"] is not None and row["reward"] < _FAILED_BELOW:
        return f"the reward is below {_FAILED_BELOW:g}"
    return None
