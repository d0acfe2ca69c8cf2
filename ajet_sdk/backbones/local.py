"""The `local` backbone: sampling, training and validation in this process, on a CPU or one GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ajet_sdk.backbones.shared.training import train
from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.learn.determinism import deterministic_torch
from ajet_sdk.learn.learner import Learner, open_learner
from ajet_sdk.learn.probe import Probe
from ajet_sdk.reporting.results import TunedModel

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

    async def open_model(steps: int, say: Callable[[str], None]) -> tuple[Learner, PreTrainedModel]:
        learner = await open_learner(
            job.config, Probe(job.config, job.workflow, job.judge, job.train), steps, say
        )
        return learner, learner.trainer.model

    with deterministic_torch(job.config.rollout.deterministic):
        return await train(job, gateway, writer, open_model)
