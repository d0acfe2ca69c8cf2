"""What ajet asks of a service that holds, trains and samples a model elsewhere.

A hosted variant with an SDK of its own is another implementation of `TrainingService`; that of the Tinker API is in
`sdk`.
"""

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
    """What multiplies each target's loss, length T - 1: advantages of policy losses, weights of cross_entropy."""
    logprobs: Floats | None = None
    """Of each target under the weights that sampled it, length T - 1; None for cross_entropy."""


@dataclass(frozen=True, slots=True)
class Adam:
    """One step of AdamW."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    grad_clip: float = 0.0
    """Maximum norm of the gradient; 0: none."""


@dataclass(frozen=True, slots=True)
class Continued:
    """Tokens sampled after a prompt, and their log-probabilities."""

    output_ids: Sequence[int]
    logprobs: Sequence[float]
    stopped: bool
    """By a stop token or string, and not by the limit."""
    cached: int = 0
    """Tokens of the prompt that cost as a hit of the service's prefix cache."""


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

    What returns a Future returns at once, so that the next call may be sent ahead; the others block. Not to be called
    from a thread with a running event loop. All raise TrainingError where the service fails.
    """

    max_model_len: int | None
    """Tokens of prompt and reply together; None where the service does not say."""

    def forward(self, data: Sequence[Datum]) -> Future[list[Floats]]:
        """Log-probabilities of each datum's targets."""
        ...

    def forward_backward(
        self, data: Sequence[Datum], loss: Loss, bounds: tuple[float, float] | None = None
    ) -> Future[list[Floats]]:
        """As `forward`; adds the loss's gradient to that of the next `optim_step`; `bounds` of the ratio."""
        ...

    def optim_step(self, adam: Adam) -> Future[Mapping[str, float]]:
        """Apply the gradient and clear it. Returns what the service measured."""
        ...

    def publish(self) -> ServedWeights:
        """The weights as they are now, to sample from."""
        ...

    def base(self) -> ServedWeights:
        """The weights without an adapter."""
        ...

    def save(self, name: str) -> str:
        """Keep weights and optimiser state at the service; returns their path there."""
        ...

    def load(self, path: str) -> None:
        """Take up what `save` kept."""
        ...

    def trial(self) -> TrainingService:
        """Another new adapter of the same session, to measure with."""
        ...

    def keep_sampler(self, name: str) -> str:
        """Keep the weights at the service to be sampled from later; returns their path there."""
        ...

    def download(self, name: str, directory: Path) -> str:
        """Put the adapter into a directory, as peft keeps it. Returns the path at which the service keeps it too."""
        ...

    def close(self) -> None:
        """End the session."""
        ...


def wait(future: Future[T], seconds: float, action: str) -> T:
    """The result of a future. Raises TrainingError that names what hangs where it takes longer."""
    try:
        return future.result(seconds)
    except FutureTimeout as error:
        if future.done():  # a time-out of the service's own
            raise TrainingError(f"the service failed at {action}: {error}") from error
        raise TrainingError(
            f"the service has not answered {action} for {seconds:g} s (tinker.stall_timeout); look at its status, and "
            "continue with --resume: the run goes on from its newest checkpoint"
        ) from error
