"""Reads rows and blocks from the file formats of datasets.

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
from pathlib import Path
from typing import IO, Any, BinaryIO

import polars as pl
import pyarrow as pa

from ajet_sdk.errors import ConfigError
from ajet_sdk.tasks.json_rows import LONGEST, BadRows, bounded, json_rows, parse_line
from ajet_sdk.tasks.task_rows import FIELDS
from ajet_tools.dataset.files.blocks import Block, LineBlock, Row, TableBlock, blocks_of
from ajet_tools.dataset.files.columns import Columns
from ajet_tools.dataset.files.delimited import csv_rows
from ajet_tools.dataset.files.json_columns import are_objects
from ajet_tools.dataset.files.sources import (
    columns_of,
    explain_errors,
    files_of,
    is_table,
    open_text,
    unpacked,
    unpacked_name,
)
from ajet_tools.dataset.files.values import KINDS, kind_of

_DELIMITED = (".csv", ".tsv")
_BYTES = 16 << 20
_TABLE_ROWS = 1 << 16
_TABLE_BYTES = 24 << 20
_TABLE_BUFFER = 1 << 20


def read(
    path: str | Path,
    *,
    mapping: Mapping[str, str] | None = None,
    skip_bad: bool = False,
    bad: BadRows | None = None,
) -> Iterator[Row]:
    """Reads the rows of a file, a directory (its `train` split; `DIR:NAME` is another), or stdin
    (`-`).

    Args:
        path: the source; its suffix gives the format. On stdin, Parquet, Arrow and CSV are detected, else JSON lines.
        mapping: column -> main_query, init_messages, task_id, env_type or metadata.NAME; the column is renamed.
        skip_bad: skip rows that cannot be read, instead of raising at the first.
        bad: counts bad rows and keeps the first few.

    Values are JSON values: bytes are base64, times text, NaN null. Raises TaskError, with file and
    line, for a bad row and for an unreadable file; ConfigError if there is none.
    """
    bad = bad if bad is not None else BadRows(skip=skip_bad)
    for block in read_blocks(path, mapping=mapping, bad=bad):
        yield from block.rows()


def read_blocks(
    path: str | Path, *, mapping: Mapping[str, str] | None = None, bad: BadRows | None = None
) -> Iterator[Block]:
    """Reads rows in blocks, from the sources of `read`.

    Args:
        mapping: as in `read`.
        bad: collects rows that cannot be read; without it, and where it does not skip, the first raises TaskError.
    """
    _check_mapping(mapping or {})
    bad = bad if bad is not None else BadRows()
    for file, more in columns_of(path).items():
        for block in _blocks(file, bad):
            block = block.with_columns(more) if more else block
            if not mapping:
                yield block
            elif (renamed := _with_names(block, mapping)) is not None:
                yield renamed
            else:
                yield from blocks_of(_renamed(block, mapping, bad), block.name)


def count_rows(path: str | Path) -> int:
    """Counts rows; for Parquet, from its metadata. Raises TaskError at the first bad row."""
    import pyarrow.parquet as pq

    total = 0
    for file in files_of(path):
        if isinstance(file, Path) and file.suffix == ".parquet":
            with explain_errors(file):
                total += int(pq.read_metadata(file).num_rows)
        else:
            total += sum(map(len, _blocks(file, BadRows())))
    return total


def tables_of(path: str | Path, mapping: Mapping[str, str] | None = None) -> list[Columns]:
    """Returns the columns that the tables of a path declare; text files and stdin declare none.

    A `Writer` that gets them writes the columns even without a row.
    """
    tables = []
    for file, more in columns_of(path).items():
        if isinstance(file, Path) and is_table(file):
            with explain_errors(file):
                columns = Columns.of_schema(file.name, schema_of(file))
                rows = pa.RecordBatch.from_pylist([], schema=columns.schema)
                empty = TableBlock(file.name, columns, rows).with_columns(more)
                known = {name: to for name, to in (mapping or {}).items() if name in columns.shapes}
                tables.append((empty.renamed(known) or empty).table)
    return tables


def _with_names(block: Block, mapping: Mapping[str, str]) -> TableBlock | None:
    if isinstance(block, TableBlock) and mapping.keys() <= block.table.shapes.keys():
        return block.renamed(mapping)
    return None


def _blocks(file: Path | str, bad: BadRows) -> Iterator[Block]:
    if isinstance(file, Path):
        if is_table(file):
            yield from _table_blocks(file, file.name, bad, parquet=file.name.endswith(".parquet"))
            return
        name = unpacked_name(file.name)
        with (
            explain_errors(file),
            open_text(file, cut=bad.skip and not name.endswith(_DELIMITED)) as stream,
        ):
            yield from _text_blocks(stream, name, bad)
        return
    with explain_errors("stdin"):
        stdin = io.BufferedReader(unpacked(sys.stdin.buffer), 1 << 20)
        start = stdin.peek(4)[:4096].removeprefix(b"\xef\xbb\xbf").lstrip()
        if start.startswith((b"PAR1", b"ARROW1", b"\xff\xff\xff\xff")):
            yield from _table_blocks(
                pa.BufferReader(stdin.read()), "stdin", bad, parquet=start.startswith(b"PAR1")
            )
        else:
            line = start.partition(b"\n")[0]
            is_csv = start[:1] not in (b"{", b"[", b"") and any(
                mark in line for mark in (b",", b";", b"\t", b"|")
            )
            lines = bounded(stdin, "stdin", cut=bad.skip and not is_csv)
            yield from _text_blocks(lines, "stdin.csv" if is_csv else "stdin", bad)


def _text_blocks(stream: BinaryIO, name: str, bad: BadRows) -> Iterator[Block]:
    if name.endswith(_DELIMITED):
        yield from blocks_of((Row(*row) for row in csv_rows(stream, name, bad)), name)
        return
    buffered = io.BufferedReader(stream, _BYTES)  # type: ignore[type-var]
    if _begins_with_line(buffered):
        yield from _line_blocks(buffered, name, bad)
    else:  # one document, or a bad first line
        rows = json_rows(buffered, name, bad, strict=True)
        yield from blocks_of((Row(row.where, row.value) for row in rows if _is_row(row, bad)), name)


def _begins_with_line(stream: io.BufferedReader[Any]) -> bool:
    """Whether the first line is a JSON object: no multi-line document, no array."""
    line, more, _ = stream.peek(1)[:_BYTES].removeprefix(b"\xef\xbb\xbf").lstrip().partition(b"\n")
    try:
        return line.startswith(b"{") and (not more or isinstance(json.loads(line), dict))
    except (ValueError, RecursionError):
        return False


def _is_row(row: Any, bad: BadRows) -> bool:
    if not isinstance(row.value, dict):
        bad.add(row.where, f"must be an object with keys, not {KINDS[kind_of(row.value)]}")
    return isinstance(row.value, dict)


def _line_blocks(stream: IO[bytes], name: str, bad: BadRows) -> Iterator[Block]:
    number = 1
    while data := stream.read(_BYTES):
        data += stream.readline()
        if number == 1:
            data = data.removeprefix(b"\xef\xbb\xbf")
        block, count = _line_block(data, name, number, bad)
        number += count
        if len(block):
            yield block


def _line_block(data: bytes, name: str, first: int, bad: BadRows) -> tuple[LineBlock, int]:
    try:
        lines = pl.read_lines(data, name="line").to_series()
    except pl.exceptions.PolarsError:  # not UTF-8
        return _checked(data.split(b"\n"), name, first, bad), data.count(b"\n")
    count = len(lines)
    numbers: Sequence[int] = range(first, first + count)
    if not (lines.str.starts_with("{") & lines.str.ends_with("}")).all():
        lines = lines.str.strip_chars(" \t\r")
        filled = (lines != "").arg_true()
        numbers = [numbers[index] for index in filled]
        lines = lines.gather(filled)
    if are_objects(lines):
        return LineBlock(name, lines, numbers), count
    return _checked(data.split(b"\n"), name, first, bad), count


def _checked(lines: Sequence[bytes], name: str, first: int, bad: BadRows) -> LineBlock:
    """Returns the lines that are valid objects, checked individually."""
    good: list[tuple[int, str]] = []
    for number, raw in enumerate(lines, first):
        if not (line := raw.strip()):
            continue
        row = parse_line(
            line, f"{name} line {number}", number, ended=number < first + len(lines) - 1
        )
        if row.problem is None and not isinstance(row.value, dict):
            _is_row(row, bad)
        elif row.problem is not None:
            bad.add(row.where, row.problem)
        else:
            good.append((number, line.decode()))
    series = pl.Series("line", [line for _, line in good], pl.String)
    return LineBlock(name, series, [number for number, _ in good])


def _table_blocks(
    source: Path | pa.BufferReader, name: str, bad: BadRows, *, parquet: bool
) -> Iterator[Block]:
    columns, number = None, 1
    with explain_errors(source if isinstance(source, Path) else name):
        for schema, data in _batches(source) if parquet else _arrow_batches(source):
            if columns is None or not columns.schema.equals(schema, check_metadata=True):
                columns = Columns.of_schema(name, schema)
            for first, some in (
                _without_long_rows(data, name, number, bad)
                if data.nbytes > LONGEST
                else [(0, data)]
            ):
                yield TableBlock(name, columns, some, number + first)
            number += data.num_rows


def _without_long_rows(
    data: pa.RecordBatch, name: str, number: int, bad: BadRows
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Splits a batch at rows with a cell above the size limit, and reports those; yields first
    index and rows."""
    start = 0
    for index in range(data.num_rows):
        sizes = {column: _size(data.column(column).slice(index, 1)) for column in data.schema.names}
        if longest := next((column for column, size in sizes.items() if size > LONGEST), None):
            bad.add(
                f"{name} row {number + index}",
                f"has more than {LONGEST >> 20} MiB in column {longest}",
            )
            yield start, data.slice(start, index - start)
            start = index + 1
    yield start, data.slice(start)


def _size(cell: pa.Array) -> int:
    return int((cell.dictionary_decode() if pa.types.is_dictionary(cell.type) else cell).nbytes)


def schema_of(file: Path) -> pa.Schema:
    import pyarrow.parquet as pq

    if file.name.endswith(".parquet"):
        return _without_views(pq.read_schema(file, memory_map=False))
    with _opened_arrow(file) as (schema, _):
        return _without_views(schema)


def _batches(source: Path | pa.BufferReader) -> Iterator[tuple[pa.Schema, pa.RecordBatch]]:
    import pyarrow.parquet as pq

    table = pq.ParquetFile(source, memory_map=False, buffer_size=_TABLE_BUFFER, pre_buffer=False)
    schema = _without_views(table.schema_arrow)
    for group in range(
        table.num_row_groups
    ):  # over all groups at once, pyarrow's read-ahead grows with the file
        about = table.metadata.row_group(group)
        most = max(
            1, min(_TABLE_ROWS, _TABLE_BYTES * about.num_rows // max(1, about.total_byte_size))
        )
        for batch in table.iter_batches(most, row_groups=[group], use_threads=False):
            yield schema, batch if batch.schema.equals(schema) else batch.cast(schema)


def _arrow_batches(source: Path | pa.BufferReader) -> Iterator[tuple[pa.Schema, pa.RecordBatch]]:
    with _opened_arrow(source) as (schema, batches):
        schema = _without_views(schema)
        for batch in batches:
            yield schema, batch if batch.schema.equals(schema) else batch.cast(schema)


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


def _without_views(schema: pa.Schema) -> pa.Schema:
    """Replaces string and binary views, on which Arrow has no `take`."""
    if "_view" not in str(schema):
        return schema
    return pa.schema(
        [field.with_type(_without_view(field.type)) for field in schema], schema.metadata
    )


def _without_view(kind: pa.DataType) -> pa.DataType:
    types = pa.types
    if types.is_string_view(kind):
        return pa.large_string()
    if types.is_binary_view(kind):
        return pa.large_binary()
    if types.is_struct(kind):
        return pa.struct([field.with_type(_without_view(field.type)) for field in kind])
    if types.is_map(kind):
        return pa.map_(
            _without_view(kind.key_type), _without_view(kind.item_type), kind.keys_sorted
        )
    if types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_without_view(kind.value_type)))
    if any(
        fits(kind) for fits in (types.is_large_list, types.is_list_view, types.is_large_list_view)
    ):
        return pa.large_list(kind.value_field.with_type(_without_view(kind.value_type)))
    if types.is_fixed_size_list(kind):
        return pa.list_(kind.value_field.with_type(_without_view(kind.value_type)), kind.list_size)
    return kind


def _renamed(block: Block, mapping: Mapping[str, str], bad: BadRows) -> Iterator[Row]:
    for row in block.rows():
        lacking = next((name for name in mapping if name not in row.values), None)
        if lacking is None:
            yield Row(row.where, _rename(row.values, mapping))
        else:
            there = ", ".join(row.values) or "none"
            bad.add(row.where, f"has no column {lacking!r} for {mapping[lacking]}; it has {there}")


def _check_mapping(mapping: Mapping[str, str]) -> None:
    for column, target in mapping.items():
        root, _, name = target.partition(".")
        if not (root == "metadata" and name) and (target not in FIELDS or target == "metadata"):
            raise ConfigError(
                f"{column!r} is mapped to {target!r}, not main_query, init_messages, task_id,"
                " env_type or metadata.NAME"
            )


def _rename(values: Mapping[str, object], mapping: Mapping[str, str]) -> dict[str, object]:
    renamed = {name: value for name, value in values.items() if name not in mapping}
    for column, target in mapping.items():
        root, _, name = target.partition(".")
        if root == "metadata":
            metadata = renamed.get("metadata")
            renamed["metadata"] = {
                **(metadata if isinstance(metadata, dict) else {}),
                name: values[column],
            }
        else:
            renamed[target] = values[column]
    return renamed
