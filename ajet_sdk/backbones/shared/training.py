"""The training loop of the backbones `local` and `tinker`, which sample, train and validate from
this process."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ajet_sdk.backbones.shared.carry_over import GroupPlace, SampledSteps, TakenGroups
from ajet_sdk.backbones.shared.garbage import freeze_gc
from ajet_sdk.backbones.shared.steps import (
    Rollouts,
    StepBatch,
    StepSource,
    book_unfinished,
    check_job,
    samples_of,
    total_steps,
)
from ajet_sdk.backbones.shared.stored import StoredSteps, open_stored
from ajet_sdk.backbones.shared.swarm import SwarmSteps
from ajet_sdk.backbones.shared.validation import Validation, due, validations_left
from ajet_sdk.config.model_source import checkpoint_base, first_model, saved_steps
from ajet_sdk.config.trainer_schema import Estimator
from ajet_sdk.errors import TrainingError
from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.learn import checkpoint
from ajet_sdk.learn.determinism import in_order, step_hash
from ajet_sdk.learn.objective import less_kl, without_signal
from ajet_sdk.learn.scores import TokenScores, trained_calls
from ajet_sdk.learn.teacher import LocalTeacher, RemoteTeacher, distill, open_teacher, unscored
from ajet_sdk.protocols import Sampling
from ajet_sdk.reporting.held_out import rising
from ajet_sdk.reporting.loggers import Loggers
from ajet_sdk.reporting.metrics import (
    add_prefix,
    episode_metrics,
    length_of_trained,
    reason_for_no_samples,
    staleness,
)
from ajet_sdk.reporting.results import TunedModel
from ajet_sdk.rollout.outcomes import check_sound, failure_messages, solved
from ajet_sdk.samples.build import Batch, balance
from ajet_sdk.samples.draft import sampled_tokens
from ajet_sdk.types import Episode, LedgerEntry, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ajet_sdk.learn.learner import Learner
    from ajet_sdk.learn.separate import SeparateLearner
    from ajet_sdk.learn.tinker.learner import TinkerLearner
    from ajet_sdk.protocols import Job
    from ajet_sdk.trace.writer import TraceWriter

    AnyLearner = Learner | SeparateLearner | TinkerLearner

log = logging.getLogger("ajet")

T = TypeVar("T")
OpenModel = Callable[
    [int, Callable[[str], None]],
    Awaitable["tuple[AnyLearner, PreTrainedModel | None]"],
]
"""Opens the model for a number of steps; returns also the module if it is in this process."""

_SOLVED_STEPS = 3
"""Solved steps in a row that end the run (`stop_when: solved`)."""

_CALLS_AT_ONCE = 1024
"""Rows of `trained` in memory before the step waits for the disk."""


async def train(
    job: Job, gateway: Gateway, writer: TraceWriter, open_model: OpenModel
) -> TunedModel:
    """Open the model and its teacher, train, and close them. Raises ConfigError."""
    config = job.config
    check_job(job)
    stored_steps = open_stored(job)
    stored, replay = (
        (stored_steps, None) if config.trainer_common.algorithm.stored else (None, stored_steps)
    )
    total = total_steps(config, len(job.train if stored is None else stored))
    with Loggers.of(job, writer, total) as loggers:
        learner, student = await open_model(total, loggers.say)
        teacher = None
        try:
            if stored_steps is not None:
                check = partial(stored_steps.check, learner.tokenizer, total, loggers.display)
                for line in await asyncio.to_thread(check):
                    loggers.say(line)
            teacher = await open_teacher(config, learner.tokenizer, student)
            with freeze_gc():
                return await TrainingRun(
                    job, gateway, writer, learner, loggers, total, stored, replay, teacher
                ).run()
        finally:
            await learner.engine.aclose()
            if teacher is not None:
                await teacher.aclose()


class TrainingRun:
    def __init__(
        self,
        job: Job,
        gateway: Gateway,
        writer: TraceWriter,
        learner: AnyLearner,
        loggers: Loggers,
        total: int,
        stored: StoredSteps | None,
        replay: StoredSteps | None,
        teacher: LocalTeacher | RemoteTeacher | None,
    ) -> None:
        self.job = job
        self.writer = writer
        self.loggers = loggers
        self.total = total
        self.stored = stored
        self.replay = replay
        self.teacher = teacher
        self.config = job.config
        self.common = job.config.trainer_common
        self.learner = learner
        self.sampler = learner.sampler
        self.trainer = learner.trainer
        self.tokenizer = learner.tokenizer
        self._thread = ThreadPoolExecutor(1, "trainer")
        room = asyncio.Semaphore(self.config.rollout.max_env_worker)
        self.rollouts = Rollouts(job, gateway, writer, learner.engine, room)
        self.validation = Validation(self.rollouts, loggers, total)
        self.swarm: SwarmSteps | None = None
        self.sampled = SampledSteps(self.rollouts)
        self.source: StepSource = self.sampled
        if job.swarm is not None:
            self.swarm = SwarmSteps(
                job, job.swarm, writer, lambda: learner.trainer.updates, loggers, total
            )
            self.source = self.swarm
        elif stored is not None:
            self.source = stored.source(self.tokenizer, writer)
        self.checkpoints = checkpoint_base(job.config) / job.run_id
        self.done = 0
        """Finished steps."""
        self._cpu = time.process_time()
        """Processor time of the process at the end of the last step."""
        self.saved = -1
        self.planned_updates: int | None = None
        """Updates that the resumed run was to make."""
        self.has_samples = True
        """Whether the newest step had samples to train on."""
        self.solved = 0
        """Number of newest steps in a row whose attempts were all solved."""
        self.ledger: Sequence[LedgerEntry] = ()
        """That of the newest step."""
        self.ahead: deque[StepBatch] = deque()
        """The batches of the next steps, started early."""

    async def run(self) -> TunedModel:
        if self.job.resume:
            await self._resume()
        self._announce()
        if self.swarm is not None:
            this = asyncio.current_task()
            assert this is not None
            await self.swarm.open(self.done, self.learner.engine, this)
        try:
            if self.done == 0 and self.common.val_before_train:
                await self._validate()
            while self.done < self.total:
                await self._grow()
                await self._train_step(self.done + 1)
                last = self.done == self.total or self._is_solved()
                validates = last or due(self.done, self.common.test_freq)
                if validates:
                    await self._validate()
                elif due(self.done, self.common.algorithm.val_loss_freq):
                    await self._measure_loss()
                why = self._reason_to_stop()
                if (
                    last
                    or why
                    or due(self.done, self.common.save_freq)
                    or self.loggers.best_step() == self.done
                ):
                    await _complete(asyncio.to_thread(self._write_checkpoint))
                if why:
                    self.loggers.say(f"stopped after step {self.done} of {self.total}: {why}")
                    break
        except asyncio.CancelledError:
            await self._abandon()
            if self.swarm is None:
                self._write_checkpoint()
                book_unfinished(self.writer, self.job.run_id)
            else:  # what has ended counts when the run is resumed
                await self.swarm.close("the server was stopped", is_last=False)
                self._write_checkpoint()
            self.loggers.say(f"stopped after step {self.done}; continue with --resume")
            raise
        except Exception:
            if self.swarm is not None:
                await self.swarm.close("the training failed", is_last=False)
            raise
        finally:
            await self._abandon()
        if self.swarm is not None:
            await self.swarm.close("the training is finished", is_last=True)
        elif self.config.rollout.max_staleness:  # what was sampled ahead of an early stop
            self.writer.supersede(self.job.run_id, self.done)
        async with self.sampler.exclusive():
            path = await _complete(asyncio.to_thread(self.learner.export, self.checkpoints))
        return self.loggers.tuned(
            path,
            self.job.directory,
            {0: Path(first_model(self.config)), **saved_steps(self.checkpoints)},
        )

    async def _resume(self) -> None:
        newest = checkpoint.latest(self.checkpoints)
        if newest is None:
            self.loggers.say("no checkpoint to resume from; starting at step 0")
        else:
            async with self.sampler.exclusive():  # the sampler takes over the weights at its end
                wanted = checkpoint.shared_settings(
                    self.config, self.trainer.settings, self.job.train
                )
                progress = await asyncio.to_thread(
                    checkpoint.restore, newest, self.learner.read, wanted
                )
                self.sampler.policy_version = self.trainer.updates
            self.done = self.saved = progress.step
            beyond = [GroupPlace(*place) for place in progress.taken]
            size = self.config.data.train_batch_size
            whole = self.done - len(beyond) // size
            self.sampled.resume(TakenGroups(size, whole, beyond))
            self.loggers.last |= progress.metrics
            self.loggers.say(f"resuming from {newest}: {self.done} of {self.total} steps done")
            self.planned_updates = progress.total_updates
        kept = self.swarm.keep(self.done) if self.swarm is not None else ()
        self.writer.supersede(self.job.run_id, self.done if newest is not None else -1, kept=kept)
        if newest is not None:
            sql = "SELECT name, step, value FROM metrics WHERE run_id = ? AND step <= ?"
            for row in self.writer.query(sql, [self.job.run_id, self.done]).to_pylist():
                self.loggers.history[row["name"]][row["step"]] = row["value"]

    def _announce(self) -> None:
        if self.stored is not None:
            self.loggers.say(f"{self.common.algorithm.adv_estimator}: {self.stored.origin}")
        if self.replay is not None:
            self.loggers.say(f"each step imitates {self.replay.size} of {self.replay.origin}")
        notice = self.trainer.settings.schedule_notice(self.trainer.updates, self.planned_updates)
        if notice:
            self.loggers.say(notice)
        if self.swarm is not None:
            return  # how long it takes, the clients decide
        steps = self.total - self.done
        validations = (
            validations_left(self.config, self.done, self.total) * self.validation.episodes
        )
        guess = self.learner.estimate(self.config, steps=steps, val_episodes=validations)
        self.loggers.say(f"{steps} {'step' if steps == 1 else 'steps'}: {guess}")

    async def _validate(self) -> None:
        """Measure the policy on held-out data. The clients of a swarm do it by themselves."""
        await self._measure_loss()
        if self.swarm is None:
            await self.validation.run(self.done)

    async def _abandon(self) -> None:
        """Stop the batches that were started early."""
        while self.ahead:
            await self.ahead.pop().stop()

    # Training

    async def _grow(self) -> None:
        growth = self.job.growth
        if growth is not None and growth.due(self.done):
            self.writer.flush()
            message, metrics = await growth.grow(
                self.done, partial(self.rollouts.make_trials, self.done)
            )
            self.loggers.say(message)
            self.loggers.log(self.done, metrics)

    async def _train_step(self, step: int) -> None:
        started = time.perf_counter()
        if self.ahead:
            rollout = self.ahead.popleft()
        else:
            rollout = self.source.begin_step(step)
        if self.swarm is None:
            self._begin_ahead(step, self.common.mini_batch_num * self.common.ppo_epochs)
        episodes = await rollout.episodes(self.loggers.display, f"step {step}/{self.total} train")
        seconds = rollout.seconds
        resamples = self.common.algorithm.grouped and self.swarm is None
        for _ in range(self.config.rollout.resample_groups if resamples else 0):
            if (more := self.rollouts.begin_more(step, episodes)) is None:
                break
            episodes = [
                *episodes,
                *await more.episodes(self.loggers.display, f"step {step}/{self.total} more tasks"),
            ]
            seconds += more.seconds
        for line in failure_messages(episodes):
            self.loggers.say(f"step {step}: {line}")
        if self.swarm is None:  # a client's broken agent ends no server
            check_sound(episodes, self.config.rollout.min_sound_share)
        await _complete(self._learn(step, episodes, started, seconds))
        if self.swarm is not None:
            await self.swarm.trained(step, self.ledger)

    async def _learn(
        self, step: int, episodes: Sequence[Episode], started: float, rollout_seconds: float
    ) -> None:
        """Update the weights and book the step; the run can stop only before or after it."""
        rewarded, kl = (
            await self._less_kl(episodes)
            if self.common.algorithm.has_kl_in_reward
            else (episodes, {})
        )
        batch = self._samples(rewarded)
        metrics = (
            episode_metrics("train", episodes, self.config.rollout.failure_reward)
            | add_prefix("train", batch.metrics)
            | kl
        )
        metrics |= staleness(episodes, self.trainer.updates)
        metrics |= length_of_trained(episodes, batch.ledger)
        if self.swarm is not None:
            metrics |= self.swarm.metrics_by_kind(episodes)
        samples: Sequence[Sample] = (
            in_order(batch.samples) if self.config.rollout.deterministic else batch.samples
        )
        if samples:
            scores = TokenScores()
            begun = time.perf_counter()
            if self.teacher is not None:
                async with (
                    self.sampler.exclusive()
                ):  # the student's weights determine which tokens could be drawn
                    samples, teacher_metrics = await distill(
                        samples, self.teacher, self._sampling(episodes)
                    )
                metrics |= add_prefix("train", teacher_metrics) | {
                    "time/teacher": time.perf_counter() - begun
                }
            replay = (
                ()
                if self.replay is None
                else await asyncio.to_thread(self.replay.replayed, step, self.tokenizer)
            )
            learnt = await self._update(step, samples, self._sampling(episodes), scores, replay)
            ended = time.perf_counter()
            await asyncio.to_thread(self._record_scores, step, samples, episodes, scores)
            metrics |= add_prefix("train", learnt) | {"time/train": ended - begun}
            if self.ahead:
                overlap = max(batch.overlap(begun, ended) for batch in self.ahead)
                metrics["time/overlap"] = overlap / (ended - started)
            gap = learnt.get("logprob_gap_mean", 0.0)
            self.loggers.advise_on_gap(step, gap, self.learner.service_name)
        else:
            self._begin_ahead(step, 0)
            if self.has_samples:  # of successive steps without samples, only the first is explained
                if self.trainer.updates:
                    earlier = self.loggers.history["train/reward"]
                else:
                    earlier = {}
                estimator = self.common.algorithm.adv_estimator
                why = reason_for_no_samples(
                    batch, episodes, estimator, self.config.rollout.failure_reward, earlier
                )
                self.loggers.say(f"step {step}: {why}")
        self.has_samples = bool(samples)
        if episodes and all(map(solved, episodes)):
            self.solved = self.solved + 1
        else:
            self.solved = 0
        if self.stored is None:
            sampled = sum(sampled_tokens(call) for episode in episodes for call in episode.calls)
            metrics["train/sampled_tokens_per_second"] = sampled / rollout_seconds
        if self.config.rollout.deterministic:
            metrics["train/hash"] = step_hash(episodes, self.trainer.parameters)
        metrics |= {"train/policy_version": self.trainer.updates, **self.learner.metrics()}
        metrics |= {"time/rollout": rollout_seconds, "time/step": time.perf_counter() - started}
        cpu = time.process_time()
        metrics["time/cpu"] = cpu - self._cpu
        self._cpu = cpu
        self.loggers.log(step, metrics)
        self.done = step

    async def _less_kl(self, episodes: Sequence[Episode]) -> tuple[list[Episode], dict[str, float]]:
        """Subtract the KL divergence from the rewards; returns also the metrics of the original
        rewards."""
        whole = self._build(episodes, estimator="opd")  # everything the policy sampled
        async with self.sampler.exclusive():
            score = self.trainer.reference_logprobs
            reference = await self._train(score, whole.samples, self._sampling(episodes))
        equal = (
            without_signal(episodes, self._build(episodes).ledger)
            if self.common.algorithm.divides
            else ()
        )
        rewarded, kl = less_kl(episodes, whole.samples, reference, self.common.kl_loss_coef, equal)
        metrics = {
            name: value for name, value in whole.metrics.items() if name.startswith("train/reward")
        }
        return rewarded, metrics | {"train/reward_kl": kl}

    async def _update(
        self,
        step: int,
        samples: Sequence[Sample],
        sampling: Sampling | Mapping[str, Sampling],
        scores: TokenScores,
        replay: Sequence[Sample],
    ) -> dict[str, float]:
        """Run a trainer step, with exclusive use of the model or while the next batch is
        sampled."""
        if not self.config.rollout.max_staleness:
            async with self.sampler.exclusive():
                learnt = await self._train(
                    self.trainer.step, samples, sampling, scores, None, replay
                )
                self.sampler.policy_version = self.trainer.updates
            return learnt
        loop = asyncio.get_running_loop()
        updates_left = self.trainer.updates_of(samples)
        self._begin_ahead(step, updates_left)

        async def publish() -> None:
            nonlocal updates_left
            updates_left -= 1
            async with self.sampler.exclusive():  # the sampler takes over the weights at its end
                self.sampler.policy_version = self.trainer.updates
            self._begin_ahead(step, updates_left)

        def on_update() -> None:
            asyncio.run_coroutine_threadsafe(publish(), loop).result()

        return await self._train(self.trainer.step, samples, sampling, scores, on_update, replay)

    async def _train(self, function: Callable[..., T], *arguments: object) -> T:
        """Call a method of the trainer, always in the same thread, as glibc keeps freed memory per
        thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    async def _measure_loss(self) -> None:
        if self.stored is not None and self.stored.held_out:
            samples = await asyncio.to_thread(self.stored.held_out_samples, self.tokenizer)
            async with self.sampler.exclusive():
                loss = await self._train(self.trainer.imitation_loss, samples)
            self.loggers.log(self.done, {"val/loss": loss})

    def _begin_ahead(self, step: int, updates_left: int) -> None:
        """Begin the batches after `step` whose tokens will be at most `max_staleness` updates old
        when they are trained, also if they are carried over: that step has `updates_left` to make,
        each later one at most the same number. The clients of a swarm fill one step at a time."""
        most = self.common.mini_batch_num * self.common.ppo_epochs
        bound = self.config.rollout.max_staleness - self.config.rollout.carry_over * most
        while bound and step + len(self.ahead) < self.total:
            if self.swarm is not None and self.ahead:
                return
            if updates_left + len(self.ahead) * most > bound:
                return
            self.ahead.append(self.source.begin_step(step + 1 + len(self.ahead)))

    def _record_scores(
        self, step: int, samples: Sequence[Sample], episodes: Sequence[Episode], scores: TokenScores
    ) -> None:
        """Write the scores of each trained token to the trace, in chunks of calls to bound
        memory."""
        rows = trained_calls(
            self.job.run_id, step, samples, episodes, scores.logprobs, scores.entropy
        )
        while chunk := list(itertools.islice(rows, _CALLS_AT_ONCE)):
            self.writer.put(*chunk)
            if len(chunk) == _CALLS_AT_ONCE:
                self.writer.flush()

    def _build(self, episodes: Sequence[Episode], estimator: Estimator | None = None) -> Batch:
        return samples_of(
            self.config,
            episodes,
            self.tokenizer,
            max_tokens=self.sampler.max_model_len,
            policy_version=self.trainer.updates,
            masks=not self.trainer.plain_only,
            plain_only=self.trainer.plain_only,
            estimator=estimator,
        )

    def _samples(self, episodes: Sequence[Episode]) -> Batch:
        batch = self._build(episodes)
        self.ledger = batch.ledger
        self.writer.put(*batch.ledger)
        wrong = balance(batch.ledger, [c for e in episodes for c in e.calls])
        if wrong:
            raise TrainingError("the ledger does not balance: " + "; ".join(wrong[:5]))
        if not self.loggers.history["train/tokens_unmaskable"] and (
            line := unscored(self.common.algorithm, batch)
        ):
            self.loggers.say(line)
        return batch

    def _sampling(self, episodes: Sequence[Episode]) -> Mapping[str, Sampling]:
        """The sampling parameters of each call, under which it is scored; none for imitation and
        preference."""
        if self.common.algorithm.adv_estimator in ("sft", "dpo"):
            return {}
        return {c.call_id: Sampling.of(c.sampling) for e in episodes for c in e.calls}

    def _is_solved(self) -> bool:
        by_reward = self.stored is None and self.teacher is None
        return by_reward and "solved" in self.common.stop_when and self.solved >= _SOLVED_STEPS

    def _reason_to_stop(self) -> str:
        """Why the run ends early (`trainer_common.stop_when`); empty if it continues."""
        if "drop" in self.common.stop_when and self.validation.dropped:
            return "the validation reward fell (trainer_common.stop_when: drop)"
        if "rise" in self.common.stop_when and rising(self.loggers.history["val/loss"]):
            return "the loss on held-out conversations rises (trainer_common.stop_when: rise)"
        if "unstable" in self.common.stop_when and self.loggers.unstable:
            return f"{self.loggers.unstable} (trainer_common.stop_when: unstable)"
        if reason := self.learner.reason_to_stop():
            return reason
        if self._is_solved():
            return (
                f"solved, every attempt of {_SOLVED_STEPS} steps (trainer_common.stop_when: solved)"
            )
        return ""

    # Checkpoints

    def _write_checkpoint(self) -> None:
        if self.saved == self.done:
            return
        progress = checkpoint.Progress(
            step=self.done,
            policy_version=self.trainer.updates,
            shared=checkpoint.shared_settings(self.config, self.trainer.settings, self.job.train),
            metrics=dict(self.loggers.last),
            total_updates=self.trainer.settings.total_updates,
            taken=sorted(self.sampled.taken.beyond),
        )
        self.writer.flush()
        keep = self.common.keep_checkpoints
        best = self.loggers.best_step()
        learner = self.learner
        checkpoint.save(self.checkpoints, learner.write, progress, keep, best, learner.remove)
        self.saved = self.done


async def _complete(work: Coroutine[object, None, T]) -> T:
    """Await `work` to its end; a cancellation takes effect afterwards."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise
