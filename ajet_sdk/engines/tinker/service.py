"""What is sent to a service that trains and samples a model (`sdk`), and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import Literal, TypeVar

from ajet_sdk.errors import TrainingError
from ajet_sdk.types import Floats

T = TypeVar("T")

Loss = Literal["cross_entropy", "importance_sampling", "ppo", "cispo"]
"""The losses of the Tinker API that ajet uses: -weight · new, -ratio · A, -min(ratio · A, clip(ratio) · A), and
-stop_gradient(clip(ratio)) · A · new, with ratio = exp(new - sampled). A request's tokens are added up."""


@dataclass(frozen=True, slots=True)
class Datum:
    """One sequence. Of its T tokens the first T - 1 are the input and the last T - 1 the targets."""

    token_ids: Sequence[int]
    weights: Floats
    """Factor of each target's loss, length T - 1: advantages of policy losses, weights of cross_entropy."""
    logprobs: Floats | None = None
    """Of each target under the weights that sampled it, length T - 1; None for cross_entropy."""


@dataclass(frozen=True, slots=True)
class Adam:
    """One step of AdamW."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    grad_clip: float = 0.0
    """Maximum norm of the gradient; 0: no clipping."""


@dataclass(frozen=True, slots=True)
class Continued:
    """Tokens sampled after a prompt, and their log-probabilities."""

    output_ids: Sequence[int]
    logprobs: Sequence[float]
    stopped: bool
    """Whether a stop token or string, rather than the limit, ended it."""
    cached: int = 0
    """Prompt tokens charged as hits of the service's prefix cache."""


def wait(future: Future[T], seconds: float, action: str) -> T:
    """The result of a future. Raises TrainingError, which names `action`, if it takes longer."""
    try:
        return future.result(seconds)
    except FutureTimeout as error:
        if future.done():  # a time-out of the service's own
            raise TrainingError(f"the service failed at {action}: {error}") from error
        raise TrainingError(
            f"the service has not answered {action} for {seconds:g} s (tinker.stall_timeout); look at its status, and "
            "continue with --resume: the run goes on from its newest checkpoint"
        ) from error
