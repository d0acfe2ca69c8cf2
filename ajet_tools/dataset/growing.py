"""The task reader `growing`: starts with a few tasks and adds tasks that the policy can learn from.

`data/growing/RUN/step_N.json` in the experiment's directory records the round after step N and its
rows, so that a resumed run has the same tasks.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Awaitable, Callable, Sequence
from contextlib import closing
from functools import partial
from statistics import fmean
from typing import Any

from ajet_sdk.config.config import Config
from ajet_sdk.engines.budget import Budget, BudgetSpent
from ajet_sdk.errors import ConfigError
from ajet_sdk.rollout.attempts import Attempt
from ajet_sdk.rollout.event_loop import call_to_end
from ajet_sdk.tasks.jsonl import json_rows
from ajet_sdk.tasks.task_rows import to_task
from ajet_sdk.trace.reader import open_trace
from ajet_sdk.types import Episode, Task
from ajet_sdk.whole_file import write_whole
from ajet_tools.dataset.calibrate import Band, Measurements
from ajet_tools.dataset.files.blocks import Row
from ajet_tools.dataset.files.rows import read
from ajet_tools.dataset.from_traces.choice import Choice, choose
from ajet_tools.dataset.generate.directory import Directory, digest_of
from ajet_tools.dataset.generate.expand import Expansion
from ajet_tools.dataset.generate.learning import LearningValue, Policy, seed_of
from ajet_tools.dataset.generate.records import NoProgress
from ajet_tools.dataset.generate.runs import generate
from ajet_tools.dataset.generate.seeds import read_seeds
from ajet_tools.dataset.generate.settings import GenerationConfig
from ajet_tools.dataset.readers import Rows, file_of, generation_config, job_rows, open_writer
from ajet_tools.dataset.verify.combined import Verify

_GENERATION = "task_reader.data_generation"


def read_growing(config: Config) -> Rows:
    """Returns the seeds, on which a run starts to train, and the validation tasks."""
    validation = file_of(config, "validation")
    rows = job_rows(_seeds(config), config.task_reader.field_mapping)
    return rows, json_rows(validation) if validation is not None else iter(())


def _seeds(config: Config) -> list[Row]:
    path = file_of(config, "training")
    if path is None:
        raise ConfigError(
            "task_reader.type: growing needs"
            f" {_GENERATION}.query_reader.jsonl_dataset_file.training"
        )
    return read_seeds(path, mapping=dict(config.task_reader.field_mapping))


@dataclasses.dataclass(frozen=True)
class _Trainee(Policy):
    """The policy of a running job, called from another thread."""

    loop: asyncio.AbstractEventLoop
    make: Callable[[Sequence[Any]], Awaitable[list[Episode]]]

    async def attempt(self, attempts: Sequence[Attempt]) -> list[Episode]:
        async def episodes() -> list[Episode]:
            return await self.make(attempts)

        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(episodes(), self.loop))


class Growing:
    """The rounds of a run; `ajet_sdk.protocols.Growth`."""

    def __init__(self, config: Config, run_id: str) -> None:
        self._config = config
        self._settings = config.task_reader.growing
        self._run_id = run_id
        self._band = Band.parse(self._settings.band)
        self._mapping = config.task_reader.field_mapping
        self._folder = config.directory.resolve() / "data" / "growing" / run_id
        self._seeds = _seeds(config)
        self._rounds: dict[int, list[Row]] = {}
        for file in sorted(self._folder.glob("step_*.json")):
            done = json.loads(file.read_text(encoding="utf-8"))
            self._rounds[done["step"]] = self._rows_in(Directory(self._folder / done["directory"]))
        self._tasks = {
            step: self._as_tasks(rows, added_after_step=step) for step, rows in self._rounds.items()
        }

    def due(self, step: int) -> bool:
        return step % self._settings.every == 0

    def tasks(self, step: int) -> list[Task]:
        begun_early = 1 if self._config.rollout.max_staleness else 0
        tasks: list[Task] = []
        for after in sorted(self._tasks):
            if after + begun_early < step:
                tasks += self._tasks[after]
        return tasks

    async def grow(
        self, step: int, attempt: Callable[[Sequence[Any]], Awaitable[list[Episode]]]
    ) -> tuple[str, dict[str, float]]:
        summary = f"step {step}: using the tasks that an earlier run added here"
        if step not in self._rounds:
            trainee = _Trainee(asyncio.get_running_loop(), attempt)
            self._rounds[step], summary = await call_to_end(partial(self._round, step, trainee))
            self._tasks[step] = self._as_tasks(self._rounds[step], added_after_step=step)
        rates = [row.values["metadata"]["pass_rate"] for row in self._rounds[step]]
        metrics = {
            "tasks/added": float(len(rates)),
            "tasks/total": float(len(self._known(step + 1))),
        }
        return summary, metrics | ({"tasks/added_pass_rate": fmean(rates)} if rates else {})

    def _round(self, step: int, trainee: _Trainee) -> tuple[list[Row], str]:
        """Grows tasks similar to those that failed since the last round, within the policy's
        band."""
        config = self._config
        settings = self._settings
        data_generation = config.task_reader.data_generation
        known = self._known(step)
        failed = self._failed(step)
        seeds = [
            row
            for row, task in zip(known, self._as_tasks(known), strict=True)
            if task.task_id in failed
        ]
        seeds = seeds if len(seeds) > 1 else known
        validation = file_of(config, "validation")
        generation = generation_config(config, [], file_of(config, "training"), validation)
        assert isinstance(generation, GenerationConfig), "without documents, it is no DocsConfig"
        seed = seed_of(config.trainer_common.seed, step)
        generation = dataclasses.replace(
            generation, count=settings.tasks, validation=0.0, seed=seed
        )
        directory = Directory(self._folder / f"step_{step:06d}-{digest_of(seeds)}")
        directory.check(resume=True)
        value = LearningValue(
            trainee,
            f"the policy after step {step}",
            Measurements(directory.replies(create=True), f"{self._run_id}/{step}"),
            settings.attempts,
            self._band,
            config.trainer_common.seed,
            max(1, config.rollout.max_env_worker // settings.attempts),
        )
        endpoint = open_writer(config, Budget(settings.max_calls))
        result = generate(
            Expansion(seeds, generation, known=known),
            directory,
            endpoint,
            verify=Verify(
                data_generation.verify,
                data_generation.verify_model,
                unfenced=data_generation.unfenced,
            ),
            evals=[validation] if validation is not None else [],
            value=value,
        ).result
        if result.stopped is not None and not isinstance(result.stopped, NoProgress | BudgetSpent):
            raise result.stopped
        refused = "".join(f", {count} {reason}" for reason, count in result.refused.most_common(3))
        why = f"; {result.stopped}" if result.stopped is not None else ""
        summary = f"step {step}: {result.accepted} tasks added to {len(known)}{refused}{why}"
        done = {"step": step, "directory": directory.path.name, "tasks": result.accepted}
        write_whole(self._folder / f"step_{step:06d}.json", json.dumps(done) + "\n")
        return self._rows_in(directory), summary

    def _failed(self, step: int) -> set[str]:
        """Returns the ids of tasks solved too rarely since the last round."""
        since = step - self._settings.every
        if since < 0:
            return set()
        with closing(open_trace(self._config.directory)) as trace:
            chosen = choose(
                trace, Choice(f"step > {since}", failures=True, run=self._run_id, split="train")
            )
        return {
            task
            for task, (tried, failed) in chosen.tried.items()
            if 1 - failed / tried <= self._band.high
        }

    def _known(self, step: int) -> list[Row]:
        known = list(self._seeds)
        for after in sorted(self._rounds):
            if after < step:
                known += self._rounds[after]
        return known

    def _as_tasks(self, rows: Sequence[Row], **more: int) -> list[Task]:
        tasks = [to_task(row, self._mapping) for row in job_rows(rows, self._mapping)]
        return [task.model_copy(update={"metadata": {**task.metadata, **more}}) for task in tasks]

    @staticmethod
    def _rows_in(directory: Directory) -> list[Row]:
        return list(read(directory.train)) if directory.train.exists() else []
