"""Finds duplicate rows: exact copies, near copies and, with embeddings, paraphrases.

Similar rows form clusters, transitively. One row per cluster stays, chosen by a policy. The
clusters do not depend on the order of the rows.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from ajet_sdk.errors import ConfigError
from ajet_sdk.tasks.questions import answer_of, text_of
from ajet_tools.dataset.files.values import value_at
from ajet_tools.dataset.similarity.near import (
    Clusters,
    OnProgress,
    Pair,
    check_threshold,
    close_pairs,
    near_pairs,
    same_numbers,
)
from ajet_tools.dataset.similarity.text import likeness, normal

Kind = Literal["exact", "near", "meaning"]
KEEP = ("first", "last", "longest", "shortest", "answered", "max:FIELD", "min:FIELD")


@dataclass(frozen=True)
class RowFacts:
    """Facts that decide about a row: location, text, answer, and rank (the highest stays)."""

    where: str
    text: str
    answer: str = ""
    rank: float = 0.0

    @classmethod
    def of(cls, where: str, values: Mapping[str, object], keep: str = "first") -> RowFacts:
        """Raises ConfigError for an unknown policy, or if the row lacks the number that it
        needs."""
        text = text_of(values)
        answer = answer_of(values)
        if answer is None:
            answer = ""
        elif not isinstance(answer, str):
            answer = json.dumps(answer, sort_keys=True)
        row = cls(where, text, answer)
        return replace(row, rank=row._rank(values, keep))

    def _rank(self, values: Mapping[str, object], keep: str) -> float:
        if keep in ("first", "last"):
            return 0.0
        if keep == "longest":
            return len(self.text)
        if keep == "shortest":
            return -len(self.text)
        if keep == "answered":
            return float(bool(self.answer))
        return _number_at(self.where, values, keep)


def _number_at(where: str, values: Mapping[str, object], keep: str) -> float:
    """Returns the rank by a field, for `max:FIELD` and `min:FIELD`."""
    policy, _, field = keep.partition(":")
    if policy not in ("max", "min") or not field:
        raise ConfigError(f"--keep must be one of {', '.join(KEEP)} (got {keep!r})")
    value = value_at(values, field)
    if isinstance(value, bool | str) or not isinstance(value, int | float | None):
        raise ConfigError(f"--keep {keep}: {where} has no number there (got {value!r:.60})")
    if value is None:
        return float("-inf")
    return float(value) if policy == "max" else -float(value)


@dataclass(frozen=True)
class Duplicate:
    """A row to remove. `via` is set if only another row connects it with the row that stays."""

    index: int
    kept: int
    kind: Kind
    similarity: float
    via: int | None = None
    answers_differ: bool = False


@dataclass(frozen=True)
class Found:
    """The result of `find`: the number of rows, the rows to remove in order, and the number of
    clusters."""

    rows: int
    duplicates: list[Duplicate]
    clusters: int


def find(
    rows: Sequence[RowFacts],
    *,
    threshold: float = 0.8,
    keep: str = "first",
    vectors: npt.NDArray[np.float32] | None = None,
    meaning: float = 0.9,
    on_progress: OnProgress | None = None,
) -> Found:
    """Finds duplicate rows.

    Args:
        threshold: minimum share of equal characters (see `likeness`); 1: exact copies only.
        keep: one of `KEEP`; of equal rows the first stays, with `last` the last.
        vectors: normalized embeddings of the rows.
        meaning: minimum cosine.
    """
    check_threshold(threshold)
    forms: dict[str, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        forms[normal(row.text)].append(index)
    texts = list(forms)
    members = list(forms.values())
    clusters = Clusters(len(texts))
    links: dict[int, dict[int, tuple[float, Kind]]] = defaultdict(dict)

    def link(pair: Pair, kind: Kind) -> None:
        clusters.join(pair.first, pair.second)
        for item, neighbour in ((pair.first, pair.second), (pair.second, pair.first)):
            links[item][neighbour] = max(
                links[item].get(neighbour, (0.0, kind)), (pair.similarity, kind)
            )

    def why(number: int, home: int) -> tuple[Kind, float, int | None]:
        """Returns kind, similarity and connecting row of a text in a cluster."""
        if number == home:
            return "exact", 1.0, None
        if home in links[number]:
            similarity, kind = links[number][home]
            return kind, similarity, None
        share = likeness(texts[number], texts[home], threshold)
        if share is not None:
            return "near", share, None
        neighbour = max(
            links[number], key=lambda neighbour: (links[number][neighbour][0], -neighbour)
        )
        similarity, kind = links[number][neighbour]
        return kind, similarity, members[neighbour][0]

    if threshold < 1:
        for pair in near_pairs(texts, threshold, on_progress):
            link(pair, "near")
    if vectors is not None:
        embedded = vectors[[rows_of[0] for rows_of in members]], texts
        for pair in close_pairs(embedded, None, meaning, same_numbers):
            link(pair, "meaning")
    together: dict[int, dict[int, int]] = defaultdict(dict)
    """Rows of each cluster, with the index of their text."""
    for number, indices in enumerate(members):
        together[clusters.find(number)].update(dict.fromkeys(indices, number))
    duplicates: list[Duplicate] = []
    many = [cluster for cluster in together.values() if len(cluster) > 1]
    for cluster in many:
        kept = max(
            cluster, key=lambda index: (rows[index].rank, index if keep == "last" else -index)
        )
        for index in cluster.keys() - {kept}:
            differ = bool(
                rows[index].answer and rows[kept].answer and rows[index].answer != rows[kept].answer
            )
            duplicates.append(Duplicate(index, kept, *why(cluster[index], cluster[kept]), differ))
    return Found(len(rows), sorted(duplicates, key=lambda d: d.index), len(many))
