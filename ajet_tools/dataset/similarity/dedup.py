"""Rows that repeat another: exact copies, near copies, and, with embeddings, the same said otherwise.

Rows that are alike make a cluster, and a row that is like one of a cluster belongs to it. One row of each stays.
Which clusters there are does not depend on the order of the rows; which row stays may, by the policy.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ajet_sdk.errors import ConfigError
from ajet_tools.dataset.files.tables import text_of
from ajet_tools.dataset.files.values import value_at
from ajet_tools.dataset.similarity.near import Clusters, OnProgress, check_threshold, close_pairs, near_pairs
from ajet_tools.dataset.similarity.text import likeness, normal

__all__ = ["KEEP", "Duplicate", "Facts", "Found", "find"]

KEEP = ("first", "last", "longest", "shortest", "answered", "max:FIELD", "min:FIELD")


@dataclass(frozen=True)
class Facts:
    """What of a row decides: its place, its text, its answer, and by what it is preferred (the greatest stays)."""

    where: str
    text: str
    answer: str = ""
    rank: float = 0.0

    @classmethod
    def of(cls, where: str, values: Mapping[str, Any], keep: str = "first") -> Facts:
        """Raises ConfigError where the policy is none, or asks for a number that the row has not."""
        text, answer = text_of(values), value_at(values, "metadata.answer")
        answer = value_at(values, "answer") if answer is None else answer
        shown = "" if answer is None else answer if isinstance(answer, str) else json.dumps(answer, sort_keys=True)
        return cls(where, text, shown, _rank(where, values, text, shown, keep))


def _rank(where: str, values: Mapping[str, Any], text: str, answer: str, keep: str) -> float:
    if keep in ("first", "last"):
        return 0.0
    if keep in ("longest", "shortest"):
        return len(text) if keep == "longest" else -len(text)
    if keep == "answered":
        return float(bool(answer))
    policy, _, field = keep.partition(":")
    if policy not in ("max", "min") or not field:
        raise ConfigError(f"--keep must be one of {', '.join(KEEP)} (got {keep!r})")
    value = value_at(values, field)
    if isinstance(value, bool | str) or not isinstance(value, int | float | None):
        raise ConfigError(f"--keep {keep}: {where} has no number there (got {value!r:.60})")
    return float("-inf") if value is None else float(value) if policy == "max" else -float(value)


@dataclass(frozen=True)
class Duplicate:
    """A row that goes, and why. `via` is set where it is like the row that stays only by way of another row."""

    index: int
    kept: int
    kind: Literal["exact", "near", "meaning"]
    similarity: float
    via: int | None = None
    answers_differ: bool = False


@dataclass(frozen=True)
class Found:
    """What `find` found: how many rows there are, those that go, in their order, and how many clusters they are of."""

    rows: int
    duplicates: list[Duplicate]
    clusters: int


def find(
    rows: Sequence[Facts],
    *,
    threshold: float = 0.8,
    seed: int = 0,
    numbers: bool = True,
    near: bool = True,
    keep: str = "first",
    vectors: npt.NDArray[np.float32] | None = None,
    meaning: float = 0.9,
    on_progress: OnProgress | None = None,
) -> Found:
    """The rows that repeat another.

    Args:
        threshold: the share of characters that two rows have in common (see `likeness`).
        numbers: keep apart what differs in its numbers.
        near: look for near copies too, and not only for exact ones.
        keep: one of `KEEP`; of several the earliest stays, and with `last` the latest.
        vectors: of length 1, one for each row; rows whose cosine is `meaning` or more are duplicates.
    """
    check_threshold(threshold)
    forms: dict[str, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        forms[normal(row.text)].append(index)
    texts, members = list(forms), list(forms.values())
    clusters, links = Clusters(len(texts)), _Links()
    if near:
        for pair in near_pairs(texts, threshold, seed=seed, numbers=numbers, on_progress=on_progress):
            clusters.join(pair.one, pair.other)
            links.add(pair.one, pair.other, pair.similarity, "near")
    if vectors is not None:
        for pair in close_pairs(vectors[[rows_of[0] for rows_of in members]], texts, meaning, numbers=numbers):
            clusters.join(pair.one, pair.other)
            links.add(pair.one, pair.other, pair.similarity, "meaning")
    together: dict[int, list[int]] = defaultdict(list)
    for number in range(len(texts)):
        together[clusters.find(number)].append(number)
    duplicates: list[Duplicate] = []
    many = [numbers for numbers in together.values() if sum(len(members[n]) for n in numbers) > 1]
    for cluster in many:
        duplicates += _choose_duplicates(cluster, members, texts, rows, links, threshold, numbers, keep)
    return Found(len(rows), sorted(duplicates, key=lambda d: d.index), len(many))


class _Links:
    """Why texts are in one cluster: for each the pairs it is in."""

    def __init__(self) -> None:
        self._of: dict[int, list[tuple[float, int, Literal["near", "meaning"]]]] = defaultdict(list)

    def add(self, one: int, other: int, similarity: float, kind: Literal["near", "meaning"]) -> None:
        self._of[one].append((similarity, other, kind))
        self._of[other].append((similarity, one, kind))

    def between(self, one: int, other: int) -> tuple[float, Literal["near", "meaning"]] | None:
        found = [(similarity, kind) for similarity, number, kind in self._of[one] if number == other]
        return max(found) if found else None

    def best(self, one: int) -> tuple[float, int, Literal["near", "meaning"]]:
        return max(self._of[one], key=lambda link: (link[0], -link[1]))


def _choose_duplicates(
    cluster: Sequence[int],
    members: Sequence[Sequence[int]],
    texts: Sequence[str],
    rows: Sequence[Facts],
    links: _Links,
    threshold: float,
    numbers: bool,
    keep: str,
) -> list[Duplicate]:
    """Of one cluster, the rows that go."""
    number_of = {index: number for number in cluster for index in members[number]}
    latest = keep == "last"
    kept = max(number_of, key=lambda index: (rows[index].rank, index if latest else -index))
    made = []
    for index, number in number_of.items():
        if index == kept:
            continue
        home, via = number_of[kept], None
        kind: Literal["exact", "near", "meaning"]
        if number == home:
            kind, similarity = "exact", 1.0
        elif direct := links.between(number, home):
            similarity, kind = direct
        elif (share := likeness(texts[number], texts[home], threshold, numbers=numbers)) is not None:
            kind, similarity = "near", share
        else:
            similarity, other, kind = links.best(number)
            via = members[other][0]
        differ = bool(rows[index].answer and rows[kept].answer and rows[index].answer != rows[kept].answer)
        made.append(Duplicate(index, kept, kind, similarity, via, differ))
    return made
