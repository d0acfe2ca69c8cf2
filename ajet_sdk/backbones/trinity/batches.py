"""Plug-ins for Trinity's pipeline between explorer and trainer: order of tasks, advantages, whole
steps.

Trinity passes a fixed number of experiences to its trainer, while the number of an episode's
timelines varies. So the experiences of a step have their number (`info["step_size"]`), and
`WholeSteps` reads exactly as many: a training step has the experiences of one explored step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from trinity.algorithm import AdvantageFn
from trinity.algorithm.algorithm import MultiStepGRPOAlgorithm
from trinity.algorithm.sample_strategy.sample_strategy import DefaultSampleStrategy
from trinity.buffer.operators import ExperienceOperator
from trinity.buffer.selector.selector import BaseSelector
from trinity.common.experience import EID, Experience

from ajet_sdk.backbones.shared.steps import order_of_tasks
from ajet_sdk.backbones.trinity.reports import write_report
from ajet_sdk.cluster.mailbox import TakenGroup, TrainedMessage, mailbox_of
from ajet_sdk.config.trainer_schema import Aggregation
from ajet_sdk.learn.objective import TrainedTurns, turn_weights
from ajet_sdk.samples.build import token_metrics

if TYPE_CHECKING:
    from trinity.buffer.reader.file_reader import _HFBatchReader
    from trinity.common.config import BufferConfig, DataSelectorConfig


class WithReference(MultiStepGRPOAlgorithm):  # type: ignore[misc]
    """Trinity's multi-step GRPO, with a KL term against the initial model."""


class WithoutReference(MultiStepGRPOAlgorithm):  # type: ignore[misc]
    """Trinity's multi-step GRPO without the forward pass of a reference model, which only KL
    needs."""

    use_reference = False


def blank(eid: EID | None = None, metrics: dict[str, float] | None = None) -> Experience:
    """Make an experience of two untrained tokens, for places that require one."""
    return Experience(
        eid=eid or EID(),
        tokens=torch.zeros(2, dtype=torch.int32),
        prompt_length=1,
        logprobs=torch.zeros(1),
        action_mask=torch.zeros(1, dtype=torch.bool),
        advantages=torch.zeros(1),
        returns=torch.zeros(1),
        reward=0.0,
        info={"trained": []},
        metrics=metrics or {},
    )


def _is_blank(experience: Experience) -> bool:
    return not experience.info.get("trained")


class GivenAdvantages(AdvantageFn, ExperienceOperator):  # type: ignore[misc]
    """Keeps the advantages of ajet's samples, and makes the experiences of a step a batch.

    Args:
        multiple_of: number that must divide the batch, which is filled with blank experiences.
    """

    def __init__(self, multiple_of: int = 1) -> None:
        self.multiple_of = multiple_of

    def __call__(
        self, exps: list[Experience], **_: object
    ) -> tuple[list[Experience], dict[str, float]]:
        return self.process(exps)

    def process(self, exps: list[Experience]) -> tuple[list[Experience], dict[str, float]]:
        """Process all experiences of a step; metrics are those of the step."""
        real = [experience for experience in exps if not _is_blank(experience)] or exps[:1]
        if not real:
            return [], {"timelines": 0.0}
        groups = [experience.info["group"] for experience in exps if "group" in experience.info]
        timelines = len(real) if not _is_blank(real[0]) else 0
        template = real[0]
        while len(real) % self.multiple_of:
            filler = blank(EID(batch=template.eid.batch, task=template.eid.task))
            filler.info |= {
                name: template.info[name] for name in ("model_version",) if name in template.info
            }
            real.append(filler)
        for experience in real:
            experience.info["step_size"] = len(real)
        real[0].info["groups"] = groups
        return real, {"timelines": float(timelines)}

    @classmethod
    def compute_in_trainer(cls) -> bool:
        return False

    @classmethod
    def default_args(cls) -> dict[str, object]:
        return {"multiple_of": 1}


def weigh(
    experiences: Sequence[Experience], ranks: int, aggregation: Aggregation, loss_length: int
) -> None:
    """Set `returns` to the weight of each token in the loss, times the number of ranks, over which
    Trinity averages. Its sign changes from one turn to the next, also for a weight of 0."""
    turns = []
    for experience in experiences:
        trained = experience.info.get("trained") or []
        if experience.action_mask.any():
            sizes = [int(call["tokens"]) for call in trained]
        else:
            sizes = []
        agent = (experience.info.get("episode_id", ""), experience.info.get("agent", ""))
        turns.append(TrainedTurns(agent, sizes))
    weights = turn_weights(turns, aggregation, loss_length)
    for experience, of_turns, weights_N in zip(experiences, turns, weights, strict=True):
        signs = [-1.0 if n % 2 else 1.0 for n in range(len(of_turns.sizes))]
        signs_N = np.repeat(np.array(signs, np.float32), of_turns.sizes)
        experience.returns = torch.zeros_like(experience.advantages)
        experience.returns[experience.action_mask] = torch.from_numpy(weights_N * signs_N * ranks)


class WholeSteps(DefaultSampleStrategy):  # type: ignore[misc]
    """Reads exactly one explored step, masks stale experiences, and reports the trained calls to
    the driver.

    Args (in `algorithm.sample_strategy_args`):
        max_staleness: maximum age of a sampled token, in updates.
        run_id: the run whose driver gets the report.
        ranks: number of ranks over which the trainer averages; `returns` has the weight of a token (see `plugins`).
        loss_aggregation, loss_length: as in `trainer_common`.
        reports: directory of the same reports as files.
        carry_over: as in `rollout`, for the explorer.
    """

    def __init__(self, buffer_config: BufferConfig, **arguments: Any) -> None:
        super().__init__(buffer_config)
        self.max_staleness = int(arguments["max_staleness"])
        self._run_id = str(arguments["run_id"])
        self.ranks = int(arguments.get("ranks", 1))
        self._aggregation: Aggregation = arguments.get("loss_aggregation", "token")
        self._loss_length = int(arguments.get("loss_length", 1))
        self._reports = str(arguments.get("reports", ""))

    async def sample(
        self, step: int, **_: object
    ) -> tuple[list[Experience], dict[str, object], list[object]]:
        first = (await self.exp_buffer.read(batch_size=1))[0]
        size = int(first.info.get("step_size", 1))
        batch = [first, *(await self.exp_buffer.read(batch_size=size - 1) if size > 1 else [])]
        updates = step - 1
        stale = 0
        rows: list[dict[str, Any]] = []
        lags: list[int] = []
        for experience in batch:
            trained = experience.info.get("trained") or []
            lag = updates - min((call["version"] for call in trained), default=updates)
            outcome = "stale" if lag > self.max_staleness else "trained"
            if trained:
                lags.append(lag)
            if outcome == "stale":
                stale += 1  # stays in the batch to keep its size, with all tokens masked
                experience.action_mask = torch.zeros_like(experience.action_mask)
                experience.advantages = torch.zeros_like(experience.advantages)
            rows += [{**call, "outcome": outcome} for call in trained]
        weigh(batch, self.ranks, self._aggregation, self._loss_length)
        groups: list[TakenGroup] = []
        for experience in batch:
            groups += experience.info.get("groups", [])
        report = TrainedMessage(step=step, calls=rows, groups=groups)
        if self._reports:
            await asyncio.to_thread(write_report, Path(self._reports), report)
        await mailbox_of(self._run_id).put.remote("trained", report)
        metrics: dict[str, object] = {
            "train/timelines": float(sum(bool(e.info.get("trained")) for e in batch))
        }
        metrics |= token_metrics((row["outcome"], row["tokens"]) for row in rows)
        if lags:
            metrics |= {
                "train/staleness": sum(lags) / len(lags),
                "train/timelines_stale": float(stale),
            }
        self.set_model_version_metric(batch, metrics)
        return batch, metrics, []

    @classmethod
    def default_args(cls) -> dict[str, object]:
        return {
            "max_staleness": 0,
            "run_id": "",
            "ranks": 1,
            "loss_aggregation": "token",
            "loss_length": 1,
            "reports": "",
            "carry_over": 0,
        }


class OrderOfLocal(BaseSelector):  # type: ignore[misc]
    """Selects tasks in the same order as `local`."""

    def __init__(self, data_source: _HFBatchReader, config: DataSelectorConfig) -> None:
        self._size = int(data_source.dataset_size)
        self._seed = int(config.seed)
        self._at = 0

    def get_indices(
        self, batch_size: int, return_extra_info: bool = False
    ) -> list[int] | tuple[list[int], dict[str, object]]:
        places = range(self._at, self._at + batch_size)
        self._at += batch_size
        chosen = order_of_tasks(self._size, places, self._seed)
        return (chosen, {}) if return_extra_info else chosen

    def feedback(self, *_: object, **__: object) -> None:
        """Does nothing: rewards do not change the order."""

    def state_dict(self) -> dict[str, int]:
        return {"current_index": self._at}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self._at = int(state_dict.get("current_index", 0))
