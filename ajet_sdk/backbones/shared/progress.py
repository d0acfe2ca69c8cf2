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

    from ajet_sdk.cluster.mailbox import GroupMessage
    from ajet_sdk.protocols import Job
    from ajet_sdk.trace.writer import TraceWriter

_WAIT = 1.0
_SUMS = ("tokens", "splits", "timelines", "groups", "episodes")


@dataclass
class _Part:
    """The finished groups of a step or validation."""

    episodes: list[Episode] = field(default_factory=list)
    groups: int = 0
    metrics: list[Mapping[str, float]] = field(default_factory=list)

    def totals(self, prefix: str, failure_reward: float | None) -> dict[str, float]:
        measured = episode_metrics(prefix, self.episodes, failure_reward)
        sums: dict[str, float] = defaultdict(float)
        tokens = apart = 0.0
        for metrics in self.metrics:
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
        part = self._parts[step, purpose]
        display = self._loggers.display
        if purpose == "train":
            expected = self._job.config.data.train_batch_size
        else:
            expected = self._val
        if display is not None and not part.groups:
            display.begin(f"step {step}/{self._total} {purpose}", expected)
        part.episodes += [Episode.model_validate_json(text) for text in group["episodes"]]
        part.groups += 1
        part.metrics.append(group["metrics"])
        if display is not None:
            display.advance()
        if part.groups == expected:
            self._finish_part(step, purpose, part)

    def add_collected(
        self, step: int, episodes: Sequence[Episode], metrics: Mapping[str, float]
    ) -> None:
        """Note a training step's episodes, which clients made. A client's broken agent ends no
        server."""
        part = self._parts[step, "train"]
        part.episodes += episodes
        part.metrics.append(metrics)
        for line in failure_messages(episodes):
            self._loggers.say(f"step {step}: {line}")

    def _finish_part(self, step: int, purpose: str, part: _Part) -> None:
        if purpose == "train":
            for line in failure_messages(part.episodes):
                self._loggers.say(f"step {step}: {line}")
            try:
                check_sound(part.episodes, self._job.config.rollout.min_sound_share)
            except TrainingError as error:
                self._unsound = error
            return
        for line in failures_by_cause(part.episodes):
            self._loggers.say(f"{purpose}: {line}")
        both = [self._parts.get((step, name)) for name in ("val", "val, greedy")]
        if any(each is None or each.groups < self._val for each in both):
            return
        sampled, greedy = (each.episodes for each in both if each is not None)
        self._loggers.log(
            step,
            validation_metrics(sampled, greedy, self._repeats, self._sets, self._failure_reward),
        )
        self._loggers.held_out(step, self._sets)

    def _log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log a finished training step: the `metrics` of the trainer and those of its episodes."""
        self._steps = max(self._steps, step)
        part = self._parts.pop((step, "train"), None)
        if part is not None:
            totals = part.totals("train", self._failure_reward)
        else:
            totals = {}
        self._loggers.log(step, {**totals, **metrics, "train/policy_version": float(step)})

    def _notice(self, content: Mapping[str, object]) -> None:
        self._loggers.say(str(content["text"]))
