"""All texts of a file that are like another, found at once: candidates by MinHash, each verified by edit distance."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ajet_tools.dataset.bands import candidates, digest
from ajet_tools.dataset.likeness import MARKED, allowed, likeness, marks, masked, shortest
from ajet_tools.dataset.signature import GRAM

__all__ = ["Clusters", "Pair", "Told", "near_pairs"]

Ints = npt.NDArray[np.int64]
Told = Callable[[str, int, int], None]
"""Told of progress: the name of the stage, how much is done, of how much."""


_TRIED = 50
"""Texts made from one template may all be candidates of each other: two that failed with so many are not compared."""


@dataclass(frozen=True)
class Pair:
    """Two texts, by their index, that are alike, and by how much."""

    one: int
    other: int
    similarity: float


class Clusters:
    """Which items belong together (disjoint sets); the least index stands for its cluster."""

    def __init__(self, size: int) -> None:
        self._above = list(range(size))

    def find(self, item: int) -> int:
        above = self._above
        while above[item] != item:
            above[item] = above[above[item]]
            item = above[item]
        return item

    def join(self, one: int, other: int) -> None:
        a, b = self.find(one), self.find(other)
        self._above[max(a, b)] = min(a, b)


def near_pairs(
    texts: Sequence[str],
    threshold: float,
    *,
    seed: int = 0,
    numbers: bool = True,
    across: int | None = None,
    told: Told | None = None,
) -> Iterator[Pair]:
    """Pairs of texts in normal form that are alike: enough of them to connect each cluster.

    Which clusters there are depends on the texts and the seed, and not on their order.

    Args:
        numbers: keep apart what differs in its numbers (see `likeness`).
        across: give only pairs of a text before this index with one from it on, and then all that are found.
    """
    least = max(shortest(threshold), GRAM)
    chosen = [index for index, text in enumerate(texts) if len(text) >= least]
    # in an order of the texts' own, so that their order in the file decides nothing
    chosen.sort(key=texts.__getitem__)
    pool = [texts[index] for index in chosen]
    early = np.array([index < across for index in chosen]) if across is not None else None
    possible = _Possible(pool, threshold, numbers)
    clusters, failed = Clusters(len(pool)), [0] * len(pool)
    for low, high in candidates(pool, threshold, seed=seed, early=early, told=told or _untold):
        for a, b in possible.new(low, high):
            if failed[a] >= _TRIED and failed[b] >= _TRIED:
                continue
            if across is None and clusters.find(a) == clusters.find(b):
                continue
            similarity = likeness(pool[a], pool[b], threshold, numbers=False)  # `possible` has seen to the numbers
            if similarity is None:
                failed[a] += 1
                failed[b] += 1
            else:
                clusters.join(a, b)
                one, other = sorted((chosen[a], chosen[b]))
                yield Pair(one, other, similarity)


def _untold(stage: str, done: int, of: int) -> None:
    return None


class _Possible:
    """Leaves out of many pairs, quickly, those that came before and those that length or numbers rule out."""

    def __init__(self, texts: Sequence[str], threshold: float, numbers: bool) -> None:
        self._texts, self._numbers = texts, numbers
        self._lengths = np.array([len(text) for text in texts], np.int64)
        self._most = np.array([allowed(len(text), threshold) for text in texts])
        self._seen = np.empty(0, np.int64)
        if numbers:
            # of two texts that may be alike, the longer has at most twice the length
            self._marks = np.array(
                [digest("|".join(marks(text))) if len(text) < 2 * MARKED else 0 for text in texts], np.uint64
            )
            self._masked = np.array([digest(masked(text)) for text in texts], np.uint64)

    def new(self, low: Ints, high: Ints) -> Iterator[tuple[int, int]]:
        lengths = self._lengths
        fit = np.abs(lengths[low] - lengths[high]) <= np.maximum(self._most[low], self._most[high])
        if self._numbers:
            short = np.minimum(lengths[low], lengths[high]) < MARKED
            same = self._marks[low] == self._marks[high]
            fit &= np.where(short, same, self._masked[low] != self._masked[high])
        codes = low[fit] * len(lengths) + high[fit]
        codes = np.unique(codes)
        if len(self._seen):
            place = np.minimum(np.searchsorted(self._seen, codes), len(self._seen) - 1)
            codes = codes[self._seen[place] != codes]
        self._seen = np.union1d(self._seen, codes)
        one, other = np.divmod(codes, len(lengths))
        return zip(one.tolist(), other.tolist(), strict=True)
