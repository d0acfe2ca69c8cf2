"""Splits a dataset: a row is assigned by a hash of its content, so it keeps its side when the file
grows."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from itertools import accumulate

from ajet_sdk.errors import ConfigError, TaskError
from ajet_sdk.tasks.questions import text_of
from ajet_tools.dataset.files.blocks import Block
from ajet_tools.dataset.files.values import value_at
from ajet_tools.dataset.similarity.text import normal

_TRAINING = ("train", "training")
_GOLDEN = 0.6180339887498949


def check_fractions(fractions: Mapping[str, float]) -> dict[str, float]:
    """Returns the fractions after validation. Raises ConfigError."""
    if len(fractions) < 2 or any(not 0 <= share <= 1 for share in fractions.values()):
        raise ConfigError(
            "a split needs at least two sides, each with a fraction from 0 to 1 (got"
            f" {dict(fractions)})"
        )
    if abs(sum(fractions.values()) - 1) > 1e-6:
        raise ConfigError(
            f"fractions must add up to 1 (got {sum(fractions.values()):g}: {dict(fractions)})"
        )
    return dict(fractions)


def is_held_out(side: str, sides: Iterable[str]) -> bool:
    """Whether rows of a side are kept out of training: each besides train, where there is one."""
    return side not in _TRAINING and any(name in _TRAINING for name in sides)


def keys_of(block: Block, by: str | None = None) -> list[str]:
    """Returns the keys that decide the sides of rows: the field `by`, else the question in normal
    form. Raises TaskError for a row without the field."""
    keys = []
    for index, values in enumerate(block.values()):
        if by is None:
            # what asks nothing is told by all its values
            keys.append(normal(text_of(values)) or _as_key(values))
            continue
        value = value_at(values, by)
        if value is None:
            raise TaskError(f"{block.where(index)} has no {by}, by which rows are to be grouped")
        keys.append(value if isinstance(value, str) else _as_key(value))
    return keys


def _as_key(value: object) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)


def _place(seed: int, key: str) -> float:
    """Hashes a key to a number from 0 to 1."""
    content = f"{seed}\n{key}".encode("utf-8", "surrogatepass")
    return int.from_bytes(blake2b(content, digest_size=8).digest(), "big") / 2**64


class Splitter:
    """Assigns each row of a file to a side.

    Without `stratify`, the side depends on the row's key only. With it, each value of that field is
    divided as exactly as whole rows allow, and rows appended to the file change no earlier side.
    """

    def __init__(
        self,
        fractions: Mapping[str, float],
        *,
        by: str | None = None,
        stratify: str | None = None,
        seed: int = 0,
    ) -> None:
        self.fractions = check_fractions(fractions)
        first, *others = fractions
        self._names = [*others, first]
        self._edges = [end - 1e-12 for end in accumulate(fractions[name] for name in others)]
        self._stratify = stratify
        self._seed = seed
        self._places: dict[int, float] = {}
        """Numbers from 0 to 1 by the hash of their key."""
        self._counts = Counter[str]()

    @property
    def strata(self) -> set[str]:
        """The values of the stratification field seen so far, as JSON."""
        return set(self._counts)

    def sides(self, block: Block, keys: Sequence[str]) -> list[str]:
        """Assigns the next rows, by their keys or those of the rows they belong to. Raises
        TaskError."""
        if self._stratify is None:
            return [self._side(_place(self._seed, key)) for key in keys]
        sides = []
        for key, values in zip(keys, block.values(), strict=True):
            number = hash(key)
            if number not in self._places:
                stratum = _as_key(value_at(values, self._stratify))
                start = _place(self._seed, f"stratum {stratum}")
                # multiples of the golden ratio modulo 1 are evenly distributed over any run
                self._places[number] = (start + self._counts[stratum] * _GOLDEN) % 1
                self._counts[stratum] += 1
            sides.append(self._side(self._places[number]))
        return sides

    def _side(self, place: float) -> str:
        return self._names[bisect_right(self._edges, place)]
