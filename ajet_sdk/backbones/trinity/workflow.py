"""Our workflow as Trinity runs it: in a runner process, a group of attempts at once, back as experiences.

A runner process holds one `_Node`: a gateway and a trace file of its own, so that what one node records never depends
on another. What is trained is decided at the trainer: `info["trained"]` carries each call's share there.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from trinity.common.experience import EID, Experience
from trinity.common.workflows import Workflow

from ajet_sdk.backbones.post import light, post_of
from ajet_sdk.backbones.seeds import seed_of
from ajet_sdk.backbones.trinity.batches import blank
from ajet_sdk.backbones.trinity.mapping import ALTERNATING
from ajet_sdk.backbones.trinity.sampler import ServerSampler
from ajet_sdk.backbones.trinity.shipping import unpack
from ajet_sdk.capture import ensure_api_key, installed
from ajet_sdk.engines.chat import TokenEngine
from ajet_sdk.engines.local.tokenizer import HFTokenizer
from ajet_sdk.episode import Attempt, run_batch
from ajet_sdk.gateway import Gateway, SamplingOverride
from ajet_sdk.outcomes import untrained_entries
from ajet_sdk.samples import Batch, build
from ajet_sdk.trace.writer import TraceWriter
from ajet_sdk.types import Episode, Reward, Sample, Task, new_id
from ajet_sdk.workers import Workers, current_workers

__all__ = ["AjetWorkflow", "to_experience"]


def to_experience(sample: Sample, episode: Episode, step: int) -> Experience:
    """A training sample as Trinity's experience: ids, mask, log-probabilities and advantages exactly as they are.

    Shapes: `tokens` T; the others T - prompt_length, where the prompt is everything before the first trained token.
    `step` numbers the timelines of an episode; `eid.run` is the attempt.
    """
    line = sample.timeline
    start = max(1, int(np.flatnonzero(line.loss_mask)[0]))
    calls = {call.call_id: call for call in episode.calls}
    mask_T = np.asarray(line.loss_mask)
    advantages = torch.tensor(np.asarray(sample.advantages)[start:], dtype=torch.float32)
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
    """All attempts at one task, with our engine over the model that Trinity serves."""

    is_async = True
    can_repeat = True
    can_reset = True

    def __init__(self, *, task: Any, model: Any, auxiliary_models: Any = None) -> None:
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        self._repeats, self._first = 1, 0

    def reset(self, task: Any) -> None:
        self.task = task

    def set_repeat_times(self, repeat_times: int, run_id_base: int) -> None:
        self._repeats, self._first = repeat_times, run_id_base

    async def run_async(self) -> list[Experience]:
        """The group's experiences; a blank one where nothing of it is to be trained."""
        given = self.task.workflow_args
        node = _node(given, self.model)
        group = _Group(node, self.task, range(self._first, self._first + self._repeats), bool(given.get("greedy")))
        episodes = await group.run()
        if self.task.is_eval:
            node.writer.put(*(entry for episode in episodes for entry in untrained_entries(episode)))
            made: list[Experience] = []
            metrics: Mapping[str, float] = {}
        else:
            batch = node.batch(episodes)
            made = _experiences(batch, episodes)
            metrics = batch.metrics
        await group.tell(episodes, metrics)
        node.writer.flush()
        return made or [blank()]


class _Node:
    """What a runner process keeps for a run: the user's code, a gateway, a trace file, the engine."""

    def __init__(self, given: Mapping[str, Any], model: Any) -> None:
        ensure_api_key()
        self.run_id = str(given["run_id"])
        self.config, self.workflow, self.judge = unpack(given)
        name = f"trace-{platform.node() or 'node'}-{os.getpid()}.duckdb"
        self.writer = TraceWriter(Path(given["directory"]) / name)
        self.gateway = Gateway(self.writer).start()
        self._hooks = installed()
        self._hooks.__enter__()
        self.workers = Workers(self.config.rollout.max_env_worker)
        self.tokenizer = HFTokenizer(str(given["model"]))
        self.sampler = ServerSampler(
            model, self.config.model_name, self.config.rollout.max_model_len, self.tokenizer.eos_ids
        )
        self.engine = TokenEngine(self.sampler, self.tokenizer, tool_call_parser=self.config.model.tool_call_parser)
        self.post = post_of(self.run_id)

    def batch(self, episodes: Sequence[Episode]) -> Batch:
        """The group's samples; what is not for training is in the ledger at once."""
        algorithm, rollout = self.config.trainer_common.algorithm, self.config.rollout
        if ALTERNATING in self.config.roots:
            episodes = [e.model_copy(update={"rewards": (Reward(value=e.attempt % 2),)}) for e in episodes]
        batch = build(
            episodes,
            estimator=algorithm.adv_estimator,
            normalize_std=algorithm.normalize_std,
            max_tokens=rollout.max_model_len,
            failure_reward=rollout.failure_reward,
            decode=self.tokenizer.decode,
        )
        self.writer.put(*(row for row in batch.ledger if row.outcome != "trained" or not row.tokens))
        return batch


_nodes: dict[str, _Node] = {}


def _node(given: Mapping[str, Any], model: Any) -> _Node:
    run_id = str(given["run_id"])
    if run_id not in _nodes:
        _nodes[run_id] = _Node(given, model)
    return _nodes[run_id]


class _Group:
    """The attempts at one position of a batch."""

    def __init__(self, node: _Node, task: Any, attempts: Sequence[int], greedy: bool) -> None:
        self.node, self.greedy = node, greedy
        self.split: Any = "val" if task.is_eval else "train"
        batch, _, _ = str(task.batch_id).partition("/")
        self.step, self.position, self.group_id = int(batch), int(task.task_id), new_id()
        """For a validation the step is set to the version of the model that is asked."""
        self.task = Task.model_validate_json(task.raw_task["task"])
        self.attempts = attempts

    async def run(self) -> list[Episode]:
        node, config = self.node, self.node.config
        if self.split == "val":
            self.step = await node.sampler.version()
        seed, what = config.trainer_common.seed, self.step if self.split == "train" else self._what
        attempts = [
            Attempt(
                task=self.task,
                run_id=node.run_id,
                group_id=self.group_id,
                attempt=attempt,
                step=self.step,
                split=self.split,
                seed=seed_of(seed, what, self.position, attempt),
            )
            for attempt in self.attempts
        ]
        token = current_workers.set(node.workers)
        try:
            return await run_batch(
                node.workflow, node.judge, attempts, engine=node.engine, gateway=node.gateway, config=config,
                writer=node.writer, sampling=self._sampling(),
            )  # fmt: skip
        finally:
            current_workers.reset(token)

    @property
    def _what(self) -> str:
        return "val, greedy" if self.greedy else self.split

    def _sampling(self) -> SamplingOverride:
        rollout = self.node.config.rollout
        if self.split == "train":
            return SamplingOverride(temperature=rollout.temperature, top_p=rollout.top_p, top_k=rollout.top_k)
        if self.greedy:
            return SamplingOverride(temperature=0.0, greedy=True)
        kwargs = rollout.val_kwargs
        heat = 1.0 if kwargs.greedy else kwargs.temperature
        return SamplingOverride(temperature=heat, top_p=kwargs.top_p, top_k=kwargs.top_k)

    async def tell(self, episodes: Sequence[Episode], metrics: Mapping[str, float]) -> None:
        """Tell the driver how it went. What was said stays here, in this node's trace."""
        await self.node.post.put.remote(
            "group",
            {
                "step": self.step,
                "what": self._what,
                "metrics": dict(metrics),
                "sampled": sum(len(c.output_ids) for e in episodes for c in e.calls if c.output_ids is not None),
                "episodes": [light(episode).model_dump_json() for episode in episodes],
            },
        )


def _experiences(batch: Batch, episodes: Sequence[Episode]) -> list[Experience]:
    by_id = {episode.episode_id: episode for episode in episodes}
    made, steps = [], dict.fromkeys(by_id, 0)
    for sample in batch.samples:
        made.append(to_experience(sample, by_id[sample.episode_id], steps[sample.episode_id]))
        steps[sample.episode_id] += 1
    return made
