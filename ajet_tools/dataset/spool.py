"""The rows of a dataset in an unnamed file: any of them is read by its number, while more are being added."""

from __future__ import annotations

import json
import os
import tempfile
from array import array
from collections.abc import Iterator
from itertools import pairwise
from types import TracebackType
from typing import Any

from ajet_sdk.errors import ConfigError
from ajet_tools.dataset.tables import Row
from ajet_tools.dataset.writer import json_line

__all__ = ["Spool"]

_TOGETHER = 256
"""Rows that are written at a time; those that wait can't be read yet."""


class Spool:
    """Holds rows as JSON lines on disk, 8 bytes a row in memory. One thread adds, any may read.

    A dataset of any format is so read once and in its order, and then shown, searched and written in any other.
    """

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115  # closed by __exit__
        self._ends = array("Q", [0])
        self._count = 0
        self._waiting: list[bytes] = []

    def __enter__(self) -> Spool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()

    def __len__(self) -> int:
        """Rows that can be read."""
        return self._count

    def add(self, row: Row) -> bytes:
        """Add a row and return its line of JSON; `publish` makes it readable, at the latest."""
        line = json_line(row.values)
        self._waiting.append(b"%s\t%s" % (row.where.encode("utf-8", "replace"), line))
        if len(self._waiting) >= _TOGETHER:
            self.publish()
        return line

    def publish(self) -> None:
        """Make what was added readable. Raises ConfigError where the disk does not take it."""
        try:
            self._file.write(b"".join(self._waiting))
            self._file.flush()
        except OSError as error:
            raise ConfigError(
                f"cannot keep the rows in {tempfile.gettempdir()}: {error.strerror or error}. Make room there, or name "
                "another directory by TMPDIR"
            ) from error
        for line in self._waiting:
            self._ends.append(self._ends[-1] + len(line))
        self._count = len(self._ends) - 1
        self._waiting.clear()

    def line(self, number: int) -> bytes:
        """A row as its line of JSON."""
        return self._lines(number, number + 1)[0].partition(b"\t")[2]

    def rows(self, start: int, stop: int) -> list[Row]:
        """The rows from one number up to another, as far as there are."""
        return [_row(line) for line in self._lines(start, min(stop, self._count))]

    def row(self, number: int) -> Row:
        return self.rows(number, number + 1)[0]

    def lines(self) -> Iterator[bytes]:
        """Every row that can be read by now, as its line of JSON, some on disk and none twice in memory."""
        count = self._count
        for start in range(0, count, _TOGETHER):
            for line in self._lines(start, min(start + _TOGETHER, count)):
                yield line.partition(b"\t")[2]

    def _lines(self, start: int, stop: int) -> list[bytes]:
        if stop <= start:
            return []
        ends = self._ends[start : stop + 1]
        block = os.pread(self._file.fileno(), ends[-1] - ends[0], ends[0])
        return [block[one - ends[0] : other - ends[0]] for one, other in pairwise(ends)]


def _row(line: bytes) -> Row:
    where, _, values = line.partition(b"\t")
    made: dict[str, Any] = json.loads(values)
    return Row(where.decode("utf-8", "replace"), made)
