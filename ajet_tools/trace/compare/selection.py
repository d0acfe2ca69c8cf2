"""How the training episodes that were trained on differ from all that were sampled.

What is left out is not left out by chance: groups with equal rewards are the easy and the
impossible tasks, and episodes that ran into a limit are long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TypedDict

from ajet_sdk.protocols import TraceReader
from ajet_sdk.trace.counted import COUNTED
from ajet_sdk.trace.schema import SAMPLED
from ajet_tools.text.clean import counted
from ajet_tools.trace.compare.changes import differ
from ajet_tools.trace.queries.base import rows


class _Sampled(TypedDict):
    """A training episode with sampled tokens."""

    outcome: str
    """`trained` if any token was, else the outcome of most of its tokens."""
    tokens: int
    seconds: float
    group_reward: float | None
    """Mean reward of the group's attempts that count; None without any."""


@dataclass(frozen=True)
class Measure:
    """A mean over the trained episodes and over all sampled ones."""

    name: str
    trained: float
    sampled: float
    differs: bool
    """Whether trained and other episodes differ by more than chance."""


@dataclass(frozen=True)
class Selection:
    sampled: int
    """Training episodes with sampled tokens, up to a step."""
    trained: int
    """Of these, those with at least one trained token."""
    left_out: dict[str, int]
    """Other episodes by the outcome of most of their tokens, most frequent first."""
    measures: tuple[Measure, ...]


def selection(reader: TraceReader, run_id: str, step: int) -> Selection | None:
    """Compare the trained episodes of a run with all sampled ones, up to a step; None if none was
    trained, as in a run without training."""
    # A ledger names the step that trained a call; an episode the one that it was sampled for.
    sql = f"""
        WITH chosen AS (
            SELECT episode_id, group_id, epoch(ended_at) - epoch(started_at) AS seconds, reward
            FROM episodes JOIN {COUNTED} counted USING (episode_id)
            WHERE run_id = $1 AND NOT superseded AND split = 'train' AND step <= $2),
        sampled AS (
            SELECT c.episode_id, sum({SAMPLED})::BIGINT AS tokens FROM calls c
            WHERE c.phase = 'rollout' AND c.trainable
                AND c.episode_id IN (SELECT episode_id FROM chosen) GROUP BY c.episode_id),
        booked AS (
            SELECT episode_id, outcome, sum(tokens) AS tokens FROM ledger
            WHERE run_id = $1 GROUP BY episode_id, outcome),
        outcomes AS (
            SELECT episode_id, arg_max(outcome, (outcome = 'trained', tokens)) AS outcome
            FROM booked WHERE tokens > 0 GROUP BY episode_id)
        SELECT outcome, tokens, coalesce(seconds, 0) AS seconds,
            avg(reward) OVER (PARTITION BY group_id) AS group_reward
        FROM chosen JOIN sampled USING (episode_id) JOIN outcomes USING (episode_id)
        WHERE tokens > 0 ORDER BY episode_id"""
    episodes: list[_Sampled] = rows(reader, sql, run_id, step)
    trained = [one for one in episodes if one["outcome"] == "trained"]
    if not trained:
        return None
    others = [one for one in episodes if one["outcome"] != "trained"]
    left_out: dict[str, int] = {}
    for one in others:
        left_out[one["outcome"]] = left_out.get(one["outcome"], 0) + 1
    measures = [
        _measure("tokens", [one["tokens"] for one in trained], [one["tokens"] for one in others]),
        _measure(
            "seconds", [one["seconds"] for one in trained], [one["seconds"] for one in others]
        ),
        _measure("reward of the group", _group_rewards(trained), _group_rewards(others)),
    ]
    return Selection(
        sampled=len(episodes),
        trained=len(trained),
        left_out=dict(sorted(left_out.items(), key=lambda item: -item[1])),
        measures=tuple(measure for measure in measures if measure is not None),
    )


def _group_rewards(episodes: Sequence[_Sampled]) -> list[float]:
    rewards = [one["group_reward"] for one in episodes]
    return [reward for reward in rewards if reward is not None]


def _measure(name: str, trained: Sequence[float], others: Sequence[float]) -> Measure | None:
    if not trained:
        return None
    return Measure(name, fmean(trained), fmean([*trained, *others]), differ(others, trained))


def selection_lines(found: Selection) -> list[str]:
    """Format a selection, with the measures in which trained and other episodes differ; no line if
    every sampled episode was trained."""
    if not found.left_out:
        return []
    causes = ", ".join(f"{count:,} {outcome}" for outcome, count in found.left_out.items())
    lines = [
        f"up to this step {found.trained:,} of {counted(found.sampled, 'sampled episode')} were"
        f" trained; the others: {causes}"
    ]
    differences = [
        f"{measure.name} {measure.trained:.3g} (all: {measure.sampled:.3g})"
        for measure in found.measures
        if measure.differs
    ]
    if differences:
        lines.append(f"  trained episodes differ from all sampled: {', '.join(differences)}")
    else:
        lines.append("  in tokens, seconds and rewards they do not differ by more than chance")
    return lines
