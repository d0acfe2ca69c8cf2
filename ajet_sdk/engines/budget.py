"""The cost of requests to models: prices, usage, and limits in calls, tokens or money."""

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
    """Money for a million tokens, in the currency that the limit is in."""

    input: float
    output: float

    @classmethod
    def parse(cls, text: str, named: str = "--price") -> Price:
        """`0.15,0.60`: a million tokens of input and of output. Raises ConfigError, which says who `named` it."""
        parts = text.replace("/", ",").split(",")
        try:
            numbers = [float(part) for part in parts]
        except ValueError:
            numbers = []
        if len(numbers) != 2 or not all(math.isfinite(one) and one >= 0 for one in numbers):
            raise ConfigError(
                f"{named} takes INPUT,OUTPUT, the price of a million tokens of each, such as 0.15,0.60 (got {text!r})"
            )
        return cls(*numbers)

    def of(self, input_tokens: float, output_tokens: float) -> float:
        return (self.input * input_tokens + self.output * output_tokens) / 1e6


@dataclass(slots=True)
class Usage:
    """Requests that were sent and answered; replies from the cache cost nothing and are only counted."""

    calls: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cached: int = 0
    cost: float | None = None
    """Money; None where no price is known."""

    @property
    def tokens(self) -> int:
        return self.input_tokens + self.output_tokens

    def add(self, other: Usage) -> None:
        """Count what another request used."""
        self.calls += other.calls
        self.input_tokens += other.input_tokens
        self.output_tokens += other.output_tokens
        self.cached += other.cached
        if other.cost is not None:
            self.cost = (self.cost or 0.0) + other.cost


def tokens_of(content: object) -> int:
    """About how many tokens a text or a list of messages is: four characters of Latin script each, or one of others."""
    if isinstance(content, str):
        wide = 0 if content.isascii() else sum(1 for character in content if ord(character) > 0x2E7F)
        return wide + math.ceil((len(content) - wide) / 4)
    if isinstance(content, dict):
        return 4 + sum(tokens_of(value) for value in content.values())
    if isinstance(content, list | tuple):
        return sum(tokens_of(one) for one in content)
    return 1


_meters: ContextVar[tuple[Usage, ...]] = ContextVar("ajet_meters", default=())


@contextmanager
def metered() -> Iterator[Usage]:
    """Measures the usage of requests in the block and in tasks that begin in it, also of those that fail."""
    usage = Usage()
    token = _meters.set((*_meters.get(), usage))
    try:
        yield usage
    finally:
        _meters.reset(token)


class BudgetSpent(AjetError, RuntimeError):
    """The next call would go past a limit of the budget; nothing was sent."""


@dataclass(eq=False, frozen=True)
class Reservation:
    """Tokens that a budget sets aside for a call under way."""

    input_tokens: int
    output_tokens: int
    price: Price | None

    @property
    def cost(self) -> float:
        return self.price.of(self.input_tokens, self.output_tokens) if self.price is not None else 0.0


@dataclass
class Budget:
    """Limits on what is spent from now on; None is no limit. With a limit it belongs to one event loop.

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
        self._reserved: set[Reservation] = set()
        """For the calls under way."""
        if self.price is not None:
            self.spent.cost = 0.0
        self._guessed = 0
        """Input tokens that were guessed for the calls that are settled: how far to trust a guess."""
        self._longest: int | None = None
        self._waiting: list[asyncio.Future[None]] = []

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
        self._add(Usage(cached=1, cost=0.0 if self.price else None))

    async def admit(self, input_tokens: int, most_output: int) -> Reservation:
        """A reservation for a call, to be given to `settle` or `release`.

        Waits while calls under way may leave room. Raises BudgetSpent where there is none, and none can come.
        """
        return await (self.whole or self)._admit(input_tokens, most_output, self.price)

    async def _admit(self, input_tokens: int, most_output: int, price: Price | None) -> Reservation:
        while True:
            output = most_output if self._longest is None else min(self._longest, most_output)
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
        """The call was answered, and used these tokens."""
        root = self.whole or self
        root._guessed += call.input_tokens
        if output_tokens:  # embeddings say nothing of how long a reply is
            root._longest = max(root._longest or 0, output_tokens)
        cost = call.price.of(input_tokens, output_tokens) if call.price is not None else None
        self._end(call, Usage(1, input_tokens, output_tokens, 0, cost))

    def release(self, call: Reservation) -> None:
        """The call failed: it counts as a call, and no tokens are known of it."""
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
        totals = [self.spent, *([self.whole.spent] if self.whole is not None else []), *_meters.get()]
        for total in totals:
            total.add(usage)

    def summary(self) -> str:
        """`12 calls, 3,456 tokens, 0.0123 in money`."""
        text = f"{self.spent.calls:,} calls, {self.spent.tokens:,} tokens"
        return text if self.cost is None else f"{text}, {self.cost:.4f} in money"

    def _limit_exceeded(self, call: Reservation) -> str | None:
        """The limit that one more call would pass, in words."""
        under_way = [*self._reserved, call]
        trust = max(1.0, self.spent.input_tokens / self._guessed) if self._guessed else 1.0
        reserved = [Reservation(math.ceil(trust * c.input_tokens), c.output_tokens, c.price) for c in under_way]
        if self.calls is not None and self.spent.calls + len(under_way) > self.calls:
            return f"{self.calls:,} calls"
        tokens = self.spent.tokens + sum(c.input_tokens + c.output_tokens for c in reserved)
        if self.tokens is not None and tokens > self.tokens:
            return f"{self.tokens:,} tokens"
        if self.money is not None and (self.spent.cost or 0.0) + sum(c.cost for c in reserved) > self.money:
            return f"{self.money:g} in money"
        return None
