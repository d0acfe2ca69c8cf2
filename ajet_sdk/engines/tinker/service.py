"""The interface of a service that holds, trains and samples a model; `sdk` implements it for the Tinker API."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, TypeVar

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


class ServedWeights(Protocol):
    """Weights that the service samples from; they never change."""

    async def sample(
        self,
        prompt_ids: Sequence[int],
        count: int,
        *,
        max_tokens: int,
        temperature: float,
        top_p: float,
        top_k: int,
        seed: int | None,
        stop: Sequence[str] | Sequence[int],
    ) -> list[Continued]:
        """`count` continuations. Raises EngineUnavailable, RequestRefused."""
        ...

    def logprobs(self, token_ids: Sequence[int]) -> Future[Floats]:
        """Of all tokens but the first, length T - 1, at temperature 1."""
        ...


class TrainingService(Protocol):
    """One LoRA adapter in training. Work is done in the order of the calls.

    Methods that return a Future return at once, so that calls can be pipelined; others block. Do not call them from a
    thread with a running event loop. All raise TrainingError if the service fails.
    """

    max_model_len: int | None
    """Tokens of prompt and reply together; None if unknown."""

    def forward(self, data: Sequence[Datum]) -> Future[list[Floats]]:
        """Log-probabilities of each datum's targets."""
        ...

    def forward_backward(
        self, data: Sequence[Datum], loss: Loss, bounds: tuple[float, float] | None = None
    ) -> Future[list[Floats]]:
        """As `forward`; adds the loss's gradient to that of the next `optim_step`; `bounds` of the ratio."""
        ...

    def optim_step(self, adam: Adam) -> Future[Mapping[str, float]]:
        """Apply the gradient and clear it. Returns the service's metrics."""
        ...

    def publish(self) -> ServedWeights:
        """The current weights, to sample from."""
        ...

    def base(self) -> ServedWeights:
        """The weights without an adapter."""
        ...

    def save(self, name: str) -> str:
        """Save weights and optimizer state at the service; returns their path."""
        ...

    def load(self, path: str) -> None:
        """Restore the state that `save` saved."""
        ...

    def trial(self) -> TrainingService:
        """A new adapter in the same session, for measurements."""
        ...

    def keep_sampler(self, name: str) -> str:
        """Save the weights at the service for sampling; returns their path."""
        ...

    def download(self, name: str, directory: Path) -> str:
        """Write the adapter to a directory in peft's format. Returns its path at the service."""
        ...

    def delete(self, path: str) -> None:
        """Delete what `save`, `keep_sampler` or `download` left at the service."""
        ...

    def close(self) -> None:
        """End the session."""
        ...


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
