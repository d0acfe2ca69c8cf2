"""Several datasets as one, in shares: which rows, and in which order.

Rows are drawn without repetition, and the sources are interleaved at random; within a source the order stays. Each file
is read once to be counted and once (or once a round) to be written, so that memory does not grow with it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ajet_sdk.errors import ConfigError, TaskError
from ajet_tools.dataset.tables import Row, count, read

__all__ = ["Part", "Share", "parse_part", "plan", "rows"]


@dataclass(frozen=True)
class Part:
    """A source and its share."""

    path: str
    weight: float


@dataclass(frozen=True)
class Share:
    """What a mix takes of a source: `take` of its `rows`, more than there are where it is repeated."""

    path: str
    rows: int
    take: int


def parse_part(text: str) -> Part:
    """A source of `FILE=WEIGHT` or `FILE` (weight 1). Raises ConfigError."""
    path, equals, weight = text.rpartition("=")
    if not equals:
        return Part(text, 1.0)
    try:
        value = float(weight)
    except ValueError:
        return Part(text, 1.0)
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f"{text}: a weight is a number above 0 (got {weight})")
    return Part(path, value)


def plan(parts: Sequence[Part], total: int | None = None, *, repeat: bool = False) -> list[Share]:
    """How many rows of each source make a mix in its weights, to the nearest row.

    Without `total` it is as large as the shares allow without repeating a row. Raises ConfigError where `total` needs
    more rows than a source has, unless `repeat`; TaskError for a source without rows.
    """
    if any(part.path == "-" for part in parts):
        raise ConfigError("a mix reads its sources twice, which stdin cannot be; give files")
    sizes = [count(part.path) for part in parts]
    for part, size in zip(parts, sizes, strict=True):
        if not size:
            raise TaskError(f"{part.path} has no rows")
    whole = sum(part.weight for part in parts)
    if total is None:
        total = math.floor(min(size * whole / part.weight for part, size in zip(parts, sizes, strict=True)) + 1e-9)
    shares = [
        Share(part.path, size, take)
        for part, size, take in zip(parts, sizes, _apportioned(total, parts, whole), strict=True)
    ]
    for share in shares:
        if share.take > share.rows and not repeat:
            most = math.floor(min(s * whole / p.weight for p, s in zip(parts, sizes, strict=True)) + 1e-9)
            raise ConfigError(
                f"{share.path} has {share.rows:,} rows, and the mix needs {share.take:,} of it. Ask for at most "
                f"{most:,} rows (-n), give it a smaller weight, or allow rows to come again (--repeat)"
            )
    return shares


def _apportioned(total: int, parts: Sequence[Part], whole: float) -> list[int]:
    """Whole rows for each share; what rounding down leaves goes to the largest remainders."""
    exact = [total * part.weight / whole for part in parts]
    takes = [math.floor(share + 1e-9) for share in exact]
    order = sorted(range(len(parts)), key=lambda i: (takes[i] - exact[i], i))
    for i in order[: total - sum(takes)]:
        takes[i] += 1
    return takes


def rows(
    shares: Sequence[Share], *, seed: int = 0, mapping: Mapping[str, str] | None = None
) -> Iterator[tuple[str, Row]]:
    """The rows of a mix, each with its source; the same for the same seed and files."""
    order = random.Random(f"{seed} order")
    sources = [_drawn(share, random.Random(f"{seed} {i}"), mapping) for i, share in enumerate(shares)]
    left = [share.take for share in shares]
    while remaining := sum(left):
        i = _where(order.randrange(remaining), left)
        left[i] -= 1
        yield shares[i].path, next(sources[i])


def _where(place: int, sizes: Sequence[int]) -> int:
    """Which of adjoining blocks a place is in."""
    for i, size in enumerate(sizes):
        if place < size:
            return i
        place -= size
    raise IndexError(place)


def _drawn(share: Share, chance: random.Random, mapping: Mapping[str, str] | None) -> Iterator[Row]:
    """`take` rows: all of them as often as they fit, then a random part of a last round."""
    rounds, rest = divmod(share.take, share.rows)
    for _ in range(rounds):
        yield from read(share.path, mapping=mapping)
    wanted, left = rest, share.rows
    if not wanted:
        return
    for row in read(
        share.path, mapping=mapping
    ):  # selection sampling (Knuth, The Art of Computer Programming 3.4.2, S)
        if chance.randrange(left) < wanted:
            wanted -= 1
            yield row
            if not wanted:
                return
        left -= 1
