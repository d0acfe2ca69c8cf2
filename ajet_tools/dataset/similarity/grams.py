"""Finds candidates for near copies: texts that share rare 8-grams.

A text has up to 48 keys, the smallest hashes of its 8-grams. Two texts that share a fraction s of
their characters share about s^8 of the keys: 0.43 with a tenth edited, 0.17 with a fifth. A search
looks up the rarest shared keys of a text, and returns the texts that share at least two. Common
8-grams therefore count only in texts that have hardly any others.

Shorter grams survive edits more often, but occur everywhere; unrelated texts in one language share
at most a hundredth of their 8-grams.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]
Ints = npt.NDArray[np.int64]
GRAM = 8
KEYS = 48
CANDIDATES = 32
"""Maximum number of candidates per text."""
_RAREST = 16
"""Maximum number of keys to look up per text."""
_LOOKED_AT = 48
"""Maximum number of postings per text; of a key with more, the texts added last."""
_SEED = (0, GRAM)
_BITS = 40
"""Bits of a hash; the others number the text in its chunk."""
_CHUNK_CHARS = 2_000_000
_AT_ONCE = 20_000
"""Texts per batch of a search."""


class Postings(NamedTuple):
    """Keys, each with the index of a text that has it."""

    keys: U64
    texts: npt.NDArray[np.int32]

    def sorted(self) -> Postings:
        order = np.argsort(self.keys, kind="stable")
        return self.take(order)

    def take(self, places: Any) -> Postings:
        return Postings(self.keys[places], self.texts[places])

    @classmethod
    def joined(cls, parts: Sequence[Postings]) -> Postings:
        return cls(*map(np.concatenate, zip(*parts, strict=True)))

    def find(self, asked: Postings) -> tuple[Ints, Ints]:
        """Returns query indices and candidates among these sorted postings, best matches first."""
        asked = asked.sorted()
        low, high = (
            np.searchsorted(self.keys, asked.keys, side=side) for side in ("left", "right")
        )
        return _pick(asked.texts, low, high, self.texts)

    def pairs(self) -> Iterator[tuple[Ints, Ints]]:
        """Yields, in batches, the candidates of each text among the texts before it."""
        keys, texts = self.sorted()
        low = np.arange(len(keys)) - _ranks(keys)
        for start in range(0, int(texts.max(initial=-1)) + 1, _AT_ONCE):
            places = np.flatnonzero((texts >= start) & (texts < start + _AT_ONCE))
            who, candidates = _pick(texts[places] - start, low[places], places, texts)
            yield who + start, candidates


def _pick(asking: Any, low: Ints, high: Ints, texts: npt.NDArray[np.int32]) -> tuple[Ints, Ints]:
    """Returns query indices and candidates, best matches first.

    Args:
        asking: the query of each key.
        low, high: the key's range in `texts`.
    """
    asking = asking.astype(np.int64)
    size = high - low
    order = np.flatnonzero(size)
    # sorting packed integers is five times as fast as by two columns
    order = (
        np.sort((asking[order] << 43) | (np.minimum(size[order], 2047) << 32) | order) & 0xFFFFFFFF
    )
    asking = asking[order]
    high = high[order]
    size = size[order]
    rank = _ranks(asking)
    before = np.cumsum(size) - size
    is_looked_up = (rank < _RAREST) & (before - before[np.arange(len(rank)) - rank] < _LOOKED_AT)
    asking = asking[is_looked_up]
    high = high[is_looked_up]
    size = np.minimum(size[is_looked_up], _LOOKED_AT)
    looked_up = np.bincount(asking)
    places = np.repeat(high - np.cumsum(size), size) + np.arange(size.sum())
    codes = np.sort((np.repeat(asking, size) << 32) | texts[places])
    starts = _starts(codes)
    shared = np.diff(starts, append=len(codes))
    who = codes[starts] >> 32
    candidates = codes[starts] & 0xFFFFFFFF
    enough = shared >= np.minimum(2, looked_up[who])
    who = who[enough]
    candidates = candidates[enough]
    shared = shared[enough]
    order = np.sort((who << 43) | ((KEYS - shared) << 32) | np.arange(len(who))) & 0xFFFFFFFF
    who = who[order]
    candidates = candidates[order]
    most = _ranks(who) < CANDIDATES
    return who[most], candidates[most]


def postings(texts: Sequence[str]) -> Postings:
    """Returns the keys of texts."""
    parts = [Postings(np.empty(0, np.uint64), np.empty(0, np.int32))]
    start = 0
    pending_chars = 0
    for end, text in enumerate(texts, 1):
        pending_chars += len(text)
        if pending_chars >= _CHUNK_CHARS or end == len(texts):
            keys, text_numbers = _smallest(*_grams(texts[start:end]))
            parts.append(Postings(keys, text_numbers + start))
            start = end
            pending_chars = 0
    return Postings.joined(parts)


def _smallest(hashes: U64, bounds: Ints) -> Postings:
    """Returns the smallest hashes per text; for speed, sorts only hashes below a bound unless grams
    repeat."""
    size = np.diff(bounds)
    numbers = np.repeat(np.arange(len(size), dtype=np.uint64), size)
    least = (np.minimum(1.0, 2.5 * KEYS / np.maximum(size, 1)) * (2**64 - 2**11)).astype(np.uint64)
    likely = np.flatnonzero(hashes <= least[numbers])
    smallest = _different(numbers[likely], hashes[likely])
    poor = np.flatnonzero(
        np.bincount(smallest.texts, minlength=len(size)) < np.minimum(KEYS, size) // 2
    )
    if len(poor):
        again = np.flatnonzero(np.isin(numbers, poor))
        rich = smallest.take(~np.isin(smallest.texts, poor))
        smallest = Postings.joined([rich, _different(numbers[again], hashes[again])])
    return smallest


def _different(numbers: U64, hashes: U64) -> Postings:
    codes = np.sort((numbers << np.uint64(_BITS)) | (hashes >> np.uint64(64 - _BITS)))
    codes = codes[_starts(codes)]
    owners = (codes >> np.uint64(_BITS)).astype(np.int32)
    is_kept = _ranks(owners) < KEYS
    return Postings(codes[is_kept] & np.uint64(2**_BITS - 1), owners[is_kept])


def _starts(values: npt.NDArray[Any]) -> Ints:
    return np.flatnonzero(
        np.concatenate((np.ones(min(1, len(values)), np.bool_), values[1:] != values[:-1]))
    )


def _ranks(values: npt.NDArray[Any]) -> Ints:
    """Returns the index of each value in its run."""
    starts = _starts(values)
    return np.arange(len(values)) - np.repeat(starts, np.diff(starts, append=len(values)))


def _grams(texts: Sequence[str]) -> tuple[U64, Ints]:
    """Returns the hashed 8-grams of all texts, concatenated, and the bounds of each text."""
    codes = np.frombuffer("".join(texts).encode("utf-32-le", "surrogatepass"), np.uint32).astype(
        np.uint64
    )
    lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    numbers = np.maximum(lengths - GRAM + 1, 0)
    bounds = np.concatenate((np.zeros(1, np.int64), np.cumsum(numbers)))
    if not bounds[-1]:
        return np.empty(0, np.uint64), bounds
    factors = np.random.default_rng(_SEED).integers(1, 2**63, GRAM, np.uint64) | np.uint64(1)
    hashes = codes[: len(codes) - GRAM + 1] * factors[0]
    for place in range(1, GRAM):
        hashes += codes[place : len(codes) - GRAM + 1 + place] * factors[place]
    starts = np.cumsum(lengths) - lengths
    inside = np.repeat(starts - bounds[:-1], numbers) + np.arange(bounds[-1])
    return _mix(hashes[inside]), bounds


def _mix(values: U64) -> U64:
    """Mixes the bits (the finalizer of MurmurHash3)."""
    mixed = values ^ (values >> np.uint64(33))
    mixed *= np.uint64(0xFF51AFD7ED558CCD)
    mixed ^= mixed >> np.uint64(33)
    mixed *= np.uint64(0xC4CEB9FE1A85EC53)
    mixed ^= mixed >> np.uint64(33)
    return mixed
