"""Reads rows from the file formats of datasets.

JSON lines (also one JSON document), Parquet, Arrow, CSV (text also compressed), a directory in the
Hugging Face layout, and stdin (`-`). Errors name file and line. Memory is constant: some thousand
rows, for a table at most some megabytes unless a single row is larger.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa

from ajet_sdk.errors import ConfigError
from ajet_sdk.tasks.json_rows import LONGEST, BadRows, bounded, json_rows, parse_line
from ajet_sdk.tasks.json_rows import Row as JsonRow
from ajet_sdk.tasks.row_pictures import unreadable_files
from ajet_sdk.tasks.task_rows import FIELDS
from ajet_tools.dataset.files.blocks import Block, Row, block_of_lines, blocks_of
from ajet_tools.dataset.files.columns import LINES, common, described, warn_of_losses
from ajet_tools.dataset.files.delimited import csv_rows
from ajet_tools.dataset.files.json_columns import are_objects
from ajet_tools.dataset.files.sources import (
    columns_of,
    explain_errors,
    is_table,
    open_text,
    unpacked,
    unpacked_name,
)
from ajet_tools.dataset.files.values import KINDS, kind_of

_DELIMITED = (".csv", ".tsv")
# a block of text, and of a table, whose groups of rows may be of any size
_BYTES = 16 << 20
_TABLE_ROWS = 1 << 16
_TABLE_BYTES = 24 << 20
_TABLE_BUFFER = 1 << 20
_BOM = b"\xef\xbb\xbf"
_BLANK = b" \t\r\n"


class Rows:
    """The rows of a file, a directory (its `train` split; `DIR:NAME` is another), a pattern, or
    stdin (`-`).

    Each pass reads the files again. Values are JSON values: bytes are base64, times text, NaN null.
    Reading raises TaskError, with file and line, for a bad row and for an unreadable file.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        mapping: Mapping[str, str] | None = None,
        bad: BadRows | None = None,
        again: bool = False,
        pictures: bool = False,
    ) -> None:
        """Finds the files. Raises ConfigError if there are none.

        Args:
            path: the suffix gives the format. On stdin, Parquet, Arrow and CSV are detected, else
                JSON lines.
            mapping: column -> main_query, init_messages, task_id, env_type or metadata.NAME; the
                column is renamed.
            bad: counts the bad rows of a pass; without it, and where it does not skip, the first
                one raises.
            again: stdin is kept in memory, for more than one pass.
            pictures: rows are compared by their pictures, so that a row with a file that cannot be
                read is a bad one.
        """
        self.mapping = mapping or {}
        _check_mapping(self.mapping)
        self.path = str(path)
        self.bad = bad if bad is not None else BadRows()
        self.files = columns_of(path)
        self._was_read = False
        self._clean: set[Path | str] = set()
        self._warned: set[str] = set()
        """Tables whose types were lost, with a warning."""
        self._again = again
        self._compares_pictures = pictures
        self._kept: list[Block] | None = None

    @cached_property
    def schema(self) -> pa.Schema:
        """The columns that all rows have, in a table; `LINES` if some rows are text."""
        schemas = []
        for file, more in self.files.items():
            if not isinstance(file, Path) or not is_table(file):
                return LINES
            with explain_errors(file):
                schema = schema_of(file)
            block = Block(file.name, pa.RecordBatch.from_pylist([], schema), [], "row")
            block = block.with_columns(more)
            if not self._can_rename(block):
                return LINES
            schemas.append(block.renamed(self.mapping).data.schema)
        return common(schemas)

    def __iter__(self) -> Iterator[Row]:
        for block in self._blocks():
            yield from block.rows()

    def empty(self) -> Block:
        """Returns a block without rows."""
        return Block("", pa.RecordBatch.from_pylist([], self.schema), [])

    def blocks(self) -> Iterator[Block]:
        """Yields blocks of rows, all in the columns of `schema`."""
        for block in self._blocks():
            is_table_as_text = self.schema == LINES and not block.is_text
            if is_table_as_text and block.name not in self._warned:
                self._warned.add(block.name)
                warn_of_losses(block.data.schema, block.name, "read")
            yield block.fitted(self.schema)

    def _blocks(self) -> Iterator[Block]:
        if self._kept is not None:
            yield from self._kept
            return
        if self._was_read:
            self.bad.count = 0
            self.bad.first = []
        self._was_read = True
        kept = []
        for file, more in self.files.items():
            count = self.bad.count
            source = _Source(file, self.bad, is_clean=file in self._clean)
            for block in source.blocks():
                for named in self._named(block.with_columns(more) if more else block):
                    if isinstance(file, Path):
                        named = replace(named, directory=file.parent)
                        if self._compares_pictures and file not in self._clean:
                            named = _with_readable_pictures(named, self.bad)
                    if self._again and self.path == "-":
                        kept.append(named)
                    yield named
            if self.bad.count == count:
                self._clean.add(file)
        if self._again and self.path == "-":
            self._kept = kept

    def _named(self, block: Block) -> Iterator[Block]:
        if not self.mapping:
            yield block
        elif self._can_rename(block):
            yield block.renamed(self.mapping)
        else:
            yield from blocks_of(_renamed(block, self.mapping, self.bad), block.name)

    def _can_rename(self, block: Block) -> bool:
        """Whether the mapping renames columns of a table; fields of `metadata` are JSON."""
        is_nested = any("." in target for target in self.mapping.values())
        return not is_nested and self.mapping.keys() <= set(block.data.schema.names)


def read(
    path: str | Path, *, mapping: Mapping[str, str] | None = None, pictures: bool = False
) -> Iterator[Row]:
    """Reads rows once, as `Rows` does."""
    yield from Rows(path, mapping=mapping, pictures=pictures)


@dataclass(frozen=True)
class _Source:
    """One of the files, or stdin, and what to do with its bad rows."""

    file: Path | str
    bad: BadRows
    is_clean: bool
    """Whether an earlier pass found no bad row in it."""

    def blocks(self) -> Iterator[Block]:
        if not isinstance(self.file, Path):
            with explain_errors("stdin"):
                yield from self._stdin_blocks()
        elif is_table(self.file):
            is_parquet = self.file.name.endswith(".parquet")
            with explain_errors(self.file):
                yield from _table_blocks(self.file, self.file.name, self.bad, is_parquet)
        else:
            name = unpacked_name(self.file.name)
            cut = self.bad.skip and not name.endswith(_DELIMITED)
            with explain_errors(self.file), open_text(self.file, cut=cut) as stream:
                yield from self._text_blocks(stream, name)

    def _stdin_blocks(self) -> Iterator[Block]:
        """Reads stdin in the format that its first bytes tell."""
        stdin = io.BufferedReader(unpacked(sys.stdin.buffer), 1 << 20)
        start = stdin.peek(4)[:4096].removeprefix(_BOM).lstrip()
        if start.startswith((b"PAR1", b"ARROW1", b"\xff\xff\xff\xff")):
            table = pa.BufferReader(stdin.read())
            yield from _table_blocks(table, "stdin", self.bad, start.startswith(b"PAR1"))
            return
        line = start.partition(b"\n")[0]
        has_cells = any(mark in line for mark in (b",", b";", b"\t", b"|"))
        is_csv = has_cells and start[:1] not in (b"{", b"[")
        stream = bounded(stdin, "stdin", cut=self.bad.skip and not is_csv)
        yield from self._text_blocks(stream, "stdin.csv" if is_csv else "stdin")

    def _text_blocks(self, stream: BinaryIO, name: str) -> Iterator[Block]:
        if name.endswith(_DELIMITED):
            cells = csv_rows(stream, name, self.bad)
            yield from blocks_of((Row(*row) for row in cells), name)
            return
        buffered = io.BufferedReader(stream, _BYTES)  # type: ignore[type-var]
        if _begins_with_line(buffered):
            yield from self._line_blocks(buffered, name)
        else:  # one document, or a bad first line
            values = filter(self._is_object, json_rows(buffered, name, self.bad, strict=True))
            yield from blocks_of((Row(row.where, row.value) for row in values), name)

    def _is_object(self, row: JsonRow) -> bool:
        """Whether a JSON value is a row; if not, it is a bad one."""
        if isinstance(row.value, dict):
            return True
        kind = KINDS[kind_of(row.value)]
        self.bad.add(row.where, f"must be an object with keys, not {kind}")
        return False

    def _line_blocks(self, stream: BinaryIO, name: str) -> Iterator[Block]:
        first = 1
        while lines := stream.readlines(_BYTES):
            if first == 1:
                lines[0] = lines[0].removeprefix(_BOM)
            block = self._line_block(lines, name, first)
            first += len(lines)
            if len(block):
                yield block

    def _line_block(self, lines: Sequence[bytes], name: str, first: int) -> Block:
        texts = [line.strip(_BLANK) for line in lines]
        numbers: Sequence[int] = range(first, first + len(lines))
        if not all(texts):
            numbers = [number for number, text in zip(numbers, texts, strict=True) if text]
            texts = [text for text in texts if text]
        try:
            array = pa.array(texts, pa.binary()).cast(pa.string())
            if self.is_clean or are_objects(array):
                return block_of_lines(array, name, numbers)
        except pa.ArrowInvalid:  # not UTF-8
            pass
        # Python tells which lines are bad, and why
        good = []
        places = []
        is_ended = lines[-1].endswith(b"\n")
        for number, text in zip(numbers, texts, strict=True):
            ended = is_ended or number < numbers[-1]
            row = parse_line(text, f"{name} line {number}", number, ended=ended)
            if row.problem is not None:
                self.bad.add(row.where, row.problem)
            elif self._is_object(row):
                good.append(text.decode())
                places.append(number)
        return block_of_lines(good, name, places)


def _begins_with_line(stream: io.BufferedReader[Any]) -> bool:
    """Whether the first line is a JSON object: no multi-line document, no array."""
    start = stream.peek(1)[:_BYTES].removeprefix(_BOM).lstrip()
    line, more, _ = start.partition(b"\n")
    if not line.startswith(b"{"):
        return False
    if not more:  # the line is longer than what was read
        return True
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _table_blocks(
    table: Path | pa.BufferReader, name: str, bad: BadRows, is_parquet: bool
) -> Iterator[Block]:
    number = 1
    for data in _parquet_batches(table) if is_parquet else _arrow_batches(table):
        schema = described(data.schema, name)
        block = Block(name, data.cast(schema), range(number, number + len(data)), "row")
        number += len(data)
        if data.nbytes > LONGEST:
            block = block.take(_good_rows(block, bad))
        yield block


def _with_readable_pictures(block: Block, bad: BadRows) -> Block:
    """Returns the rows without those that have a picture's file that cannot be read."""
    good = []
    for index, values in enumerate(block.values()):
        problem = next(unreadable_files(values), None)
        if problem is None:
            good.append(index)
        else:
            bad.add(block.where(index), problem)
    return block.take(good)


def _good_rows(block: Block, bad: BadRows) -> list[int]:
    """Returns the indices of the rows without a cell above the size limit, and reports others."""
    good = []
    for index in range(len(block)):
        longest = None
        for column in block.data.schema.names:
            cell = block.data.column(column).slice(index, 1)
            if pa.types.is_dictionary(cell.type):
                cell = cell.dictionary_decode()
            if cell.nbytes > LONGEST:
                longest = column
        if longest is None:
            good.append(index)
        else:
            bad.add(block.where(index), f"has more than {LONGEST >> 20} MiB in column {longest}")
    return good


def schema_of(file: Path) -> pa.Schema:
    import pyarrow.parquet as pq

    if file.name.endswith(".parquet"):
        return described(pq.read_schema(file, memory_map=False), file.name)
    with _opened_arrow(file) as (schema, _):
        return described(schema, file.name)


def _parquet_batches(source: Path | pa.BufferReader) -> Iterator[pa.RecordBatch]:
    import pyarrow.parquet as pq

    table = pq.ParquetFile(source, memory_map=False, buffer_size=_TABLE_BUFFER, pre_buffer=False)
    # over all groups at once, pyarrow's read-ahead grows with the file
    for group in range(table.num_row_groups):
        metadata = table.metadata.row_group(group)
        fitting = _TABLE_BYTES * metadata.num_rows // max(1, metadata.total_byte_size)
        rows = max(1, min(_TABLE_ROWS, fitting))
        for batch in table.iter_batches(rows, row_groups=[group], use_threads=False):
            yield batch.replace_schema_metadata(table.schema_arrow.metadata)


def _arrow_batches(source: Path | pa.BufferReader) -> Iterator[pa.RecordBatch]:
    with _opened_arrow(source) as (_, batches):
        yield from batches


@contextmanager
def _opened_arrow(
    source: Path | pa.BufferReader,
) -> Iterator[tuple[pa.Schema, Iterator[pa.RecordBatch]]]:
    with source.open("rb") if isinstance(source, Path) else source as file:
        try:
            opened = pa.ipc.open_stream(file)
            batches = iter(opened)
        except pa.ArrowInvalid:  # the file format instead of the stream format
            file.seek(0)
            opened = whole = pa.ipc.open_file(source)
            batches = (whole.get_batch(index) for index in range(whole.num_record_batches))
        yield opened.schema, batches


def _check_mapping(mapping: Mapping[str, str]) -> None:
    for column, target in mapping.items():
        root, _, name = target.partition(".")
        if not (root == "metadata" and name) and (target not in FIELDS or target == "metadata"):
            raise ConfigError(
                f"{column!r} is mapped to {target!r}, not main_query, init_messages, task_id,"
                " env_type or metadata.NAME"
            )


def _renamed(block: Block, mapping: Mapping[str, str], bad: BadRows) -> Iterator[Row]:
    for row in block.rows():
        lacking = [name for name in mapping if name not in row.values]
        if not lacking:
            yield Row(row.where, _with_names(row.values, mapping))
            continue
        target = mapping[lacking[0]]
        known = ", ".join(row.values) or "none"
        bad.add(row.where, f"has no column {lacking[0]!r} for {target}; it has {known}")


def _with_names(values: Mapping[str, object], mapping: Mapping[str, str]) -> dict[str, object]:
    renamed = {name: value for name, value in values.items() if name not in mapping}
    for column, target in mapping.items():
        root, _, name = target.partition(".")
        if root != "metadata":
            renamed[target] = values[column]
            continue
        metadata = renamed.get("metadata")
        known = metadata if isinstance(metadata, dict) else {}
        renamed["metadata"] = {**known, name: values[column]}
    return renamed
