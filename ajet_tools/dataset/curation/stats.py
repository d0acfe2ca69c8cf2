"""Statistics of a dataset in one pass, with 8 bytes of memory per row."""

from __future__ import annotations

import json
import math
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ajet_sdk.tasks.questions import answer_of, text_of
from ajet_tools.dataset.curation.forms import Diversity, Forms
from ajet_tools.dataset.curation.language import language_of
from ajet_tools.dataset.files.blocks import Block
from ajet_tools.dataset.files.values import as_text, kind_of, value_at
from ajet_tools.dataset.similarity.text import normal

_MOST_FIELDS = 500
_MOST_VALUES = 100_000
"""Values of a field that are counted; of more, none is known to be the most common."""
_MOST_GROUPS = 1000
_LONGEST_VALUE = 80
_SHOWN = 10
_EVERY_ROW = 10_000
_STEP_ROWS = 101  # a prime, so that alternating rows are sampled equally
_ENCODE = json.JSONEncoder(ensure_ascii=False).encode


class Lengths(Counter[int]):
    """A distribution of lengths."""

    def quantile(self, share: float) -> int:
        """Returns the quantile of a share."""
        rank = max(1, math.ceil(share * self.total()))
        seen = 0
        for length, times in sorted(self.items()):
            seen += times
            if seen >= rank:
                return length
        return 0

    def as_json(self) -> dict[str, float]:
        total = sum(length * times for length, times in self.items())
        return {
            "min": min(self, default=0),
            "p5": self.quantile(0.05),
            "p50": self.quantile(0.5),
            "p95": self.quantile(0.95),
            "max": max(self, default=0),
            "mean": round(total / max(1, self.total()), 4),
        }


@dataclass
class Field:
    """The values of a field."""

    present: int = 0
    """Rows with a value other than null."""
    kinds: Counter[str] = field(default_factory=Counter)
    values: Counter[str] = field(default_factory=Counter)
    """Counts of short values, as JSON."""
    others: int = 0
    """Number of values not counted individually."""
    has_too_many: bool = False
    """Some short values are not counted, since there are too many different ones."""

    def add(self, value: object) -> None:
        self.present += value is not None
        self.kinds[kind_of(value)] += 1
        if value is None or isinstance(value, dict):
            return
        text = None if _is_long(value) else _ENCODE(value)
        if text is None or len(text) > _LONGEST_VALUE + len('""'):
            self.others += 1
        elif text in self.values or len(self.values) < _MOST_VALUES:
            self.values[text] += 1
        else:
            self.others += 1
            self.has_too_many = True

    def as_json(self) -> dict[str, object]:
        distinct = len(self.values)
        return {
            "present": self.present,
            "kinds": dict(ordered(self.kinds)),
            "distinct": f">{distinct}" if self.others else distinct,
            "common": dict(self.common()),
        }

    def common(self, most: int = _SHOWN) -> list[tuple[str, int]]:
        """Returns the repeated values, as JSON, with their counts; none if too many were not
        counted."""
        if self.has_too_many:
            return []
        return [(text, number) for text, number in ordered(self.values)[:most] if number > 1]


def _is_long(value: object) -> bool:
    """Whether a value is longer than those that are counted, without encoding it."""
    if isinstance(value, str):
        return len(value) > _LONGEST_VALUE
    if isinstance(value, list):
        return len(value) > 8 or any(isinstance(item, dict | list) for item in value)
    return False


@dataclass
class Stats:
    rows: int = 0
    looked_at: int = 0
    """Number of rows whose form was examined: all, or the first 10,000 and every 101st of the
    others."""
    distinct: int = 0
    """Number of distinct texts, ignoring case and white space."""
    diversity: Diversity = field(default_factory=lambda: Diversity(0, 0))
    """Number of distinct texts without numbers and names."""
    empty: int = 0
    """Number of rows without text."""
    answered: int = 0
    """Number of rows with a reference answer, or a reply at the end of a chat."""
    chars: Lengths = field(default_factory=Lengths)
    words: Lengths = field(default_factory=Lengths)
    answer_chars: Lengths = field(default_factory=Lengths)
    languages: Counter[str] = field(default_factory=Counter)
    fields: dict[str, Field] = field(default_factory=dict)
    """Fields by path, to two levels below a column, such as `metadata.answer`."""
    by: str | None = None
    groups: dict[str, Lengths] = field(default_factory=dict)
    """Text lengths, by the values of the field `by`."""

    @property
    def duplicates(self) -> int:
        return self.rows - self.distinct

    def as_json(self) -> dict[str, object]:
        summary: dict[str, object] = {
            "rows": self.rows,
            "looked_at": self.looked_at,
            "distinct": self.distinct,
            "duplicates": self.duplicates,
            "diversity": self.diversity.as_json(),
            "empty": self.empty,
            "answered": self.answered,
            "chars": self.chars.as_json(),
            "words": self.words.as_json(),
            "answer_chars": self.answer_chars.as_json(),
            "languages": dict(ordered(self.languages)),
            "fields": {name: part.as_json() for name, part in self.fields.items()},
        }
        if self.by:
            groups = {}
            for name, lengths in self.top_groups():
                groups[name] = {"rows": lengths.total(), **lengths.as_json()}
            summary["by"] = {self.by: groups}
        return summary

    def top_groups(self, most: int = 50) -> list[tuple[str, Lengths]]:
        return sorted(self.groups.items(), key=lambda item: (-item[1].total(), item[0]))[:most]


def gather(blocks: Iterable[Block], *, by: str | None = None, exact: bool = True) -> Stats:
    """Computes the statistics; `by` groups text lengths by the values of a field.

    Unless `exact`, the forms of more than 10,000 rows are those of a sample (`looked_at`); all else
    is exact.
    """
    stats = Stats(by=by)
    forms = Forms()
    hashes = array("q")
    for block in blocks:
        for values in block.values():
            text = text_of(values)
            language = language_of(text)
            is_sampled = (stats.rows - _EVERY_ROW) % _STEP_ROWS == 0
            if exact or is_sampled or stats.rows < _EVERY_ROW:
                forms.add(text, language)
                stats.looked_at += 1
            stats.rows += 1
            stats.languages[language] += 1
            hashes.append(hash(normal(text)))
            _add(stats, values, text)
    stats.distinct = len(np.unique(np.frombuffer(hashes, np.int64)))
    stats.diversity = forms.diversity()
    return stats


def _add(stats: Stats, values: Mapping[str, object], text: str) -> None:
    words = len(text.split())
    stats.chars[len(text)] += 1
    stats.words[words] += 1
    stats.empty += not words
    answer = answer_of(values)
    if answer is not None:
        stats.answered += 1
        stats.answer_chars[len(as_text(answer))] += 1
    _add_fields(stats.fields, values)
    if stats.by:
        name = _name(value_at(values, stats.by))
        if name not in stats.groups and len(stats.groups) >= _MOST_GROUPS:
            name = "(others)"
        stats.groups.setdefault(name, Lengths())[len(text)] += 1


def _add_fields(fields: dict[str, Field], values: Mapping[str, object], before: str = "") -> None:
    for name, value in values.items():
        path = f"{before}{name}"
        column = fields.get(path)
        if column is None:
            if len(fields) >= _MOST_FIELDS:
                continue
            column = fields[path] = Field()
        column.add(value)
        if path.count(".") < 2 and isinstance(value, Mapping):
            _add_fields(fields, value, f"{path}.")


def _name(value: object) -> str:
    text = as_text(value)
    if len(text) <= _LONGEST_VALUE:
        return text
    return text[: _LONGEST_VALUE - 1] + "…"


def ordered(counts: Mapping[Any, int]) -> Sequence[tuple[Any, int]]:
    """Sorts by decreasing count, then by name."""
    return sorted(counts.items(), key=lambda item: (-item[1], str(item[0])))
