"""The `local` backbone: sampling, training and validation in this process, on a CPU or one GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from ajet_sdk.backbones.shared.learner import Learner
from ajet_sdk.backbones.shared.training import train
from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.learn.determinism import deterministic_torch
from ajet_sdk.learn.learner import open_learner
from ajet_sdk.learn.probe import Probe
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

    async def open_model(steps: int, say: Callable[[str], None]) -> tuple[Learner, torch.nn.Module]:
        probe = Probe(job.config, job.workflow, job.judge, job.train)
        learner = await open_learner(job.config, probe, steps, say)
        return learner, learner.trainer.model

    with deterministic_torch(job.config.rollout.deterministic):
        return await train(job, gateway, writer, open_model)
