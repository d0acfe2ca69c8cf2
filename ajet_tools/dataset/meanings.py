"""Texts as they come, each asked whether one that means the same was there before."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ajet_sdk.errors import EngineError
from ajet_tools.dataset.embeddings import BATCH, ROUNDING, Vectors, embed, numbers_of, open_embedder
from ajet_tools.dataset.endpoint import Endpoint
from ajet_tools.dataset.likeness import normal
from ajet_tools.dataset.similar import Match

__all__ = ["Meanings"]


class Meanings:
    """The texts added so far, as vectors; `find` says which of them a text repeats in other words.

    For a set that grows row by row; `embeddings.close_pairs` does a whole file at once. As in `dedup`, short texts with
    other numbers never mean the same.
    """

    def __init__(self, embedder: Endpoint, least: float = 0.9, *, paid: bool = True) -> None:
        self.embedder, self.least, self.paid = embedder, least, paid
        self._keys: list[str] = []
        self._numbers: list[list[str] | None] = []
        self._vectors: Vectors = np.empty((64, 0), np.float32)

    @classmethod
    def by(cls, embeddings: tuple[str, str], least: float, writer: Endpoint, cache: Path) -> Meanings:
        """`embeddings` as `open_embedder` takes it; an endpoint is charged to the budget of the one that writes."""
        where, model = embeddings
        made = open_embedder(where, model, concurrency=writer.concurrency, cache=cache, budget=writer.budget)
        return cls(made, least, paid=where != "local")

    def as_json(self) -> dict[str, Any]:
        """Everything that decides what is found."""
        return {"at": self.embedder.base_url, "model": self.embedder.model, "meaning": self.least}

    def in_words(self) -> str:
        return f"{self.embedder.model}, a cosine of {self.least:g}"

    def requests(self, calls: int, seeds: int) -> int:
        """To be paid for: those for the seeds, and one for the rows of each call."""
        return calls + -(-seeds // BATCH) if self.paid else 0

    async def vectors(self, texts: Sequence[str]) -> Vectors:
        """Raises as `embed`."""
        made = await embed(self.embedder, texts)
        if not self._vectors.shape[1]:
            self._vectors = np.empty((64, made.shape[1]), np.float32)
        if made.shape[1] != self._vectors.shape[1]:
            raise EngineError(
                f"{self.embedder.base_url} gave vectors of {made.shape[1]} numbers after some of "
                f"{self._vectors.shape[1]}; one model gives one length"
            )
        return made

    def add(self, key: str, text: str, vector: Vectors) -> None:
        """Remember a text and its vector, one of `vectors`, under a key."""
        count = len(self._keys)
        if count == len(self._vectors):
            self._vectors = np.concatenate((self._vectors, np.empty_like(self._vectors)))
        self._vectors[count] = vector
        self._keys.append(key)
        self._numbers.append(numbers_of(normal(text)))

    def find(self, text: str, vector: Vectors) -> Match | None:
        """The text whose vector is nearest, of those with a cosine of `least` or more."""
        cosines = self._vectors[: len(self._keys)] @ vector
        numbers = numbers_of(normal(text))
        close = np.flatnonzero(cosines >= self.least - ROUNDING)
        for index in close[np.argsort(-cosines[close], kind="stable")].tolist():
            if numbers is None or self._numbers[index] is None or numbers == self._numbers[index]:
                return Match(self._keys[index], min(1.0, float(cosines[index])), "meaning")
        return None
