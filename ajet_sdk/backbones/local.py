"""The `local` backbone: sampling, training and validation in this process, on a CPU or one GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ajet_sdk.backbones.shared.garbage import freeze_gc
from ajet_sdk.backbones.shared.steps import total_steps
from ajet_sdk.backbones.shared.stored import open_stored
from ajet_sdk.backbones.shared.training import TrainingRun
from ajet_sdk.errors import ConfigError
from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.learn.determinism import deterministic_torch
from ajet_sdk.learn.learner import open_learner
from ajet_sdk.learn.probe import Probe
from ajet_sdk.learn.teacher import open_teacher
from ajet_sdk.reporting.loggers import Loggers
from ajet_sdk.reporting.results import TunedModel

if TYPE_CHECKING:
    from ajet_sdk.protocols import Job
    from ajet_sdk.trace.writer import TraceWriter


async def local(job: Job, gateway: Gateway, writer: TraceWriter) -> TunedModel:
    """Train: sample a batch (or take what was said before), make samples of it, update, and validate now and then.

    With `rollout.max_staleness` above 0 the episodes of the next batch run while the present one trains.

    Returns the trained model, written as a Hugging Face checkpoint. A cancelled run leaves a checkpoint of its last
    whole step. Raises TrainingError where too few episodes are sound or the ledger does not balance.
    """
    config = job.config
    if not job.train:
        raise ConfigError("there is no training task; see task_reader")
    given = open_stored(job)
    stored, replay = (given, None) if config.trainer_common.algorithm.stored else (None, given)
    total = total_steps(config, len(job.train if stored is None else stored))
    with Loggers.of(job, writer, total) as loggers, deterministic_torch(config.rollout.deterministic):
        probe = Probe(config, job.workflow, job.judge, job.train)
        learner = await open_learner(config, probe, total, loggers.say)
        teacher = None
        try:
            teacher = await open_teacher(config, learner.tokenizer, learner.trainer.model)
            with freeze_gc():
                return await TrainingRun(job, gateway, writer, learner, loggers, total, stored, replay, teacher).run()
        finally:
            await learner.engine.aclose()
            if teacher is not None:
                await teacher.aclose()
