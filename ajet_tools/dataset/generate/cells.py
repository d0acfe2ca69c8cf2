"""Tracks the variety of generated rows, and chooses the kind of row to request next.

A cell is a combination of values of the axes: topic, skill, difficulty, or any field of the seeds
or option of the user. A row counts in the cell of its own fields; on axes without a field, in the
requested cell. It covers the cell if its form (its text without numbers and names) is new.
"""

from __future__ import annotations

import itertools
import math
import random
import re
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ajet_sdk.errors import ConfigError
from ajet_sdk.tasks.questions import text_of
from ajet_sdk.tasks.row_names import is_answer
from ajet_tools.dataset import prompts
from ajet_tools.dataset.curation.forms import form_of
from ajet_tools.dataset.curation.schema import LANGUAGE_FIELDS, OURS, query_of
from ajet_tools.dataset.files.blocks import Row
from ajet_tools.dataset.generate.records import NoProgress
from ajet_tools.dataset.generate.settings import CIRCUMSTANCE

Cell = tuple[str, ...]
WINDOW = 200
"""Number of recent sound rows in which new forms are counted."""
_NAMED = re.compile(
    r"topic|subject|category|domain|area|skill|difficulty|level|form|format|type|kind|style"
)
"""Fields of seeds that always are axes; other fields are if each of their values repeats."""
_LONGEST_VALUE = 60
_MOST_VALUES = 50
_MOST_CELLS = 2000
_AVOIDED = 5
_REPEATED = 3
"""Number of rows of a form from which the prompt asks to avoid it."""


class Collapsed(NoProgress):
    """The writer repeats itself: hardly any row has a new form."""


@dataclass(frozen=True)
class Axis:
    """A dimension in which rows differ."""

    name: str
    values: tuple[str, ...]
    path: tuple[str, ...] = ()
    """Path of the value in a row, if rows have a field for it."""

    def value_of(self, row: Mapping[str, object], asked: Mapping[str, str]) -> str | None:
        """Returns the row's value, or None."""
        if not self.path:
            return asked.get(self.name)
        value: object = row
        for name in self.path:
            value = value.get(name) if isinstance(value, Mapping) else None
        return str(value) if str(value) in self.values else None


def cells_of(texts: Sequence[str]) -> dict[str, tuple[str, ...]] | None:
    """Parses `--cells`: `topic=rates,percentages` or `topic=FILE` (a value per line).

    Returns None without options; `none` means no axes. Raises ConfigError.
    """
    if not texts:
        return None
    values_by_axis: dict[str, tuple[str, ...]] = {}
    for text in texts:
        name, equals, listed = (part.strip() for part in text.partition("="))
        if text == "none":
            continue
        if not equals:
            raise ConfigError(f"--cells {text}: write AXIS=VALUE,VALUE, AXIS=FILE or none")
        if Path(listed).is_file():
            values = prompts.lines_of(Path(listed))
        else:
            values = tuple(filter(None, re.split(r"\s*,\s*", listed)))
        if not name or len(values) < 2 or len(set(values)) < len(values):
            raise ConfigError(
                f"--cells {name}: an axis has at least 2 different values (got"
                f" {', '.join(values) or 'none'})"
            )
        values_by_axis[name] = values
    return values_by_axis


def axes_of(seeds: Sequence[Row], given: Mapping[str, Sequence[str]] | None) -> list[Axis]:
    """Returns the axes of the seeds' fields, and the given axes, which replace those of the same
    name.

    An empty `given` means no axes. Raises ConfigError for too many cells.
    """
    if given is not None and not given:
        return []
    axis_by_name = {axis.name: axis for axis in _field_axes([seed.values for seed in seeds])}
    for name, values in (given or {}).items():
        if name in CIRCUMSTANCE.values():
            continue  # these replace the lists of a strategy
        path = axis_by_name[name].path if name in axis_by_name else ()
        axis_by_name[name] = Axis(name, tuple(values), path)
    axes = list(axis_by_name.values())
    cells = math.prod(len(axis.values) for axis in axes)
    if cells > _MOST_CELLS:
        sizes = ", ".join(f"{axis.name} {len(axis.values)}" for axis in axes)
        raise ConfigError(
            f"there are {cells:,} cells ({sizes}), at most {_MOST_CELLS:,}: --cells AXIS=... with"
            " fewer"
        )
    return axes


def _field_axes(rows: Sequence[Mapping[str, object]]) -> list[Axis]:
    """Returns axes for fields with a few short values, except question and answer."""
    counts: dict[tuple[str, ...], Counter[str]] = {}
    for row in rows:
        for path, value in _fields(row):
            name = path[-1]
            is_taken = name.lower() in (*LANGUAGE_FIELDS, *OURS) or name == query_of(row)
            if is_taken or is_answer(name):
                continue
            is_value = isinstance(value, str | int) and not isinstance(value, bool)
            if is_value and len(str(value)) <= _LONGEST_VALUE:
                counts.setdefault(path, Counter())[str(value)] += 1
    axes = []
    for path, values in counts.items():
        is_in_all = values.total() == len(rows)
        recurs = _NAMED.fullmatch(path[-1].lower()) or min(values.values()) >= 2
        if is_in_all and recurs and 2 <= len(values) <= _MOST_VALUES:
            axes.append(Axis(path[-1], tuple(sorted(values)), path))
    return axes


def _fields(row: Mapping[str, object]) -> Iterator[tuple[tuple[str, ...], object]]:
    """Yields path and value of a row's columns, and of the fields in its metadata."""
    for name, value in row.items():
        yield (name,), value
    metadata = row.get("metadata")
    if isinstance(metadata, Mapping):
        for name, value in metadata.items():
            yield ("metadata", name), value


class Coverage:
    """Counts calls and rows by cell, and rows by form."""

    def __init__(
        self, axes: Sequence[Axis], seeds: Sequence[Mapping[str, object]], least_new: float
    ) -> None:
        self.axes = list(axes)
        self._cells: list[Cell] = list(itertools.product(*(axis.values for axis in axes)))
        self._covered: Counter[Cell] = Counter()
        """Rows with a new form, by cell."""
        self._weights: Counter[Any] = Counter()
        """Calls and rows with a new form, by cell and by value of an axis."""
        self._chosen: Counter[tuple[str, str]] = Counter()
        """Calls, by axis and value."""
        self._forms: Counter[str] = Counter()
        self._recent: deque[bool] = deque(maxlen=WINDOW)
        """Whether the last rows had new forms."""
        self._least_new = least_new
        seed_forms = {form_of(text_of(seed)) for seed in seeds}
        self.seeds_repeat = bool(seeds) and 2 * len(seed_forms) <= len(seeds)
        """Whether the seeds themselves have few forms, so that few forms are intended."""

    def choose(self, chance: random.Random) -> dict[str, str]:
        """Returns the cell with the lowest count, by axis; ties are broken at random."""
        if not self.axes:
            return {}

        def weight(cell: Cell) -> tuple[int, int, float]:
            by_value = sum(self._weights[pair] for pair in enumerate(cell))
            return self._weights[cell], by_value, chance.random()

        least = min(self._cells, key=weight)
        return dict(zip((axis.name for axis in self.axes), least, strict=True))

    def choose_value(self, name: str, values: Sequence[str], chance: random.Random) -> str:
        """Returns the value chosen least often."""
        return min(values, key=lambda value: (self._chosen[name, value], chance.random()))

    def ask(self, cell: Mapping[str, str]) -> None:
        """Counts a call for a cell, so that a cell without results is not requested forever."""
        self._weigh(tuple(cell[axis.name] for axis in self.axes))
        self._chosen.update(cell.items())

    def add(self, row: Mapping[str, object], asked: Mapping[str, str]) -> None:
        """Adds a sound row of a call for a cell."""
        form = form_of(text_of(row))
        is_new = form not in self._forms
        self._forms[form] += 1
        self._recent.append(is_new)
        values = [axis.value_of(row, asked) for axis in self.axes]
        if is_new and values and None not in values:
            cell = tuple(map(str, values))
            self._covered[cell] += 1
            self._weigh(cell)

    def _weigh(self, cell: Cell) -> None:
        if cell:
            self._weights.update([cell, *enumerate(cell)])

    @property
    def repeated(self) -> list[str]:
        """The most common repeated forms, for the prompt to exclude; empty if the seeds repeat
        too."""
        if self.seeds_repeat or not self.axes:
            return []
        return [form for form, rows in self._forms.most_common(_AVOIDED) if rows >= _REPEATED]

    def check(self) -> None:
        """Raises Collapsed if hardly any of the last rows has a new form."""
        new = sum(self._recent)
        is_low = len(self._recent) == WINDOW and new < self._least_new * WINDOW
        if is_low and not self.seeds_repeat:
            raise Collapsed(
                f"the writer repeats itself: of the last {WINDOW} rows {new} have a new form (the"
                f" others repeat one of {len(self._forms):,} with other numbers and names). Name"
                " what rows should differ in (--cells topic=...), raise the temperature, give more"
                " varied seeds or another model, or keep a few rows of each form"
                " (--with max_same_form=5); --with min_new_forms=0 continues anyway"
            )

    def parts(self) -> list[str]:
        """Summarizes the figures."""
        if not self._forms:
            return []
        share = sum(self._recent) / len(self._recent)
        parts = [f"{len(self._forms):,} forms, {share:.0%} new in the last {len(self._recent)}"]
        if self.axes:
            parts.append(f"{len(self._covered):,} of {len(self._cells):,} cells")
        return parts

    def as_json(self) -> dict[str, object]:
        share = sum(self._recent) / len(self._recent) if self._recent else None
        if not self.axes:
            return {"new_share": share, "cells": None}
        rows_by_value = {axis.name: dict.fromkeys(axis.values, 0) for axis in self.axes}
        for cell, rows in self._covered.items():
            for axis, value in zip(self.axes, cell, strict=True):
                rows_by_value[axis.name][value] += rows
        cells = {"covered": len(self._covered), "of": len(self._cells), "forms": rows_by_value}
        return {"new_share": share, "cells": cells}
