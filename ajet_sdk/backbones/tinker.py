"""The `tinker` backbone: episodes run here, the model at a service with the Tinker API."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ajet_sdk.backbones.shared.learner import Learner
from ajet_sdk.backbones.shared.training import train
from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.learn.tinker.learner import open_tinker_learner
from ajet_sdk.reporting.results import TunedModel

if TYPE_CHECKING:
    from ajet_sdk.protocols import Job
    from ajet_sdk.trace.writer import TraceWriter


async def tinker(job: Job, gateway: Gateway, writer: TraceWriter) -> TunedModel:
    """Like `local`, with a LoRA adapter that the service of `config.tinker` samples from and trains.

    Returns the adapter in peft's format. Raises TrainingError if the service fails; `--resume` continues from its
    newest state.
    """

    async def open_model(steps: int, say: Callable[[str], None]) -> tuple[Learner, None]:
        return await open_tinker_learner(job.config, steps, say), None

    return await train(job, gateway, writer, open_model)
