"""Converts messages of the `Mailbox` to metrics, with the same names as in `local`, and log
lines."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ajet_sdk.backbones.shared.validation import validation_metrics, validation_sets
from ajet_sdk.errors import TrainingError
from ajet_sdk.reporting.loggers import Loggers
from ajet_sdk.reporting.metrics import episode_metrics
from ajet_sdk.rollout.outcomes import check_sound, failure_messages, failures_by_cause
from ajet_sdk.types import Episode, Task

if TYPE_CHECKING:
    from ray.actor import ActorHandle

    from ajet_sdk.cluster.mailbox import GroupMessage, TakenGroup
    from ajet_sdk.protocols import Job
    from ajet_sdk.trace.writer import TraceWriter

_WAIT = 1.0
_SUMS = ("tokens", "splits", "timelines", "groups", "episodes")


@dataclass(frozen=True)
class _Group:
    """The attempts at a task, or all that clients made for a step."""

    episodes: Sequence[Episode]
    metrics: Mapping[str, float]


@dataclass
class _Part:
    """The finished groups of a step or validation, by their position."""

    groups: dict[int, _Group] = field(default_factory=dict)

    @property
    def episodes(self) -> list[Episode]:
        return [episode for group in self.groups.values() for episode in group.episodes]

    def totals(self, prefix: str, failure_reward: float | None) -> dict[str, float]:
        measured = episode_metrics(prefix, self.episodes, failure_reward)
        sums: dict[str, float] = defaultdict(float)
        tokens = apart = 0.0
        for group in self.groups.values():
            metrics = group.metrics
            for name, value in metrics.items():
                if name.partition("/")[2].startswith(_SUMS):
                    sums[name] += value
            tokens += metrics.get("train/tokens_in_samples", 0.0)
            apart += metrics.get("train/tokens_in_samples", 0.0) * metrics.get(
                "train/merge_ratio", 1.0
            )
        return {**sums, **measured, **({"train/merge_ratio": apart / tokens} if tokens else {})}


class Progress:
    """Logs the messages of a run; each backbone adds those of its trainer."""

    _regroups = False
    """Whether the trainer names the groups that a step took."""

    def __init__(
        self, loggers: Loggers, writer: TraceWriter, job: Job, val: Sequence[Task], total: int
    ) -> None:
        self._loggers = loggers
        self._writer = writer
        self._job = job
        self._total = total
        self._val = len(val)
        self._sets = validation_sets(job)
        self._failure_reward = job.config.rollout.failure_reward
        self._repeats = max(1, job.config.validation_attempts)
        self._parts: dict[tuple[int, str], _Part] = defaultdict(_Part)
        self._taken: dict[int, _Part] = {}
        """The groups of the steps that are being trained, where the trainer names them."""
        self._ended = asyncio.Event()
        self._steps = 0
        self._unsound: TrainingError | None = None

    def updates(self) -> int:
        """Updates reported so far. Raises TrainingError if too few episodes of a step are sound."""
        if self._unsound is not None:
            raise self._unsound
        return self._steps

    async def listen(self, post: ActorHandle) -> None:
        """Handle messages until `finish` is called, then the remaining ones."""
        while True:
            last = self._ended.is_set()
            for kind, content in await post.take.remote(0.01 if last else _WAIT):
                getattr(self, f"_{kind}")(content)
            if last:
                return

    async def finish(self, listening: asyncio.Task[None]) -> None:
        """Handle the remaining messages and stop; the cluster may have ended already."""
        self._ended.set()
        done, _ = await asyncio.wait({listening}, timeout=10 * _WAIT)
        if not done:
            listening.cancel()
        elif not listening.cancelled() and (error := listening.exception()) is not None:
            self._loggers.say(f"the cluster's final messages were lost: {error}")

    def _group(self, group: GroupMessage) -> None:
        step = int(group["step"])
        purpose = str(group["purpose"])
        is_first = (step, purpose) not in self._parts
        part = self._parts[step, purpose]
        display = self._loggers.display
        if purpose == "train":
            expected = self._job.config.data.train_batch_size
        else:
            expected = self._val
        if display is not None and is_first:
            display.begin(f"step {step}/{self._total} {purpose}", expected)
        episodes = [Episode.model_validate_json(text) for text in group["episodes"]]
        is_new = group["position"] not in part.groups  # else a runner died and it was run again
        part.groups[group["position"]] = _Group(episodes, group["metrics"])
        if display is not None and is_new:
            display.advance()
        if is_new and len(part.groups) == expected:
            self._finish_part(step, purpose, part)

    def add_collected(
        self, step: int, episodes: Sequence[Episode], metrics: Mapping[str, float]
    ) -> None:
        """Note a training step's episodes, which clients made. A client's broken agent ends no
        server."""
        self._parts[step, "train"].groups[0] = _Group(episodes, metrics)
        for line in failure_messages(episodes):
            self._loggers.say(f"step {step}: {line}")

    def _regroup(self, step: int, taken: Sequence[TakenGroup]) -> None:
        """Make the groups that a step took its own, of whichever batch they are."""
        part = _Part()
        for place in taken:
            batch = self._parts[place["batch"], "train"]
            group = batch.groups.pop(place["position"], None)
            if group is not None:
                part.groups[len(part.groups)] = group
        self._taken[step] = part
        self._check_sound(step, part.episodes)

    def _finish_part(self, step: int, purpose: str, part: _Part) -> None:
        if purpose == "train":
            if not self._regroups:
                self._check_sound(step, part.episodes)
            return
        for line in failures_by_cause(part.episodes):
            self._loggers.say(f"{purpose}: {line}")
        both = [self._parts.get((step, name)) for name in ("val", "val, greedy")]
        if any(each is None or len(each.groups) < self._val for each in both):
            return
        sampled, greedy = (each.episodes for each in both if each is not None)
        self._loggers.log(
            step,
            validation_metrics(sampled, greedy, self._repeats, self._sets, self._failure_reward),
        )
        self._loggers.held_out(step, self._sets)

    def _check_sound(self, step: int, episodes: Sequence[Episode]) -> None:
        for line in failure_messages(episodes):
            self._loggers.say(f"step {step}: {line}")
        try:
            check_sound(episodes, self._job.config.rollout.min_sound_share)
        except TrainingError as error:
            self._unsound = error

    def _log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log a finished training step: the `metrics` of the trainer and those of its episodes."""
        self._steps = max(self._steps, step)
        if self._regroups:
            part = self._taken.pop(step, None)
        else:
            part = self._parts.pop((step, "train"), None)
        if part is not None:
            totals = part.totals("train", self._failure_reward)
        else:
            totals = {}
        self._loggers.log(step, {**totals, **metrics, "train/policy_version": float(step)})

    def _notice(self, content: Mapping[str, object]) -> None:
        self._loggers.say(str(content["text"]))
