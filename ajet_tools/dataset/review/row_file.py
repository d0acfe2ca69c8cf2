"""Stores the rows of a dataset in a temporary file for random access, and validates edited rows."""

from __future__ import annotations

import difflib
import json
import sqlite3
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from ajet_sdk.errors import ConfigError, TaskError
from ajet_sdk.tasks.questions import text_of
from ajet_tools.dataset.curation.filter import task_id_of
from ajet_tools.dataset.curation.schema import OURS
from ajet_tools.dataset.files.blocks import Row, json_line
from ajet_tools.dataset.files.values import KINDS, kind_of

_TOGETHER = 256
"""Rows written at a time; waiting rows can't be read yet."""


class RowFile:
    """Stores rows as JSON lines in a private database on disk. One thread adds rows, any thread may
    read."""

    def __init__(self) -> None:
        self._rows = sqlite3.connect("", check_same_thread=False)
        self._rows.execute("PRAGMA journal_mode = OFF")
        self._rows.execute("CREATE TABLE rows (number INTEGER PRIMARY KEY, place TEXT, line BLOB)")
        self._count = 0
        self._waiting: list[tuple[int, str, bytes]] = []

    def close(self) -> None:
        self._rows.close()

    def __len__(self) -> int:
        """Returns the number of readable rows."""
        return self._count

    def add(self, row: Row) -> bytes:
        """Adds a row and returns its JSON line; it becomes readable with `publish` at the
        latest."""
        line = json_line(row.values)
        place = row.where.encode("utf-8", "replace").decode()
        self._waiting.append((self._count + len(self._waiting), place, line))
        if len(self._waiting) >= _TOGETHER:
            self.publish()
        return line

    def publish(self) -> None:
        """Makes added rows readable. Raises ConfigError if writing fails."""
        try:
            with self._rows:
                self._rows.executemany("INSERT INTO rows VALUES (?, ?, ?)", self._waiting)
        except sqlite3.Error as error:
            raise ConfigError(
                f"cannot store the rows in {tempfile.gettempdir()}: {error}; free some space, or"
                " set TMPDIR"
            ) from error
        self._count += len(self._waiting)
        self._waiting.clear()

    def line(self, number: int) -> bytes:
        return bytes(
            self._rows.execute("SELECT line FROM rows WHERE number = ?", (number,)).fetchone()[0]
        )

    def rows(self, numbers: Iterable[int]) -> list[Row]:
        """Returns the existing rows of these numbers."""
        numbers = list(numbers)
        query = "SELECT * FROM rows WHERE number IN (SELECT value FROM json_each(?)) AND number < ?"
        known = {
            number: row for number, *row in self._rows.execute(query, (str(numbers), self._count))
        }
        return [
            Row(known[number][0], json.loads(known[number][1]))
            for number in numbers
            if number in known
        ]

    def row(self, number: int) -> Row:
        return self.rows([number])[0]

    def lines(self) -> Iterator[bytes]:
        """Yields every readable row as a JSON line, in batches."""
        query, count = (
            "SELECT line FROM rows WHERE number >= ? AND number < ? ORDER BY number",
            self._count,
        )
        for start in range(0, count, _TOGETHER):
            for (line,) in self._rows.execute(
                query, (start, min(start + _TOGETHER, count))
            ).fetchall():
                yield line


@dataclass
class Kinds:
    """The kinds of value that occur at a path of the rows, and in its fields."""

    kinds: set[str] = field(default_factory=set)
    fields: dict[str, Kinds] = field(default_factory=dict)

    def observe(self, value: object) -> None:
        self.kinds.add(kind_of(value))
        for name, inner in value.items() if isinstance(value, Mapping) else ():
            self.fields.setdefault(name, Kinds()).observe(inner)


_KINDS = {**KINDS, "integer": "a number"}


def edited(
    original: Mapping[str, object],
    before: Mapping[str, object],
    after: Mapping[str, object],
    shape: Kinds,
) -> dict[str, object]:
    """Returns the row to store: with the task id of its new content, and the changes in its
    provenance.

    Args:
        original: the row as read.
        before: the row before this edit.
        after: the edited row.
        shape: kinds of the dataset's rows.

    Raises TaskError if it no longer is a row of this dataset.
    """
    result = dict(after)
    if before.get("task_id") is not None and result.get("task_id") == before[
        "task_id"
    ] == _id_by_content(before):
        result["task_id"] = _id_by_content(result)
    check_row(before, result, shape)
    provenance = result.get("provenance")
    changed = sorted(
        path for path in _changed(original, result) if path.partition(".")[0] not in OURS
    )
    if changed and isinstance(provenance, dict):  # its verdict is about the original row
        result["provenance"] = {**provenance, "edited": changed}
    elif not changed and isinstance(provenance, dict) and "provenance" in original:
        result["provenance"] = original["provenance"]
    return result


def check_row(before: Mapping[str, object], after: Mapping[str, object], shape: Kinds) -> None:
    """Raises TaskError if a task became invalid, or a field has a kind that occurs in no row.

    A new field is rejected only if it looks like a misspelling of a missing one.
    """
    _check_kinds(before, after, shape, "")
    if text_of(before).strip() and not text_of(after).strip():
        raise TaskError("the row has no question any more")
    if task_id_of(before) is not None and task_id_of(after) is None:
        raise TaskError(
            "the row is no valid task: main_query is text, metadata an object, init_messages a list"
        )


def _id_by_content(values: Mapping[str, object]) -> str | None:
    return task_id_of({name: value for name, value in values.items() if name not in OURS})


def _changed(before: object, after: object, path: str = "") -> Iterator[str]:
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for name in dict.fromkeys((*before, *after)):
            yield from _changed(
                before.get(name), after.get(name), f"{path}.{name}" if path else name
            )
    elif before != after:
        yield path


def _check_kinds(before: object, after: object, shape: Kinds | None, path: str) -> None:
    known = {
        _KINDS[kind] for kind in (*(shape.kinds if shape is not None else ()), kind_of(before))
    }
    known.discard("null")
    kind = _KINDS[kind_of(after)]
    if known and kind != "null" and kind not in known:
        raise TaskError(
            f"{path or 'the row'} is {kind}, and {' or '.join(sorted(known))} in these rows"
        )
    if isinstance(after, Mapping):
        fields = shape.fields if shape is not None else {}
        inner = before if isinstance(before, Mapping) else {}
        for name, value in after.items():
            place = f"{path}.{name}" if path else name
            if name not in fields and name not in inner:
                missing = [field for field in (*fields, *inner) if field not in after]
                if near := difflib.get_close_matches(name, missing, n=1, cutoff=0.75):
                    raise TaskError(
                        f"{place} is a field that no row has, and {near[0]} is missing: is it"
                        " misspelt?"
                    )
            _check_kinds(inner.get(name), value, fields.get(name), place)
