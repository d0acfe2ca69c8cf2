"""What changed between two datasets: rows added, removed and changed, matched by task id and by text.

Rows are matched by the id they have, then, where one has none or it is unknown, by what they ask. Of each row of the
first file some 350 bytes are remembered; it is read again for the values that are shown.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import numpy as np
import polars as pl

from ajet_sdk.errors import ConfigError
from ajet_tools.dataset.files.blocks import LineBlock, Row, text_of
from ajet_tools.dataset.files.hashes import digest_of
from ajet_tools.dataset.files.tables import read_blocks
from ajet_tools.text.clean import flat_keys

_MISSING = object()
_LOOKED_AT = 100
"""Rows with one text among which an equal one is looked for."""


@dataclass(frozen=True)
class Changed:
    """A row that stands in both files, differently."""

    before: str
    """Its place in the first file."""
    after: str
    text: str
    by: str
    """What it was matched by: `id` or `text`."""
    fields: dict[str, tuple[Any, Any]]
    """Path -> value before, value after; None where there is none."""
    added: tuple[str, ...] = ()
    """Paths that the first file's row lacks."""
    removed: tuple[str, ...] = ()


@dataclass
class Difference:
    """What differs. Of each kind the first are kept, and all are counted."""

    same: int = 0
    changed_count: int = 0
    added_count: int = 0
    removed_count: int = 0
    changed: list[Changed] = field(default_factory=list)
    added: list[Row] = field(default_factory=list)
    removed: list[Row] = field(default_factory=list)

    @property
    def any(self) -> bool:
        return bool(self.changed_count or self.added_count or self.removed_count)


@dataclass(frozen=True, slots=True)
class _Entry:
    number: int
    content: bytes


_Entries = _Entry | deque[_Entry]
_Key = TypeVar("_Key", str, int)


class _Index:
    """The rows of the first file, each to be taken once."""

    def __init__(self) -> None:
        self._by_id: dict[str, _Entries] = {}
        self._by_text: dict[int, _Entries] = {}
        self.left: set[int] = set()

    def add(self, number: int, values: Mapping[str, Any]) -> None:
        entry = _Entry(number, _digest(values))
        self.left.add(number)
        if (row_id := _own_id(values)) is not None:
            _put(self._by_id, row_id, entry)
        _put(self._by_text, digest_of(text_of(values)), entry)

    def take(self, values: Mapping[str, Any], digest: bytes) -> tuple[_Entry, str] | None:
        """The row that this one is, and what tells so: an equal one where there are several."""
        row_id = _own_id(values)
        of_id = None if row_id is None else self._by_id.get(row_id)
        for entries, by in ((of_id, "id"), (self._by_text.get(digest_of(text_of(values))), "text")):
            entry = self._first(entries, digest)
            if entry is not None:
                self.left.discard(entry.number)
                return entry, by
        return None

    def _first(self, entries: _Entries | None, digest: bytes) -> _Entry | None:
        if entries is None or isinstance(entries, _Entry):
            return entries if entries is not None and entries.number in self.left else None
        while entries and entries[0].number not in self.left:
            entries.popleft()
        free = [entry for entry in islice(entries, _LOOKED_AT) if entry.number in self.left]
        return next((entry for entry in free if entry.content == digest), free[0] if free else None)


def _put(index: dict[_Key, _Entries], key: _Key, entry: _Entry) -> None:
    """Most keys have one row, and a deque would be most of the memory."""
    known = index.get(key)
    if known is None:
        index[key] = entry
    elif isinstance(known, deque):
        known.append(entry)
    else:
        index[key] = deque((known, entry))


def diff(
    before: str, after: str, *, mapping: Mapping[str, str] | None = None, ignore: tuple[str, ...] = (), limit: int = 20
) -> Difference:
    """What differs between two datasets.

    Args:
        before: read twice, so not stdin.
        after: read once.
        mapping: as in `read`.
        ignore: columns that are not compared, such as provenance.
        limit: how many rows of each kind are kept.
    """
    if before == "-":
        raise ConfigError(
            "the first dataset is read twice, which is impossible with stdin; pass a file, and - as the second"
        )
    index, difference = _Index(), Difference()
    unequal = _without_equal_lines(before, after) if after != "-" and not (mapping or ignore) else None
    if unequal is not None:
        difference.same = int((~unequal[0]).sum())
    rows = partial(_rows, before, mapping, ignore, unequal[0] if unequal else None)
    for number, row in enumerate(rows()):
        index.add(number, row.values)
    matched: dict[int, tuple[Row, str]] = {}
    for row in _rows(after, mapping, ignore, unequal[1] if unequal else None):
        digest = _digest(row.values)
        taken = index.take(row.values, digest)
        if taken is None:
            difference.added_count += 1
            if len(difference.added) < limit:
                difference.added.append(row)
        elif taken[0].content == digest:
            difference.same += 1
        else:
            difference.changed_count += 1
            if len(matched) < limit:
                matched[taken[0].number] = (row, taken[1])
    difference.removed_count = len(index.left)
    _show(difference, rows(), matched, index.left, limit)
    return difference


def _without_equal_lines(before: str, after: str) -> tuple[Any, Any] | None:
    """Which rows are to be compared: not those of lines that both files have as often. None where they are no lines."""
    hashes, other_hashes = _line_hashes(before), _line_hashes(after)
    if hashes is None or other_hashes is None:
        return None
    (lines, times), (others, other_times) = (np.unique(each, return_counts=True) for each in (hashes, other_hashes))
    common, at, other_at = np.intersect1d(lines, others, assume_unique=True, return_indices=True)
    equal = pl.Series(common[times[at] == other_times[other_at]]).implode()
    masks = [(~pl.Series(each).is_in(equal)).to_numpy() for each in (hashes, other_hashes)]
    return masks[0], masks[1]


def _line_hashes(path: str) -> Any:
    hashes = []
    for block in read_blocks(path):
        if not isinstance(block, LineBlock):
            return None
        hashes.append(block.lines.hash())
    return (pl.concat(hashes) if hashes else pl.Series([], dtype=pl.UInt64)).to_numpy()


def _show(
    difference: Difference, rows: Iterator[Row], matched: Mapping[int, tuple[Row, str]], unmatched: set[int], limit: int
) -> None:
    """Fill in what only the first file's own values tell."""
    changed: dict[int, Changed] = {}
    most = min(limit, len(unmatched))
    for number, row in enumerate(rows):
        if len(changed) == len(matched) and len(difference.removed) == most:
            break
        if number in matched:
            changed[number] = _compare(row, *matched[number])
        elif number in unmatched and len(difference.removed) < limit:
            difference.removed.append(row)
    difference.changed = [changed[number] for number in matched]


def _rows(path: str, mapping: Mapping[str, str] | None, ignore: tuple[str, ...], chosen: Any) -> Iterator[Row]:
    for row in _chosen(path, mapping, chosen):
        values = {name: value for name, value in row.values.items() if name not in ignore} if ignore else row.values
        yield Row(row.where, values)


def _chosen(path: str, mapping: Mapping[str, str] | None, chosen: Any) -> Iterator[Row]:
    number = 0
    for block in read_blocks(path, mapping=mapping):
        yield from block.rows(None if chosen is None else np.flatnonzero(chosen[number : number + len(block)]))
        number += len(block)


def _own_id(values: Mapping[str, Any]) -> str | None:
    for name in ("task_id", "id"):
        if isinstance(values.get(name), str | int) and not isinstance(values[name], bool):
            return str(values[name])
    return None


def _digest(values: Mapping[str, Any]) -> bytes:
    return hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=16).digest()


def _compare(before: Row, after: Row, by: str) -> Changed:
    a, b = dict(flat_keys(before.values)), dict(flat_keys(after.values))
    differing = [path for path in (*a, *(p for p in b if p not in a)) if a.get(path, _MISSING) != b.get(path, _MISSING)]
    return Changed(
        before=before.where,
        after=after.where,
        text=text_of(after.values),
        by=by,
        fields={path: (a.get(path), b.get(path)) for path in differing},
        added=tuple(path for path in differing if path not in a),
        removed=tuple(path for path in differing if path not in b),
    )
