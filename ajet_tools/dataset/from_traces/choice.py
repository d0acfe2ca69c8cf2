"""Which episodes of a trace become data: by filter, by what people said, by whether the policy failed.

What people said of an episode, taken together.
"""

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
from ajet_tools.trace.queries.base import rows
from ajet_tools.trace.queries.episodes import exported_ids
from ajet_tools.trace.queries.filters import REWARD, parse
from ajet_tools.trace.queries.listing import open_listing


@dataclass(frozen=True)
class Opinion:
    """Several people's feedback as one. Where one person spoke twice of the same thing, the later word counts."""

    score: float | None = None
    """The mean of the scores; a thumb up is 1 and a thumb down is 0."""
    correction: Feedback | None = None
    """The latest corrected answer."""
    comments: tuple[str, ...] = ()

    @property
    def kinds(self) -> frozenset[str]:
        """Which of up, down and corrected it is. A score of exactly one half is neither up nor down."""
        kinds = {"corrected"} if self.correction else set()
        if self.score is not None and self.score != 0.5:
            kinds.add("up" if self.score > 0.5 else "down")
        return frozenset(kinds)


def opinion(feedback: Iterable[Feedback]) -> Opinion:
    """The opinion that feedback on one episode comes to."""
    ordered = sorted(feedback, key=lambda entry: (entry.at, entry.feedback_id))
    scores = {
        (entry.call_id, entry.author or entry.feedback_id): entry.score for entry in ordered if entry.score is not None
    }
    corrections = [entry for entry in ordered if entry.correction and entry.correction.strip()]
    return Opinion(
        score=sum(scores.values()) / len(scores) if scores else None,
        correction=corrections[-1] if corrections else None,
        comments=tuple(entry.comment for entry in ordered if entry.comment),
    )


def opinions(reader: TraceReader) -> Mapping[str, Opinion]:
    """The opinion on each episode of a trace; an empty one where nothing was said."""
    by_episode: dict[str, list[Feedback]] = defaultdict(list)
    for row in rows(reader, "SELECT * FROM feedback"):
        by_episode[row["episode_id"]].append(Feedback(**row))
    return defaultdict(Opinion, {episode_id: opinion(feedback) for episode_id, feedback in by_episode.items()})


FEEDBACK = ("up", "down", "corrected")
Split = Literal["train", "val", "trial"]

_LOOKUP = 5_000


@dataclass(frozen=True)
class Choice:
    """The episodes to take from a trace; all given conditions must hold."""

    filter: str = ""
    """In the language of `ajet trace ls --filter`."""
    feedback: Sequence[str] = ()
    """Any of FEEDBACK."""
    failures: bool = False
    """Only what the policy failed at: a person said so, else the run did, else the reward is below `below`."""
    below: float = 0.5
    run: str | None = None
    """A run, by a unique prefix; None: every run."""
    split: Split | None = None
    """None: all but trials."""
    include_validation: bool = False
    """Also validation tasks and near copies of one; `split` `val` says so too."""

    def __post_init__(self) -> None:
        for word in self.feedback:
            if word not in FEEDBACK:
                raise ConfigError(f"--feedback must be one of {', '.join(FEEDBACK)} (got {word!r})")


@dataclass(frozen=True)
class Chosen:
    """The episodes that fit, oldest first, and what is known of them without reading what was said."""

    ids: list[str]
    of: int
    """How many there were to choose from."""
    opinions: Mapping[str, Opinion]
    rewards: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    """Episode -> why it counts as failed; of all episodes, not only of those that fit."""
    tried: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Task id -> how many episodes there were of it, and how many failed."""
    left_out: Counter[str] = field(default_factory=Counter)
    """Episodes that fit and are of validation tasks, by a reason."""
    splits: Mapping[str, str] = field(default_factory=dict)
    """Episode -> its split, where that is known."""


def choose(reader: TraceReader, choice: Choice) -> Chosen:
    """The episodes that fit. Raises FilterError for a filter that is not understood, QueryError for an unknown run."""
    run_id = queries.find_run(reader, choice.run) if choice.run else None
    ids = exported_ids(reader, run_id, choice.split)
    of = len(ids)
    if choice.filter.strip():
        fitting = set(open_listing(reader, run_id, parse(choice.filter)).ids())
        ids = [episode_id for episode_id in ids if episode_id in fitting]
    left_out = Counter[str]()
    if not (choice.include_validation or choice.split == "val"):
        ids, left_out = training_ids(reader, ids, run_id)
    all_opinions = opinions(reader)
    facts = _facts(reader, ids)
    failed = {id: why for id, row in facts.items() if (why := _failure(row, all_opinions[id], choice.below))}
    attempts = Counter(row["task_id"] for row in facts.values())
    failures = Counter(facts[id]["task_id"] for id in failed)
    tried = {task_id: (count, failures[task_id]) for task_id, count in attempts.items()}
    if choice.feedback:
        ids = [id for id in ids if all_opinions[id].kinds & set(choice.feedback)]
    if choice.failures:
        ids = [id for id in ids if id in failed]
    rewards = {id: row["reward"] for id, row in facts.items() if row["reward"] is not None}
    splits = {id: row["split"] for id, row in facts.items() if row["split"]}
    return Chosen(ids, of, all_opinions, rewards, failed, tried, left_out, splits)


def _facts(reader: TraceReader, ids: Sequence[str]) -> dict[str, dict[str, Any]]:
    sql = f"""
        SELECT e.episode_id, e.task_id, e.status, e.cause, e.infrastructure, e.is_success, {REWARD} AS reward,
          CASE WHEN {OF_VALIDATION} THEN 'val' WHEN split = 'val' THEN 'train' ELSE split END AS split
        FROM episodes e WHERE e.episode_id IN (SELECT unnest(?::VARCHAR[]))"""
    facts_by_id: dict[str, dict[str, object]] = {}
    for start in range(0, len(ids), _LOOKUP):
        for row in rows(reader, sql, list(ids[start : start + _LOOKUP])):
            facts_by_id[row["episode_id"]] = row
    return {episode_id: facts_by_id[episode_id] for episode_id in ids if episode_id in facts_by_id}


def _failure(row: dict[str, Any], person_opinion: Opinion, below: float) -> str | None:
    """Why an episode counts as failed. What a person says outranks the reward; a fault of the machinery is none."""
    if row["infrastructure"]:
        return None
    if person_opinion.correction is not None:
        return "a person corrected the answer"
    if person_opinion.score is not None and person_opinion.score != 0.5:
        return "a person gave a thumb down" if person_opinion.score < 0.5 else None
    if row["status"] in ("failed", "timeout"):
        return f"{row['status']}: {row['cause']}" if row["cause"] else str(row["status"])
    if row["is_success"] is not None:
        return None if row["is_success"] else "the task was not solved"
    if row["reward"] is not None and row["reward"] < below:
        return f"the reward is below {below:g}"
    return None
