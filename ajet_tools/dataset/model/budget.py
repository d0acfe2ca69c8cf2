"""What may be spent on an endpoint, in calls, tokens or money, and what has been."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from ajet_sdk.engines.reply_cache import Price, Usage
from ajet_sdk.errors import AjetError, ConfigError

__all__ = ["Budget", "BudgetSpent"]


class BudgetSpent(AjetError, RuntimeError):
    """The next call would go past a limit of the budget; nothing was sent."""


@dataclass
class Budget:
    """Limits on what is spent from now on; None is no limit. It belongs to the event loop in which it is first used.

    A limit on calls is exact. How long a reply will be is not known before it is there, so a call sets aside its prompt
    and the longest reply so far (before the first reply, the most it may say): the last calls can go past a limit on
    tokens or money by what their replies are longer than that.
    """

    calls: int | None = None
    tokens: int | None = None
    money: float | None = None
    price: Price | None = None
    spent: Usage = field(default_factory=Usage)
    whole: Budget | None = None
    """The budget that this is a part of, whose limits hold."""

    def __post_init__(self) -> None:
        if self.money is not None and self.price is None:
            raise ConfigError("a limit in money needs prices: --price INPUT,OUTPUT for a million tokens of each")
        self._aside: dict[int, tuple[int, int, Price | None]] = {}
        """Input and output tokens set aside for each call under way, and their price."""
        if self.price is not None:
            self.spent.cost = 0.0
        self._guessed = 0
        """Input tokens that were guessed for the calls that are settled: how far to trust a guess."""
        self._longest: int | None = None
        self._next = 0
        self._settled = asyncio.Condition()

    def part(self, price: Price | None) -> Budget:
        """A budget with a count and a price of its own; what is spent of it is spent of this one too.

        Raises ConfigError where this one has a limit in money and the part no price.
        """
        if self.money is not None and price is None:
            raise ConfigError(
                "a limit in money needs the price of every model that is asked: pass --verify-price IN,OUT"
            )
        if price is not None:
            self.spent.cost = self.spent.cost or 0.0
        return Budget(price=price, whole=self)

    @property
    def cost(self) -> float | None:
        """Money spent; None where no price is known."""
        return self.spent.cost

    def record_cached(self) -> None:
        """A reply was there already."""
        self.spent.cached += 1
        if self.whole is not None:
            self.whole.record_cached()

    async def admit(self, input_tokens: int, most_output: int, price: Price | None = None) -> int:
        """A ticket for a call, to be given to `settle` or `release`. Waits while calls under way may leave room.

        Raises BudgetSpent where there is none, and none can come.
        """
        if self.whole is not None:
            return await self.whole.admit(input_tokens, most_output, self.price)
        price = price or self.price
        async with self._settled:
            while True:
                output = most_output if self._longest is None else min(self._longest, most_output)
                passed = self._limit_exceeded(input_tokens, output, price)
                if passed is None:
                    self._next += 1
                    self._aside[self._next] = (input_tokens, output, price)
                    return self._next
                if not self._aside:
                    raise BudgetSpent(f"the budget of {passed} is spent: {self.summary()}")
                await self._settled.wait()

    async def settle(self, ticket: int, input_tokens: int, output_tokens: int) -> None:
        """The call was answered, and this is what it took."""
        if self.whole is not None:
            await self.whole.settle(ticket, input_tokens, output_tokens)
            self._charge(input_tokens, output_tokens, self.price)
            return
        async with self._settled:
            guessed, _, price = self._aside.pop(ticket)
            self._guessed += guessed
            self._charge(input_tokens, output_tokens, price)
            if output_tokens:  # embeddings say nothing of how long a reply is
                self._longest = max(self._longest or 0, output_tokens)
            self._settled.notify_all()

    async def release(self, ticket: int) -> None:
        """The call failed: it counts as a call, and no tokens are known of it."""
        if self.whole is not None:
            await self.whole.release(ticket)
            self.spent.calls += 1
            return
        async with self._settled:
            if self._aside.pop(ticket, None) is not None:
                self.spent.calls += 1
                self._settled.notify_all()

    def _charge(self, input_tokens: int, output_tokens: int, price: Price | None) -> None:
        self.spent.calls += 1
        self.spent.input_tokens += input_tokens
        self.spent.output_tokens += output_tokens
        if price is not None:
            self.spent.cost = (self.spent.cost or 0.0) + price.of(input_tokens, output_tokens)

    def summary(self) -> str:
        """`12 calls, 3,456 tokens, 0.0123 in money`."""
        text = f"{self.spent.calls:,} calls, {self.spent.tokens:,} tokens"
        return text if self.cost is None else f"{text}, {self.cost:.4f} in money"

    def _limit_exceeded(self, input_tokens: int, output_tokens: int, price: Price | None) -> str | None:
        """The limit that one more call would pass, in words."""
        under_way = [*self._aside.values(), (input_tokens, output_tokens, price)]
        trust = max(1.0, self.spent.input_tokens / self._guessed) if self._guessed else 1.0
        tokens = self.spent.tokens + sum(trust * read + written for read, written, _ in under_way)
        money = (self.spent.cost or 0.0) + sum(one.of(trust * read, written) for read, written, one in under_way if one)
        if self.calls is not None and self.spent.calls + len(under_way) > self.calls:
            return f"{self.calls:,} calls"
        if self.tokens is not None and tokens > self.tokens:
            return f"{self.tokens:,} tokens"
        if self.money is not None and money > self.money:
            return f"{self.money:g} in money"
        return None
