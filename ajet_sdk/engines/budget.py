"""Prices and usage of requests to models, and limits in calls, tokens or money."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from ajet_sdk.errors import AjetError, ConfigError


@dataclass(frozen=True, slots=True)
class Price:
    """Price of a million tokens, in the currency of the limit."""

    input: float
    output: float

    @classmethod
    def parse(cls, text: str, named: str = "--price") -> Price:
        """Parse `0.15,0.60`, the prices of input and output. Raises ConfigError that names the
        option `named`."""
        parts = text.replace("/", ",").split(",")
        try:
            numbers = [float(part) for part in parts]
        except ValueError:
            numbers = []
        if len(numbers) != 2 or not all(
            math.isfinite(number) and number >= 0 for number in numbers
        ):
            raise ConfigError(
                f"{named} takes INPUT,OUTPUT, the price of a million tokens of each, such as"
                f" 0.15,0.60 (got {text!r})"
            )
        return cls(*numbers)

    def of(self, input_tokens: float, output_tokens: float) -> float:
        return (self.input * input_tokens + self.output * output_tokens) / 1e6


@dataclass(slots=True)
class Usage:
    """Requests sent, their tokens and cost; replies from the cache are only counted."""

    calls: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cached: int = 0
    cost: float | None = None
    """Money; None without a price."""

    @property
    def tokens(self) -> int:
        return self.input_tokens + self.output_tokens

    def add(self, other: Usage) -> None:
        """Add the usage of another request."""
        self.calls += other.calls
        self.input_tokens += other.input_tokens
        self.output_tokens += other.output_tokens
        self.cached += other.cached
        if other.cost is not None:
            self.cost = (self.cost or 0.0) + other.cost


def tokens_of(content: object) -> int:
    """Estimate the tokens of a text or messages: one per four Latin characters, or per character of
    other scripts."""
    if isinstance(content, str):
        if content.isascii():
            wide = 0
        else:
            wide = sum(1 for character in content if ord(character) > 0x2E7F)
        return wide + math.ceil((len(content) - wide) / 4)
    if isinstance(content, dict):
        return 4 + sum(tokens_of(value) for value in content.values())
    if isinstance(content, list | tuple):
        return sum(map(tokens_of, content))
    return 1


_meters: ContextVar[tuple[Usage, ...]] = ContextVar("ajet_meters", default=())


@contextmanager
def metered() -> Iterator[Usage]:
    """Measure the usage of requests in the block and in tasks started in it, including failed
    requests."""
    usage = Usage()
    token = _meters.set((*_meters.get(), usage))
    try:
        yield usage
    finally:
        _meters.reset(token)


class BudgetSpent(AjetError, RuntimeError):
    """The next call would exceed the budget; nothing was sent."""


@dataclass(eq=False, frozen=True)
class Reservation:
    """Tokens that a budget reserves for a call in flight."""

    input_tokens: int
    output_tokens: int
    price: Price | None

    @property
    def cost(self) -> float:
        if self.price is not None:
            return self.price.of(self.input_tokens, self.output_tokens)
        return 0.0


@dataclass
class Budget:
    """Limits of calls, tokens or money; None is no limit. With a limit it belongs to one event
    loop.

    The limit of calls is exact. As the length of a reply is unknown in advance, a call reserves its
    prompt and the longest reply so far (before the first reply, its limit); the last calls can
    exceed a limit of tokens or money if their replies are longer.
    """

    calls: int | None = None
    tokens: int | None = None
    money: float | None = None
    price: Price | None = None
    spent: Usage = field(default_factory=Usage)
    whole: Budget | None = None
    """The budget that this is a part of, and whose limits apply."""

    def __post_init__(self) -> None:
        if self.money is not None and self.price is None:
            raise ConfigError(
                "a limit in money needs prices: --price INPUT,OUTPUT for a million tokens of each"
            )
        self._reserved: set[Reservation] = set()
        """Reservations of the calls in flight."""
        if self.price is not None:
            self.spent.cost = 0.0
        self._guessed = 0
        """Estimated input tokens of settled calls, to correct later estimates by the actual
        numbers."""
        self._longest: int | None = None
        self._waiting: list[asyncio.Future[None]] = []

    def part(self, price: Price | None) -> Budget:
        """Return a budget with its own count and price, which also counts towards this budget.

        Raises ConfigError if this budget has a limit in money and the part has no price.
        """
        if self.money is not None and price is None:
            raise ConfigError(
                "a limit in money needs the price of every model that is asked: --verify-model"
                " NAME@URL,price=IN/OUT"
            )
        if price is not None:
            self.spent.cost = self.spent.cost or 0.0
        return Budget(price=price, whole=self.whole or self)

    @property
    def cost(self) -> float | None:
        """Money spent; None without a price."""
        return self.spent.cost

    def record_cached(self) -> None:
        """Count a reply from the cache."""
        self._add(Usage(cached=1, cost=0.0 if self.price else None))

    async def admit(self, input_tokens: int, most_output: int) -> Reservation:
        """Reserve the tokens of a call, for `settle` or `release`.

        Waits while calls in flight may leave room in the budget. Raises BudgetSpent if there is
        none.
        """
        return await (self.whole or self)._admit(input_tokens, most_output, self.price)

    async def _admit(self, input_tokens: int, most_output: int, price: Price | None) -> Reservation:
        while True:
            if self._longest is None:
                output = most_output
            else:
                output = min(self._longest, most_output)
            call = Reservation(input_tokens, output, price)
            exceeded = self._limit_exceeded(call)
            if exceeded is None:
                self._reserved.add(call)
                return call
            if not self._reserved:
                raise BudgetSpent(f"the budget of {exceeded} is spent: {self.summary()}")
            waiting = asyncio.get_running_loop().create_future()
            self._waiting.append(waiting)
            await waiting

    def settle(self, call: Reservation, input_tokens: int, output_tokens: int) -> None:
        """Charge an answered call."""
        root = self.whole or self
        root._guessed += call.input_tokens
        if output_tokens:  # not for embeddings
            root._longest = max(root._longest or 0, output_tokens)
        if call.price is not None:
            cost = call.price.of(input_tokens, output_tokens)
        else:
            cost = None
        self._end(call, Usage(1, input_tokens, output_tokens, 0, cost))

    def release(self, call: Reservation) -> None:
        """Count a failed call, without tokens."""
        self._end(call, Usage(1))

    def _end(self, call: Reservation, usage: Usage) -> None:
        self._add(usage)
        root = self.whole or self
        root._reserved.discard(call)
        for waiting in root._waiting:
            if not waiting.done():
                waiting.set_result(None)
        root._waiting.clear()

    def _add(self, usage: Usage) -> None:
        totals = [
            self.spent,
            *([self.whole.spent] if self.whole is not None else []),
            *_meters.get(),
        ]
        for total in totals:
            total.add(usage)

    def summary(self) -> str:
        """`12 calls, 3,456 tokens, 0.0123 in money`."""
        text = f"{self.spent.calls:,} calls, {self.spent.tokens:,} tokens"
        if self.cost is None:
            return text
        return f"{text}, {self.cost:.4f} in money"

    def _limit_exceeded(self, call: Reservation) -> str | None:
        """The limit that one more call would exceed, in words."""
        under_way = [*self._reserved, call]
        if self._guessed:
            trust = max(1.0, self.spent.input_tokens / self._guessed)
        else:
            trust = 1.0
        reserved = [
            Reservation(math.ceil(trust * c.input_tokens), c.output_tokens, c.price)
            for c in under_way
        ]
        if self.calls is not None and self.spent.calls + len(under_way) > self.calls:
            return f"{self.calls:,} calls"
        tokens = self.spent.tokens + sum(c.input_tokens + c.output_tokens for c in reserved)
        if self.tokens is not None and tokens > self.tokens:
            return f"{self.tokens:,} tokens"
        if (
            self.money is not None
            and (self.spent.cost or 0.0) + sum(c.cost for c in reserved) > self.money
        ):
            return f"{self.money:g} in money"
        return None
