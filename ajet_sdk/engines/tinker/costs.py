"""Tokens that a service processed for a run, and their cost by the config's prices."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ajet_sdk.config.config import Config
    from ajet_sdk.config.schema import Prices


class Costs:
    """Counts tokens; calls come from several threads. `prices` are dollars per million tokens."""

    def __init__(self, prices: Prices) -> None:
        self.prices = prices
        self.prefilled = self.sampled_tokens = self.trained_tokens = 0
        self.step = 0.0
        """Dollars of the most expensive step so far, with its validation."""
        self._before = 0.0
        self._lock = threading.Lock()

    @classmethod
    def of(cls, config: Config) -> Costs:
        return cls(config.tinker.prices)

    def sampled(self, prompt: int, replies: Sequence[int], cached: int = 0) -> None:
        """A request over a prompt of that many tokens; `cached` of them cost nothing here."""
        with self._lock:
            self.prefilled += max(0, prompt - cached)
            self.sampled_tokens += sum(replies)

    def scored(self, tokens: int) -> None:
        """A forward pass, which costs as a prefill does."""
        with self._lock:
            self.prefilled += tokens

    def trained(self, tokens: int) -> None:
        """A forward and backward pass."""
        with self._lock:
            self.trained_tokens += tokens

    @property
    def dollars(self) -> float:
        """Cost by the prices; 0 without any."""
        prices = self.prices
        parts = ((self.prefilled, prices.prefill), (self.sampled_tokens, prices.sample),
                 (self.trained_tokens, prices.train))  # fmt: skip
        return sum(tokens * price for tokens, price in parts) / 1e6

    def metrics(self) -> dict[str, float]:
        """Metrics of the run so far; called once after each step."""
        self.step, self._before = max(self.step, self.dollars - self._before), self.dollars
        counts = {"prefilled": self.prefilled, "sampled": self.sampled_tokens, "trained": self.trained_tokens}
        priced = {"cost/dollars": self.dollars} if any(self.prices.model_dump().values()) else {}
        return {f"cost/{name}_tokens": float(count) for name, count in counts.items()} | priced
