"""The driver of the `trinity` backbone: prepares the job, runs Trinity, collects results, completes
the ledger.

It writes the tasks and Trinity's config to the checkpoint store, starts Trinity, reads the
`Mailbox`, and writes the run's metrics and the ledger's rows of trained tokens.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ajet_sdk.backbones.shared.driver import ClusterRun, check_installed, ledger_entries, open_run
from ajet_sdk.backbones.shared.fit import check_shape
from ajet_sdk.backbones.shared.node import serialize_job
from ajet_sdk.backbones.shared.progress import Progress
from ajet_sdk.backbones.shared.steps import Rollouts, resume_at, saved_step
from ajet_sdk.backbones.shared.validation import Validation, validation_tasks
from ajet_sdk.backbones.trinity.adapters import checkpoint_adapter
from ajet_sdk.backbones.trinity.handover import open_handover
from ajet_sdk.backbones.trinity.launch import (
    environment,
    explore_and_train,
    explore_only,
    last_checkpoint,
    validate_config,
)
from ajet_sdk.backbones.trinity.learner import run_learner
from ajet_sdk.backbones.trinity.mapping import TrinityPlace, check, is_on_cpu, to_trinity
from ajet_sdk.backbones.trinity.reports import first_batch, read_reports, reports_of
from ajet_sdk.backbones.trinity.without_vllm import HOOK, install
from ajet_sdk.cluster.code import INSTALL
from ajet_sdk.cluster.mailbox import open_mailbox
from ajet_sdk.engines.local.loading import load_model, local_engine
from ajet_sdk.errors import ConfigError, TrainingError
from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.learn.checkpoint import export
from ajet_sdk.reporting.loggers import Loggers
from ajet_sdk.reporting.results import TunedModel
from ajet_sdk.rollout.episode import all_of
from ajet_sdk.tokens.huggingface import HFTokenizer
from ajet_sdk.trainer_service.policies import Checkpoints
from ajet_sdk.types import Task
from ajet_sdk.whole_file import write_whole

if TYPE_CHECKING:
    from trinity.common.config import Config as TrinityConfig

    from ajet_sdk.backbones.trinity.swarm import ClientSteps
    from ajet_sdk.cluster.mailbox import MetricsMessage, TrainedMessage
    from ajet_sdk.protocols import Job
    from ajet_sdk.trace.writer import TraceWriter


_CLIENT_STEPS = "ajet_sdk.backbones.trinity.swarm"
"""Loaded once `install` has made Trinity ready, which it imports."""


async def trinity(job: Job, gateway: Gateway, writer: TraceWriter) -> TunedModel:
    """Train with Trinity-RFT on the Ray cluster of `job.ray`, or on a new one on this machine.

    Raises ConfigError before anything starts, and TrainingError with the first cause and its log if
    a part of Trinity fails or the ledger does not balance.
    """
    check_installed("ray", "trinity")
    with open_run(job, writer) as (sized, loggers, total):
        if is_on_cpu(sized.config):
            check_installed("tinker")
            loggers.say(
                "no GPU: a LoRA adapter is trained and sampled on this machine's CPU with ajet's"
                " own learner"
            )
            install()
        else:
            check_installed("vllm", "verl")
        return await _Run(sized, gateway, writer, loggers, total).run()


class _Run(ClusterRun):
    def __init__(
        self, job: Job, gateway: Gateway, writer: TraceWriter, loggers: Loggers, total: int
    ) -> None:
        super().__init__(job, writer, loggers, total)
        self.gateway, self.cpu = gateway, is_on_cpu(job.config)
        self.clients: ClientSteps | None = None
        """Of a swarm."""

    async def run(self) -> TunedModel:
        check(self.config)  # before a model is made
        check_shape(self.config)
        place = await self.place(
            TrinityPlace,
            lora=self.cpu or self.config.model.lora.enabled,
            tasks=self.store / self.job.run_id / "tasks",
            flash_attention=find_spec("flash_attn") is not None,
            is_given=self.job.swarm is not None,
        )
        if self.job.swarm is not None:
            return await self._train_for_clients(replace(place, val_tasks=0))
        val = validation_tasks(self.job)
        _write_tasks(place.tasks, self.job.train, val)
        if self.job.resume:
            self._roll_back(place)
        trained = saved_step(place.directory) >= self.total
        if not (trained and (self.cpu or self.is_validated() or not val)):
            config = await self._with_trinity(place, val, trained)
            if config.mode in ("explore", "bench"):
                self.close_books(self._reports(place))
                return self.result(None)
        self.close_books(self._reports(place))
        if val and not self.cpu and not self.is_validated():
            self.loggers.say(
                "the trained model was not validated; see Trinity's logs in"
                f" {place.directory / 'log'}"
            )
        path = self.export(_newest_model(place, self.cpu))
        if self.cpu and not self.is_validated():
            await self._validate(path)
        return self.result(path)

    async def _train_for_clients(self, place: TrinityPlace) -> TunedModel:
        """Train on the episodes of a swarm's clients, who validate, too."""
        _write_tasks(place.tasks, [Task()] * self.config.data.train_batch_size, [])
        done = resume_at(place.directory) if self.job.resume else 0
        kind: type[ClientSteps] = import_module(_CLIENT_STEPS).ClientSteps
        clients = kind(self.job, self.writer, self.loggers, self.total, done, place.model)
        if self.job.resume:
            self._roll_back(place, clients.steps.keep(done))
        self.clients = clients
        try:
            if done < self.total:
                await self._with_trinity(place, [], trained=False)
        except BaseException:
            await clients.stop()
            raise
        path = self.export(_newest_model(place, self.cpu))
        await clients.finish(path)
        self.close_books(self._reports(place))
        return self.result(path)

    async def _with_trinity(self, place: TrinityPlace, val: Sequence[Task], trained: bool) -> Any:
        """Explore and train, and validate the last checkpoint. Returns Trinity's config."""
        with environment(TRINITY_LOG_DIR=str(place.directory / "log")):
            if not self.cpu:
                return await self._on_cluster(place, val, trained)
            log = self.job.directory / "logs" / f"{self.job.run_id}-learner.log"
            rollout = self.config.rollout
            heat = rollout.temperature
            length = rollout.max_model_len
            seed = self.config.trainer_common.seed
            running = run_learner(
                place.model, _state(place), log, temperature=heat, max_model_len=length, seed=seed
            )
            async with running as learner:
                return await learner.beside(self._on_cluster(place, val, trained))

    async def _on_cluster(self, place: TrinityPlace, val: Sequence[Task], trained: bool) -> Any:
        with self.cluster(HOOK if self.cpu else INSTALL) as cluster:
            job = {**serialize_job(self.job), "directory": str(self.traces), "model": place.model}
            place = replace(place, ray_address=cluster.address, workflow_args=job)
            mapping = to_trinity(self.config, place)
            self.keep(_readable(mapping), "trinity.yaml")
            config = await asyncio.to_thread(validate_config, mapping)
            if self.clients is not None and config.mode != "both":
                raise ConfigError(
                    f"trinity.mode: {config.mode}: a swarm's server trains; remove the key"
                )
            progress = TrinityProgress(
                self.loggers,
                self.writer,
                self.job,
                val,
                self.total,
                self.clients,
                trains=config.mode == "both",
            )
            listening = asyncio.create_task(progress.listen(open_mailbox(self.job.run_id)))
            try:
                if config.mode in ("explore", "bench"):
                    await explore_only(config)
                    return config
                if not trained:
                    await self._train(config, progress)
                if val and not self.cpu:
                    await explore_only(last_checkpoint(config))
            finally:
                await progress.finish(listening)
        return config

    async def _train(self, config: TrinityConfig, progress: TrinityProgress) -> None:
        training = explore_and_train(config, progress.updates)
        if self.clients is None:
            await training
            return
        this = asyncio.current_task()
        assert this is not None
        # The actor ends with this name, and the last step may wait there for the runners.
        handover = open_handover(self.job.run_id)
        feeding = self.clients.feed(config, handover, progress, this)
        await all_of([asyncio.create_task(training), asyncio.create_task(feeding)])

    async def _validate(self, model: Path) -> None:
        """Validate the trained model in this process, as Trinity can't evaluate the last checkpoint
        without GPUs."""
        changed = self.config.model.model_copy(update={"path": str(model), "recipe": None})
        engine = local_engine(self.config.model_copy(update={"model": changed}))
        try:
            room = asyncio.Semaphore(self.job.config.rollout.max_env_worker)
            rollouts = Rollouts(self.job, self.gateway, self.writer, engine, room)
            await Validation(rollouts, self.loggers, self.total).run(self.total)
        finally:
            await engine.aclose()

    def _reports(self, place: TrinityPlace) -> list[TrainedMessage]:
        return read_reports(reports_of(place.directory), self.total)

    def _roll_back(self, place: TrinityPlace, kept: Sequence[str] = ()) -> None:
        """Resume from the newest checkpoint, also in Trinity's explorer, with new logs."""
        step = resume_at(place.directory)
        reports = read_reports(reports_of(place.directory), step)
        size = self.config.data.train_batch_size
        begin = first_batch(reports, step, size, self.config.rollout.carry_over)
        self.roll_back(step, kept, reports)
        place.directory.mkdir(parents=True, exist_ok=True)
        if (logs := place.directory / "log").is_dir():
            logs.rename(place.directory / f"log.{len(list(place.directory.glob('log.*'))) + 1}")
        position = {"current_index": begin * size}
        state = {"latest_iteration": begin, "taskset_states": [position]}
        write_whole(place.directory / "explorer_meta.json", json.dumps(state))


def _write_tasks(directory: Path, train: Sequence[Task], val: Sequence[Task]) -> None:
    """Write tasks for Trinity's readers: a directory per part, with a JSON-lines file."""
    for part, tasks in (("train", train), ("val", val)):
        if tasks:
            (directory / part).mkdir(parents=True, exist_ok=True)
            lines = (json.dumps({"task": task.model_dump_json()}) + "\n" for task in tasks)
            # Trinity's reader reads the split `train` for every part.
            (directory / part / "train.jsonl").write_text("".join(lines))


def _readable(mapping: Mapping[str, object]) -> dict[str, object]:
    """The mapping without pickled code, for printing."""
    shown: dict[str, Any] = json.loads(json.dumps(mapping, default=str))
    inputs = shown["buffer"]["explorer_input"]
    for taskset in (*inputs["tasksets"], *inputs["eval_tasksets"]):
        taskset["workflow_args"] = {"run_id": shown["project"]}
    return shown


def _state(place: TrinityPlace) -> Path:
    """The directory of the learner's adapters, optimizers and checkpoints."""
    return place.directory / "learner"


def _newest_model(place: TrinityPlace, cpu: bool) -> Path:
    """The newest checkpoint in transformers format, with the adapter merged, if one was trained.
    Raises TrainingError if there is none."""

    def step(path: Path) -> int:
        return int(path.name.removeprefix("global_step_"))

    for checkpoint in sorted(place.directory.glob("global_step_*"), key=step, reverse=True):
        model = checkpoint / "actor" / "huggingface"
        pointer = checkpoint / "remote_checkpoint_path.txt"
        adapter = checkpoint_adapter(place.directory, step(checkpoint))
        if cpu and pointer.exists():
            adapter = Checkpoints(_state(place)).find(pointer.read_text().strip())
        if adapter.is_dir():
            adapted = load_model(adapter, device="cpu")
            return export(place.directory / "merged", adapted, HFTokenizer(place.model).hf)
        if (model / "config.json").exists() and any(model.glob("*.safetensors")):
            return model
    raise TrainingError(
        f"Trinity wrote no model to {place.directory}; see its logs in {place.directory / 'log'}"
    )


class TrinityProgress(Progress):
    """Handles also the messages of `plugins` and `batches`; a swarm's clients are told of them."""

    def __init__(
        self,
        loggers: Loggers,
        writer: TraceWriter,
        job: Job,
        val: Sequence[Task],
        total: int,
        clients: ClientSteps | None = None,
        *,
        trains: bool = True,
    ) -> None:
        super().__init__(loggers, writer, job, val, total)
        self._clients = clients
        self._regroups = trains and clients is None

    def _metrics(self, message: MetricsMessage) -> None:
        step = int(message["step"])
        if message["role"] != "trainer":
            self._loggers.log(step, message["metrics"])
            return
        self._log_step(step, message["metrics"])
        if self._clients is not None:
            self._clients.trained(step)

    def _trained(self, message: TrainedMessage) -> None:
        step = message["step"]
        rows = ledger_entries(self._job.run_id, message)
        self._writer.put(*rows)
        if self._clients is not None:
            self._clients.book(step, rows)
        else:
            self._regroup(step, message["groups"])
