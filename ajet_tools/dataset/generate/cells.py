"""The cells of `--cells`: combinations of values, of which each call asks for one."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ajet_sdk.errors import ConfigError
from ajet_tools.dataset import prompts
from ajet_tools.dataset.files.blocks import Row

_MOST_CELLS = 2000


@dataclass(frozen=True)
class Axis:
    """A dimension in which rows differ."""

    name: str
    values: tuple[str, ...]
    path: tuple[str, ...] = ()
    """Path of the value in a row, if the seeds have a field of this name."""


def cells_of(texts: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Parses `--cells`: `topic=rates,percentages` or `topic=FILE` (a value per line). Raises
    ConfigError."""
    values_by_axis: dict[str, tuple[str, ...]] = {}
    for text in texts:
        name, equals, listed = (part.strip() for part in text.partition("="))
        if not equals:
            raise ConfigError(f"--cells {text}: write AXIS=VALUE,VALUE or AXIS=FILE")
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


def axes_of(seeds: Sequence[Row], given: Mapping[str, Sequence[str]]) -> list[Axis]:
    """Returns the axes, with the seeds' fields of the same names. Raises ConfigError for too many
    cells."""
    cells = math.prod(map(len, given.values()))
    if cells > _MOST_CELLS:
        sizes = ", ".join(f"{name} {len(values)}" for name, values in given.items())
        raise ConfigError(
            f"there are {cells:,} cells ({sizes}), at most {_MOST_CELLS:,}: --cells AXIS=... with"
            " fewer"
        )
    return [Axis(name, tuple(values), _path_of(name, seeds)) for name, values in given.items()]


def _path_of(name: str, seeds: Sequence[Row]) -> tuple[str, ...]:
    for seed in seeds:
        metadata = seed.values.get("metadata")
        if isinstance(metadata, Mapping) and name in metadata:
            return ("metadata", name)
        if name in seed.values:
            return (name,)
    return ()


class Cells:
    """All cells of some axes in a random order, which calls take in turns."""

    def __init__(self, axes: Sequence[Axis], seed: int) -> None:
        self._names = [axis.name for axis in axes]
        self._cells = list(itertools.product(*(axis.values for axis in axes)))
        random.Random(seed).shuffle(self._cells)

    def of_call(self, number: int) -> dict[str, str]:
        """Returns the values of a call, by axis."""
        return dict(zip(self._names, self._cells[number % len(self._cells)], strict=True))
