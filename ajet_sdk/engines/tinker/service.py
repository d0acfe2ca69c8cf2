"""Types of requests to a training service and of its answers, and the cost of the tokens that it
processes."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

from ajet_sdk.engines.picture_text import PictureSpan
from ajet_sdk.errors import TrainingError
from ajet_sdk.types import Floats

if TYPE_CHECKING:
    from ajet_sdk.config.schema import Prices


T = TypeVar("T")

Loss = Literal["cross_entropy", "importance_sampling", "ppo", "cispo"]
"""The losses of the Tinker API that ajet uses: -weight · new, -ratio · A, -min(ratio · A,
clip(ratio) · A), and -stop_gradient(clip(ratio)) · A · new, with ratio = exp(new - sampled), summed
over the tokens of a request."""


@dataclass(frozen=True, slots=True)
class Datum:
    """A sequence of T tokens; the first T - 1 are the input and the last T - 1 the targets."""

    token_ids: Sequence[int]
    weights: Floats
    """Factor of each target's loss, length T - 1: advantages of policy losses, weights of
    cross_entropy."""
    logprobs: Floats | None = None
    """Log-probability of each target under the weights that sampled it, length T - 1; None for
    cross_entropy."""
    pictures: Sequence[PictureSpan] = ()
    """Those of the input, by their places in `token_ids`."""


@dataclass(frozen=True, slots=True)
class Adam:
    """The settings of an AdamW step."""

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


class NamedService(Protocol):
    """A service as messages name it."""

    @property
    def name(self) -> str: ...

    @property
    def reason(self) -> str:
        """Why it may not answer, as far as its SDK says: empty, or a text that begins with a
        colon."""
        ...


def wait(future: Future[T], seconds: float, action: str, service: NamedService) -> T:
    """Wait for a future's result. Raises TrainingError that names `service` and `action` after
    `seconds`."""
    try:
        return future.result(seconds)
    except FutureTimeout as error:
        if future.done():  # a time-out of the service
            raise TrainingError(f"{service.name} failed at {action}: {error}") from error
        raise TrainingError(
            f"{service.name} has not answered {action} for {seconds:g} s"
            f" (tinker.stall_timeout){service.reason}; look at its status, and continue with"
            " --resume: the run goes on from its newest checkpoint"
        ) from error


class Costs:
    """Counts tokens; thread-safe. `prices` are dollars per million tokens."""

    def __init__(self, prices: Prices) -> None:
        self.prices = prices
        self.tokens = {"prefilled": 0, "cached": 0, "sampled": 0, "trained": 0}
        self.step = 0.0
        """Dollars of the most expensive step so far, with its validation."""
        self._before = 0.0
        self._lock = threading.Lock()

    def sampled(self, prompt: int, replies: Sequence[int], cached: int = 0) -> None:
        """Count a request with a prompt of `prompt` tokens, `cached` of them from the prefix
        cache."""
        self.add(prefilled=max(0, prompt - cached), cached=cached, sampled=sum(replies))

    def add(self, **tokens: int) -> None:
        """Count tokens by kind: those of forward passes are `prefilled`, with a backward pass
        `trained`."""
        with self._lock:
            for name, count in tokens.items():
                self.tokens[name] += count

    def resume(self, tokens: Mapping[str, int]) -> None:
        """Count the tokens of a run before it was resumed, unless they are counted already."""
        self.tokens |= {name: max(count, self.tokens[name]) for name, count in tokens.items()}
        self._before = self.dollars

    @property
    def dollars(self) -> float:
        """The cost by the prices; 0 without prices."""
        prices = (self.prices.prefill, self.prices.cached, self.prices.sample, self.prices.train)
        return (
            sum(tokens * price for tokens, price in zip(self.tokens.values(), prices, strict=True))
            / 1e6
        )

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the run so far; called once after each step."""
        self.step = max(self.step, self.dollars - self._before)
        self._before = self.dollars
        priced = {"cost/dollars": self.dollars} if self.prices.known else {}
        return {f"cost/{name}_tokens": float(count) for name, count in self.tokens.items()} | priced
