"""Statistics of a dataset: lengths, languages, fields and their values."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ajet_sdk.tasks.questions import Reading
from ajet_tools.dataset.curation.forms import Forms
from ajet_tools.dataset.curation.language import language_of
from ajet_tools.dataset.files.values import as_text, kind_of

_MOST_FIELDS = 500
_MOST_VALUES = 100_000
"""Values of a field that are counted; of more, none is known to be the most common."""
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

    depth: int
    """0 for a column, 1 for a field within it."""
    rows: int = 0
    """Rows with this key."""
    first_lacking: int | None = None
    """The number of the first row without this key that a row with it follows."""
    kinds: Counter[str] = field(default_factory=Counter)
    first_of_kind: dict[str, int] = field(default_factory=dict)
    """The number of the first row with a value of each kind."""
    values: Counter[str] = field(default_factory=Counter)
    """Counts of short values, as JSON."""
    others: int = 0
    """Number of values not counted individually."""
    has_too_many: bool = False
    """Some short values are not counted, since there are too many different ones."""

    def add(self, value: object, row: int) -> None:
        if self.first_lacking is None and self.rows < row:
            # all rows before had the key, so their number is that of the first without it
            self.first_lacking = self.rows
        self.rows += 1
        kind = kind_of(value)
        self.kinds[kind] += 1
        self.first_of_kind.setdefault(kind, row)
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

    @property
    def present(self) -> int:
        """Rows with a value other than null."""
        return self.rows - self.kinds["null"]

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
    """The forms are those of the first 10,000 rows and of every 101st of the others; all else is of
    every row."""

    rows: int = 0
    distinct: int = 0
    """Number of distinct questions, ignoring case and white space."""
    forms: Forms = field(default_factory=Forms)
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

    @property
    def duplicates(self) -> int:
        return self.rows - self.distinct

    def as_json(self) -> dict[str, object]:
        diversity = self.forms.diversity()
        return {
            "rows": self.rows,
            "looked_at": diversity.rows,
            "distinct": self.distinct,
            "duplicates": self.duplicates,
            "diversity": diversity.as_json(),
            "empty": self.empty,
            "answered": self.answered,
            "chars": self.chars.as_json(),
            "words": self.words.as_json(),
            "answer_chars": self.answer_chars.as_json(),
            "languages": dict(ordered(self.languages)),
            "fields": {name: part.as_json() for name, part in self.fields.items()},
        }

    def add(self, row: Reading) -> None:
        text = row.text
        language = language_of(text)
        self.languages[language] += 1
        if self.rows < _EVERY_ROW or (self.rows - _EVERY_ROW) % _STEP_ROWS == 0:
            self.forms.add(text, language)
        words = len(text.split())
        self.chars[len(text)] += 1
        self.words[words] += 1
        self.empty += not words
        if row.answer is not None:
            self.answered += 1
            self.answer_chars[len(as_text(row.answer))] += 1
        self._add_fields(row.values, "", 0)
        self.rows += 1

    def _add_fields(self, values: Mapping[str, object], before: str, depth: int) -> None:
        for name, value in values.items():
            path = f"{before}{name}"
            column = self.fields.get(path)
            if column is None:
                if len(self.fields) >= _MOST_FIELDS:
                    continue
                column = self.fields[path] = Field(depth)
            column.add(value, self.rows)
            if depth < 2 and isinstance(value, dict):
                self._add_fields(value, f"{path}.", depth + 1)


def ordered(counts: Mapping[Any, int]) -> Sequence[tuple[Any, int]]:
    """Sorts by decreasing count, then by name."""
    return sorted(counts.items(), key=lambda item: (-item[1], str(item[0])))
