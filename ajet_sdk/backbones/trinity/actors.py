"""Trinity's explorer, changed to repeat tasks of dead runners, and its trainer, changed to update
by whole batches.

Trinity's own scheduler replaces a dead runner, but loses its task and waits until it times out.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections import deque
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import trinity.explorer.explorer
from trinity.common.config import Config
from trinity.common.constants import SyncStyle
from trinity.common.experience import Experience
from trinity.common.workflows import Task
from trinity.explorer.explorer import Explorer
from trinity.explorer.rollout_coordinator import (
    BatchLifecycleState,
    BatchState,
    BatchType,
    RolloutCoordinator,
)
from trinity.explorer.scheduler import RunnerWrapper, Scheduler
from trinity.trainer.trainer import Trainer

from ajet_sdk.backbones.shared.carry_over import GroupPlace, TakenGroups, groups_of_step
from ajet_sdk.backbones.shared.failure import failure_of
from ajet_sdk.backbones.shared.padding import unpad_without_flash_attention
from ajet_sdk.backbones.shared.steps import saved_step
from ajet_sdk.backbones.trinity.adapters import (
    checkpoint_adapter,
    handed_over,
    load_adapter,
    versions_in_use,
)
from ajet_sdk.backbones.trinity.pictures import install as send_pictures
from ajet_sdk.backbones.trinity.reports import read_reports, reports_of, taken_groups
from ajet_sdk.cluster.mailbox import mailbox_of

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from ray.actor import ActorHandle
    from tinker import RestClient

_ADAPTER_TRAINER = "ajet_sdk.backbones.trinity.adapter_trainer"
"""Loaded where it is used: it needs verl, which a machine without GPUs may lack."""

_LIVES = 4
"""Maximum runners that a task may crash before it counts as failed."""

_NAMES = {"grad_norm": "actor/grad_norm", "learning_rate": "actor/lr"}
"""verl's names for metrics of the Tinker API."""

_LOOK = 0.05
"""Seconds between two looks for new weights."""

_PAUSE = 5.0
"""Seconds before the next runner is started, as Ray assigns work to a dead node for a while."""


class SteadyExplorer(Explorer):  # type: ignore[misc]
    """A Ray actor, started like Trinity's own.

    In Trinity's style `fully_async` it paces itself: step k is sampled once the weights are at most
    `max_staleness` updates older than those that it will be trained with, so that no token is too
    old. Trinity alone bounds only the number of batches in flight, and its lead grows.
    """

    model_version: int
    """Updates behind the engines' weights; -1 until they are known."""
    last_monitored_step: int
    """The newest step that was handed to the trainer."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._is_async = self.sync_style == SyncStyle.FULLY_ASYNC
        self._carry_over = int(config.algorithm.sample_strategy_args["carry_over"])
        self._trained = saved_step(Path(config.checkpoint_job_dir))
        """Steps that were trained when this explorer began: of their batches only those groups are
        sampled that were carried over."""
        self.last_monitored_step = max(self.last_monitored_step, self._trained)
        self._pulling = asyncio.Lock()
        self._feeding: asyncio.Task[None] | None = None

    async def explore_step(self) -> bool:
        if self._is_async:
            if self._feeding is None:
                self._feeding = asyncio.create_task(self._feed_trainer())
            oldest = self.config.algorithm.sample_strategy_args["max_staleness"]
            ahead = oldest - self._carry_over
            await self._wait_for_version(self.explore_step_num - ahead)
        goes_on = bool(await super().explore_step())
        if self._is_async and self.explore_step_num <= self._trained:
            self._inflight_train_steps.remove(self.explore_step_num)
        return goes_on

    def need_eval(self) -> bool:
        return self.explore_step_num > self._trained and bool(super().need_eval())

    async def _feed_trainer(self) -> None:
        """Hand the sampled steps to the trainer, in their order, each when it has ended."""
        while True:
            if not self._inflight_train_steps:
                await asyncio.sleep(_LOOK)
                continue
            step = self._inflight_train_steps[0]
            await self._finish_explore_step(step=step)
            self._inflight_train_steps.popleft()
            self.last_monitored_step = step

    async def _wait_for_version(self, version: int) -> None:
        """Wait for weights of at least `version` updates."""
        while self.model_version < version:
            await self._look()

    async def _look(self) -> None:
        """Wait a moment. Raises what ended the task that feeds the trainer."""
        if self._feeding is not None and self._feeding.done():
            self._feeding.result()
        await asyncio.sleep(_LOOK)

    async def finish_current_steps(self) -> None:
        while self._is_async and self._inflight_train_steps:
            await self._look()
        await super().finish_current_steps()

    async def eval(self) -> None:
        """Validate. In the asynchronous style all steps so far are trained first, so that the
        validation is of one policy; the last one is validated after the training."""
        step = self.explore_step_num
        if not self._is_async or step == 0:
            await super().eval()
        elif step < self.config.trainer.total_steps:
            await self.finish_current_steps()
            await self._wait_for_version(step)
            await super().eval()
            await self._finish_eval_step(step=step)

    async def _pull_latest_weights(self) -> None:
        """Pull weights that are newer than the present ones.

        In the asynchronous style a task in the background pulls them, too. Of two pulls at once the
        second would wait for weights that nobody makes.
        """
        async with self._pulling:
            if self._is_async and self.model_version >= 0:
                newest = await self.synchronizer.get_latest_model_version.remote()
                if newest <= self.model_version:
                    return
            if self.enable_lora:
                await self._pull_latest_adapter()
            else:
                await super()._pull_latest_weights()

    async def _pull_latest_adapter(self) -> None:
        """Wait for an adapter that is newer than the present one, and load it. Before the first
        update an adapter changes nothing, and the base model is the policy."""
        present = self.model_version
        newest = await self.synchronizer.wait_new_model_state_dict.remote(current_version=present)
        if newest > max(0, present):
            job = Path(self.config.checkpoint_job_dir)
            await self._load_adapter(newest, handed_over(job, newest))
        self.model_version = max(newest, present)

    async def _load_adapter(self, version: int, directory: Path) -> None:
        """Load an adapter into all engines, and remove the files of those that they need no
        more."""
        kept = versions_in_use(self.config)
        unloaded = await asyncio.gather(
            *(load_adapter(engine, directory, version, kept) for engine in self.models)
        )
        job = Path(self.config.checkpoint_job_dir)
        for old in set().union(*unloaded):
            await asyncio.to_thread(shutil.rmtree, handed_over(job, old).parent, ignore_errors=True)

    async def _checkpoint_weights_update(self, step_num: int | None = None) -> int:
        if not self.enable_lora:
            return int(await super()._checkpoint_weights_update(step_num=step_num))
        assert step_num is not None, "benchmark() names the step"
        job = Path(self.config.checkpoint_job_dir)
        await self._load_adapter(step_num, checkpoint_adapter(job, step_num))
        return step_num

    async def prepare(self) -> None:
        # In this actor's process only, where Trinity starts the coordinator by this name.
        trinity.explorer.explorer.RolloutCoordinator = _Coordinator
        await super().prepare()

    async def benchmark(self) -> bool:
        """Evaluate the newest checkpoint if configured, else all, as Trinity does.

        Trinity asks its synchronizer for the newest checkpoint, which always returns 0 in this
        mode.
        """
        if not self.config.explorer.bench_on_latest_checkpoint:
            return bool(await super().benchmark())
        newest = Path(self.config.checkpoint_job_dir) / "latest_checkpointed_iteration.txt"
        self.explore_step_num = await self._checkpoint_weights_update(
            step_num=int(newest.read_text())
        )
        await self.eval()
        await self._finish_eval_step(prefix="bench")
        return True

    async def shutdown(self) -> None:
        """Shut down once the driver has all messages."""
        if self._feeding is not None:
            self._feeding.cancel()
        if self.monitor is not None:
            await self.monitor.flush()
        await super().shutdown()


class _Coordinator(RolloutCoordinator):  # type: ignore[misc]
    """Trinity's coordinator; with `rollout.carry_over`, a step takes the groups that are done
    first, of whichever batch they are."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._size = int(config.buffer.batch_size)
        self._carry_over = int(config.algorithm.sample_strategy_args["carry_over"])
        self._in_flight = set[GroupPlace]()
        self._taken = TakenGroups(self._size)
        if self._carry_over:
            job = Path(config.checkpoint_job_dir)
            trained = saved_step(job)
            reports = read_reports(reports_of(job), trained)
            self._taken = taken_groups(reports, trained, self._size)

    async def submit_batch(
        self,
        *,
        batch_id: int | str,
        tasks: list[Task],
        batch_type: BatchType,
        min_wait_num: int | None = None,
    ) -> None:
        await super().submit_batch(
            batch_id=batch_id, tasks=tasks, batch_type=batch_type, min_wait_num=min_wait_num
        )
        if self._carry_over and batch_type == "train":
            batch = int(batch_id)
            left = self._taken.left(batch)
            self.scheduler.keep_only(batch, left)
            self._in_flight |= {GroupPlace(batch, position) for position in left}

    async def _finalize_train_batch(
        self, batch_state: BatchState, *, timeout: float | None
    ) -> dict[str, Any]:
        if not self._carry_over:
            return dict(await super()._finalize_train_batch(batch_state, timeout=timeout))
        step = int(batch_state.batch_id)
        places = await self._wait_for_groups(step, timeout or self.scheduler.default_timeout)
        self._in_flight -= set(places)
        results = [self.scheduler.completed_tasks[p.batch].pop(p.position) for p in places]
        payloads = [payload for result in results for payload in result.experience_payloads]
        metrics = await self.process_experiences(payloads)
        batch_state.statuses = {n: result.status for n, result in enumerate(results)}
        batch_state.state = BatchLifecycleState.FINALIZED
        self.pending_batches.pop(step)
        return dict(self._build_batch_result(batch_state, metrics))

    async def _wait_for_groups(self, step: int, seconds: float) -> list[GroupPlace]:
        """Raises TimeoutError for a group that has not ended after `seconds`, as where every runner
        that tried it has died."""
        completed = self.scheduler.completed_tasks
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            done = {p: p.position in completed.get(p.batch, {}) for p in self._in_flight}
            places = groups_of_step(step, self._size, self._carry_over, done)
            if places is not None:
                return places
            await asyncio.sleep(_LOOK)
        raise TimeoutError(f"Timeout waiting for the groups of step {step}.")

    async def _init_scheduler(self) -> None:
        self.scheduler = _Scheduler(self.config)
        await self.scheduler.start()

    @classmethod
    def get_actor(cls, config: Config) -> ActorHandle:
        return ray.remote(cls).options(namespace=config.ray_namespace).remote(config)


class _Scheduler(Scheduler):  # type: ignore[misc]
    def keep_only(self, batch: int, positions: Sequence[int]) -> None:
        """Drop the tasks of a batch at other positions; none has begun."""
        pending = self.pending_tasks.pop(batch, deque())
        kept = deque(item for item in pending if item[0].task.task_id in positions)
        if kept:
            self.pending_tasks[batch] = kept

    async def _create_runner(self, runner_id: int) -> None:
        explorer = self.config.explorer
        runner = _Runner(
            runner_id=runner_id,
            rollout_model_id=runner_id % explorer.rollout_model.engine_num,
            auxiliary_model_ids=[
                runner_id % model.engine_num for model in explorer.auxiliary_models
            ],
            config=self.config,
        )
        await runner.prepare()
        self.runners[runner_id] = runner
        self.idle_runners.add(runner_id)


class _Runner(RunnerWrapper):  # type: ignore[misc]
    async def run_with_retry(self, *arguments: object, **named: object) -> Any:
        """Run as Trinity does, and again in a new process if the process died."""
        lost = ""
        result = None
        for _ in range(_LIVES):
            try:
                if lost:
                    text = f"a runner process died ({lost}); another one repeats its work"
                    mailbox = mailbox_of(self.config.monitor.monitor_args["run_id"])
                    await mailbox.put.remote("notice", {"text": text})
                    await self.restart_runner()
                result = await super().run_with_retry(*arguments, **named)
                if not result[0].ok:
                    await self.runner.__ray_ready__.remote()
                return result
            except ray.exceptions.RayActorError as error:
                lost = str(failure_of(str(error)))
                await asyncio.sleep(_PAUSE)
        if result is None:
            raise RuntimeError(
                f"a task crashed {_LIVES} runner processes; the last failure: {lost}"
            )
        return result


class _LateDeletion:
    """Deletes weights at a Tinker API service `later` updates after Trinity requests it, and by
    their correct name.

    Trinity requests it as soon as the trainer has newer ones, while samplers may still start with
    the old ones.
    """

    def __init__(self, client: RestClient, later: int) -> None:
        self._client = client
        self._later = later
        self._asked: deque[tuple[str, str]] = deque()

    async def delete_checkpoint_async(self, model_id: str, name: str) -> None:
        self._asked.append((model_id, f"sampler_weights/{name}"))
        if len(self._asked) > self._later:
            await self._client.delete_checkpoint(*self._asked.popleft())


class WholeBatchTrainer(Trainer):  # type: ignore[misc]
    """A Ray actor, started like Trinity's own."""

    def __init__(self, config: Config) -> None:
        if config.trainer.trainer_type == "verl" and config.model.lora_configs:
            import_module(_ADAPTER_TRAINER).train_adapter()
        super().__init__(config)

    async def prepare(self) -> None:
        if self.config.trainer.trainer_type == "verl":
            unpad_without_flash_attention()
        else:
            send_pictures()
        await super().prepare()
        if self.config.trainer.trainer_type == "tinker":
            oldest = self.config.algorithm.sample_strategy_args["max_staleness"]
            self.engine.checkpoint_manager = _LateDeletion(
                self.engine.checkpoint_manager, oldest + 1
            )

    async def train(self) -> str:
        """Run Trinity's loop; returns once the driver has all messages."""
        name = str(await super().train())
        await self.monitor.flush()
        return name

    async def train_step(self, exps: list[Experience]) -> dict[str, object]:
        """Run an update and return its metrics."""
        if self.config.trainer.trainer_type == "verl":
            set_mini_batch_size(self.engine.config, len(exps))
        metrics: dict[str, object] = await super().train_step(exps)
        return {_NAMES.get(name, name): value for name, value in metrics.items() if ":" not in name}


def set_mini_batch_size(verl: DictConfig, size: int) -> None:
    """Set the size of verl's mini-batches, which must divide every batch."""
    verl.actor.ppo_mini_batch_size = size
