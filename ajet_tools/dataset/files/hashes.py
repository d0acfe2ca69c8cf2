"""How many of many texts are different, in memory that does not grow with them.

What a file or a directory holds, as a short digest; content counts, never a time stamp.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from ajet_sdk.errors import ConfigError

__all__ = ["DistinctCounter", "digest", "digest_of", "digest_of_path", "digest_of_values", "normalize"]

_BUFFER = 1 << 16

_PART = 1 << 18
"""Digests that are sorted at a time."""


def normalize(text: str) -> str:
    """A text without what does not make it another: case, kinds of blanks, forms of one character."""
    return " ".join((text if text.isascii() else unicodedata.normalize("NFKC", text)).casefold().split())


def digest_of(text: str) -> int:
    """64 bits that stand for a normalised text: two of a million texts share one by chance once in 37 million tries."""
    return int.from_bytes(
        hashlib.blake2b(normalize(text).encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little"
    )


class DistinctCounter:
    """Counts different texts: their digests go to an unnamed file, 8 bytes each, and are sorted in parts at the end."""

    def __init__(self) -> None:
        self.total = 0
        self._buffer: list[int] = []
        self._file: Any = tempfile.TemporaryFile()  # noqa: SIM115  # closed by __exit__

    def __enter__(self) -> DistinctCounter:
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

    def add_hashes(self, hashes: Any) -> None:
        """Digests of texts, as a numpy array of 64 bits."""
        self.total += len(hashes)
        self._file.write(hashes.astype(np.uint64).tobytes())

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


_SIZE = 10

_CHUNK = 1 << 20

_LEFT_OUT = ("__pycache__",)


def digest(parts: Iterable[bytes]) -> str:
    """Of bytes, each part with its length, so that what moves from one part to the next is a change."""
    made = hashlib.blake2b(digest_size=_SIZE)
    for part in parts:
        made.update(len(part).to_bytes(8, "big"))
        made.update(part)
    return made.hexdigest()


def digest_of_values(values: Any) -> str:
    """Of anything that JSON can hold; the order of keys does not matter."""
    return digest([json.dumps(values, sort_keys=True, ensure_ascii=True, default=str).encode()])


def digest_of_path(path: Path) -> str:
    """Of a file, or of the names and contents of a directory's files (hidden ones aside). Raises ConfigError."""
    try:
        if path.is_dir():
            files = sorted(p for p in path.rglob("*") if p.is_file() and not _hidden(p.relative_to(path)))
            return digest(part for p in files for part in (p.relative_to(path).as_posix().encode(), _file(p).encode()))
        return _file(path)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") or part in _LEFT_OUT for part in path.parts)


def _file(path: Path) -> str:
    made = hashlib.blake2b(digest_size=_SIZE)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            made.update(chunk)
    return made.hexdigest()
