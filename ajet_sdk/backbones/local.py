"""The `local` backbone: sampling, training and validation in this process, on a CPU or one GPU."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import logging
import random
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ajet_sdk.episode import Attempt, run_batch
from ajet_sdk.errors import ConfigError, TrainingError
from ajet_sdk.gateway import Gateway, SamplingOverride
from ajet_sdk.learn import checkpoint
from ajet_sdk.learn.estimate import estimate
from ajet_sdk.learn.learner import Learner, open_learner
from ajet_sdk.learn.probe import Probe
from ajet_sdk.learn.trained import trained_calls
from ajet_sdk.learn.trainer import TokenScores
from ajet_sdk.loggers import Loggers
from ajet_sdk.outcomes import check_sound, failures_by_cause, notices, pass_at_k, solved, untrained_entries
from ajet_sdk.samples import Batch, balance, build
from ajet_sdk.timelines import is_trained
from ajet_sdk.types import Episode, Sample, Task, TunedModel, new_id

if TYPE_CHECKING:
    from ajet_sdk.config import Config
    from ajet_sdk.protocols import Job
    from ajet_sdk.trace.writer import TraceWriter

__all__ = ["local"]

log = logging.getLogger("ajet")
T = TypeVar("T")

_LARGE_GAP = 0.1
"""Mean difference of log-probabilities between sampler and trainer that is worth a word."""
_CALLS_AT_ONCE = 1024
"""Rows of `trained` that wait to be written before the step waits for the disk."""


async def local(job: Job, gateway: Gateway, writer: TraceWriter) -> TunedModel:
    """Train by GRPO or RLOO: sample a batch of episodes, make samples of them, update, and validate now and then.

    Returns the trained model, written as a Hugging Face checkpoint. A cancelled run leaves a checkpoint of its last
    whole step. Raises TrainingError where too few episodes are sound or the ledger does not balance.
    """
    config = job.config
    if not job.train:
        raise ConfigError("there is no training task; see task_reader")
    total = total_steps(config, len(job.train))
    with Loggers(
        config.trainer_common.logger,
        directory=job.directory / "metrics",
        run_id=job.run_id,
        writer=writer,
        total_steps=total,
    ) as loggers:
        probe = Probe(config, job.workflow, job.judge, job.train)
        learner = await open_learner(config, probe, total, loggers.say)
        try:
            return await _Learning(job, gateway, writer, learner, loggers, total).run()
        finally:
            await learner.engine.aclose()


def total_steps(config: Config, tasks: int) -> int:
    """Training steps of a run: `total_steps`, else as many batches as the epochs hold."""
    common = config.trainer_common
    return common.total_steps or max(1, common.total_epochs * tasks // config.data.train_batch_size)


def validations_left(config: Config, done: int, total: int) -> int:
    """How often a run that has `done` steps behind it will still validate: before, every so often, and at its end."""
    common = config.trainer_common
    after = sum(step == total or _due(step, common.test_freq) for step in range(done + 1, total + 1))
    return after + int(done == 0 and common.val_before_train)


def tasks_of_step(tasks: Sequence[Task], step: int, size: int, seed: int) -> list[Task]:
    """The tasks of a step (from 1): the next of an endless stream of epochs, each shuffled anew from the seed."""
    chosen, orders = [], dict[int, list[int]]()
    for position in range((step - 1) * size, step * size):
        epoch, at = divmod(position, len(tasks))
        if epoch not in orders:
            orders[epoch] = list(range(len(tasks)))
            random.Random(f"{seed}/{epoch}").shuffle(orders[epoch])
        chosen.append(tasks[orders[epoch][at]])
    return chosen


class _Learning:
    """One run of the loop. What changes is the step, the weights (in the trainer) and what the loggers hold."""

    def __init__(
        self, job: Job, gateway: Gateway, writer: TraceWriter, learner: Learner, loggers: Loggers, total: int
    ) -> None:
        self.job, self.gateway, self.writer, self.loggers, self.total = job, gateway, writer, loggers, total
        self.config = job.config
        self.common = job.config.trainer_common
        self.engine, self.sampler, self.trainer = learner.engine, learner.sampler, learner.trainer
        self.tokenizer = learner.tokenizer
        base = self.common.checkpoint_base_dir
        self.checkpoints = (Path(base) if base else job.directory / "checkpoint") / job.run_id
        self.done = 0
        """Whole steps behind us."""
        self.saved = -1

    async def run(self) -> TunedModel:
        if self.job.resume:
            await self._resume()
        self._announce()
        try:
            if self.done == 0 and self.common.val_before_train:
                await self._validate()
            while self.done < self.total:
                await self._train_step(self.done + 1)
                last = self.done == self.total
                if last or _due(self.done, self.common.test_freq):
                    await self._validate()
                if last or _due(self.done, self.common.save_freq):
                    await self._save()
        except asyncio.CancelledError:
            self._write_checkpoint()
            self.loggers.say(f"stopped after step {self.done}; go on with --resume")
            raise
        async with self.sampler.exclusive():
            path = await _thread(checkpoint.export, self.checkpoints / "model", self.trainer.model, self.tokenizer.hf)
        self.loggers.say(f"the trained model is in {path}")
        return TunedModel(path=path, metrics=dict(self.loggers.last), run_id=self.job.run_id)

    async def _resume(self) -> None:
        newest = checkpoint.latest(self.checkpoints)
        if newest is None:
            self.loggers.say("there is no checkpoint to resume from: beginning at step 0")
        else:
            async with self.sampler.exclusive():  # the sampler learns of other weights at its end
                progress = checkpoint.restore(newest, self.trainer, self._fingerprint())
                self.sampler.policy_version = self.trainer.updates
            self.done = self.saved = progress.step
            self.loggers.last |= progress.metrics
            self.loggers.say(f"going on from {newest}: {self.done} of {self.total} steps done")
        self.writer.supersede(self.job.run_id, self.done if newest is not None else -1)
        if newest is not None:
            sql = "SELECT name, step, value FROM metrics WHERE run_id = ? AND step <= ?"
            for row in self.writer.query(sql, [self.job.run_id, self.done]).to_pylist():
                self.loggers.history[row["name"]][row["step"]] = row["value"]

    def _announce(self) -> None:
        steps = self.total - self.done
        validations = validations_left(self.config, self.done, self.total) * self._validation_attempts()
        guess = estimate(self.config, self.trainer, steps=steps, val_episodes=validations)
        self.loggers.say(f"{steps} {'step' if steps == 1 else 'steps'}: {guess}")
        if self.config.rollout.top_p < 1 or self.config.rollout.top_k > 0:
            self.loggers.say(
                "rollout.top_p or top_k cuts the distribution that is sampled from, but not the trainer's: "
                "expect a gap between their log-probabilities, or set top_p: 1 and top_k: -1"
            )

    # Training

    async def _train_step(self, step: int) -> None:
        started = time.perf_counter()
        episodes = await self._episodes(step, self._attempts(step), "train", self._sampling())
        rollout_seconds = time.perf_counter() - started
        for line in notices(episodes):
            self.loggers.say(f"step {step}: {line}")
        check_sound(episodes, self.config.rollout.min_sound_share)
        await _whole(self._learn(step, episodes, started, rollout_seconds))

    async def _learn(self, step: int, episodes: Sequence[Episode], started: float, rollout_seconds: float) -> None:
        """Update the weights, and book the step as done: whoever stops the run stops it before or after all of this."""
        batch = self._samples(episodes)
        metrics = _episode_metrics("train", episodes) | _prefixed("train", batch.metrics)
        metrics |= _staleness(episodes, self.trainer.updates)
        if batch.samples:
            async with self.sampler.exclusive():
                scores, temperature = TokenScores(), self._temperature(episodes)
                learnt = await asyncio.to_thread(self.trainer.step, batch.samples, temperature, scores)
                self.sampler.policy_version = self.trainer.updates
            await asyncio.to_thread(self._keep, step, batch.samples, episodes, scores)
            metrics |= _prefixed("train", learnt)
            self._warn_of_gap(step, learnt)
        else:
            self.loggers.say(f"step {step}: {_why_nothing(batch)}")
        calls = [c for e in episodes for c in e.calls if c.output_ids is not None]
        sampled = sum(len(c.output_ids) for c in calls if c.output_ids is not None)
        metrics["train/sampled_tokens_per_second"] = sampled / rollout_seconds
        metrics["train/policy_version"] = self.trainer.updates
        metrics |= {"time/rollout": rollout_seconds, "time/step": time.perf_counter() - started}
        self.loggers.log(step, metrics)
        self.done = step

    def _keep(self, step: int, samples: Sequence[Sample], episodes: Sequence[Episode], scores: TokenScores) -> None:
        """Put what the step saw of each trained token into the trace, a few calls at a time: it can be much."""
        rows = trained_calls(self.job.run_id, step, samples, episodes, scores.logprobs, scores.entropy)
        while chunk := list(itertools.islice(rows, _CALLS_AT_ONCE)):
            self.writer.put(*chunk)
            if len(chunk) == _CALLS_AT_ONCE:
                self.writer.flush()

    def _attempts(self, step: int) -> list[Attempt]:
        seed = self.common.seed
        tasks = tasks_of_step(self.job.train, step, self.config.data.train_batch_size, seed)
        return [
            Attempt(
                task=task,
                run_id=self.job.run_id,
                group_id=group,
                attempt=attempt,
                step=step,
                split="train",
                seed=_seed(seed, step, position, attempt),
            )
            for position, (task, group) in enumerate(zip(tasks, [new_id() for _ in tasks], strict=True))
            for attempt in range(self.config.rollout.num_repeat)
        ]

    def _samples(self, episodes: Sequence[Episode]) -> Batch:
        algorithm, rollout = self.common.algorithm, self.config.rollout
        batch = build(
            episodes,
            estimator=algorithm.adv_estimator,
            normalize_std=algorithm.normalize_std,
            policy_version=self.trainer.updates,
            max_staleness=rollout.max_staleness,
            max_tokens=self.sampler.max_model_len,
            failure_reward=rollout.failure_reward,
            decode=self.tokenizer.decode,
        )
        self.writer.put(*batch.ledger)
        wrong = balance(batch.ledger, [c for e in episodes for c in e.calls])
        if wrong:
            raise TrainingError("the ledger does not balance: " + "; ".join(wrong[:5]))
        return batch

    def _sampling(self) -> SamplingOverride | None:
        rollout = self.config.rollout
        if rollout.sampling == "request":
            return None
        return SamplingOverride(temperature=rollout.temperature, top_p=rollout.top_p, top_k=rollout.top_k)

    def _temperature(self, episodes: Sequence[Episode]) -> float | Mapping[str, float]:
        if self.config.rollout.sampling == "run":
            return self.config.rollout.temperature
        return {c.call_id: float(c.sampling.get("temperature") or 1.0) for e in episodes for c in e.calls}

    def _warn_of_gap(self, step: int, learnt: Mapping[str, float]) -> None:
        gap = learnt.get("logprob_gap_mean", 0.0)
        if gap > _LARGE_GAP:
            self.loggers.say(
                f"step {step}: sampler and trainer differ by {gap:.2f} in the mean log-probability of a token; "
                "the ratios of the loss are off. Use model.dtype: float32, top_p: 1 and top_k: -1"
            )

    # Validation

    def _val_tasks(self) -> Sequence[Task]:
        limit = self.common.val_tasks
        return self.job.val if limit is None else self.job.val[:limit]

    def _validation_attempts(self) -> int:
        return len(self._val_tasks()) * (self.common.val_pass_n + 1)

    async def _validate(self) -> None:
        """Sample each task `val_pass_n` times at temperature 1 (or as `val_kwargs` says), and once greedily."""
        tasks = self._val_tasks()
        if not tasks:
            return
        kwargs, repeats = self.config.rollout.val_kwargs, max(1, self.common.val_pass_n)
        sampled = SamplingOverride(
            temperature=kwargs.temperature if not kwargs.greedy else 1.0, top_p=kwargs.top_p, top_k=kwargs.top_k
        )
        episodes = await self._evaluate(tasks, repeats, sampled, "val")
        greedy = await self._evaluate(tasks, 1, SamplingOverride(temperature=0.0, greedy=True), "val, greedy")
        metrics = _episode_metrics("val", episodes)
        metrics |= {"val/greedy_reward": _mean_reward(greedy)} if _rewards(greedy) else {}
        if repeats > 1:
            groups = [episodes[i : i + repeats] for i in range(0, len(episodes), repeats)]
            for k in sorted({1, repeats}):
                metrics[f"val/pass@{k}"] = _mean([pass_at_k(repeats, sum(map(solved, g)), k) for g in groups])
        self.loggers.log(self.done, metrics)

    async def _evaluate(
        self, tasks: Sequence[Task], repeats: int, sampling: SamplingOverride, what: str
    ) -> list[Episode]:
        seed = self.common.seed
        attempts = [
            Attempt(
                task=task,
                run_id=self.job.run_id,
                group_id=group,
                attempt=attempt,
                step=self.done,
                split="val",
                seed=_seed(seed, what, position, attempt),
            )
            for position, (task, group) in enumerate(zip(tasks, [new_id() for _ in tasks], strict=True))
            for attempt in range(repeats)
        ]
        episodes = await self._episodes(self.done, attempts, what, sampling)
        self.writer.put(*(entry for episode in episodes for entry in untrained_entries(episode)))
        for line in failures_by_cause(episodes):
            self.loggers.say(f"{what}: {line}")
        return episodes

    async def _episodes(
        self, step: int, attempts: Sequence[Attempt], what: str, sampling: SamplingOverride | None
    ) -> list[Episode]:
        display = self.loggers.display
        tell: Callable[[Episode], None] | None = None
        if display is not None:
            display.begin(f"step {step}/{self.total} {what}", len(attempts))
            tell = lambda _: display.advance()  # noqa: E731
        return await run_batch(
            self.job.workflow,
            self.job.judge,
            attempts,
            engine=self.engine,
            gateway=self.gateway,
            config=self.config,
            writer=self.writer,
            sampling=sampling,
            on_episode=tell,
        )

    # Checkpoints

    async def _save(self) -> None:
        await _thread(self._write_checkpoint)

    def _write_checkpoint(self) -> None:
        if self.saved == self.done:
            return
        progress = checkpoint.Progress(
            step=self.done,
            policy_version=self.trainer.updates,
            fingerprint=self._fingerprint(),
            metrics=dict(self.loggers.last),
        )
        self.writer.flush()
        checkpoint.save(self.checkpoints, self.trainer, self.tokenizer.hf, progress, keep=self.common.keep_checkpoints)
        self.saved = self.done

    def _fingerprint(self) -> str:
        """Of what a resumed run has to share with the run that it goes on with: model, tasks, seed, batch, loss."""
        config, common = self.config, self.common
        shared = {
            "model": config.model.model_dump(mode="json", include={"path", "lora"}),
            "tasks": [task.task_id for task in self.job.train],
            "seed": common.seed,
            "batch": [config.data.train_batch_size, config.rollout.num_repeat],
            "settings": repr(replace(self.trainer.settings, total_updates=1)),  # a longer run may go on
            "algorithm": common.algorithm.model_dump(mode="json"),
        }
        return hashlib.blake2b(json.dumps(shared, sort_keys=True).encode(), digest_size=16).hexdigest()


def _due(step: int, frequency: int) -> bool:
    return frequency > 0 and step % frequency == 0


def _seed(*parts: Any) -> int:
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big")


async def _thread(function: Callable[..., T], *arguments: Any) -> T:
    """Run in a thread, to its end even when cancelled: a checkpoint is whole or not begun."""
    return await _whole(asyncio.to_thread(function, *arguments))


async def _whole(work: Coroutine[Any, Any, T]) -> T:
    """Await to the end even when cancelled, and be cancelled only then."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


def _prefixed(prefix: str, metrics: Mapping[str, float]) -> dict[str, float]:
    return {name if "/" in name else f"{prefix}/{name}": value for name, value in metrics.items()}


def _rewards(episodes: Sequence[Episode]) -> list[float]:
    return [e.reward for e in episodes if e.status == "succeeded" and e.reward is not None]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


def _mean_reward(episodes: Sequence[Episode]) -> float:
    return _mean(_rewards(episodes))


def _episode_metrics(prefix: str, episodes: Sequence[Episode]) -> dict[str, float]:
    """Mean reward of the sound episodes, shares of failed and solved ones, and the means of their own metrics."""
    own: dict[str, list[float]] = {}
    for episode in episodes:
        for name, value in episode.metrics.items():
            own.setdefault(name, []).append(value)
    calls = [len(e.calls) for e in episodes]
    return {
        f"{prefix}/reward": _mean_reward(episodes),
        f"{prefix}/solved_share": _mean([float(solved(e)) for e in episodes]),
        f"{prefix}/failed_share": _mean([float(e.status != "succeeded") for e in episodes]),
        f"{prefix}/calls_per_episode": _mean(calls),
        **{f"{prefix}/{name}": _mean(values) for name, values in own.items()},
    }


def _staleness(episodes: Sequence[Episode], updates: int) -> dict[str, float]:
    """By how many updates the policy that sampled a call was behind the one to be trained, in the mean over calls."""
    calls = [call for episode in episodes for call in episode.calls if is_trained(call)]
    lags = [updates - call.policy_version for call in calls if call.policy_version is not None]
    return {"train/staleness": _mean(lags)} if lags else {}


def _why_nothing(batch: Batch) -> str:
    """Why a batch left no sample, in plain words."""
    outcomes: dict[str, int] = {}
    for entry in batch.ledger:
        outcomes[entry.outcome] = outcomes.get(entry.outcome, 0) + entry.tokens
    if not outcomes:
        return "no call of the policy was captured, so there is nothing to train on; is the agent's client captured?"
    if set(outcomes) == {"zero_advantage"}:
        return (
            "the reward has no variance: all attempts at each task earned the same, so there is nothing to learn from; "
            "raise rollout.num_repeat or temperature, or take easier or harder tasks"
        )
    shares = ", ".join(f"{tokens} tokens {outcome}" for outcome, tokens in sorted(outcomes.items()))
    return f"nothing was left to train on ({shares})"
