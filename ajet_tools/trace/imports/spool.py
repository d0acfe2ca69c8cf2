"""A temporary file that groups texts by key, in order of first appearance: a source may mix its
episodes, and needs not fit in memory."""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType


class Spool:
    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="ajet-import-")
        self._file = sqlite3.connect(Path(self._directory.name) / "texts.sqlite")
        self._file.executescript(
            "PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF;"
            "CREATE TABLE groups (place INTEGER PRIMARY KEY, key TEXT UNIQUE);"
            "CREATE TABLE texts (place INTEGER, text TEXT);"
        )

    def add(self, key: str, text: str) -> None:
        self._file.execute("INSERT OR IGNORE INTO groups (key) VALUES (?)", (key,))
        self._file.execute(
            "INSERT INTO texts SELECT place, ? FROM groups WHERE key = ?", (text, key)
        )

    def groups(self) -> Iterator[tuple[str, list[str]]]:
        self._file.execute("CREATE INDEX by_place ON texts (place)")
        for place, key in self._file.execute("SELECT place, key FROM groups ORDER BY place"):
            texts = self._file.execute(
                "SELECT text FROM texts WHERE place = ? ORDER BY rowid", (place,)
            )
            yield key, [text for (text,) in texts]

    def __enter__(self) -> Spool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._file.close()
        self._directory.cleanup()
