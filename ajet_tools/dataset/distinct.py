"""How many of many texts are different, in memory that does not grow with them."""

from __future__ import annotations

import hashlib
import tempfile
import unicodedata
from types import TracebackType
from typing import Any

import numpy as np

__all__ = ["Distinct", "digest_of", "normalised"]

_BUFFER = 1 << 16
_PART = 1 << 18
"""Digests that are sorted at a time."""


def normalised(text: str) -> str:
    """A text without what does not make it another: case, kinds of blanks, forms of one character."""
    return " ".join((text if text.isascii() else unicodedata.normalize("NFKC", text)).casefold().split())


def digest_of(text: str) -> int:
    """64 bits that stand for a normalised text: two of a million texts share one by chance once in 37 million tries."""
    return int.from_bytes(
        hashlib.blake2b(normalised(text).encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little"
    )


class Distinct:
    """Counts different texts: their digests go to an unnamed file, 8 bytes each, and are sorted in parts at the end."""

    def __init__(self) -> None:
        self.total = 0
        self._buffer: list[int] = []
        self._file: Any = tempfile.TemporaryFile()  # noqa: SIM115  # closed by __exit__

    def __enter__(self) -> Distinct:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()

    def add(self, text: str) -> None:
        self.total += 1
        self._buffer.append(digest_of(text))
        if len(self._buffer) >= _BUFFER:
            self._flush()

    def _flush(self) -> None:
        self._file.write(np.array(self._buffer, np.uint64).tobytes())
        self._buffer.clear()

    def count(self) -> int:
        """How many were different."""
        self._flush()
        parts = max(1, -(-self.total // _PART))
        return sum(len(np.unique(self._part(number, parts))) for number in range(parts))

    def _part(self, number: int, parts: int) -> Any:
        """The digests that leave `number` when divided by `parts`: equal ones are in one part."""
        self._file.seek(0)
        found = []
        while block := self._file.read(8 * _PART):
            digests = np.frombuffer(block, np.uint64)
            found.append(digests[digests % parts == number] if parts > 1 else digests)
        return np.concatenate(found) if found else np.empty(0, np.uint64)
