"""Texts by their 8-grams, and which of them share the rarest: what may be alike.

A text has up to 48 keys, the smallest hashes of its 8-grams. Of two texts that keep a share s of their characters, s^8
of the keys are the same: 0.43 where a tenth is edited, 0.17 where a fifth is. A search looks up a text's rarest keys
that others have too, and gives the texts that share two or more of them. Grams that are common in a file so count only
in texts that have hardly any other.

Why 8-grams: shorter ones survive oftener, but are shared by everybody; of 8-grams unrelated texts in one language share
a hundredth or less.
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
"""Texts that a search gives for each, at most."""
_RAREST = 16
"""Keys of a text that are looked up."""
_LOOKED_AT = 48
"""Places of these keys that are looked at; of a key with more, those of the texts added last."""
_BITS = 40
"""Of a hash; the others number the text in its chunk."""
_CHUNK_CHARS = 2_000_000
_AT_ONCE = 20_000
"""Texts whose candidates are looked for at a time."""


class Postings(NamedTuple):
    """Keys, each with the number of a text that has it."""

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
        """Who asks, and the candidates of each among these, which are sorted; those with most in common first."""
        asked = asked.sorted()
        low, high = (np.searchsorted(self.keys, asked.keys, side=side) for side in ("left", "right"))
        return _pick(asked.texts, low, high, self.texts)

    def pairs(self) -> Iterator[tuple[Ints, Ints]]:
        """Of each text the candidates among those before it, some texts at a time."""
        keys, texts = self.sorted()
        low = np.arange(len(keys)) - _ranks(keys)
        for start in range(0, int(texts.max(initial=-1)) + 1, _AT_ONCE):
            places = np.flatnonzero((texts >= start) & (texts < start + _AT_ONCE))
            who, candidates = _pick(texts[places] - start, low[places], places, texts)
            yield who + start, candidates


def _pick(asking: Any, low: Ints, high: Ints, texts: npt.NDArray[np.int32]) -> tuple[Ints, Ints]:
    """Who asks, and the candidates of each, those with most in common first.

    Args:
        asking: for each key that is looked up, the text that asks.
        low, high: where the key stands in `texts`.
    """
    asking, size = asking.astype(np.int64), high - low
    order = np.flatnonzero(size)
    # sorted as one number, which takes a fifth of the time that it takes to sort places by two
    order = np.sort((asking[order] << 43) | (np.minimum(size[order], 2047) << 32) | order) & 0xFFFFFFFF
    asking, high, size = asking[order], high[order], size[order]
    rank = _ranks(asking)
    before = np.cumsum(size) - size
    is_looked_up = (rank < _RAREST) & (before - before[np.arange(len(rank)) - rank] < _LOOKED_AT)
    asking, high, size = asking[is_looked_up], high[is_looked_up], np.minimum(size[is_looked_up], _LOOKED_AT)
    looked_up = np.bincount(asking)
    places = np.repeat(high - np.cumsum(size), size) + np.arange(size.sum())
    codes = np.sort((np.repeat(asking, size) << 32) | texts[places])
    starts = _starts(codes)
    shared = np.diff(starts, append=len(codes))
    who, candidates = codes[starts] >> 32, codes[starts] & 0xFFFFFFFF
    enough = shared >= np.minimum(2, looked_up[who])
    who, candidates, shared = who[enough], candidates[enough], shared[enough]
    order = np.sort((who << 43) | ((KEYS - shared) << 32) | np.arange(len(who))) & 0xFFFFFFFF
    who, candidates = who[order], candidates[order]
    most = _ranks(who) < CANDIDATES
    return who[most], candidates[most]


def postings(texts: Sequence[str], seed: int = 0) -> Postings:
    """The keys of texts, each with the number of its text."""
    parts, start, pending_chars = [Postings(np.empty(0, np.uint64), np.empty(0, np.int32))], 0, 0
    for end, text in enumerate(texts, 1):
        pending_chars += len(text)
        if pending_chars >= _CHUNK_CHARS or end == len(texts):
            keys, text_numbers = _smallest(*_grams(texts[start:end], seed))
            parts.append(Postings(keys, text_numbers + start))
            start, pending_chars = end, 0
    return Postings.joined(parts)


def _smallest(hashes: U64, bounds: Ints) -> Postings:
    """Of a long text only the hashes that may be among its smallest are sorted, unless its grams repeat."""
    size = np.diff(bounds)
    numbers = np.repeat(np.arange(len(size), dtype=np.uint64), size)
    least = (np.minimum(1.0, 2.5 * KEYS / np.maximum(size, 1)) * (2**64 - 2**11)).astype(np.uint64)
    likely = np.flatnonzero(hashes <= least[numbers])
    smallest = _different(numbers[likely], hashes[likely])
    poor = np.flatnonzero(np.bincount(smallest.texts, minlength=len(size)) < np.minimum(KEYS, size) // 2)
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
    """Where each run of equal values begins."""
    return np.flatnonzero(np.concatenate((np.ones(min(1, len(values)), np.bool_), values[1:] != values[:-1])))


def _ranks(values: npt.NDArray[Any]) -> Ints:
    """The place of each value in its run."""
    starts = _starts(values)
    return np.arange(len(values)) - np.repeat(starts, np.diff(starts, append=len(values)))


def _grams(texts: Sequence[str], seed: int = 0) -> tuple[U64, Ints]:
    """The hashed 8-grams of all texts one after the other, and where each text's begin (one more entry than texts)."""
    codes = np.frombuffer("".join(texts).encode("utf-32-le", "surrogatepass"), np.uint32).astype(np.uint64)
    lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    numbers = np.maximum(lengths - GRAM + 1, 0)
    bounds = np.concatenate((np.zeros(1, np.int64), np.cumsum(numbers)))
    if not bounds[-1]:
        return np.empty(0, np.uint64), bounds
    factors = np.random.default_rng((seed, GRAM)).integers(1, 2**63, GRAM, np.uint64) | np.uint64(1)
    whole = codes[: len(codes) - GRAM + 1] * factors[0]
    for place in range(1, GRAM):
        whole += codes[place : len(codes) - GRAM + 1 + place] * factors[place]
    starts = np.cumsum(lengths) - lengths
    inside = np.repeat(starts - bounds[:-1], numbers) + np.arange(bounds[-1])
    return _mix(whole[inside]), bounds


def _mix(values: U64) -> U64:
    """Spread over all 64 bits (the finaliser of MurmurHash3)."""
    mixed = values ^ (values >> np.uint64(33))
    mixed *= np.uint64(0xFF51AFD7ED558CCD)
    mixed ^= mixed >> np.uint64(33)
    mixed *= np.uint64(0xC4CEB9FE1A85EC53)
    mixed ^= mixed >> np.uint64(33)
    return mixed
