"""Texts as they come, each asked whether one like it was there before."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from ajet_sdk.errors import ConfigError
from ajet_tools.dataset.likeness import MARKED, likeness, marks, normal, shortest
from ajet_tools.dataset.signature import GRAM, LANES, expected, grams, lanes

__all__ = ["Match", "Near", "check_threshold"]

_TRIED = 32


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
            f"a similarity threshold is between 0.5 and 1 (got {threshold:g}); 0.8 finds texts of which a tenth changed"
        )
    return threshold


class Near:
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
            if len(among) <= _TRIED:
                return among
            places = np.array(among)
        else:
            places = np.arange(len(self._texts))
        for index in places[~self._sketched[places]]:
            self._sketches[index], self._sketched[index] = self._sketch(self._texts[index][1]), True
        agree = (self._sketches[places] == self._sketch(form)).sum(axis=1, dtype=np.int16)
        likely = np.flatnonzero(agree >= 1 + LANES * expected(self.threshold) / 2)
        best: list[int] = places[likely[np.argsort(-agree[likely], kind="stable")][:_TRIED]].tolist()
        return best

    def _sketch(self, form: str) -> npt.NDArray[np.uint8]:
        """The low byte of each lane: enough to tell likely from unlikely, at 256 bytes a text."""
        if self._last is None or self._last[0] != form:
            self._last = form, lanes(*grams([form], self.seed), self.seed)[0].astype(np.uint8)
        return self._last[1]
