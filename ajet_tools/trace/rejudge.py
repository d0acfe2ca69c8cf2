"""Runs another judge over stored episodes and reports the changes of rewards, groups and
advantages.

Nothing is written. If the judge fails on an episode, it has no new reward, rather than 0.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from statistics import fmean
from typing import Literal, TypedDict

import numpy as np

from ajet_sdk.config.config import Config
from ajet_sdk.config.trainer_schema import Estimator
from ajet_sdk.errors import AjetError, TraceError, TrainingError
from ajet_sdk.judges.call import JudgeCall, is_group_judge, judge_stored, output_of
from ajet_sdk.protocols import TraceReader
from ajet_sdk.rollout.episode import all_of
from ajet_sdk.rollout.threads import Workers
from ajet_sdk.samples.build import build
from ajet_sdk.trace.reader import episodes
from ajet_sdk.types import Episode
from ajet_tools.trace.queries.base import grouped, rows

_CHUNK = 256
"""Approximate number of episodes in memory."""
_AT_ONCE = 8
"""Concurrent calls of the judge."""


@dataclass(frozen=True)
class RejudgedEpisode:
    """Rewards of an episode by both judges. `after` is None if the new judge failed, with `cause`
    and `error`."""

    episode_id: str
    group_id: str
    task_id: str
    attempt: int
    tokens: int
    """Sampled tokens of its trainable calls."""
    before: float | None
    after: float | None
    cause: str | None = None
    error: str | None = None
    flipped: bool = False
    """The advantage of a call changes its sign."""

    @property
    def change(self) -> float | None:
        if self.before is None or self.after is None:
            return None
        return self.after - self.before


class TaskChange(TypedDict):
    """Mean rewards of a task under both judges."""

    task_id: str
    episodes: int
    before: float
    after: float
    change: float


@dataclass
class Changes:
    """Changes by the new judge, by episode, with derived totals."""

    verdicts: list[RejudgedEpisode] = field(default_factory=list)
    skipped: dict[str, int] = field(default_factory=dict)
    """Number of episodes without an output to judge, by the cause of their failure."""

    @property
    def both(self) -> list[RejudgedEpisode]:
        """Episodes with rewards by both judges, over which means are compared."""
        return [v for v in self.verdicts if v.change is not None]

    @property
    def failures(self) -> dict[str, list[RejudgedEpisode]]:
        """Episodes on which the new judge failed, by cause, most frequent first."""
        by_cause = grouped(
            (v for v in self.verdicts if v.cause is not None), lambda v: str(v.cause)
        )
        return dict(sorted(by_cause.items(), key=lambda item: -len(item[1])))

    def mean(self, which: str) -> float | None:
        """Return the mean reward `before` or `after`."""
        values: list[float] = [getattr(v, which) for v in self.both]
        return fmean(values) if values else None

    def by_task(self) -> list[TaskChange]:
        """Return mean rewards by task, largest change first."""
        changes = list[TaskChange]()
        for task_id, group in grouped(self.both, lambda v: v.task_id).items():
            before = fmean(verdict.before or 0.0 for verdict in group)
            after = fmean(verdict.after or 0.0 for verdict in group)
            change = TaskChange(
                task_id=task_id,
                episodes=len(group),
                before=before,
                after=after,
                change=after - before,
            )
            changes.append(change)
        return sorted(changes, key=lambda row: (-abs(row["change"]), row["task_id"]))

    def most_changed(self) -> list[RejudgedEpisode]:
        """Return the episodes with another reward, largest change first."""
        changed = [v for v in self.both if abs(v.change or 0.0) > 1e-9]
        return sorted(changed, key=lambda v: (-abs(v.change or 0.0), v.episode_id))

    def groups(self) -> dict[str, int]:
        """Count groups of several rewarded attempts, and those with unequal rewards: before, after,
        lost, gained."""
        counts = dict.fromkeys(("groups", "before", "after", "lost", "gained"), 0)
        for group in grouped(self.both, lambda v: v.group_id).values():
            if len(group) < 2:
                continue
            before = _varied(v.before for v in group)
            after = _varied(v.after for v in group)
            counts["groups"] += 1
            counts["before"] += before
            counts["after"] += after
            counts["lost"] += before and not after
            counts["gained"] += after and not before
        return counts


def _varied(rewards: Iterable[float | None]) -> bool:
    values = [value for value in rewards if value is not None]
    return len(values) > 1 and max(values) - min(values) > 1e-8 * max(1.0, *map(abs, values))


def workflow_returned(episode: Episode) -> bool:
    """Whether the workflow returned an output, so that any failure is the judge's."""
    if episode.status == "succeeded" or episode.cause == "NoReward":
        return True
    return (episode.error or "").startswith("judge ")


Whole = Literal["group", "step"]


def compared_over(config: Config) -> Whole:
    """Return the unit over which the estimator of a run compares rewards."""
    if config.trainer_common.algorithm.adv_estimator == "reinforce_plus_plus":
        return "step"
    return "group"


def groups_of(
    reader: TraceReader,
    run_id: str,
    episode_ids: Sequence[str] | None = None,
    *,
    whole: Whole = "group",
) -> Iterator[list[Episode]]:
    """Read all or some episodes of a run, a few whole groups or steps at a time, without superseded
    ones."""
    sql = """
        SELECT episode_id, group_id, step, split FROM episodes WHERE run_id = ? AND NOT superseded
        ORDER BY started_at, episode_id"""
    wanted = None if episode_ids is None else set(episode_ids)
    listed = (
        row for row in rows(reader, sql, run_id) if wanted is None or row["episode_id"] in wanted
    )
    by_whole = grouped(
        listed,
        lambda row: (
            (row["step"], row["split"]) if whole == "step" else row["group_id"] or row["episode_id"]
        ),
    )
    chunk: list[str] = []
    for group in by_whole.values():
        chunk += [row["episode_id"] for row in group]
        if len(chunk) >= _CHUNK:
            yield episodes(reader, episode_ids=chunk)
            chunk = []
    if chunk:
        yield episodes(reader, episode_ids=chunk)


async def rejudge(
    groups: Iterable[Sequence[Episode]],
    judge: object,
    config: Config,
    *,
    progress: Callable[[int], None] = lambda done: None,
) -> Changes:
    """Judge stored episodes again.

    Args:
        groups: episodes of a run in chunks of whole groups, or of the unit in `compared_over` (see `groups_of`).
        judge: a decorated function or an object with `compute_reward`. It gets the output, the task and its metadata,
            and the episode, but no `model` and no `env`.
        config: config of the run, for its estimator and `rollout.judge_timeout`.
        progress: called with the number of further episodes done.

    Raises TraceError if too many calls of the judge hang.
    """
    changes = Changes()
    slots = asyncio.Semaphore(_AT_ONCE)

    async def judge_unit(unit: Sequence[Episode]) -> list[Episode]:
        async with slots:
            after = await _judged(workers, unit, judge, config.rollout.judge_timeout)
            progress(len(unit))
            return after

    with Workers(_AT_ONCE) as workers:
        for group in groups:
            whole = [e for e in group if workflow_returned(e)]
            crashed = [e for e in group if not workflow_returned(e)]
            progress(len(crashed))
            for episode in crashed:
                cause = episode.cause or episode.status
                changes.skipped[cause] = changes.skipped.get(cause, 0) + 1
            units = [[episode] for episode in whole]
            if is_group_judge(judge):
                by_group = grouped(
                    whole, lambda episode: episode.group_id or episode.episode_id
                ).values()
                units = [sorted(unit, key=lambda episode: episode.attempt) for unit in by_group]
            try:
                judged_units = await all_of(
                    [asyncio.create_task(judge_unit(unit)) for unit in units]
                )
            except TrainingError as error:
                raise TraceError(
                    f"{workers.abandoned} calls of the judge did not finish in time and were"
                    " abandoned, so judging was stopped; set a time limit for its blocking calls"
                ) from error
            after = {episode.episode_id: episode for episode in chain(*judged_units)}
            changes.verdicts += _verdicts(
                whole, [after[e.episode_id] for e in whole], crashed, config
            )
    return changes


class _JudgeRaised(Exception):
    """Wraps an exception raised by the judge."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


async def _judged(
    workers: Workers, some: Sequence[Episode], judge: object, timeout: float
) -> list[Episode]:
    """Return an episode or group with the rewards of the judge, or as failed."""
    fresh = {
        "status": "succeeded",
        "error": None,
        "cause": None,
        "infrastructure": False,
        "rewards": (),
    }
    before = [
        episode.model_copy(update={**fresh, "output": output_of(episode)}) for episode in some
    ]

    async def ask(call: JudgeCall) -> object:
        outcome = await workers.call(
            call.function, {}, timeout=call.timeout or timeout, label=f"judge {call.name}"
        )
        if outcome.error is not None:
            raise _JudgeRaised(outcome.error)
        return outcome.value

    try:
        verdicts = await judge_stored(judge, before, ask)
    except TrainingError:
        raise
    except _JudgeRaised as raised:
        return [_failed(episode, raised.error) for episode in some]
    except AjetError as error:  # an unknown parameter, or no reward
        return [_failed(episode, error) for episode in some]
    return [
        e.model_copy(update={"rewards": verdict.rewards})
        for e, verdict in zip(before, verdicts, strict=True)
    ]


def _failed(episode: Episode, error: BaseException) -> Episode:
    text = f"{type(error).__name__}: {error}"[:500]
    return episode.model_copy(
        update={"status": "failed", "cause": type(error).__name__, "error": text, "rewards": ()}
    )


def advantages(
    group: Sequence[Episode],
    estimator: Estimator,
    normalize_std: bool,
    failure_reward: float | None = None,
    gamma: float = 1.0,
) -> dict[str, float]:
    """Compute the advantages of policy calls as if the episodes were trained; calls without one are
    left out.

    Uses `build` as in training, on calls with dummy token ids: only the number of sampled tokens
    matters.
    """
    bare = []
    for episode in group:
        calls = []
        for number, call in enumerate(episode.calls):
            if call.output_ids is None:
                sampled = 1
            else:
                sampled = len(call.output_ids)
            ids = np.full(sampled + 1, number, np.int32)
            tokens = {
                "prompt_ids": ids[:1],
                "output_ids": ids[1:],
                "logprobs": np.zeros(sampled, np.float32),
            }
            calls.append(call.model_copy(update=tokens))
        bare.append(episode.model_copy(update={"calls": tuple(calls), "split": "train"}))
    samples = build(
        bare,
        estimator=estimator,
        normalize_std=normalize_std,
        failure_reward=failure_reward,
        gamma=gamma,
    ).samples
    by_call: dict[str, float] = {}
    for sample in samples:
        for span in sample.timeline.spans:
            by_call[span.call_id] = float(sample.advantages[span.start])
    return by_call


def _verdicts(
    before: Sequence[Episode], after: Sequence[Episode], crashed: Sequence[Episode], config: Config
) -> Iterator[RejudgedEpisode]:
    """Compare both judges; `crashed` are the other episodes of the groups, which count with the
    failure reward."""
    algorithm = config.trainer_common.algorithm
    rollout = config.rollout
    old = dict[str, float]()
    new = dict[str, float]()
    for side, by_call in ((before, old), (after, new)):
        for step in grouped(
            [*side, *crashed], lambda episode: (episode.step, episode.split)
        ).values():
            by_call |= advantages(
                step,
                algorithm.adv_estimator,
                algorithm.normalize_std,
                rollout.failure_reward,
                rollout.gamma,
            )
    for was, now in zip(before, after, strict=True):
        failed = now.status != "succeeded"
        yield RejudgedEpisode(
            episode_id=was.episode_id,
            group_id=was.group_id or was.episode_id,
            task_id=was.task.task_id,
            attempt=was.attempt,
            tokens=sum(
                len(c.output_ids) for c in was.calls if c.trainable and c.output_ids is not None
            ),
            before=was.reward if was.status == "succeeded" else None,
            after=None if failed else now.reward,
            cause=now.cause if failed else None,
            error=now.error if failed else None,
            flipped=any(
                old[c.call_id] * new.get(c.call_id, 0.0) < 0 for c in was.calls if c.call_id in old
            ),
        )
