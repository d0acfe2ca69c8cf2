"""Short digests of texts, files and directories, by their content and never by a time stamp."""

from __future__ import annotations

import hashlib
import json
import unicodedata
from collections.abc import Iterable
from pathlib import Path

from ajet_sdk.errors import ConfigError


def normalize(text: str) -> str:
    """A text without what does not make it another: case, kinds of blanks, forms of one character."""
    return " ".join((text if text.isascii() else unicodedata.normalize("NFKC", text)).casefold().split())


def digest_of(text: str) -> int:
    """64 bits that stand for a normalised text: two of a million texts share one by chance once in 37 million tries."""
    return int.from_bytes(
        hashlib.blake2b(normalize(text).encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little"
    )


_SIZE = 10

_CHUNK = 1 << 20

_LEFT_OUT = ("__pycache__",)


def digest(parts: Iterable[bytes]) -> str:
    """Of bytes, each part with its length, so that what moves from one part to the next is a change."""
    hasher = hashlib.blake2b(digest_size=_SIZE)
    for part in parts:
        hasher.update(len(part).to_bytes(8, "big"))
        hasher.update(part)
    return hasher.hexdigest()


def digest_of_values(values: object) -> str:
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
    hasher = hashlib.blake2b(digest_size=_SIZE)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            hasher.update(chunk)
    return hasher.hexdigest()
