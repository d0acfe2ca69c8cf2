"""The `trinity` backbone in the driver: prepare a job for the cluster, run it, gather what comes back, close the books.

The driver trains nothing. It writes the tasks and Trinity's config to the checkpoint store, starts what the config
needs, listens to the `Post`, and owns the run's metrics and the ledger's rows of what was trained.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ajet_sdk.backbones.clustered import export, learning_rate, model_to_train, sized, validation_tasks
from ajet_sdk.backbones.post import namespace_of, open_post
from ajet_sdk.backbones.rollouts import Rollouts
from ajet_sdk.backbones.trinity.ledger import close_books, roll_back
from ajet_sdk.backbones.trinity.mapping import Place, schedule_is_trinitys, to_trinity
from ajet_sdk.backbones.trinity.progress import Progress
from ajet_sdk.backbones.validation import Validation
from ajet_sdk.errors import ConfigError, MissingExtra, TrainingError
from ajet_sdk.gateway import Gateway
from ajet_sdk.loggers import Loggers
from ajet_sdk.types import Task, TunedModel

if TYPE_CHECKING:
    from ajet_sdk.protocols import Job
    from ajet_sdk.trace.writer import TraceWriter

__all__ = ["trinity"]

_STAND_IN = Path(__file__).parent / "stand_in"


async def trinity(job: Job, gateway: Gateway, writer: TraceWriter) -> TunedModel:
    """Train with Trinity-RFT on the Ray cluster of `job.ray`, or one that is started here.

    Raises ConfigError before anything starts, and TrainingError, with the first cause and the path of its log, where
    a part of Trinity fails or the ledger does not balance.
    """
    if not job.train:
        raise ConfigError("there is no training task; see task_reader")
    _check_installed("ray", "trinity")
    job = replace(job, config=sized(job))
    from ajet_sdk.backbones.local import total_steps

    total = total_steps(job.config, len(job.train))
    loggers = Loggers(
        job.config.trainer_common.logger,
        directory=job.directory / "metrics",
        run_id=job.run_id,
        writer=writer,
        total_steps=total,
    )
    with loggers:
        if job.config.trainer_common.n_gpus_per_node:
            _check_installed("vllm", "verl")
        else:
            loggers.say("no GPU: ajet's own learner trains and samples on this machine's CPU")
        return await _Run(job, gateway, writer, loggers, total).run()


class _Run:
    """One run on a cluster."""

    def __init__(self, job: Job, gateway: Gateway, writer: TraceWriter, loggers: Loggers, total: int) -> None:
        self.job, self.config, self.gateway, self.writer = job, job.config, gateway, writer
        self.loggers, self.total = loggers, total
        base = job.config.trainer_common.checkpoint_base_dir
        self.store = (Path(base) if base else job.directory / "checkpoint").resolve()
        self.traces = self.store / job.run_id / "traces" if base else job.directory.resolve()
        """Where the nodes write: in the checkpoint store where that is a place of its own, since they all reach it."""
        self.cpu = job.config.trainer_common.n_gpus_per_node == 0

    async def run(self) -> TunedModel:
        from ajet_sdk.backbones.trinity.launch import explore_and_train, explore_only, last_checkpoint, validated

        place = await self._place()
        tasks = Tasks(self.job.train, validation_tasks(self.job))
        tasks.write(place.tasks)
        async with AsyncExitStack() as stack:
            stack.enter_context(_environment({"TRINITY_LOG_DIR": str(place.directory / "log")}))
            if self.cpu:
                await stack.enter_async_context(self._learner(place))
            cluster = stack.enter_context(self._cluster())
            place = replace(place, ray_address=cluster.address, workflow_args=self._workflow_args(place))
            mapping = to_trinity(self.config, place)
            self._save(mapping)
            with _environment({"TRINITY_LOG_LEVEL": "ERROR"}):  # in this process; the actors' logs are files
                config = validated(mapping)
            if self.job.resume:
                self._roll_back(place)
            progress = Progress(self.loggers, self.writer, self.job, tasks.val, self.total)
            listening = asyncio.create_task(progress.listen(open_post(self.job.run_id)))
            try:
                if config.mode in ("explore", "bench"):
                    await explore_only(config)
                else:
                    await explore_and_train(config, progress.updates)
                    if tasks.val and not self.cpu:
                        await explore_only(last_checkpoint(config))
            finally:
                await progress.finish(listening)
        self.writer.flush()
        self._bring_traces()
        close_books(self.writer, self.job.directory, self.job.run_id)
        if config.mode in ("explore", "bench"):
            return TunedModel(path=None, metrics=dict(self.loggers.last), run_id=self.job.run_id)
        path = self._export(place)
        if self.cpu:
            await self._validate(path)
        return TunedModel(path=path, metrics=dict(self.loggers.last), run_id=self.job.run_id)

    def _bring_traces(self) -> None:
        """Copy what the nodes wrote beside the driver's trace, where every command looks."""
        if self.traces != self.job.directory.resolve():
            for file in self.traces.glob("trace-*.duckdb*"):
                shutil.copy2(file, self.job.directory / file.name)

    async def _place(self) -> Place:
        model = await model_to_train(self.job, self.loggers.say)
        lr = learning_rate(self.config, model, self.loggers.say)
        return Place(
            run_id=self.job.run_id,
            model=model,
            steps=self.total,
            lr=lr,
            checkpoints=self.store,
            tasks=self.store / self.job.run_id / "tasks",
            val_tasks=len(validation_tasks(self.job)),
            flash_attention=find_spec("flash_attn") is not None,
        )

    @asynccontextmanager
    async def _learner(self, place: Place) -> AsyncIterator[None]:
        """Ajet's CPU learner, where Trinity looks for `tinker`."""
        from ajet_sdk.backbones.trinity.service_process import serving
        from ajet_sdk.learn.trainer import TrainerSettings

        rollout = self.config.rollout
        settings = TrainerSettings.of(self.config, place.lr or 0.0, self.total)
        if schedule_is_trinitys(self.config):
            settings = replace(settings, lr_scheduler_type="constant", warmup_steps=0)
        async with serving(
            place.model,
            temperature=rollout.temperature,
            max_model_len=rollout.max_model_len,
            max_batch=rollout.max_env_worker,
            seed=self.config.trainer_common.seed,
            settings=settings,
            work_dir=place.directory / "weights",
            log=self.job.directory / "logs" / f"{self.job.run_id}-learner.log",
        ) as url:
            with _environment({"TINKER_BASE_URL": url}):
                sys.path.insert(0, str(_STAND_IN))
                try:
                    yield
                finally:
                    sys.path.remove(str(_STAND_IN))

    def _cluster(self) -> Any:
        from ajet_sdk.cluster import LOCAL, cluster
        from ajet_sdk.parcel import parcel_of

        source = self.config.source
        parcel = parcel_of(
            self.job.workflow,
            self.job.judge,
            beside=[*([source.parent] if source else []), *([_STAND_IN] if self.cpu else [])],
            leave_out=[self.job.directory, self.store],
        )
        address = self.job.ray or LOCAL
        self.loggers.say(
            "starting Ray on this machine" if address == LOCAL else f"joining the Ray cluster at {address}"
        )
        return cluster(address, parcel=parcel, namespace=namespace_of(self.job.run_id), quiet=True)

    def _workflow_args(self, place: Place) -> dict[str, Any]:
        from ajet_sdk.backbones.trinity.shipping import pack

        return {**pack(self.job), "directory": str(self.traces), "model": place.model}

    def _save(self, mapping: Mapping[str, Any]) -> None:
        """Keep the config that Trinity gets beside our own."""
        import yaml

        shown = json.loads(json.dumps(mapping, default=str))
        for taskset in _tasksets(shown):
            taskset["workflow_args"] = {"run_id": self.job.run_id}  # pickled code is nothing to read
        (self.job.directory / "trinity.yaml").write_text(yaml.safe_dump(shown, sort_keys=False, allow_unicode=True))

    async def _validate(self, model: Path) -> None:
        """Validate what was trained, in this process: Trinity can't evaluate the last checkpoint without GPUs."""
        from ajet_sdk.engines.local import local_engine

        changed = self.config.model.model_copy(update={"path": str(model), "recipe": None})
        engine = local_engine(self.config.model_copy(update={"model": changed}))
        try:
            rollouts = Rollouts(self.job, self.gateway, self.writer, engine)
            await Validation(rollouts, self.loggers, self.total).run(self.total)
        finally:
            await engine.aclose()

    def _roll_back(self, place: Place) -> None:
        """Take up the run at its newest checkpoint: what was explored after it is explored again."""
        newest = place.directory / "latest_checkpointed_iteration.txt"
        step = int(newest.read_text()) if newest.exists() else 0
        self.loggers.say(
            f"going on from step {step} of {self.total}" if step else "there is no checkpoint: beginning at step 0"
        )
        after = step if step else -1
        self.writer.supersede(self.job.run_id, after)
        if self.traces.is_dir():
            roll_back(self.traces, self.writer.path, self.job.run_id, after)
        position = {"current_index": step * self.config.data.train_batch_size}
        state = {"latest_iteration": step, "taskset_states": [position]}
        (place.directory / "explorer_meta.json").write_text(json.dumps(state))

    def _export(self, place: Place) -> Path:
        """The newest Hugging Face checkpoint of Trinity's, copied to where every backbone leaves its model."""
        found = _newest_model(place.directory, self.cpu)
        if found is None:
            raise TrainingError(
                f"Trinity left no model in {place.directory}; see its logs in {place.directory / 'log'}"
            )
        target = export(found, self.store / self.job.run_id / "model")
        self.loggers.say(f"the trained model is in {target}")
        return target


class Tasks:
    """The tasks of a run as Trinity's readers want them: a directory for each part, one JSON-lines file in it."""

    def __init__(self, train: Sequence[Task], val: Sequence[Task]) -> None:
        self.train, self.val = train, val

    def write(self, directory: Path) -> None:
        for part, tasks in (("train", self.train), ("val", self.val)):
            if not tasks:
                continue
            (directory / part).mkdir(parents=True, exist_ok=True)
            lines = (json.dumps({"task": task.model_dump_json()}) for task in tasks)
            # Trinity's reader asks for the split `train`, whatever the part.
            (directory / part / "train.jsonl").write_text("".join(line + "\n" for line in lines))


def _check_installed(*packages: str) -> None:
    for package in packages:
        if find_spec(package) is None:
            raise MissingExtra(package, "trinity")


@contextmanager
def _environment(added: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in added}
    os.environ.update(added)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _tasksets(mapping: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    inputs = mapping["buffer"]["explorer_input"]
    yield from (*inputs["tasksets"], *inputs["eval_tasksets"])


def _newest_model(job: Path, cpu: bool) -> Path | None:
    """The newest checkpoint in the format of transformers."""

    def step(path: Path) -> int:
        return int(path.name.removeprefix("global_step_"))

    for checkpoint in sorted(job.glob("global_step_*"), key=step, reverse=True):
        if cpu:
            pointer = checkpoint / "remote_checkpoint_path.txt"
            found = Path(pointer.read_text().strip()) if pointer.exists() else None
        else:
            found = checkpoint / "actor" / "huggingface"
        if found is not None and (found / "config.json").exists() and any(found.glob("*.safetensors")):
            return found
    return None
