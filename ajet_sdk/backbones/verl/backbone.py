"""The `verl` backbone in the driver: prepare a job for the cluster, run it, gather what comes back, close the books.

The driver trains nothing. It writes the job to the checkpoint store, starts verl's trainer, listens to the `Post` and
to verl's metrics, and owns the run's metrics and the ledger's rows of what was trained.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ajet_sdk.backbones.clustered import export, learning_rate, model_to_train, sized, validation_tasks
from ajet_sdk.backbones.post import namespace_of, open_post
from ajet_sdk.backbones.trinity.ledger import close_books, roll_back
from ajet_sdk.backbones.verl.mapping import Place, check, to_verl
from ajet_sdk.backbones.verl.progress import VerlProgress
from ajet_sdk.errors import ConfigError, MissingExtra, TrainingError
from ajet_sdk.gateway import Gateway
from ajet_sdk.loggers import Loggers
from ajet_sdk.types import TunedModel

if TYPE_CHECKING:
    from ajet_sdk.protocols import Job
    from ajet_sdk.trace.writer import TraceWriter

__all__ = ["verl"]

_LATEST = "latest_checkpointed_iteration.txt"


async def verl(job: Job, gateway: Gateway, writer: TraceWriter) -> TunedModel:
    """Train with verl on the Ray cluster of `job.ray`, or one that is started here.

    Raises ConfigError before anything starts, and TrainingError, with the first cause, where verl fails, stops before
    the last step, or the ledger does not balance.
    """
    if not job.train:
        raise ConfigError("there is no training task; see task_reader")
    _check_installed()
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
        return await _Run(job, writer, loggers, total).run()


class _Run:
    """One run on a cluster."""

    def __init__(self, job: Job, writer: TraceWriter, loggers: Loggers, total: int) -> None:
        self.job, self.writer, self.loggers, self.total = job, writer, loggers, total
        base = job.config.trainer_common.checkpoint_base_dir
        self.store = (Path(base) if base else job.directory / "checkpoint").resolve()
        self.traces = self.store / job.run_id / "traces" if base else job.directory.resolve()
        """Where the nodes write: in the checkpoint store where that is a place of its own, since they all reach it."""

    async def run(self) -> TunedModel:
        from ajet_sdk.backbones.verl.launch import fit, validated
        from ajet_sdk.backbones.verl.runner import write_job

        job, val = self.job, validation_tasks(self.job)
        check(job.config)  # before a model is made
        model = await model_to_train(job, self.loggers.say)
        place = self._place(model, learning_rate(job.config, model, self.loggers.say))
        mapping = to_verl(job.config, place)
        self._save(mapping)
        config = validated(mapping)
        if job.resume:
            self._roll_back(place)
        with self._cluster():
            write_job(place.job, job, val, model, self.traces)
            progress = VerlProgress(self.loggers, self.writer, job, val, self.total)
            metrics = _fresh(place.directory / "metrics")
            listening = asyncio.create_task(progress.listen(open_post(job.run_id)))
            following = asyncio.create_task(progress.follow(metrics))
            try:
                await fit(config, metrics)
            finally:
                await progress.finish(listening)
                await following
        self.writer.flush()
        self._bring_traces()
        close_books(self.writer, job.directory, job.run_id)
        done = max(progress.updates(), self._saved(place))
        if done < self.total:
            raise TrainingError(f"verl stopped after {done} of {self.total} steps without an error")
        return TunedModel(path=self._export(place), metrics=dict(self.loggers.last), run_id=job.run_id)

    def _bring_traces(self) -> None:
        """Copy what the nodes wrote beside the driver's trace, where every command looks."""
        if self.traces != self.job.directory.resolve():
            for file in self.traces.glob("trace-*.duckdb*"):
                target = self.job.directory / file.name
                if not target.exists():  # else it is of an earlier start of the run, and rolled back here
                    shutil.copy2(file, target)

    def _place(self, model: str, lr: float | None) -> Place:
        return Place(
            run_id=self.job.run_id,
            model=model,
            steps=self.total,
            lr=lr,
            checkpoints=self.store,
            val_tasks=len(validation_tasks(self.job)),
        )

    def _cluster(self) -> Any:
        from ajet_sdk.cluster import LOCAL, cluster
        from ajet_sdk.parcel import parcel_of

        source = self.job.config.source
        parcel = parcel_of(
            self.job.workflow,
            self.job.judge,
            beside=[source.parent] if source else [],
            leave_out=[self.job.directory, self.store],
        )
        address = self.job.ray or LOCAL
        self.loggers.say(
            "starting Ray on this machine" if address == LOCAL else f"joining the Ray cluster at {address}"
        )
        return cluster(address, parcel=parcel, namespace=namespace_of(self.job.run_id), quiet=True)

    def _save(self, mapping: Mapping[str, Any]) -> None:
        """Keep what verl's defaults are changed to beside our own config."""
        import yaml

        shown = json.loads(json.dumps(mapping, default=str))
        (self.job.directory / "verl.yaml").write_text(yaml.safe_dump(shown, sort_keys=False, allow_unicode=True))

    def _saved(self, place: Place) -> int:
        """The step of verl's newest checkpoint; 0 where there is none."""
        newest = place.directory / _LATEST
        return int(newest.read_text()) if newest.exists() else 0

    def _roll_back(self, place: Place) -> None:
        """Take up the run at its newest checkpoint: what was sampled after it is sampled again."""
        step = self._saved(place)
        self.loggers.say(
            f"going on from step {step} of {self.total}" if step else "there is no checkpoint: beginning at step 0"
        )
        after = step if step else -1
        self.writer.supersede(self.job.run_id, after)
        roll_back(self.job.directory, self.writer.path, self.job.run_id, after)

    def _export(self, place: Place) -> Path:
        """The newest Hugging Face checkpoint of verl's, copied to where every backbone leaves its model."""
        found = place.directory / f"global_step_{self._saved(place)}" / "actor" / "huggingface"
        if not (found / "config.json").exists() or not any(found.glob("*.safetensors")):
            raise TrainingError(f"verl left no model in {found}")
        target = export(found, self.store / self.job.run_id / "model")
        self.loggers.say(f"the trained model is in {target}")
        return target


def _fresh(directory: Path) -> Path:
    """A file of its own for each start: verl's logger empties the one that it is given."""
    directory.mkdir(parents=True, exist_ok=True)
    return directory / f"{len(list(directory.glob('*.jsonl')))}.jsonl"


def _check_installed() -> None:
    from importlib.util import find_spec

    for package in ("ray", "verl", "vllm"):
        if find_spec(package) is None:
            raise MissingExtra(package, "trinity")
    if find_spec("flash_attn") is None:
        raise ConfigError(
            "flash-attn is not installed, and verl 0.8 takes the padding from a batch with it, whatever the attention. "
            "Install it with: pip install flash-attn --no-build-isolation"
        )
