"""The `tinker` backbone: episodes here, the model at a service that speaks the Tinker API."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ajet_sdk.backbones.shared.garbage import freeze_gc
from ajet_sdk.backbones.shared.steps import total_steps
from ajet_sdk.backbones.shared.stored import open_stored
from ajet_sdk.backbones.shared.training import TrainingRun
from ajet_sdk.errors import ConfigError
from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.learn.teacher import open_teacher
from ajet_sdk.learn.tinker.learner import open_tinker_learner
from ajet_sdk.reporting.loggers import Loggers
from ajet_sdk.reporting.results import TunedModel

if TYPE_CHECKING:
    from ajet_sdk.protocols import Job
    from ajet_sdk.trace.writer import TraceWriter


async def tinker(job: Job, gateway: Gateway, writer: TraceWriter) -> TunedModel:
    """As `local`, with a LoRA adapter that the service of `config.tinker` samples from and trains.

    Returns the adapter, as peft keeps it. Raises TrainingError where the service fails; `--resume` goes on from the
    newest state that it keeps.
    """
    config = job.config
    if not job.train:
        raise ConfigError("there is no training task; see task_reader")
    given = open_stored(job)
    stored, replay = (given, None) if config.trainer_common.algorithm.stored else (None, given)
    total = total_steps(config, len(job.train if stored is None else stored))
    with Loggers.of(job, writer, total) as loggers:
        learner = await open_tinker_learner(config, total, loggers.say)
        teacher = None
        try:
            teacher = await open_teacher(config, learner.tokenizer, None)
            with freeze_gc():
                return await TrainingRun(job, gateway, writer, learner, loggers, total, stored, replay, teacher).run()
        finally:
            await learner.engine.aclose()
            if teacher is not None:
                await teacher.aclose()
