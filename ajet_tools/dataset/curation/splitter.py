"""Splits a dataset: a row is assigned by a hash of its content, so it keeps its side when the file
grows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from ajet_sdk.errors import ConfigError, TaskError
from ajet_sdk.tasks.questions import text_of
from ajet_tools.dataset.curation.fields import has_dotted_key
from ajet_tools.dataset.files.blocks import Block, LineBlock, encodable
from ajet_tools.dataset.files.lines import json_at
from ajet_tools.dataset.files.values import value_at
from ajet_tools.dataset.similarity.text import normal, normals

_TRAINING = ("train", "training")
_GOLDEN = 0.6180339887498949


def check_fractions(fractions: Mapping[str, float]) -> dict[str, float]:
    """Returns the fractions after validation. Raises ConfigError."""
    if len(fractions) < 2 or any(not 0 <= share <= 1 for share in fractions.values()):
        raise ConfigError(
            "a split needs at least two sides, each with a fraction from 0 to 1 (got"
            f" {dict(fractions)})"
        )
    if abs(sum(fractions.values()) - 1) > 1e-6:
        raise ConfigError(
            f"fractions must add up to 1 (got {sum(fractions.values()):g}: {dict(fractions)})"
        )
    return dict(fractions)


def is_held_out(side: str, sides: Iterable[str]) -> bool:
    """Whether rows of a side are kept out of training: each besides train, where there is one."""
    return side not in _TRAINING and any(name in _TRAINING for name in sides)


def key_of(values: Mapping[str, object], by: str | None = None, where: str = "a row") -> str:
    """Returns the key that decides a row's side: the field `by`, else the question in normal
    form."""
    if by is not None:
        value = value_at(values, by)
        if value is None:
            raise TaskError(f"{where} has no {by}, by which rows are to be grouped")
        return (
            value
            if isinstance(value, str)
            else json.dumps(value, sort_keys=True, ensure_ascii=False)
        )
    return normal(text_of(values)) or json.dumps(
        values, sort_keys=True, ensure_ascii=False, default=str
    )


def keys_of(block: Block, by: str | None = None) -> pl.Series | list[str]:
    """Returns `key_of` for each row; a polars series if no key holds a lone surrogate."""
    if by is not None:
        return [key_of(row.values, by, row.where) for row in block.rows()]
    forms = normals(block.texts)
    blank = (forms == "").arg_true().to_list()
    if not blank:
        return forms
    keys: list[str] = forms.to_list()
    for index, row in zip(blank, block.rows(blank), strict=True):
        keys[index] = key_of(row.values)
    return keys


def _places(seed: int, keys: Iterable[str]) -> npt.NDArray[np.float64]:
    """Hashes each key to a number from 0 to 1."""
    start = f"{seed}\n".encode()
    hashes = [
        blake2b(start + key.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        for key in keys
    ]
    return np.frombuffer(b"".join(hashes), ">u8") / 2**64


def _sides(
    places: npt.NDArray[np.float64], fractions: Mapping[str, float]
) -> npt.NDArray[np.integer[Any]]:
    first, *others = fractions
    edges = np.cumsum([fractions[name] for name in others]) - 1e-12
    return np.array([*others, first])[np.searchsorted(edges, places, side="right")]


class Splitter:
    """Assigns each row of a file to a side.

    Without `stratify`, the side depends on the row's key only. With it, each value of that field is
    divided as exactly as whole rows allow, and rows appended to the file change no earlier side.
    """

    def __init__(
        self,
        fractions: Mapping[str, float],
        *,
        by: str | None = None,
        stratify: str | None = None,
        seed: int = 0,
    ) -> None:
        self.fractions = check_fractions(fractions)
        self._stratify, self._seed = stratify, seed
        self._known: list[tuple[Any, Any]] = []
        """Sorted hashes of keys with the number of each, in arrays of decreasing size (merged as in
        an LSM tree)."""
        self._counts: dict[str, int] = {}
        self._starts: dict[str, float] = {}

    @property
    def strata(self) -> set[str]:
        """The values of the stratification field seen so far, as JSON."""
        return set(self._counts)

    def sides(self, block: Block, keys: pl.Series | Sequence[str]) -> npt.NDArray[np.integer[Any]]:
        """Assigns the next rows, by their keys or those of the rows they belong to. Raises
        TaskError."""
        if self._stratify is None:
            return _sides(_places(self._seed, keys), self.fractions)
        texts = (
            keys
            if isinstance(keys, pl.Series)
            else pl.Series(map(encodable, keys), dtype=pl.String)
        )
        hashes, first, rows = np.unique(
            texts.hash().to_numpy(), return_index=True, return_inverse=True
        )
        places = np.full(len(hashes), np.nan)
        for known, their in self._known:
            at = np.minimum(np.searchsorted(known, hashes), len(known) - 1)
            places = np.where(known[at] == hashes, their[at], places)
        new = np.flatnonzero(np.isnan(places))
        new = new[np.argsort(first[new])]
        places[new] = self._new_places(_strata(block, self._stratify, first[new]))
        self._remember(np.sort(new), hashes, places)
        return _sides(places[rows], self.fractions)

    def _new_places(self, strata: pl.Series) -> npt.NDArray[np.float64]:
        """Returns numbers from 0 to 1 for new rows of these strata."""
        names = strata.unique(maintain_order=True).to_list()
        unseen = [name for name in names if name not in self._starts]
        self._starts.update(
            zip(unseen, _places(self._seed, [f"stratum {name}" for name in unseen]), strict=True)
        )
        known = {
            "before": [self._counts.get(name, 0) for name in names],
            "start": [*map(self._starts.get, names)],
        }
        rows = strata.to_frame("stratum").with_columns(
            number=pl.int_range(pl.len()).over("stratum")
        )
        rows = rows.join(
            pl.DataFrame({"stratum": names, **known}),
            on="stratum",
            how="left",
            maintain_order="left",
        )
        self._counts.update(
            rows.group_by("stratum")
            .agg((pl.col("before") + pl.col("number")).max() + 1)
            .iter_rows()
        )
        # multiples of the golden ratio modulo 1 are evenly distributed over any run
        return (rows["start"] + (rows["before"] + rows["number"]) * _GOLDEN).to_numpy() % 1

    def _remember(self, new: Any, hashes: Any, places: Any) -> None:
        more = hashes[new], places[new]
        while self._known and len(self._known[-1][0]) <= len(more[0]):
            last = self._known.pop()
            both = np.concatenate([last[0], more[0]])
            order = np.argsort(both, kind="stable")
            more = both[order], np.concatenate([last[1], more[1]])[order]
        if len(more[0]):
            self._known.append(more)


def _strata(block: Block, field: str, indices: npt.NDArray[np.integer[Any]]) -> pl.Series:
    """Returns the values of a field as JSON, from the column where possible, else from the rows."""
    path = tuple(field.split("."))
    if isinstance(block, LineBlock) and not has_dotted_key(block, [path]):
        values = json_at(
            block.lines if len(indices) == len(block) else block.lines.gather(indices), path
        )
        if values is not None:
            names = values.unique()
            return values.replace_strict(
                names, [_stratum(json.loads(name or "null")) for name in names]
            )
    values_of_rows = (value_at(row.values, field) for row in block.rows(indices))
    return pl.Series([_stratum(value) for value in values_of_rows], dtype=pl.String)


def _stratum(value: object) -> str:
    return encodable(json.dumps(value, sort_keys=True, ensure_ascii=False))
