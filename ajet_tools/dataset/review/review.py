"""A person's review of a dataset: accepting, rejecting and editing rows, with undo, stored as it
goes."""

from __future__ import annotations

import heapq
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
import polars as pl

from ajet_sdk.errors import AjetError, ConfigError
from ajet_sdk.tasks.json_rows import BadRows
from ajet_tools.dataset.curation.filter import Filter
from ajet_tools.dataset.files.blocks import LineBlock, Row, json_line
from ajet_tools.dataset.files.sources import files_of
from ajet_tools.dataset.files.tables import read, tables_of
from ajet_tools.dataset.review.journal import (
    Decision,
    Journal,
    Mark,
    Sample,
    digest_of_line,
    journal_beside,
)
from ajet_tools.dataset.review.row_file import Kinds, RowFile, edited

Only = Literal["all", "undecided", "accepted", "rejected", "edited"]
_SHAPED = 1000
"""Rows that determine the kinds of fields."""
_TOLD = 4096


class Review:
    """The rows of a dataset and the decisions on them. Call `load` in a thread, everything else in
    one other.

    Decisions are stored beside the dataset and restored when it is reopened; the dataset is
    unchanged until `save`. Rows are numbered from 0.
    """

    def __init__(
        self,
        source: str,
        *,
        mapping: Mapping[str, str] | None = None,
        skip_bad: bool = False,
        sample: int | None = None,
        seed: int | None = None,
    ) -> None:
        """Draws `sample` rows at random; without a seed, continues the previous sample.

        Raises ConfigError if there is no such dataset, or it is stdin, which is the keyboard.
        """
        if source == "-":
            raise ConfigError(
                "stdin, the keyboard, cannot be browsed; write the dataset to a file first"
            )
        self.source = source
        self.mapping = dict(mapping or {})
        self.bad = BadRows(skip=skip_bad)
        self.files = [file for file in files_of(source) if isinstance(file, Path)]
        self.stamps = self.stamps_now()
        self.spool = RowFile()
        self.loaded = False
        """Whether all rows are read."""
        self.decisions: dict[int, Decision] = {}
        self.restored = 0
        """Number of restored decisions."""
        self.lost = 0
        """Number of earlier decisions on rows that no longer exist."""
        self.journal = Journal(journal_beside(source))
        self.unkept: AjetError | None = None
        """Why decisions are only in memory, if they are."""
        self.told_unkept = False
        self._before = self.journal.read() if not self.mapping else {}
        before = self.journal.sample
        self.seed = seed if seed is not None else before.seed if before is not None else 0
        self.sample_size = sample
        self.sampled: list[int] | None = None
        """Row numbers of the sample, in the order drawn; None without a sample."""
        self._sample: Sample | None = None
        self._history: list[dict[int, Decision]] = []
        self._shape = Kinds()
        self._saved: dict[int, Decision] = {}

    def close(self) -> None:
        self.spool.close()

    def stamps_now(self) -> list[tuple[int, int]]:
        """Returns sizes and times of the files, to detect changes by other programs."""
        stats = [file.stat() if file.exists() else None for file in self.files]
        return [(stat.st_size, stat.st_mtime_ns) if stat is not None else (0, 0) for stat in stats]

    def load(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Reads the rows. Raises TaskError, with the location, for an unreadable row."""
        before, drawn = dict(self._before), list[tuple[int, int]]()
        for number, row in enumerate(read(self.source, mapping=self.mapping, bad=self.bad)):
            if stop():
                return
            line = self.spool.add(row)
            if number < _SHAPED:
                self._shape.observe(row.values)
            if self.sample_size is not None:  # the top of the heap has the last position
                change = heapq.heappush if len(drawn) < self.sample_size else heapq.heappushpop
                change(drawn, (-Sample.place(self.seed, row.values), -number))
            if before:
                self._restore(number, before.pop((number, digest_of_line(line)), None))
        self.spool.publish()
        if before:
            self._restore_moved(before)
        if drawn:
            known = self.journal.sample
            last = known.last if known is not None and known.seed == self.seed else 0
            self._sample = Sample(self.seed, max(last, -drawn[0][0]))
            self.sampled = [-number for _, number in sorted(drawn, reverse=True)]
        self.loaded = True

    def _restore(self, number: int, decision: Decision | None) -> None:
        if decision is not None:
            self._saved[number] = decision
            self.decisions.setdefault(number, decision)
            self.restored += 1

    def _restore_moved(self, before: dict[tuple[int, str], Decision]) -> None:
        by_digest: dict[str, list[Decision]] = {}
        for (_, digest), decision in before.items():
            by_digest.setdefault(digest, []).append(decision)
        for number, line in enumerate(self.spool.lines()):
            if number not in self._saved and (waiting := by_digest.get(digest_of_line(line))):
                self._restore(number, waiting.pop(0))
        self.lost = sum(map(len, by_digest.values()))
        if self.is_kept:
            self.journal.replace(
                {number: (self._digest(number), each) for number, each in self.decisions.items()}
            )

    @property
    def is_kept(self) -> bool:
        """Whether decisions are stored on disk; not if columns are mapped, since the rows differ
        from the file."""
        return not self.mapping and self.unkept is None

    def row(self, number: int) -> Row:
        """Returns a row in its current state."""
        return self._current(number, self.spool.row(number))

    def line(self, number: int) -> str:
        """Returns a row in its current state as a JSON line."""
        return json_line(self.row(number).values).decode("utf-8").rstrip("\n")

    def rows(self, numbers: Sequence[int]) -> list[Row]:
        """Returns several rows in their current state."""
        return list(map(self._current, numbers, self.spool.rows(numbers)))

    def _current(self, number: int, row: Row) -> Row:
        values = self._values_of(number)
        return Row(row.where, dict(values)) if values is not None else row

    def _scan(self, stop: threading.Event) -> Iterator[LineBlock]:
        """Yields all rows with edits, numbered from 0, until stopped."""
        lines, number = self.spool.lines(), 0
        while not stop.is_set() and (some := list(islice(lines, _TOLD))):
            numbers = np.arange(number, number + len(some))
            for row_number in self.decisions.keys() & set(numbers.tolist()):
                if (values := self._values_of(row_number)) is not None:
                    some[row_number - number] = json_line(values)
            yield LineBlock(
                "", pl.Series("line", [line[:-1].decode() for line in some], pl.String), numbers
            )
            number += len(some)

    def fitting(
        self, wanted: Filter, only: Only = "all", *, stop: threading.Event
    ) -> list[int] | None:
        """Returns the numbers of matching rows, or None if stopped. Raises ConfigError for an
        unknown field."""
        fitting_numbers: list[int] = []
        table = next(iter(tables_of(self.source, self.mapping)), None)
        for block in self._scan(stop):
            in_scope = [
                only == "all" or self._is(number, only) for number in block.numbers.tolist()
            ]
            fitting_numbers += block.numbers[wanted.mask(block, table) & in_scope].tolist()
            wanted.note(block)
        if stop.is_set():
            return None
        if only == "all":
            wanted.check()
        return fitting_numbers

    def _is(self, number: int, state: Only) -> bool:
        if state == "edited":
            return self._values_of(number) is not None
        return (self.mark_of(number) or "undecided") == state

    def holding(self, needle: str, *, stop: threading.Event) -> list[int] | None:
        """Returns the numbers of rows that contain a text, ignoring case; None if stopped."""
        sought = json.dumps(needle, ensure_ascii=False)[1:-1].casefold()
        matches: list[int] = []
        for block in self._scan(stop):
            lines = zip(block.numbers.tolist(), block.lines, strict=True)
            matches += [number for number, line in lines if sought in line.casefold()]
        return None if stop.is_set() else matches

    def mark_of(self, number: int) -> Mark | None:
        return self.decisions.get(number, Decision()).mark

    def is_blind(self, number: int) -> bool:
        """Whether a row's verdict is hidden, because it is in the sample and undecided."""
        return self.sample_size is not None and self.mark_of(number) is None

    @property
    def marks(self) -> Counter[str]:
        decisions = list(self.decisions.values())
        counts: Counter[str] = Counter(
            decision.mark for decision in decisions if decision.mark is not None
        )
        counts["edited"] = sum(decision.values is not None for decision in decisions)
        return counts

    @property
    def unsaved(self) -> bool:
        """Whether there are decisions since the dataset was opened or saved."""
        return self.decisions != self._saved

    def mark(self, numbers: Sequence[int], mark: Mark) -> None:
        """Accepts or rejects rows; if all have this mark already, removes it."""
        wanted = None if all(self.mark_of(number) == mark for number in numbers) else mark
        self._decide({number: Decision(wanted, self._values_of(number)) for number in numbers})

    def edit(self, number: int, values: Mapping[str, object]) -> None:
        """Changes the values of a row. Raises TaskError for values that do not fit this dataset."""
        before = self.row(number).values
        edited_values = edited(self.spool.row(number).values, before, values, self._shape)
        if edited_values != before:
            unchanged = edited_values == self.spool.row(number).values
            self._decide(
                {number: Decision(self.mark_of(number), None if unchanged else edited_values)}
            )

    def undo(self) -> list[int]:
        """Reverts the last decision and returns its rows."""
        if not self._history:
            return []
        before = self._history.pop()
        self._put(before)
        return list(before)

    def _values_of(self, number: int) -> Mapping[str, object] | None:
        return self.decisions.get(number, Decision()).values

    def _decide(self, decisions: Mapping[int, Decision]) -> None:
        self._history.append(
            {number: self.decisions.get(number, Decision()) for number in decisions}
        )
        self._put(decisions)

    def _put(self, decisions: Mapping[int, Decision]) -> None:
        for number, decision in decisions.items():
            if decision:
                self.decisions[number] = decision
            else:
                self.decisions.pop(number, None)
        if self.is_kept:
            try:
                noted = {
                    number: (self._digest(number), decision)
                    for number, decision in decisions.items()
                }
                self.journal.add(noted, self._sample)
            except ConfigError as error:
                self.unkept = error

    def _digest(self, number: int) -> str:
        return digest_of_line(self.spool.line(number))

    def was_saved(self) -> None:
        """Marks the current decisions as saved."""
        self._saved = dict(self.decisions)
