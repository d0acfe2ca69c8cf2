"""Tokens that a service processed for a run, and their cost by the config's prices."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ajet_sdk.config.schema import Prices


class Costs:
    """Counts tokens; calls come from several threads. `prices` are dollars per million tokens."""

    def __init__(self, prices: Prices) -> None:
        self.prices = prices
        self.tokens = {"prefilled": 0, "cached": 0, "sampled": 0, "trained": 0}
        self.step = 0.0
        """Dollars of the most expensive step so far, with its validation."""
        self._before = 0.0
        self._lock = threading.Lock()

    def sampled(self, prompt: int, replies: Sequence[int], cached: int = 0) -> None:
        """A request over a prompt of that many tokens, `cached` of them from the prefix cache."""
        self.add(prefilled=max(0, prompt - cached), cached=cached, sampled=sum(replies))

    def add(self, **tokens: int) -> None:
        """Count tokens by kind: a forward pass costs as a prefill does, one with a backward pass is `trained`."""
        with self._lock:
            for name, count in tokens.items():
                self.tokens[name] += count

    def resume(self, tokens: Mapping[str, int]) -> None:
        """Count what a run had processed before it was resumed, unless that is counted already."""
        self.tokens |= {name: max(count, self.tokens[name]) for name, count in tokens.items()}
        self._before = self.dollars

    @property
    def dollars(self) -> float:
        """Cost by the prices; 0 without any."""
        prices = (self.prices.prefill, self.prices.cached, self.prices.sample, self.prices.train)
        return sum(tokens * price for tokens, price in zip(self.tokens.values(), prices, strict=True)) / 1e6

    def metrics(self) -> dict[str, float]:
        """Metrics of the run so far; called once after each step."""
        self.step, self._before = max(self.step, self.dollars - self._before), self.dollars
        priced = {"cost/dollars": self.dollars} if self.prices.known else {}
        return {f"cost/{name}_tokens": float(count) for name, count in self.tokens.items()} | priced
