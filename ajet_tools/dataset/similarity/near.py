"""All texts of a file that are like another, found at once: candidates by MinHash, each verified by edit distance.

Texts as they come, each asked whether one like it was there before.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from ajet_sdk.errors import ConfigError
from ajet_tools.dataset.similarity.minhash import GRAM, LANES, candidates, digest, expected, grams, lanes
from ajet_tools.dataset.similarity.text import MARKED, allowed, likeness, marks, masked, normal, shortest

__all__ = [
    "ROUNDING",
    "Clusters",
    "Match",
    "NearIndex",
    "OnProgress",
    "Pair",
    "Vectors",
    "check_threshold",
    "close_pairs",
    "near_pairs",
    "numbers_of",
]

Ints = npt.NDArray[np.int64]
Vectors = npt.NDArray[np.float32]

ROUNDING = 1e-6
"""By which a cosine may be off."""
_BLOCK = 2048

OnProgress = Callable[[str, int, int], None]
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
    on_progress: OnProgress | None = None,
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
    possible = _PairFilter(pool, threshold, numbers)
    clusters, failed = Clusters(len(pool)), [0] * len(pool)
    for low, high in candidates(pool, threshold, seed=seed, early=early, on_progress=on_progress or _ignore):
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


def _ignore(stage: str, done: int, of: int) -> None:
    return None


class _PairFilter:
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


def numbers_of(form: str) -> list[str] | None:
    """Of a short text in normal form, what must be the same in all that mean the same; None of a long one."""
    return marks(form) if len(form) < MARKED else None


def close_pairs(vectors: Vectors, texts: Sequence[str], least: float, *, numbers: bool = True) -> Iterator[Pair]:
    """All pairs with a cosine of at least that; short texts in normal form with different numbers stay apart.

    Every pair is compared, a block of the matrix at a time: 100,000 rows are 5 billion products of vectors.
    """
    apart = [numbers_of(text) if numbers else None for text in texts]
    for start in range(0, len(vectors), _BLOCK):
        block = vectors[start : start + _BLOCK]
        for other in range(start, len(vectors), _BLOCK):
            cosine = block @ vectors[other : other + _BLOCK].T
            for a, b in np.argwhere(cosine >= least - ROUNDING).tolist():
                one, two = start + a, other + b
                if one < two and (apart[one] is None or apart[two] is None or apart[one] == apart[two]):
                    yield Pair(one, two, min(1.0, float(cosine[a, b])))


_CANDIDATES = 32


@dataclass(frozen=True)
class Match:
    """The text that was there before: its key, and the share of characters in common, or the cosine of meanings."""

    key: str
    similarity: float
    kind: Literal["exact", "near", "meaning"]


def check_threshold(threshold: float) -> float:
    """The threshold, if it is one. Raises ConfigError."""
    if not 0.5 <= threshold <= 1:
        raise ConfigError(
            f"a similarity threshold must be between 0.5 and 1 (got {threshold:g}); 0.8 finds texts in which a "
            "tenth has changed"
        )
    return threshold


class NearIndex:
    """The texts added so far; `find` says which of them a text repeats. What is alike is said in `likeness`.

    For a set that grows row by row (tens of thousands); `pairs` does a whole file at once. The same calls with the same
    seed give the same answers. An exact copy is always found; of texts with a tenth of their characters edited, more
    than 99 in 100 are; what is found is verified by edit distance.
    """

    def __init__(self, threshold: float = 0.8, seed: int = 0, *, numbers: bool = True) -> None:
        self.threshold, self.seed, self.numbers = check_threshold(threshold), seed, numbers
        self._shortest = max(shortest(threshold), GRAM)
        self._exact: dict[str, str] = {}
        self._texts: list[tuple[str, str]] = []
        self._sketches = np.empty((64, LANES), np.uint8)
        self._sketched = np.zeros(64, np.bool_)
        self._with_marks: dict[tuple[str, ...], array[int]] = {}
        """Texts by their numbers and operators: only among those with the same can a short one have its like."""

        self._last: tuple[str, npt.NDArray[np.uint8]] | None = None
        """A text is mostly looked for, and then added."""

    def __len__(self) -> int:
        return len(self._exact)

    def add(self, key: str, text: str) -> None:
        """Remember a text under a key; of texts with one normal form the first key stands."""
        form = normal(text)
        if form in self._exact:
            return
        self._exact[form] = key
        if len(form) < self._shortest:
            return
        if len(self._texts) == len(self._sketches):
            self._sketches = np.concatenate((self._sketches, np.empty_like(self._sketches)))
            self._sketched = np.concatenate((self._sketched, np.zeros_like(self._sketched)))
        if self.numbers:
            self._with_marks.setdefault(tuple(marks(form)), array("q")).append(len(self._texts))
        self._texts.append((key, form))

    def find(self, text: str) -> Match | None:
        """The text that this one repeats: an exact copy, else the most similar of those that are alike."""
        form = normal(text)
        if form in self._exact:
            return Match(self._exact[form], 1.0, "exact")
        if len(form) < self._shortest:
            return None
        best: Match | None = None
        for index in self._likely(form):
            key, other = self._texts[index]
            least = best.similarity if best else self.threshold
            similarity = likeness(form, other, max(least, self.threshold), numbers=self.numbers)
            if similarity is not None and (best is None or similarity > best.similarity):
                best = Match(key, similarity, "near")
        return best

    def _likely(self, form: str) -> Sequence[int]:
        """The texts that may be like one: few, the likeliest first."""
        if self.numbers and len(form) < MARKED:
            among = self._with_marks.get(tuple(marks(form)), ())
            if len(among) <= _CANDIDATES:
                return among
            places = np.array(among)
        else:
            places = np.arange(len(self._texts))
        for index in places[~self._sketched[places]]:
            self._sketches[index], self._sketched[index] = self._sketch(self._texts[index][1]), True
        agree = (self._sketches[places] == self._sketch(form)).sum(axis=1, dtype=np.int16)
        likely = np.flatnonzero(agree >= 1 + LANES * expected(self.threshold) / 2)
        best: list[int] = places[likely[np.argsort(-agree[likely], kind="stable")][:_CANDIDATES]].tolist()
        return best

    def _sketch(self, form: str) -> npt.NDArray[np.uint8]:
        """The low byte of each lane: enough to tell likely from unlikely, at 256 bytes a text."""
        if self._last is None or self._last[0] != form:
            self._last = form, lanes(*grams([form], self.seed), self.seed)[0].astype(np.uint8)
        return self._last[1]
