"""`AjetManager` replaces the agent loop of verl's trainer and returns ajet's samples as the rows of
a step.

verl requires as many rows as it sent; the tasks follow from step and seed, in the same order as in
`local`. Importing this module registers the advantage estimator `ajet_given`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import ray
from ray.exceptions import RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl import DataProto  # pyright: ignore[reportAttributeAccessIssue]
from verl.trainer.ppo.core_algos import register_adv_est

from ajet_sdk.backbones.shared.failure import failure_of
from ajet_sdk.backbones.shared.node import deserialize_job
from ajet_sdk.backbones.shared.steps import (
    attempts_of,
    samples_of,
    tasks_of_step,
    training_sampling,
)
from ajet_sdk.backbones.shared.validation import GREEDY, validation_sampling
from ajet_sdk.backbones.verl.batches import reward_rows, training_rows, truncate
from ajet_sdk.backbones.verl.mapping import ESTIMATOR
from ajet_sdk.backbones.verl.runner import Runner, read_job, takes_pictures
from ajet_sdk.cluster.mailbox import group_message, mailbox_of
from ajet_sdk.errors import TrainingError
from ajet_sdk.gateway.episode import SamplingOverride
from ajet_sdk.reporting.metrics import reason_for_no_samples
from ajet_sdk.rollout.attempts import Attempt
from ajet_sdk.rollout.outcomes import check_sound
from ajet_sdk.samples.build import balance, token_metrics
from ajet_sdk.tokens.huggingface import HFTokenizer
from ajet_sdk.trace.counted import counted_rewards
from ajet_sdk.types import Episode, Task

if TYPE_CHECKING:
    import torch
    from omegaconf import DictConfig
    from ray import ObjectRef
    from ray.actor import ActorHandle
    from verl.workers.rollout.llm_server import LLMServerClient

_LOSSES = 3
"""Repeats of a group whose node was lost."""


@register_adv_est(ESTIMATOR)  # type: ignore[untyped-decorator]
def recorded_advantages(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, **_: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the advantages of the samples, token by token, also as returns."""
    advantages = token_level_rewards * response_mask
    return advantages, advantages


class AjetManager:
    """Implements the part of `AgentLoopManager` that verl calls: `create` and
    `generate_sequences`."""

    def __init__(
        self, config: DictConfig, llm_client: LLMServerClient, *_: object, **__: object
    ) -> None:
        self._job = read_job(Path(config.ajet.job))
        self.config, _workflow, _judge = deserialize_job(self._job)
        self.run_id = str(self._job["run_id"])
        self._client = llm_client
        self._train, self._val = (
            [Task.model_validate(task) for task in self._job[part]] for part in ("train", "val")
        )
        self._tokenizer = HFTokenizer(str(self._job["model"]))
        self._padding = min(self._tokenizer.eos_ids, default=0)
        self._mailbox = mailbox_of(self.run_id)
        self._runners = [self._start(node) for node in _nodes()]

    @classmethod
    def create(cls, *args: object, **kwargs: object) -> AjetManager:
        return cls(*args, **kwargs)

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """The rows of a training step, or of a validation; as many as there are in `prompts`.

        Raises TrainingError if too few episodes are sound or the ledger does not balance.
        """
        step = int(prompts.meta_info["global_steps"])
        if prompts.meta_info.get("validate"):
            return self._validate(step, len(prompts))
        return self._learn(step, len(prompts))

    def _learn(self, step: int, count: int) -> DataProto:
        started = time.perf_counter()
        config = self.config
        tasks = tasks_of_step(
            self._train, step, config.data.train_batch_size, config.trainer_common.seed
        )
        attempts = self._attempts(tasks, config.rollout.num_repeat, step, "train")
        episodes = self._run(attempts, "train", training_sampling(config))
        check_sound(episodes, config.rollout.min_sound_share)
        batch = samples_of(config, episodes, self._tokenizer)
        samples, ledger = truncate(batch, count)
        wrong = balance(ledger, [call for episode in episodes for call in episode.calls])
        if wrong:
            raise TrainingError("the ledger does not balance: " + "; ".join(wrong[:5]))
        words = []
        if len(batch.samples) > count:
            words.append(
                f"{len(batch.samples)} timelines, and a batch of verl holds {count}: the tokens of"
                f" {len(batch.samples) - count} are left out as truncated; raise"
                " rollout.multi_turn.expected_steps"
            )
        if not batch.samples:
            estimator = config.trainer_common.algorithm.adv_estimator
            words.append(
                reason_for_no_samples(batch, episodes, estimator, config.rollout.failure_reward)
            )
        message = {
            "step": step,
            "metrics": {
                **batch.metrics,
                **token_metrics((row.outcome, row.tokens) for row in ledger),
                "train/rows": float(count),
                "train/rows_blank": float(count - len(samples)),
                "train/timelines_cut": float(len(batch.samples) - len(samples)),
                "time/rollout": time.perf_counter() - started,
            },
            "words": words,
            "ledger": [entry.model_dump() for entry in ledger],
        }
        ray.get(self._mailbox.put.remote("batch", message))
        if takes_pictures(self._tokenizer):
            processor = self._tokenizer.pictures
        else:
            processor = None
        return training_rows(samples, count, self._padding, processor)

    def _validate(self, step: int, count: int) -> DataProto:
        """Return the mean reward of each task to verl; the driver computes metrics from the
        episodes."""
        config = self.config
        if count != len(self._val):
            raise TrainingError(
                f"verl validates on {count} rows, but there are {len(self._val)} validation tasks"
            )
        repeats = max(1, config.validation_attempts)
        sampled: list[Episode] = []
        for purpose, times, sampling in (
            ("val", repeats, validation_sampling(config)),
            ("val, greedy", 1, GREEDY),
        ):
            episodes = self._run(self._attempts(self._val, times, step, purpose), purpose, sampling)
            sampled = sampled or episodes
        means = []
        for at in range(count):
            attempts = sampled[at * repeats : (at + 1) * repeats]
            earned = counted_rewards(attempts, config.rollout.failure_reward)
            means.append(sum(earned) / len(earned) if earned else 0.0)
        return reward_rows(means, self._padding)

    # Episodes on nodes

    def _attempts(
        self, tasks: Sequence[Task], repeats: int, step: int, purpose: str
    ) -> list[Attempt]:
        seed = self.config.trainer_common.seed
        return attempts_of(
            tasks, repeats, run_id=self.run_id, step=step, purpose=purpose, seed=seed
        )

    def _run(
        self, attempts: Sequence[Attempt], purpose: str, sampling: SamplingOverride | None
    ) -> list[Episode]:
        """Run all groups on the nodes, in order; groups whose process is lost are repeated."""
        groups: dict[str, list[Attempt]] = {}
        for attempt in attempts:
            groups.setdefault(attempt.group_id, []).append(attempt)
        done: dict[str, list[Episode]] = {}
        losses_left = _LOSSES
        while len(done) < len(groups):
            running: dict[ObjectRef, tuple[str, ActorHandle]] = {}
            for at, name in enumerate(name for name in groups if name not in done):
                runner = self._runners[at % len(self._runners)]
                running[runner.run.remote(groups[name], sampling)] = name, runner
            lost = self._gather(running, done, list(groups), purpose)
            if not lost:
                break
            if not losses_left:
                raise TrainingError(
                    f"processes that run episodes died {_LOSSES + 1} times in one step:"
                    f" {failure_of(str(lost[0]))}"
                )
            losses_left -= 1
            why = failure_of(str(lost[0]))
            text = (
                f"a process that ran episodes died: {why}; repeating {len(lost)} groups of attempts"
            )
            ray.get(
                self._mailbox.put.remote("notice", {"text": f"step {attempts[0].step}: {text}"})
            )
        return [episode for name in groups for episode in done[name]]

    def _gather(
        self,
        running: dict[ObjectRef, tuple[str, ActorHandle]],
        done: dict[str, list[Episode]],
        order: Sequence[str],
        purpose: str,
    ) -> list[RayActorError]:
        """Wait for all groups and send each to the driver; `order` is that of their tasks. Returns
        the errors of lost runners, which are replaced."""
        lost = []
        while running:
            (reference,), _ = ray.wait(list(running), num_returns=1)
            name, runner = running.pop(reference)
            try:
                done[name] = ray.get(reference)
            except RayActorError as error:
                lost.append(error)
                self._replace(runner)
                continue
            episodes = done[name]
            message = group_message(episodes, episodes[0].step, order.index(name), purpose, {})
            self._mailbox.put.remote("group", message)
        return lost

    def _start(self, node: str) -> ActorHandle:
        affinity = NodeAffinitySchedulingStrategy(node_id=node, soft=True)
        actor = ray.remote(Runner).options(
            num_cpus=0, max_concurrency=1024, scheduling_strategy=affinity
        )
        job = {
            name: value for name, value in self._job.items() if name not in ("train", "val")
        }  # sent with attempts
        return actor.remote(job, self._client, max(1, len(_nodes())))

    def _replace(self, runner: ActorHandle) -> None:
        """Replace a dead runner by a new one on a live node."""
        nodes = _nodes()
        self._runners = [
            self._start(nodes[at % len(nodes)]) if old is runner else old
            for at, old in enumerate(self._runners)
        ]


def _nodes() -> list[str]:
    return [n["NodeID"] for n in ray.nodes() if n["Alive"] and n["Resources"].get("CPU", 0) > 0]
