"""Tracks the variety of generated rows, and chooses the kind of row to request next.

A cell is a combination of values of the axes: topic, skill, difficulty, length, or any field of the
seeds or option of the user. A row counts in the cell of its own fields and length; on axes without
a field, in the requested cell. It covers the cell if its form (its text without numbers and names)
is new.
"""

from __future__ import annotations

import itertools
import math
import random
import re
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ajet_sdk.config.source import load_yaml
from ajet_sdk.errors import ConfigError
from ajet_sdk.tasks.questions import text_of
from ajet_sdk.tasks.row_names import is_answer
from ajet_tools.dataset import prompts
from ajet_tools.dataset.curation.forms import form_of
from ajet_tools.dataset.curation.schema import LANGUAGE_FIELDS, OURS, query_of
from ajet_tools.dataset.files.blocks import Row
from ajet_tools.dataset.generate.records import CIRCUMSTANCE, NoProgress

WINDOW = 100
"""Number of recent sound rows in which new forms are counted."""
_NAMED = re.compile(
    r"topic|subject|category|domain|area|skill|difficulty|level|form|format|type|kind|style"
)
"""Fields of seeds that always are axes; other fields are if each of their values repeats."""
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
    bounds: tuple[int, ...] = ()
    """For the length axis: maximum words of each value but the last."""

    def value_of(self, row: Mapping[str, object], asked: Mapping[str, str]) -> str | None:
        """Returns the row's value, or None."""
        if self.bounds:
            return self.values[bisect_left(self.bounds, len(text_of(row).split()))]
        if not self.path:
            return asked.get(self.name)
        value: object = row
        for name in self.path:
            value = value.get(name) if isinstance(value, Mapping) else None
        return str(value) if str(value) in self.values else None


def cells_of(texts: Sequence[str]) -> dict[str, tuple[str, ...]] | None:
    """Parses `--cells`: `topic=rates,percentages`, `topic=FILE` (a value per line), or a YAML file
    of lists by axis.

    Returns None without options; `none` means no axes. Raises ConfigError.
    """
    if not texts:
        return None
    values_by_axis: dict[str, tuple[str, ...]] = {}
    for text in texts:
        name, equals, values = (part.strip() for part in text.partition("="))
        if equals:
            path = Path(values)
            listed = tuple(filter(None, re.split(r"\s*,\s*", values)))
            values_by_axis[name] = prompts.lines_of(path) if path.is_file() else listed
        elif Path(text).is_file():
            values_by_axis |= _read_axes(Path(text))
        elif text != "none":
            raise ConfigError(
                f"--cells {text}: write AXIS=VALUE,VALUE, AXIS=FILE, none or a YAML file"
            )
    for name, axis in values_by_axis.items():
        if not name or len(axis) < 2 or len(set(axis)) < len(axis):
            there = ", ".join(axis) or "none"
            raise ConfigError(
                f"--cells {name}: an axis has at least 2 different values (got {there})"
            )
    return values_by_axis


def _read_axes(path: Path) -> dict[str, tuple[str, ...]]:
    try:
        read = load_yaml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read the cells in {path}: {error}") from error
    if not isinstance(read, dict) or not all(isinstance(values, list) for values in read.values()):
        raise ConfigError(
            f"{path} names no axes: it reads `topic: [rates, percentages]`, a line for each axis"
        )
    return {str(name): tuple(map(str, values)) for name, values in read.items()}


def axes_of(seeds: Sequence[Row], given: Mapping[str, Sequence[str]] | None) -> list[Axis]:
    """Returns the axes of the seeds' fields and lengths, and the given axes, which replace those of
    the same name.

    An empty `given` means no axes. Raises ConfigError for too many cells.
    """
    if given is not None and not given:
        return []
    given = {
        name: values for name, values in (given or {}).items() if name not in CIRCUMSTANCE.values()
    }
    rows = [seed.values for seed in seeds]
    axis_by_name = {axis.name: axis for axis in [*_field_axes(rows), *_length_axis(rows)]}
    for name, values in given.items():
        axis_by_name[name] = Axis(
            name, tuple(values), axis_by_name[name].path if name in axis_by_name else ()
        )
    cells = math.prod(len(axis.values) for axis in axis_by_name.values())
    if cells > _MOST_CELLS:
        sizes = ", ".join(f"{axis.name} {len(axis.values)}" for axis in axis_by_name.values())
        raise ConfigError(
            f"there are {cells:,} cells ({sizes}), at most {_MOST_CELLS:,}: --cells AXIS=... with"
            " fewer"
        )
    return list(axis_by_name.values())


def _field_axes(rows: Sequence[Mapping[str, object]]) -> list[Axis]:
    """Returns axes for fields with a few short values, except question and answer."""
    counts: dict[tuple[str, ...], Counter[str]] = {}
    for row in rows:
        metadata = row.get("metadata")
        inner = metadata.items() if isinstance(metadata, Mapping) else ()
        fields = [((name,), value) for name, value in row.items()]
        for path, value in [*fields, *((("metadata", name), value) for name, value in inner)]:
            taken = (
                is_answer(path[-1])
                or path[-1].lower() in (*LANGUAGE_FIELDS, *OURS)
                or path[-1] == query_of(row)
            )
            if (
                not taken
                and isinstance(value, str | int)
                and not isinstance(value, bool)
                and len(str(value)) <= 60
            ):
                counts.setdefault(path, Counter())[str(value)] += 1
    return [
        Axis(path[-1], tuple(sorted(values)), path)
        for path, values in counts.items()
        if 2 <= len(values) <= _MOST_VALUES
        and values.total() == len(rows)
        and (_NAMED.fullmatch(path[-1].lower()) or min(values.values()) >= 2)
    ]


def _length_axis(rows: Sequence[Mapping[str, object]]) -> list[Axis]:
    """Divides the seeds in thirds by length, if the longest has at least twice the words of the
    shortest."""
    words = sorted(len(text_of(row).split()) for row in rows)
    if len(words) < 4 or words[-1] < 2 * words[0]:
        return []
    bounds = tuple(sorted({words[(len(words) - 1) // 3], words[2 * (len(words) - 1) // 3]}))
    between = [f"{low + 1} to {high} words" for low, high in itertools.pairwise(bounds)]
    return [
        Axis(
            "length",
            (f"up to {bounds[0]} words", *between, f"more than {bounds[-1]} words"),
            bounds=bounds,
        )
    ]


class Coverage:
    """Counts cells and forms. Deterministic for the same rows in the same order."""

    def __init__(
        self, axes: Sequence[Axis], seeds: Sequence[Mapping[str, object]], least_new: float
    ) -> None:
        self.axes = list(axes)
        self._forms: Counter[str] = Counter()
        self._cells: Counter[tuple[str, ...]] = Counter()
        """Rows with a new form, by cell."""
        self._weights: Counter[Any] = Counter()
        """Number of these rows and of calls, by cell and by value of an axis."""
        self._recent: deque[bool] = deque(maxlen=WINDOW)
        self._all: list[tuple[str, ...]] = list(itertools.product(*(axis.values for axis in axes)))
        self.seeds_repeat = bool(seeds) and 2 * len(
            {form_of(text_of(seed)) for seed in seeds}
        ) <= len(seeds)
        """Whether the seeds themselves have few forms, so that few forms are intended."""
        self._least_new, self._warned_at = least_new, 0

    def choose(self, chance: random.Random) -> dict[str, str]:
        """Returns the cell with the lowest count, by axis; ties are broken at random."""
        if not self.axes:
            return {}

        def weight(cell: tuple[str, ...]) -> tuple[int, int, float]:
            return (
                self._weights[cell],
                sum(self._weights[pair] for pair in enumerate(cell)),
                chance.random(),
            )

        least: tuple[str, ...] = min(self._all, key=weight)
        return dict(zip((axis.name for axis in self.axes), least, strict=True))

    def choose_value(self, name: str, values: Sequence[str], chance: random.Random) -> str:
        """Returns the value chosen least often."""
        return min(values, key=lambda value: (self._weights[None, name, value], chance.random()))

    def ask(self, cell: Mapping[str, str]) -> None:
        """Counts a call for a cell, so that a cell without results is not requested forever."""
        self._weigh(tuple(cell[axis.name] for axis in self.axes))
        self._weights.update((None, name, value) for name, value in cell.items())

    def add(self, row: Mapping[str, object], asked: Mapping[str, str]) -> None:
        """Adds a sound row of a call for a cell."""
        form = form_of(text_of(row))
        is_new = form not in self._forms
        self._forms[form] += 1
        self._recent.append(is_new)
        cell = tuple(axis.value_of(row, asked) for axis in self.axes)
        if is_new and self.axes and None not in cell:
            self._cells[tuple(map(str, cell))] += 1
            self._weigh(tuple(map(str, cell)))

    def _weigh(self, cell: tuple[str, ...]) -> None:
        self._weights.update([cell, *enumerate(cell)] if cell else [])

    @property
    def repeated(self) -> list[str]:
        """The most common repeated forms, for the prompt to exclude; empty if the seeds repeat
        too."""
        if self.seeds_repeat or not self.axes:
            return []
        return [form for form, rows in self._forms.most_common(_AVOIDED) if rows >= _REPEATED]

    def collapse(self) -> str | None:
        """Returns a warning when new forms get rare. Raises Collapsed if that persists for `WINDOW`
        rows."""
        rows = self._forms.total()
        is_low = len(self._recent) == WINDOW and sum(self._recent) < self._least_new * WINDOW
        if not is_low or self.seeds_repeat:
            return None
        summary = (
            f"of the last {WINDOW} rows {sum(self._recent)} have a new form (the others repeat one"
            f" of {len(self._forms):,} with other numbers and names)"
        )
        change = (
            "name what rows should differ in (--cells topic=...), raise --temperature, give more"
            " varied seeds or another model; --max-same-form 5 keeps at most five of each form"
        )
        if not self._warned_at:
            self._warned_at = rows
            return (
                f"{summary}; if the next {WINDOW} are the same, the run stops. To avoid that:"
                f" {change}"
            )
        if rows >= self._warned_at + WINDOW:
            raise Collapsed(
                f"the writer repeats itself: {summary}. {change}; --min-new-forms 0 continues"
                " anyway"
            )
        return None

    def parts(self) -> list[str]:
        """Summarizes the figures."""
        rows = self._forms.total()
        if not rows:
            return []
        new = f", {sum(self._recent) / len(self._recent):.0%} new in the last {len(self._recent)}"
        cells = [f"{len(self._cells):,} of {len(self._all):,} cells"] if self.axes else []
        return [f"{len(self._forms):,} forms{new}", *cells]

    def as_json(self) -> dict[str, object]:
        recent = sum(self._recent) / len(self._recent) if self._recent else None
        cells = None
        if self.axes:
            values = {axis.name: dict.fromkeys(axis.values, 0) for axis in self.axes}
            for cell, rows in self._cells.items():
                for axis, value in zip(self.axes, cell, strict=True):
                    values[axis.name][value] += rows
            cells = {"covered": len(self._cells), "of": len(self._all), "forms": values}
        return {"new_share": recent, "cells": cells}
