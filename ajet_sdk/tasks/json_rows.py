"""Reads JSON from untrusted files row by row, and reports bad rows by file and line."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO

from ajet_sdk.errors import TaskError

_WHOLE = 1 << 30
"""Largest JSON document, in bytes, that isn't JSON lines."""
LONGEST = 1 << 28
"""Longest line, in bytes: a compressed file of a few megabytes may contain one of many
gigabytes."""
_CHUNK = 1 << 20
_NO_VALUE = " is no JSON value"


@dataclass(frozen=True)
class Row:
    """A JSON value with its location."""

    where: str
    number: int
    value: Any
    text: bytes
    """The raw text, from which an id can be derived."""
    problem: str | None = None
    """The reason why it could not be read."""


@dataclass
class BadRows:
    """Unreadable rows: the first raises, unless they are skipped and counted."""

    skip: bool = False
    count: int = 0
    first: list[str] = field(default_factory=list)
    """Messages about the first few."""

    def add(self, where: str, problem: str) -> None:
        """Record a bad row. Raises TaskError unless `skip`."""
        message = f"{where} {problem}"
        if not self.skip:
            raise TaskError(f"{message}. To skip and count such rows, pass --skip-bad-rows")
        self.count += 1
        if len(self.first) < 5:
            self.first.append(message)


class _Bounded(io.RawIOBase):
    """A stream whose lines are limited in length; a longer one raises, or is cut with `cut`."""

    def __init__(self, stream: Any, name: str, cut: bool) -> None:
        self._stream = stream
        self._name = name
        self._cut = cut
        self._line = 1
        self._size = 0
        """Number and length so far of the current line."""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[:_CHUNK]
        while count := self._stream.readinto(view):
            part = whole = bytes(view[:count])
            lines = whole.count(b"\n")
            first = whole.find(b"\n") if lines else count
            if self._size + first > LONGEST:
                if not self._cut:
                    raise TaskError(
                        f"{self._name} line {self._line} {_too_long()}; a row must be shorter, and"
                        " one large JSON document be converted to JSON lines (`jq -c .[]`)"
                    )
                part = whole[: max(0, LONGEST - self._size)] + whole[first:]
                view[: len(part)] = part
            if lines:
                self._size = count - whole.rfind(b"\n") - 1
            else:
                self._size = self._size + count
            self._line += lines
            if part:
                return len(part)
        return 0


def _too_long() -> str:
    return f"is longer than {LONGEST >> 20} MiB"


def bounded(stream: object, name: str, *, cut: bool = False) -> io.BufferedReader:
    """Buffers a stream. Reading raises TaskError for a line longer than 256 MiB.

    With `cut` the line is cut at the limit instead, and becomes a bad row.
    """
    return io.BufferedReader(_Bounded(stream, name, cut), _CHUNK)


def json_rows(file: BinaryIO, name: str, bad: BadRows, *, strict: bool = False) -> Iterator[Row]:
    """Reads rows from JSON lines, or from one JSON document: the items of an array, or a single
    row.

    `strict` rejects NaN and Infinity, which Python writes but JSON doesn't have.
    """
    for row in scan(file, name, strict=strict):
        if row.problem is not None:
            bad.add(row.where, row.problem)
        elif isinstance(row.value, list):
            for i, item in enumerate(row.value, 1):
                text = json.dumps(item, ensure_ascii=False).encode("utf-8", "replace")
                yield Row(f"{row.where} item {i}", i, item, text)
        else:
            yield row


def scan(file: BinaryIO, name: str, *, strict: bool = False) -> Iterator[Row]:
    """Yields each line, or the one document of a stream; invalid JSON has a `problem`."""
    first = True
    for number, raw in enumerate(file, 1):
        if number == 1 and raw[:2] in (b"\xff\xfe", b"\xfe\xff"):
            raise TaskError(
                f"{name} is UTF-16, not UTF-8; convert it first (`iconv -f UTF-16 -t UTF-8`)"
            )
        if number == 1:
            line = raw.removeprefix(b"\xef\xbb\xbf").strip()
        else:
            line = raw.strip()
        if not line:
            continue
        row = _parse(line, f"{name} line {number}", number, strict)
        if (
            row.problem is not None
            and first
            and line[:1] in (b"{", b"[")
            and not row.problem.endswith(_NO_VALUE)
        ):
            yield from _document(raw + file.read(_WHOLE), name, file, strict)
            return
        yield _cut_off(row, raw.endswith(b"\n"))
        first = False


def parse_line(text: bytes, where: str, number: int, *, ended: bool) -> Row:
    """Strictly parses a stripped line of JSON lines; `ended`: whether a line feed followed."""
    return _cut_off(_parse(text, where, number, True), ended)


def _cut_off(row: Row, ended: bool) -> Row:
    if row.problem is None or ended or row.problem == _too_long():
        return row
    return replace(row, problem=f"{row.problem}; the file seems to be truncated")


def _document(content: bytes, name: str, file: BinaryIO, strict: bool) -> Iterator[Row]:
    """Parses a file as one JSON value over many lines, or else as JSON lines with a bad first
    one."""
    if file.read(1):
        raise TaskError(
            f"{name} is a single JSON document of more than {_WHOLE >> 30} GiB; convert it to JSON"
            " lines"
        )
    whole = _parse(content.removeprefix(b"\xef\xbb\xbf"), name, 1, strict)
    if whole.problem is None:
        yield whole
        return
    lines = content.split(b"\n")
    if len(lines) < 2 or _parse(lines[1].strip(), name, 2, strict).problem is not None:
        yield replace(
            whole,
            problem=(
                f"{whole.problem}; the file is neither JSON lines nor a JSON document, or it is"
                " truncated"
            ),
        )
        return
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield _parse(line.strip(), f"{name} line {number}", number, strict)


def _parse(text: bytes, where: str, number: int, strict: bool) -> Row:
    try:
        return Row(where, number, (_STRICT if strict else _LENIENT).decode(text.decode()), text)
    except UnicodeDecodeError as error:
        problem = f"is not UTF-8 ({error.reason} at byte {error.start})"
    except json.JSONDecodeError as error:
        line = f"line {error.lineno} " if error.lineno > 1 else ""
        problem = f"is not JSON: {error.msg.removesuffix(' at')} at {line}column {error.colno}"
    except (ValueError, RecursionError) as error:
        problem = f"is not JSON: {error}"
    return Row(where, number, None, text, _too_long() if len(text) >= LONGEST else problem)


def _refuse(name: str) -> object:
    raise ValueError(f"{name}{_NO_VALUE}")


_LENIENT = json.JSONDecoder()
_STRICT = json.JSONDecoder(parse_constant=_refuse)
