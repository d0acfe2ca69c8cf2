"""The `tinker` backbone: episodes run here, the model at a service with the Tinker API."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ajet_sdk.backbones.shared.training import train
from ajet_sdk.config.model_source import checkpoint_base
from ajet_sdk.engines.tinker.sdk import Session
from ajet_sdk.engines.tinker.service import Costs
from ajet_sdk.errors import TrainingError
from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.learn import checkpoint
from ajet_sdk.learn.tinker.learner import TinkerLearner, open_tinker_learner
from ajet_sdk.reporting.results import TunedModel

if TYPE_CHECKING:
    from ajet_sdk.protocols import Job
    from ajet_sdk.trace.writer import TraceWriter

_log = logging.getLogger("ajet")


async def tinker(job: Job, gateway: Gateway, writer: TraceWriter) -> TunedModel:
    """Train like `local`, with a LoRA adapter that the service of `config.tinker` trains and
    samples.

    If the service ends the session, the run continues in a new one from its newest checkpoint, as
    with `--resume`; once per checkpoint.

    Returns the adapter in peft's format. Raises TrainingError if the service fails; `--resume`
    continues from the newest state.
    """
    costs = Costs(job.config.tinker.prices)
    session: Session | None = None
    continued = list[Path | None]()

    async def open_model(steps: int, say: Callable[[str], None]) -> tuple[TinkerLearner, None]:
        nonlocal session
        session = None
        learner = await open_tinker_learner(job.config, steps, say, costs)
        session = learner.session
        return learner, None

    while True:
        try:
            return await train(job, gateway, writer, open_model)
        except TrainingError:
            newest = checkpoint.latest(checkpoint_base(job.config) / job.run_id)
            stopped = (task := asyncio.current_task()) is not None and task.cancelling()
            if session is None or not session.lost or newest in continued or stopped:
                raise
            continued.append(newest)
            _log.warning(
                "%s; continuing in a new session, from the newest checkpoint", session.lost
            )
            job = replace(job, resume=True)
