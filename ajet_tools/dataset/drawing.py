"""Which examples, strategy and circumstances a prompt is made of: drawn by the call's number, for variety."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Example", "Pool", "alike"]

_LOOKED_AT = 12
_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class Example:
    """A row that may stand in a prompt, under the id of the seed or of the generated row."""

    id: str
    values: Mapping[str, Any]
    words: frozenset[str]
    seeds: tuple[str, ...]
    """The seeds that it comes from; a seed comes from itself."""

    @classmethod
    def of(cls, id: str, values: Mapping[str, Any], text: str, seeds: Sequence[str] | None = None) -> Example:
        words = frozenset(_WORD.findall(text.lower()))
        return cls(id, values, words, tuple(seeds) if seeds is not None else (id,))


class Pool:
    """The examples of one side of the split: its seeds, and its accepted rows as they come."""

    def __init__(self, seeds: Sequence[Example]) -> None:
        self.seeds = list(seeds)
        self.accepted: list[Example] = []
        self._used: dict[str, int] = {}

    def draw(self, count: int, chance: random.Random) -> list[Example]:
        """Some examples, seeds first to come: at least half are seeds, where there are enough.

        Of those that were used least, those are taken that have the fewest words in common.
        """
        grown = min(count // 2, len(self.accepted))
        taken = self._spread(self.seeds, count - grown, [], chance)
        taken += self._spread(self.accepted, grown, taken, chance)
        chance.shuffle(taken)
        for example in taken:
            self._used[example.id] = self._used.get(example.id, 0) + 1
        return taken

    def _spread(
        self, source: Sequence[Example], count: int, beside: Sequence[Example], chance: random.Random
    ) -> list[Example]:
        looked_at = _some(source, 3 * _LOOKED_AT, chance)
        order = sorted(looked_at, key=lambda one: (self._used.get(one.id, 0), chance.random()))[:_LOOKED_AT]
        nearest = {one.id: max((alike(one, other) for other in beside), default=0.0) for one in order}
        taken: list[Example] = []
        while order and len(taken) < count:
            best = min(order, key=lambda one: nearest[one.id])
            taken.append(best)
            order.remove(best)
            for one in order:
                nearest[one.id] = max(nearest[one.id], alike(one, best))
        return taken


def _some(source: Sequence[Example], most: int, chance: random.Random) -> Sequence[Example]:
    return source if len(source) <= most else chance.sample(source, most)


def alike(one: Example, other: Example) -> float:
    """The share of their words that two examples have in common."""
    both = len(one.words & other.words)
    either = len(one.words) + len(other.words) - both
    return both / either if either else 1.0
