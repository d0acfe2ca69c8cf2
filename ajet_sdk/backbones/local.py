"""The `local` backbone: sampling, training and validation in this process, on a CPU or one GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ajet_sdk.backbones.shared.training import train
from ajet_sdk.config.model_source import is_directory_name
from ajet_sdk.errors import ConfigError
from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.learn.determinism import deterministic_torch
from ajet_sdk.learn.learner import Learner, open_learner, open_learners
from ajet_sdk.learn.probe import Probe
from ajet_sdk.learn.separate import SeparateLearner
from ajet_sdk.reporting.results import TunedModel
from ajet_sdk.rollout.attempts import named_targets

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ajet_sdk.protocols import Job
    from ajet_sdk.trace.writer import TraceWriter


async def local(job: Job, gateway: Gateway, writer: TraceWriter) -> TunedModel:
    """Train: sample a batch or load stored conversations, build training samples, update, and
    validate.

    With `rollout.max_staleness` above 0 the next batch is sampled while the current one trains. A
    cancelled run saves its last complete step.

    Returns the trained model as a Hugging Face checkpoint. Raises TrainingError if too few episodes
    are sound or the ledger does not balance.
    """

    probe = Probe(job.config, job.workflow, job.judge, job.train)

    async def open_model(steps: int, say: Callable[[str], None]) -> tuple[Learner, PreTrainedModel]:
        learner = await open_learner(job.config, probe, steps, say)
        return learner, learner.trainer.model

    async def open_separate(steps: int, say: Callable[[str], None]) -> tuple[SeparateLearner, None]:
        targets = named_targets(job.config.rollout, job.workflow)
        if targets is None:
            raise ConfigError(
                "rollout.trained_models: separate needs the names of the trained targets: list them"
                " in rollout.trainable_targets, or in trainable_targets of the workflow"
            )
        odd = [name for name in targets if not is_directory_name(name)]
        if odd:
            raise ConfigError(
                f"rollout.trained_models: separate: the target {odd[0]!r} can't name the directory"
                " of its model"
            )
        learners = await open_learners(job.config, probe, steps, say, targets)
        return SeparateLearner.of(learners, job.config.model_name), None

    separate = job.config.rollout.trained_models == "separate"
    with deterministic_torch(job.config.rollout.deterministic):
        return await train(job, gateway, writer, open_separate if separate else open_model)
