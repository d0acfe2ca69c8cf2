"""Finds near copies among texts added one by one (`NearIndex`) or in a whole file (`near_pairs`).

Both verify the candidates of `grams` by edit distance.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

import numpy as np
import numpy.typing as npt

from ajet_sdk.errors import ConfigError
from ajet_tools.dataset.similarity.grams import GRAM, Postings, postings
from ajet_tools.dataset.similarity.text import (
    FULL,
    MARKED,
    least_part,
    likeness,
    marks,
    normal,
    shortest,
    unmarked,
)

Vectors = npt.NDArray[np.float32]
ROUNDING = 1e-6
"""Rounding error of a cosine."""
_BLOCK = 2048  # texts that are compared at once
OnProgress = Callable[[str, int, int], None]
"""Called with the name of the stage, the progress and the total."""


@dataclass(frozen=True)
class Pair:
    """The indices of two similar texts, and their similarity."""

    first: int
    second: int
    similarity: float


class Clusters:
    """Disjoint sets; the lowest index represents a cluster."""

    def __init__(self, size: int) -> None:
        self._above = list(range(size))

    def find(self, item: int) -> int:
        above = self._above
        while above[item] != item:
            above[item] = above[above[item]]
            item = above[item]
        return item

    def join(self, first: int, second: int) -> None:
        heads = self.find(first), self.find(second)
        self._above[max(heads)] = min(heads)


def near_pairs(
    texts: Sequence[str],
    threshold: float,
    on_progress: OnProgress | None = None,
) -> Iterator[Pair]:
    """Yields enough pairs of similar texts in normal form to connect each cluster.

    The clusters depend on the texts, not on their order.
    """
    least = max(shortest(threshold), GRAM)
    index_by_text: dict[str, int] = {}
    for index, text in enumerate(map(unmarked, texts)):
        if index_by_text.setdefault(text, index) != index and threshold < 1:
            yield Pair(index_by_text[text], index, 1.0)
    # sorted, so that the order of the file has no influence
    pool = sorted(text for text in index_by_text if len(text) >= least)
    indices = [index_by_text[text] for text in pool]
    clusters = Clusters(len(pool))
    for who, candidates in _keys(pool, threshold).pairs():
        for place, (a, b) in enumerate(zip(who.tolist(), candidates.tolist(), strict=True)):
            if on_progress is not None and place % _BLOCK == 0:
                on_progress("comparing", a, len(pool))
            if clusters.find(a) == clusters.find(b):
                continue
            similarity = likeness(pool[a], pool[b], threshold)
            if similarity is not None:
                clusters.join(a, b)
                first_index, second_index = sorted((indices[a], indices[b]))
                yield Pair(first_index, second_index, similarity)


def _keys(forms: Sequence[str], threshold: float) -> Postings:
    """Returns the keys of texts; those of short texts include their numbers and operators."""
    all_keys = postings(forms)
    lengths = np.fromiter(map(len, forms), np.int64, len(forms))
    below = MARKED / least_part(threshold)  # longer texts match no short one
    digests = np.zeros(len(forms), np.uint64)
    for index in np.flatnonzero(lengths < below).tolist():
        text = "|".join(sorted(marks(forms[index]))).encode("utf-8", "surrogatepass")
        digests[index] = int.from_bytes(blake2b(text, digest_size=8).digest(), "little")
    marked = all_keys.take(lengths[all_keys.texts] < below)
    plain = all_keys.take(
        lengths[all_keys.texts] >= FULL
    )  # may be contained in a text with more numbers
    return Postings.joined([Postings(marked.keys ^ digests[marked.texts], marked.texts), plain])


def same_numbers(first: str, second: str) -> bool:
    """Whether two texts in normal form have the same numbers and operators, if both are short."""
    return max(len(first), len(second)) >= MARKED or marks(first) == marks(second)


Embedded = tuple[Vectors, Sequence[str]]
"""Normalized embeddings of texts, and the texts."""


def close_pairs(
    rows: Embedded, known: Embedded | None, least: float, agree: Callable[[str, str], bool]
) -> Iterator[Pair]:
    """Yields all pairs of rows and known texts with a cosine of at least `least`, or all pairs of
    rows; `agree` says whether two texts may mean the same.

    Compares all pairs, in blocks of the matrix: 100,000 rows need 5 billion dot products.
    """
    vectors, texts = rows
    known_vectors, known_texts = known or rows
    for start in range(0, len(vectors), _BLOCK):
        block = vectors[start : start + _BLOCK]
        for known_start in range(start if known is None else 0, len(known_vectors), _BLOCK):
            cosine = block @ known_vectors[known_start : known_start + _BLOCK].T
            for a, b in np.argwhere(cosine >= least - ROUNDING).tolist():
                first = start + a
                second = known_start + b
                if known is None and first >= second:
                    continue
                if agree(texts[first], known_texts[second]):
                    yield Pair(first, second, min(1.0, float(cosine[a, b])))


@dataclass(frozen=True)
class Match:
    """The matching earlier text: its key, and the share of equal characters."""

    key: str
    similarity: float
    kind: Literal["exact", "near"]


def check_threshold(threshold: float) -> float:
    """Returns the threshold after validation. Raises ConfigError."""
    if not 0.5 <= threshold <= 1:
        raise ConfigError(
            f"a similarity must be between 0.5 and 1 (got {threshold:g}); 0.8 tolerates 10 % of"
            " edits"
        )
    return threshold


class NearIndex:
    """An index of texts; `find` returns a text that a new one repeats (see `likeness`).

    Deterministic. Exact copies are always found; of texts with a tenth
    of the characters edited, more than 99 %.
    """

    def __init__(self, threshold: float = 0.8) -> None:
        self._threshold = check_threshold(threshold)
        self._shortest = max(shortest(threshold), GRAM)
        self._exact: dict[str, str] = {}
        self._unmarked: dict[str, str] = {}
        self._texts: list[tuple[str, str]] = []
        self._sorted: list[Postings] = []
        """Sorted keys, in parts that each have more than twice as many as the next."""
        self._counted = 0
        """Number of texts whose keys are in a part."""

    def __len__(self) -> int:
        return len(self._exact)

    def add(self, key: str, text: str) -> None:
        """Adds a text under a key; for texts with the same normal form, the first key counts."""
        form = normal(text)
        if form not in self._exact:
            self._exact[form] = key
            form = unmarked(form)
            if self._unmarked.setdefault(form, key) == key and len(form) >= self._shortest:
                self._texts.append((key, form))

    def find(self, text: str) -> Match | None:
        """Returns the exact copy, else the most similar text, or None."""
        return self.find_all([text])[0]

    def find_all(
        self, texts: Sequence[str], on_progress: OnProgress | None = None
    ) -> list[Match | None]:
        """Returns the match of each text, without adding any."""
        matches: list[Match | None] = []
        for start in range(0, len(texts), _BLOCK):
            if on_progress is not None:
                on_progress("comparing", start, len(texts))
            forms = [normal(text) for text in texts[start : start + _BLOCK]]
            plain = [unmarked(form) if form not in self._exact else "" for form in forms]
            likely = self._likely([form if form not in self._unmarked else "" for form in plain])
            for number, form in enumerate(forms):
                if form in self._exact:
                    matches.append(Match(self._exact[form], 1.0, "exact"))
                elif plain[number] in self._unmarked and self._threshold < 1:
                    matches.append(Match(self._unmarked[plain[number]], 1.0, "near"))
                else:
                    matches.append(self._best(plain[number], likely[number]))
        return matches

    def _best(self, form: str, likely: Sequence[int]) -> Match | None:
        best: Match | None = None
        for index in likely:
            key, candidate = self._texts[index]
            least = best.similarity if best else self._threshold
            similarity = likeness(form, candidate, least)
            if similarity is not None and (best is None or similarity > best.similarity):
                best = Match(key, similarity, "near")
        return best

    def _likely(self, forms: Sequence[str]) -> dict[int, list[int]]:
        self._sort_new()
        likely: dict[int, list[int]] = defaultdict(list)
        long_enough = [form if len(form) >= self._shortest else "" for form in forms]
        asked = _keys(long_enough, self._threshold)
        if not len(asked.keys):
            return likely
        for part in self._sorted:
            who, candidates = part.find(asked)
            for number, candidate in zip(who.tolist(), candidates.tolist(), strict=True):
                likely[number].append(candidate)
        return likely

    def _sort_new(self) -> None:
        new = [form for _, form in self._texts[self._counted :]]
        if new:
            keys, texts = _keys(new, self._threshold)
            self._sorted.append(Postings(keys, texts + self._counted).sorted())
            self._counted = len(self._texts)
        while len(self._sorted) > 1 and len(self._sorted[-2].keys) <= 2 * len(
            self._sorted[-1].keys
        ):
            last = [self._sorted.pop(), self._sorted.pop()]
            self._sorted.append(Postings.joined(last[::-1]).sorted())


def together(keys: Sequence[str], *groupings: Sequence[int]) -> list[str]:
    """Returns the key of each row; rows with an equal key, or an equal number in a grouping,
    transitively, get the key of the first of them."""
    clusters = Clusters(len(keys))
    for names in (keys, *groupings):
        first_by_name: dict[object, int] = {}
        for index, name in enumerate(names):
            clusters.join(index, first_by_name.setdefault(name, index))
    return [keys[clusters.find(index)] for index in range(len(keys))]


def near_groups(
    texts: Sequence[str], threshold: float, on_progress: OnProgress | None = None
) -> list[int]:
    """Returns a number for each text, the same for equal and for similar ones."""
    forms: dict[str, int] = {}
    numbers = [forms.setdefault(normal(text), len(forms)) for text in texts]
    clusters = Clusters(len(forms))
    for pair in near_pairs(list(forms), threshold, on_progress):
        clusters.join(pair.first, pair.second)
    return [clusters.find(number) for number in numbers]
