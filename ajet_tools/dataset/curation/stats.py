"""Statistics of a dataset in one pass, with 8 bytes of memory per row."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import polars as pl

from ajet_sdk.tasks.questions import answer_of, text_of
from ajet_tools.dataset.curation.forms import Diversity, Forms
from ajet_tools.dataset.curation.language import language_of
from ajet_tools.dataset.files.blocks import Block
from ajet_tools.dataset.files.values import kind_of, value_at
from ajet_tools.dataset.similarity.text import normals

_MOST_FIELDS = 500
_MOST_VALUES = 1000
_LONGEST_VALUE = 80
_SHOWN = 10
_EVERY_ROW, _STEP_ROWS = 10_000, 101  # a prime, so that alternating rows are sampled equally
_ENCODE = json.JSONEncoder(ensure_ascii=False).encode


class Lengths(Counter[int]):
    """A distribution of lengths."""

    def quantile(self, share: float) -> int:
        """Returns the quantile of a share."""
        rank, seen = max(1, math.ceil(share * self.total())), 0
        for length, times in sorted(self.items()):
            seen += times
            if seen >= rank:
                return length
        return 0

    def as_json(self) -> dict[str, float]:
        total = sum(length * times for length, times in self.items())
        quantiles = {f"p{share}": self.quantile(share / 100) for share in (5, 50, 95)}
        ends = min(self, default=0), max(self, default=0)
        return {
            "min": ends[0],
            **quantiles,
            "max": ends[1],
            "mean": round(total / max(1, self.total()), 4),
        }


@dataclass
class Field:
    """The values of a field."""

    present: int = 0
    """Rows with a value other than null."""
    kinds: Counter[str] = field(default_factory=Counter)
    values: Counter[str] = field(default_factory=Counter)
    """Counts of short values, as JSON; limited to a thousand values."""
    others: int = 0
    """Number of values not counted individually."""

    def add(self, value: object, times: int = 1) -> None:
        self.present += times * (value is not None)
        self.kinds[kind_of(value)] += times
        if value is None or isinstance(value, Mapping):
            return
        nested = isinstance(value, list) and (
            len(value) > 8 or any(isinstance(item, dict | list) for item in value)
        )
        if nested or (isinstance(value, str) and len(value) > _LONGEST_VALUE):
            self.others += times
            return
        text = _ENCODE(value)
        if text in self.values or (
            len(self.values) < _MOST_VALUES and len(text) <= _LONGEST_VALUE + 2
        ):
            self.values[text] += times
        else:
            self.others += times

    def as_json(self) -> dict[str, object]:
        distinct = len(self.values) if not self.others else f">{len(self.values)}"
        kinds = dict(ordered(self.kinds))
        return {
            "present": self.present,
            "kinds": kinds,
            "distinct": distinct,
            "common": dict(self.common()),
        }

    def common(self, most: int = _SHOWN) -> list[tuple[str, int]]:
        """Returns the repeated values, as JSON, with their counts."""
        return [(text, number) for text, number in ordered(self.values)[:most] if number > 1]


@dataclass
class Stats:
    rows: int = 0
    looked_at: int = 0
    """Number of rows whose language, form, answer and fields were examined: all, or the first
    10,000 and every 101st of the others, which then counts as 101.
    """
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
            groups = {
                name: {"rows": part.total(), **part.as_json()} for name, part in self.top_groups()
            }
            summary["by"] = {self.by: groups}
        return summary

    def top_groups(self, most: int = 50) -> list[tuple[str, Lengths]]:
        return sorted(self.groups.items(), key=lambda item: (-item[1].total(), item[0]))[:most]


def gather(blocks: Iterable[Block], *, by: str | None = None, exact: bool = True) -> Stats:
    """Computes the statistics; `by` groups text lengths by the values of a field.

    Unless `exact`, fields, answers, forms and languages of more than 10,000 rows are estimates
    (`looked_at`); counts of rows and distinct texts, and lengths, are always exact.
    """
    stats = Stats(by=by)
    forms, hashes = Forms(), list[pl.Series]()
    for block in blocks:
        stats.chars.update(dict(block.texts.str.len_chars().value_counts().iter_rows()))
        stats.words.update(dict(block.texts.str.count_matches(r"\S+").value_counts().iter_rows()))
        stats.empty += int((~block.texts.str.contains(r"\S")).sum())
        hashes.append(normals(block.texts).hash())
        first, every = (len(block), 1) if exact else (max(0, _EVERY_ROW - stats.rows), _STEP_ROWS)
        some = [*range(min(first, len(block))), *range(first, len(block), every)]
        for index, row in zip(some, block.rows(some), strict=True):
            _add(stats, forms, row.values, 1 if index < first else min(every, len(block) - index))
        stats.rows, stats.looked_at = stats.rows + len(block), stats.looked_at + len(some)
    stats.distinct = pl.concat(hashes).n_unique() if hashes else 0
    stats.diversity = forms.diversity()
    return stats


def _add(stats: Stats, forms: Forms, values: Mapping[str, object], times: int) -> None:
    text = text_of(values)
    language = language_of(text)
    forms.add(text, language)
    stats.languages[language] += times
    if (answer := _answer(values)) is not None:
        stats.answered += times
        stats.answer_chars[len(answer)] += times
    _add_fields(stats.fields, values, times)
    if stats.by:
        name = _name(value_at(values, stats.by))
        if name not in stats.groups and len(stats.groups) >= _MOST_VALUES:
            name = "(others)"
        stats.groups.setdefault(name, Lengths())[len(text)] += times


def _add_fields(
    fields: dict[str, Field], values: Mapping[str, object], times: int, before: str = ""
) -> None:
    for name, value in values.items():
        path = f"{before}{name}"
        column = fields.get(path)
        if column is None:
            if len(fields) >= _MOST_FIELDS:
                continue
            column = fields[path] = Field()
        column.add(value, times)
        if path.count(".") < 2 and isinstance(value, Mapping):
            _add_fields(fields, value, times, f"{path}.")


def _answer(values: Mapping[str, object]) -> str | None:
    """Returns the answer, or the reply at the end of a chat, as text."""
    if (answer := answer_of(values)) is not None:
        return answer if isinstance(answer, str) else _ENCODE(answer)
    messages = values.get("messages")
    if isinstance(messages, list) and messages and isinstance(messages[-1], Mapping):
        last = messages[-1]
        if last.get("role") == "assistant":
            return last["content"] if isinstance(last.get("content"), str) else ""
    return None


def _name(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 1] + "…"


def ordered(counts: Mapping[Any, int]) -> Sequence[tuple[Any, int]]:
    """Sorts by decreasing count, then by name."""
    return sorted(counts.items(), key=lambda item: (-item[1], str(item[0])))
