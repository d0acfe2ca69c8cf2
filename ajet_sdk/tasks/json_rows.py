"""JSON out of files of any origin, a row at a time, each with its place; a bad one is told by file and line."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO

from ajet_sdk.errors import TaskError

_WHOLE = 1 << 30
"""The largest file that is read as one piece, where it is not JSON lines."""
LONGEST = 1 << 28
"""Bytes of a line: a packed file of a few megabytes can hold one of many gigabytes."""
_CHUNK = 1 << 20
_NO_VALUE = " is no JSON value"


@dataclass(frozen=True)
class Row:
    """One JSON value and where it stood."""

    where: str
    number: int
    value: Any
    text: bytes
    """As it was read: what an id can be made of where the row has none."""
    problem: str | None = None
    """Why it could not be read."""


@dataclass
class BadRows:
    """Rows that could not be read: the first raises, unless they are to be skipped and counted."""

    skip: bool = False
    count: int = 0
    first: list[str] = field(default_factory=list)
    """What was wrong with the first few."""

    def add(self, where: str, problem: str) -> None:
        """Note a bad row. Raises TaskError where they are not to be skipped."""
        message = f"{where} {problem}"
        if not self.skip:
            raise TaskError(f"{message}. To skip and count such rows, pass --skip-bad-rows")
        self.count += 1
        if len(self.first) < 5:
            self.first.append(message)


class _Bounded(io.RawIOBase):
    """The bytes of a stream, until one of its lines is too long; with `cut` that line is cut off at its limit."""

    def __init__(self, stream: Any, name: str, cut: bool) -> None:
        self._stream, self._name, self._cut = stream, name, cut
        self._line, self._size = 1, 0
        """The line that is read, and how many bytes of it were."""

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
                        f"{self._name} line {self._line} {_too_long()}; a row must be shorter, and one large JSON "
                        "document be converted to JSON lines (`jq -c .[]`)"
                    )
                part = whole[: max(0, LONGEST - self._size)] + whole[first:]
                view[: len(part)] = part
            self._size = count - whole.rfind(b"\n") - 1 if lines else self._size + count
            self._line += lines
            if part:
                return len(part)
        return 0


def _too_long() -> str:
    return f"is longer than {LONGEST >> 20} MiB"


def bounded(stream: object, name: str, *, cut: bool = False) -> io.BufferedReader:
    """The stream, buffered. Reading raises TaskError with the number of a line that is longer than 256 MiB.

    With `cut` that line ends at its limit instead, and is a bad row for the readers of this module.
    """
    return io.BufferedReader(_Bounded(stream, name, cut), _CHUNK)


def json_rows(file: BinaryIO, name: str, bad: BadRows, *, strict: bool = False) -> Iterator[Row]:
    """The rows of a stream: JSON lines; or one JSON document, whose items (of an array) or self are the rows.

    `strict` refuses NaN and Infinity, which Python writes and JSON has not.
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
    """Each line, or the one document that the stream is, also where it is not JSON: `problem` says why."""
    first = True
    for number, raw in enumerate(file, 1):
        if number == 1 and raw[:2] in (b"\xff\xfe", b"\xfe\xff"):
            raise TaskError(f"{name} is UTF-16, not UTF-8; convert it first (`iconv -f UTF-16 -t UTF-8`)")
        line = raw.removeprefix(b"\xef\xbb\xbf").strip() if number == 1 else raw.strip()
        if not line:
            continue
        row = _parse(line, f"{name} line {number}", number, strict)
        if row.problem is not None and first and line[:1] in (b"{", b"[") and not row.problem.endswith(_NO_VALUE):
            yield from _document(raw + file.read(_WHOLE), name, file, strict)
            return
        yield _cut_off(row, raw.endswith(b"\n"))
        first = False


def parse_line(text: bytes, where: str, number: int, *, ended: bool) -> Row:
    """A line of JSON lines, without blanks around it, strictly read; `ended`: a line feed stood behind it."""
    return _cut_off(_parse(text, where, number, True), ended)


def _cut_off(row: Row, ended: bool) -> Row:
    if row.problem is None or ended or row.problem == _too_long():
        return row
    return replace(row, problem=f"{row.problem}; the file seems to be truncated")


def _document(content: bytes, name: str, file: BinaryIO, strict: bool) -> Iterator[Row]:
    """A file that is one JSON value over many lines; where it is none, JSON lines with a bad first one."""
    if file.read(1):
        raise TaskError(f"{name} is a single JSON document of more than {_WHOLE >> 30} GiB; convert it to JSON lines")
    whole = _parse(content.removeprefix(b"\xef\xbb\xbf"), name, 1, strict)
    if whole.problem is None:
        yield whole
        return
    lines = content.split(b"\n")
    if len(lines) < 2 or _parse(lines[1].strip(), name, 2, strict).problem is not None:
        yield replace(
            whole, problem=f"{whole.problem}; the file is neither JSON lines nor a JSON document, or it is truncated"
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


_LENIENT, _STRICT = json.JSONDecoder(), json.JSONDecoder(parse_constant=_refuse)
