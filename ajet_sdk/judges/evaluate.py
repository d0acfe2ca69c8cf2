"""Evaluates a judge: agreement with labels, variance of repeated verdicts, and bias by length or
order."""

from __future__ import annotations

import asyncio
import copy
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ajet_sdk.engines.budget import Usage, metered
from ajet_sdk.errors import ConfigError
from ajet_sdk.judges.agreement import Interval, bootstrap, concordance, kappa, rank_correlation
from ajet_sdk.judges.call import is_group_judge, judge_stored, output_of
from ajet_sdk.judges.combined import CombinedJudge, WeightedJudge
from ajet_sdk.judges.llm import LlmJudge
from ajet_sdk.judges.rewards import Verdict
from ajet_sdk.judges.rubric import RubricJudge
from ajet_sdk.types import Episode, Task

_QUERY = ("query", "main_query", "question", "prompt")
_OUTPUT = ("output", "response", "final_answer", "answer")
_LABEL = ("score", "label", "reward")


@dataclass(frozen=True)
class Labelled:
    """An output with the label of a person or another judge. A group judge compares outputs with
    equal `group_id`."""

    episode: Episode
    label: float


@dataclass
class Evaluation:
    """The measurements; None if undefined, such as the agreement when all labels are equal."""

    count: int
    failures: dict[str, int] = field(default_factory=dict)
    """Missing verdicts by cause; the other measurements leave them out."""
    agreement: Interval | None = None
    """Share of pairs with different labels in the order of the labels; 0.5 is chance."""
    accuracy: Interval | None = None
    """Share of right verdicts, for two distinct labels; a score above their middle predicts the
    higher one."""
    kappa: float | None = None
    correlation: Interval | None = None
    """Spearman's correlation of score and label."""
    repeats: int = 1
    spread: float | None = None
    """Standard deviation of an output's repeated scores, averaged over outputs."""
    flipped: float | None = None
    """Share of outputs whose repeated scores are on both sides of the middle of the labels."""
    order: float | None = None
    """Share of a group's pairs that change order when the group is judged in reverse."""
    length: float | None = None
    """Spearman's correlation of score and output length."""
    length_of_labels: float | None = None
    length_beyond_labels: float | None = None
    """Partial correlation of score and length given the labels: the bias towards length."""
    calls: float = 0.0
    """Requests per output in the first round, with failed verdicts and without cached replies; so
    are the next two."""
    tokens: float = 0.0
    cost: float | None = None
    building: Usage | None = None
    """Usage for writing the rubric; None for a judge without one."""
    cached: int = 0
    seconds: float = 0.0
    scores: list[tuple[str, float, float | None]] = field(default_factory=list)
    """Id, label and score of each output."""


def _first_present(row: Mapping[str, object], names: Sequence[str]) -> str | None:
    for name in names:
        if row.get(name) is not None:
            return name
    return None


def labelled_row(row: object, place: int) -> Labelled:
    """Reads a row with a query, an `output` (or `response`, `final_answer`, `answer`) and a `score`
    (or `label`).

    All other fields, including those of `metadata`, become the task's metadata. Raises ConfigError.
    """
    if not isinstance(row, Mapping):
        raise ConfigError(f"row {place + 1} of the labels is not an object (got {row!r:.50})")
    metadata = row.get("metadata")
    whole = {**row, **(metadata if isinstance(metadata, Mapping) else {})}
    whole.pop("metadata", None)
    asked = _first_present(whole, _QUERY)
    output = _first_present(whole, _OUTPUT)
    label = _first_present(whole, _LABEL)
    value = whole.get(label)
    if (
        output is None
        or label is None
        or not isinstance(value, bool | int | float)
        or not np.isfinite(value)
    ):
        raise ConfigError(
            f"row {place + 1} of the labels needs an output ({', '.join(_OUTPUT)}) and a number as"
            f" its label ({', '.join(_LABEL)}); it has {', '.join(map(str, row)) or 'nothing'}"
        )
    query = str(whole.get(asked or "", ""))
    taken = (asked, output, label)
    task_metadata = {key: value for key, value in whole.items() if key not in taken}
    task = Task(main_query=query, metadata=task_metadata)
    group = str(whole.get("group") or query)
    return Labelled(
        Episode(
            episode_id=str(place + 1),
            group_id=group,
            attempt=place,
            task=task,
            output=whole[output],
            split="",
        ),
        float(value),
    )


async def evaluate(
    judge: object,
    labelled: Sequence[Labelled],
    *,
    repeats: int = 3,
    parallel: int = 8,
    seed: int = 0,
    done: Callable[[int], None] = lambda count: None,
) -> Evaluation:
    """Judge each output `repeats` times, and groups once more in reverse order.

    Args:
        repeats: new verdicts on each output; 1 gives no variance.
        parallel: concurrent verdicts.
        seed: random seed of the intervals.
        done: called with the number of newly judged outputs.
    """
    if not labelled:
        raise ConfigError("there are no labelled outputs to judge")
    room = asyncio.Semaphore(parallel)
    evaluation = Evaluation(len(labelled), repeats=repeats)
    if isinstance(judge, RubricJudge):
        with metered() as evaluation.building:
            await judge.ready()
    began = time.perf_counter()
    with metered() as usage:
        first = await _round(judge, labelled, room, done)
    _count(evaluation, [verdict for verdict in first if isinstance(verdict, Verdict)], usage)
    evaluation.seconds = (time.perf_counter() - began) / len(labelled)
    rounds = [first]
    for repeat in range(1, repeats):
        rounds.append(await _round(_anew(judge, repeat), labelled, room, done))
    values = [[value_of(verdict) for verdict in verdicts] for verdicts in rounds]
    evaluation.failures = dict(
        Counter(v for verdicts in rounds for v in verdicts if isinstance(v, str))
    )
    evaluation.scores = [
        (row.episode.episode_id, row.label, v) for row, v in zip(labelled, values[0], strict=True)
    ]
    _agree(evaluation, labelled, values[0], is_group_judge(judge), seed)
    _repeat(evaluation, labelled, values)
    if is_group_judge(judge):
        reverse = await _round(judge, labelled[::-1], room, done)
        evaluation.order = _order(
            labelled, values[0], [value_of(verdict) for verdict in reverse][::-1]
        )
    return evaluation


def _anew(judge: object, repeat: int) -> Any:
    """A copy of the judge that ignores the verdicts of earlier rounds; a function is returned
    unchanged."""
    if isinstance(judge, CombinedJudge):
        return CombinedJudge(
            [
                WeightedJudge(_anew(part.judge, repeat), part.weight, part.name)
                for part in judge.parts
            ]
        )
    if not isinstance(judge, LlmJudge):
        return judge
    another = copy.copy(judge)
    another.repeat = repeat
    return another


async def _round(
    judge: object,
    labelled: Sequence[Labelled],
    room: asyncio.Semaphore,
    done: Callable[[int], None],
) -> list[Verdict | str]:
    """Judges all outputs, in order; a string is the reason for a missing verdict."""
    groups: dict[str, list[int]] = {}
    for index, row in enumerate(labelled):
        groups.setdefault(row.episode.group_id if is_group_judge(judge) else str(index), []).append(
            index
        )
    verdict_at: dict[int, Verdict | str] = {}

    async def one_group(places: Sequence[int]) -> None:
        async with room:
            verdicts = await verdicts_on(judge, [labelled[index].episode for index in places])
        verdict_at.update(zip(places, verdicts, strict=True))
        done(len(places))

    await asyncio.gather(*(one_group(places) for places in groups.values()))
    return [verdict_at[index] for index in range(len(labelled))]


async def verdicts_on(judge: object, episodes: Sequence[Episode]) -> Sequence[Verdict | str]:
    """Judges episodes with any judge; a string is the reason for a missing verdict. Raises
    ConfigError."""
    try:
        return await judge_stored(judge, episodes)
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001  the user's own judge
        return [f"{type(error).__name__}: {error}"] * len(episodes)


def value_of(verdict: Verdict | str) -> float | None:
    if isinstance(verdict, str):
        return None
    return sum(reward.value * reward.weight for reward in verdict.rewards)


def _count(evaluation: Evaluation, verdicts: Sequence[Verdict], usage: Usage) -> None:
    """Records the usage of our judges' models, or else the usage that the verdicts report."""

    def total(name: str) -> float:
        return sum(verdict.metrics.get(name, 0.0) for verdict in verdicts)

    calls = float(usage.calls)
    tokens = float(usage.tokens)
    cost = usage.cost
    if not usage.calls and not usage.cached:
        calls = total("judge_calls")
        tokens = total("judge_tokens")
        if any("judge_cost" in verdict.metrics for verdict in verdicts):
            cost = total("judge_cost")
        else:
            cost = None
    evaluation.calls = calls / evaluation.count
    evaluation.tokens = tokens / evaluation.count
    evaluation.cost = None if cost is None else cost / evaluation.count
    evaluation.cached = round(total("judge_cached"))


def _agree(
    evaluation: Evaluation,
    labelled: Sequence[Labelled],
    values: Sequence[float | None],
    grouped: bool,
    seed: int,
) -> None:
    sound = [(row, value) for row, value in zip(labelled, values, strict=True) if value is not None]
    if not sound:
        return
    labels = [row.label for row, _ in sound]
    scores = [value for _, value in sound]
    groups = [row.episode.group_id for row, _ in sound]

    def over(statistic: Callable[[list[int]], float | None]) -> Interval | None:
        return bootstrap(lambda places: statistic(list(places)), len(sound), seed=seed)

    evaluation.agreement = over(
        lambda at: concordance(
            [scores[i] for i in at],
            [labels[i] for i in at],
            [groups[i] for i in at] if grouped else None,
        )
    )
    evaluation.correlation = over(
        lambda at: rank_correlation([scores[i] for i in at], [labels[i] for i in at])
    )
    if len(set(labels)) == 2:
        middle = _middle(labels)
        right = [
            (score > middle) == (label > middle)
            for score, label in zip(scores, labels, strict=True)
        ]
        evaluation.accuracy = over(lambda at: sum(right[i] for i in at) / len(at))
        evaluation.kappa = kappa(
            [score > middle for score in scores], [label > middle for label in labels]
        )
    lengths = [float(len(str(output_of(row.episode)))) for row, _ in sound]
    evaluation.length = rank_correlation(scores, lengths)
    evaluation.length_of_labels = rank_correlation(labels, lengths)
    agreed = rank_correlation(scores, labels)
    by_score = evaluation.length
    by_label = evaluation.length_of_labels
    if agreed is not None and by_score is not None and by_label is not None:
        unexplained = (1 - agreed**2) * (1 - by_label**2)
        if unexplained > 1e-12:  # else the label determines score or length
            evaluation.length_beyond_labels = (by_score - agreed * by_label) / unexplained**0.5


def _middle(labels: Sequence[float]) -> float:
    return (min(labels) + max(labels)) / 2


def _repeat(
    evaluation: Evaluation, labelled: Sequence[Labelled], values: Sequence[Sequence[float | None]]
) -> None:
    known = [
        [score for score in scores if score is not None] for scores in zip(*values, strict=True)
    ]
    repeated = [scores for scores in known if len(scores) > 1]
    if not repeated:
        return
    middle = _middle([row.label for row in labelled])
    evaluation.spread = float(np.mean([np.std(scores) for scores in repeated]))
    evaluation.flipped = float(
        np.mean([len({score > middle for score in scores}) > 1 for scores in repeated])
    )


def _order(
    labelled: Sequence[Labelled], values: Sequence[float | None], reverse: list[float | None]
) -> float | None:
    groups = np.array([row.episode.group_id for row in labelled])
    first, second = np.triu_indices(len(labelled), 1)
    before, after = (
        np.sign(scores[first] - scores[second])
        for scores in (np.array(values, float), np.array(reverse, float))
    )
    known = (groups[first] == groups[second]) & ~np.isnan(before + after)  # a missing score is NaN
    if known.any():
        return float(np.mean(before[known] != after[known]))
    return None
