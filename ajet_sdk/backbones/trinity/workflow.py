"""The workflow that Trinity runs in its runner processes: a group of attempts, returned as
experiences.

A runner process has one `Node` per run. The trainer decides which calls are trained, by
`info["trained"]`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from trinity.common.experience import EID, Experience
from trinity.common.workflows import Workflow

from ajet_sdk.backbones.shared.node import Node
from ajet_sdk.backbones.shared.steps import attempts_at, samples_of, training_sampling
from ajet_sdk.backbones.shared.validation import GREEDY, validation_sampling
from ajet_sdk.backbones.trinity.batches import blank
from ajet_sdk.backbones.trinity.handover import handover_of
from ajet_sdk.backbones.trinity.mapping import ALTERNATING, is_on_cpu
from ajet_sdk.backbones.trinity.sampler import ServerSampler, ServiceSampler
from ajet_sdk.cluster.mailbox import TakenGroup, group_message, mailbox_of
from ajet_sdk.config.config import Config
from ajet_sdk.engines.picture_text import PictureSpan, picture_spans
from ajet_sdk.gateway.episode import SamplingOverride
from ajet_sdk.protocols import Tokenizer
from ajet_sdk.samples.build import Batch
from ajet_sdk.tokens.huggingface import HFTokenizer
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Episode, LedgerEntry, Reward, Sample, Task

if TYPE_CHECKING:
    from trinity.common.models.model import ModelWrapper
    from trinity.common.workflows import Task as TrinityTask

AnySampler = ServerSampler | ServiceSampler


def to_experience(
    sample: Sample, episode: Episode, step: int, tokenizer: Tokenizer | None = None
) -> Experience:
    """Convert a training sample to Trinity's experience, with its exact ids, mask,
    log-probabilities and advantages.

    Shapes: `tokens` T; the others T - prompt_length, where the prompt is everything before the
    first trained token. `step` numbers the timelines of an episode; `eid.run` is the attempt.
    `tokenizer` is needed if the sample has pictures.
    """
    line = sample.timeline
    start = max(1, int(np.flatnonzero(line.loss_mask)[0]))
    calls = {call.call_id: call for call in episode.calls}
    mask_T = np.asarray(line.loss_mask)
    advantages = torch.tensor(np.asarray(sample.advantages)[start:], dtype=torch.float32)
    shown: dict[str, list[PictureSpan]] = {}
    if line.pictures:
        assert tokenizer is not None
        shown["pictures"] = picture_spans(line.token_ids.tolist(), line.pictures, tokenizer)
    return Experience(
        eid=EID(task=sample.group_id, run=episode.attempt, step=step, suffix=sample.episode_id),
        tokens=torch.tensor(np.asarray(line.token_ids), dtype=torch.int32),
        prompt_length=start,
        logprobs=torch.tensor(np.asarray(line.logprobs)[start:], dtype=torch.float32),
        action_mask=torch.tensor(mask_T[start:], dtype=torch.bool),
        advantages=advantages,
        returns=advantages.clone(),
        reward=sample.reward,
        info={
            "episode_id": sample.episode_id,
            "group_id": sample.group_id,
            "agent": line.agent,
            **shown,
            "trained": [
                {
                    "episode_id": sample.episode_id,
                    "call_id": span.call_id,
                    "tokens": span.end - span.start,
                    "version": calls[span.call_id].policy_version or 0,
                }
                for span in line.spans
            ],
        },
    )


class AjetWorkflow(Workflow):  # type: ignore[misc]
    """Runs all attempts at a task, with ajet's engine over Trinity's model."""

    is_async = True
    can_repeat = True
    can_reset = True

    def __init__(
        self,
        *,
        task: TrinityTask,
        model: ModelWrapper,
        auxiliary_models: list[ModelWrapper] | None = None,
    ) -> None:
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        self._repeats = 1
        self._first = 0

    def reset(self, task: TrinityTask) -> None:
        self.task = task

    def set_repeat_times(self, repeat_times: int, run_id_base: int) -> None:
        self._repeats = repeat_times
        self._first = run_id_base

    async def run_async(self) -> list[Experience]:
        """Run the group and return its experiences, or a blank one if there is nothing to train."""
        node = _node(self.task.workflow_args, self.model)
        purpose, sampling = self._purpose(node.config)
        step = int(str(self.task.batch_id).partition("/")[0])
        position = int(self.task.task_id)
        if purpose != "train":
            step = await node.sampler.version()  # a validation is of the current weights
        attempts = attempts_at(
            Task.model_validate_json(self.task.raw_task["task"]),
            position,
            range(self._first, self._first + self._repeats),
            run_id=node.run_id,
            step=step,
            purpose=purpose,
            seed=node.config.trainer_common.seed,
            latest_step=step + node.config.rollout.carry_over if purpose == "train" else None,
        )
        episodes = await node.run(attempts, sampling)
        batch = None
        if purpose == "train":
            batch = build_batch(node.config, episodes, node.tokenizer, node.writer)
        metrics = batch.metrics if batch else {}
        message = group_message(episodes, step, position, purpose, metrics)
        await mailbox_of(node.run_id).put.remote("group", message)
        node.writer.flush()
        made = experiences_of(batch, episodes, node.tokenizer) if batch else []
        made = made or [blank()]
        ids = [episode.episode_id for episode in episodes]
        made[0].info["group"] = TakenGroup(batch=step, position=position, episodes=ids)
        return made

    def _purpose(self, config: Config) -> tuple[str, SamplingOverride | None]:
        """The purpose of the group, as named in `Progress`, and its sampling."""
        if not self.task.is_eval:
            return "train", training_sampling(config)
        if self.task.workflow_args.get("greedy"):
            return "val, greedy", GREEDY
        return "val", validation_sampling(config)


class GivenWorkflow(Workflow):  # type: ignore[misc]
    """Returns its share of a step that the driver has collected, in place of running agents."""

    is_async = True
    can_repeat = True
    can_reset = True

    def reset(self, task: TrinityTask) -> None:
        self.task = task

    def set_repeat_times(self, repeat_times: int, run_id_base: int) -> None:
        """Does nothing: the clients make the attempts."""

    async def run_async(self) -> list[Experience]:
        """Wait for the step; a blank experience stands for an empty share."""
        arguments = self.task.workflow_args
        step = int(str(self.task.batch_id).partition("/")[0])
        position = int(self.task.task_id)
        handover = handover_of(str(arguments["run_id"]))
        share = await handover.take.remote(step, position, int(arguments["positions"]))
        return list(share) or [blank()]


def build_batch(
    config: Config, episodes: Sequence[Episode], tokenizer: HFTokenizer, writer: TraceWriter
) -> Batch:
    """Build the samples of groups; tokens that are not for training are booked in the ledger at
    once."""
    if ALTERNATING in config.roots:
        episodes = [
            e.model_copy(update={"rewards": (Reward(value=e.attempt % 2),)}) for e in episodes
        ]
    batch = samples_of(config, episodes, tokenizer)
    writer.put(*(row for row in batch.ledger if not _is_trained(row)))
    return batch


def _is_trained(row: LedgerEntry) -> bool:
    """Whether the trainer will report a row, so that it isn't booked before."""
    return row.outcome == "trained" and row.tokens > 0


_nodes: dict[str, Node[AnySampler]] = {}


def _node(job: Mapping[str, object], model: ModelWrapper) -> Node[AnySampler]:
    run_id = str(job["run_id"])
    if run_id not in _nodes:
        _nodes[run_id] = Node(job, partial(sampler_over, model))
    return _nodes[run_id]


def sampler_over(model: ModelWrapper, config: Config, tokenizer: HFTokenizer) -> AnySampler:
    """The sampler over a model that Trinity serves."""
    if is_on_cpu(config):
        return ServiceSampler(model, config, tokenizer)
    return ServerSampler(model, config.model_name, config.rollout.max_model_len, tokenizer)


def experiences_of(
    batch: Batch, episodes: Sequence[Episode], tokenizer: Tokenizer
) -> list[Experience]:
    """The experiences of the batch's samples."""
    by_id = {episode.episode_id: episode for episode in episodes}
    experiences = []
    steps = dict.fromkeys(by_id, 0)
    for sample in batch.samples:
        experiences.append(
            to_experience(sample, by_id[sample.episode_id], steps[sample.episode_id], tokenizer)
        )
        steps[sample.episode_id] += 1
    return experiences
