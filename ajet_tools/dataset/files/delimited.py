"""Reads rows of CSV and TSV: detects delimiter and quote; cells stay text."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from typing import Any, BinaryIO

from ajet_sdk.errors import TaskError
from ajet_sdk.tasks.json_rows import LONGEST, BadRows
from ajet_sdk.tasks.row_names import QUERY_COLUMNS
from ajet_tools.dataset.files.blocks import text_of_json

_ESCAPED = '"\\u'  # no other program writes cells that begin like this
_SNIFFED = 1 << 16
"""Bytes read to detect delimiter and quote."""


def csv_rows(stream: BinaryIO, name: str, bad: BadRows) -> Iterator[tuple[str, dict[str, object]]]:
    """Yields rows of text. Cells with a JSON object or list are parsed, except in query columns
    (`cell_of`)."""
    csv.field_size_limit(LONGEST)  # process-wide; the default is 131,072 characters
    stream = io.BufferedReader(stream, _SNIFFED)  # type: ignore[type-var]
    delimiter, quote = _dialect(
        stream.peek(_SNIFFED)[:_SNIFFED], "\t" if name.endswith(".tsv") else ","
    )
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
    table = csv.reader(text, delimiter=delimiter, quotechar=quote)
    names: list[str] | None = None
    line = 1
    try:
        for cells in table:
            where = f"{name} line {line}"
            line = table.line_num + 1  # of the next row: cells may have several lines
            if names is None:
                names = _header(cells, where)
            elif not cells:
                continue
            elif len(cells) != len(names):
                count = "1 cell" if len(cells) == 1 else f"{len(cells)} cells"
                bad.add(where, f"has {count}, but the header has {len(names)}")
            elif not all(map(_is_utf8, cells)):
                bad.add(where, "is not UTF-8")
            else:
                pairs = zip(names, cells, strict=True)
                yield where, {column: _value(column, cell) for column, cell in pairs}
    except csv.Error as error:
        raise TaskError(f"{name} line {line} is not CSV: {error}") from error
    text.detach()


def _dialect(start: bytes, usual: str = ",") -> tuple[str, str]:
    """Returns the delimiter and quote that divide the first lines into the same number of cells, at
    least two.

    Prefers the usual delimiter, then the most cells.
    """
    text = start.decode("utf-8-sig", "replace")
    whole, _, rest = text.rpartition("\n")
    lines = (whole if whole else rest).splitlines(keepends=True)
    best = (usual, '"')
    cells = 1
    for delimiter in dict.fromkeys((usual, ",", ";", "\t", "|")):
        for quote in ('"', "'"):
            try:
                table = csv.reader(lines, delimiter=delimiter, quotechar=quote)
                rows = [row for row in table if row]
            except csv.Error:
                continue
            if rows[:-1]:  # the last may be cut off
                rows = rows[:-1]
            if rows and all(len(row) == len(rows[0]) for row in rows) and len(rows[0]) > cells:
                best = (delimiter, quote)
                cells = len(rows[0])
        if cells > 1 and best[0] == usual:
            break
    return best


def _header(cells: list[str], where: str) -> list[str]:
    if not all(map(_is_utf8, cells)):
        raise TaskError(f"{where} is not UTF-8; convert the file first (`iconv -t UTF-8`)")
    if len(set(cells)) < len(cells):
        raise TaskError(
            f"{where}: two columns of the header have the same name: {', '.join(cells)}"
        )
    return cells


def _is_utf8(cell: str) -> bool:
    return cell.isascii() or not any("\udc80" <= c <= "\udcff" for c in cell)


def _value(column: str, cell: str) -> Any:
    is_json = cell[:1] in ("{", "[") and (column not in QUERY_COLUMNS or column == "prompt")
    if not is_json and not cell.startswith(_ESCAPED):
        return cell
    try:
        return json.loads(cell)
    except (ValueError, RecursionError):  # text that begins with a bracket
        return cell


def cell_of(column: str, value: object) -> str:
    """Returns the cell of a value: text as it is, null as nothing, everything else as JSON.

    Text that would be read as JSON, or that UTF-8 can't hold, is a JSON string with its first
    character escaped, as no other program writes it. Raises TaskError for a number that JSON
    doesn't have.
    """
    if value is None:
        return ""
    if not isinstance(value, str):
        try:
            return text_of_json(value)
        except ValueError as error:
            raise TaskError(
                f"{column} has a number that is larger than any float, such as 1e400; write .jsonl"
            ) from error
    try:
        value.encode()
    except UnicodeEncodeError:
        return _escaped(value)
    return value if _value(column, value) == value else _escaped(value)


def _escaped(text: str) -> str:
    return f'"\\u{ord(text[0]):04x}{json.dumps(text[1:])[1:]}'
