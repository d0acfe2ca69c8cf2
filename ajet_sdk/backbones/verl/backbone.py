"""The `verl` backbone in the driver: prepare a job for the cluster, run it, gather what comes back, close the books.

The driver trains nothing. It writes the job to the checkpoint store, starts verl's trainer, listens to the `Post` and
to verl's metrics, and owns the run's metrics and the ledger's rows of what was trained.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ajet_sdk.backbones.cluster_run import ClusterRun, opened, step_saved
from ajet_sdk.backbones.clustered import check_installed, learning_rate, model_to_train
from ajet_sdk.backbones.post import open_post
from ajet_sdk.backbones.validation import validation_tasks
from ajet_sdk.backbones.verl.mapping import VerlPlace, check, to_verl
from ajet_sdk.backbones.verl.progress import VerlProgress
from ajet_sdk.errors import ConfigError, TrainingError
from ajet_sdk.gateway import Gateway
from ajet_sdk.types import Task, TunedModel

if TYPE_CHECKING:
    from ajet_sdk.protocols import Job
    from ajet_sdk.trace.writer import TraceWriter

__all__ = ["verl"]


async def verl(job: Job, gateway: Gateway, writer: TraceWriter) -> TunedModel:
    """Train with verl on the Ray cluster of `job.ray`, or one that is started here.

    Raises ConfigError before anything starts, and TrainingError, with the first cause, where verl fails, stops before
    the last step, or the ledger does not balance.
    """
    check_installed("ray", "verl", "vllm")
    if find_spec("flash_attn") is None:
        raise ConfigError(
            "flash-attn is not installed, and verl 0.8 takes the padding from a batch with it, whatever the attention. "
            "Install it with: pip install flash-attn --no-build-isolation"
        )
    with opened(job, writer) as (sized, loggers, total):
        return await _Run(sized, writer, loggers, total).run()


class _Run(ClusterRun):
    """One run of verl's on a cluster."""

    async def run(self) -> TunedModel:
        from ajet_sdk.backbones.verl.launch import validated

        job, val = self.job, validation_tasks(self.job)
        check(job.config)  # before a model is made
        model = await model_to_train(job, self.loggers.say)
        place = self._place(model, learning_rate(job.config, model, self.loggers.say))
        mapping = to_verl(job.config, place)
        self.keep(mapping, "verl.yaml")
        config = validated(mapping)
        if job.resume:
            self.roll_back(step_saved(place.directory))
        if step_saved(place.directory) < self.total or (val and not self.is_validated()):
            await self._with_verl(config, place, val)
        self.close_books()
        done = step_saved(place.directory)
        if done < self.total:
            raise TrainingError(f"verl stopped after {done} of {self.total} steps without an error")
        path = self.export(_newest_model(place))
        return TunedModel(path=path, metrics=dict(self.loggers.last), run_id=job.run_id)

    async def _with_verl(self, config: Any, place: VerlPlace, val: Sequence[Task]) -> None:
        """Train and validate; only validate where all steps are trained."""
        from ajet_sdk.backbones.verl.launch import fit
        from ajet_sdk.backbones.verl.runner import write_job

        job = self.job
        if step_saved(place.directory) >= self.total:
            config.trainer.val_before_train = config.trainer.val_only = True
        with self.cluster():
            write_job(place.job, job, val, place.model, self.traces)
            progress = VerlProgress(self.loggers, self.writer, job, val, self.total)
            metrics = _fresh(place.directory / "metrics")
            listening = asyncio.create_task(progress.listen(open_post(job.run_id)))
            following = asyncio.create_task(progress.follow(metrics))
            try:
                await fit(config, metrics)
            finally:
                await progress.finish(listening)
                await following

    def _place(self, model: str, lr: float | None) -> VerlPlace:
        return VerlPlace(
            run_id=self.job.run_id,
            model=model,
            steps=self.total,
            lr=lr,
            checkpoints=self.store,
            val_tasks=len(validation_tasks(self.job)),
        )


def _newest_model(place: VerlPlace) -> Path:
    """The newest checkpoint in the format of transformers. Raises TrainingError where it is not whole."""
    found = place.directory / f"global_step_{step_saved(place.directory)}" / "actor" / "huggingface"
    if not (found / "config.json").exists() or not any(found.glob("*.safetensors")):
        raise TrainingError(f"verl left no model in {found}")
    return found


def _fresh(directory: Path) -> Path:
    """A file of its own for each start: verl's logger empties the one that it is given."""
    directory.mkdir(parents=True, exist_ok=True)
    return directory / f"{len(list(directory.glob('*.jsonl')))}.jsonl"
