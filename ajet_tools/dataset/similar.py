"""Texts as they come, each asked whether one like it was there before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from ajet_sdk.errors import ConfigError
from ajet_tools.dataset.likeness import likeness, normal, shortest
from ajet_tools.dataset.signature import GRAM, LANES, expected, grams, lanes

__all__ = ["Match", "Near", "check_threshold"]

_TRIED = 32


@dataclass(frozen=True)
class Match:
    """The text that was there before: its key, the share of characters in common, and `exact` or `near`."""

    key: str
    similarity: float
    kind: Literal["exact", "near"]


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
        self._sketches[len(self._texts)] = self._sketch(form)
        self._texts.append((key, form))

    def find(self, text: str) -> Match | None:
        """The text that this one repeats: an exact copy, else the most similar of those that are alike."""
        form = normal(text)
        if form in self._exact:
            return Match(self._exact[form], 1.0, "exact")
        if len(form) < self._shortest or not self._texts:
            return None
        agree = (self._sketches[: len(self._texts)] == self._sketch(form)).sum(axis=1, dtype=np.int16)
        likely = np.flatnonzero(agree >= 1 + LANES * expected(self.threshold) / 2)
        best: Match | None = None
        for index in likely[np.argsort(-agree[likely], kind="stable")][:_TRIED]:
            key, other = self._texts[index]
            least = best.similarity if best else self.threshold
            similarity = likeness(form, other, max(least, self.threshold), numbers=self.numbers)
            if similarity is not None and (best is None or similarity > best.similarity):
                best = Match(key, similarity, "near")
        return best

    def _sketch(self, form: str) -> npt.NDArray[np.uint8]:
        """The low byte of each lane: enough to tell likely from unlikely, at 256 bytes a text."""
        if self._last is None or self._last[0] != form:
            self._last = form, lanes(*grams([form], self.seed), self.seed)[0].astype(np.uint8)
        return self._last[1]
