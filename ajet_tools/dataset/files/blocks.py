"""Rows of a file some thousand at a time, as they are stored: lines of JSON, or an Arrow batch.

Commands that choose rows look at columns of a block (polars) and pass on its lines or its Arrow rows untouched, so no
value changes on its way. A block that polars does not read is read row by row, which also says which row is bad.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np

from ajet_sdk.tasks.json_rows import BadRows, parse_line
from ajet_sdk.tasks.rows import QUERY_COLUMNS, decoded
from ajet_tools.dataset.files.stored import Batch, Stored, json_value, rows_of
from ajet_tools.dataset.files.tables import (
    Row,
    explain_errors,
    files_of,
    is_table,
    kind_of,
    open_text,
    read_file,
    table_batches,
    text_of,
)
from ajet_tools.dataset.files.writer import Writer, json_line

__all__ = [
    "QUERIES",
    "Block",
    "Irregular",
    "LineBlock",
    "TableBlock",
    "Wanted",
    "blocks_of",
    "count_rows",
    "is_lines",
    "join",
    "read_blocks",
    "write_block",
]

_BYTES = 8 << 20
_ROWS = 8192
Wanted = Sequence[tuple[str, ...]]
"""Paths of the fields to be looked at, such as `("metadata", "level")`."""
QUERIES: Wanted = [(name,) for name in QUERY_COLUMNS]
"""What `texts` looks at."""
_UNCLEAR = r"^(?:[\[{]|-?[0-9][0-9.eE+-]*$|true$|false$)"
"""Text that a list, an object, a number or a truth value could be, too."""


class Irregular(Exception):
    """Columns do not show what stands in this block; its rows do."""


@dataclass
class LineBlock:
    """Rows as lines of JSON objects."""

    name: str
    lines: Any
    """Text without blanks around it, as a polars series."""
    numbers: Any
    """Of the lines in the file, from 1, as a numpy array; or the place of each row, as a list of texts."""
    known: dict[tuple[str, ...], Any] = field(default_factory=dict, repr=False)
    """Columns of text that were read so far, by their paths."""

    def __len__(self) -> int:
        return len(self.lines)

    def where(self, index: int) -> str:
        found = self.numbers[index]
        return found if isinstance(found, str) else f"{self.name} line {found}"

    def rows(self, indices: Iterable[int] | None = None) -> Iterator[Row]:
        chosen = range(len(self)) if indices is None else list(map(int, indices))
        lines = self.lines if indices is None else self.lines.gather(chosen)
        for index, line in zip(chosen, lines.to_list(), strict=True):
            yield Row(self.where(index), json.loads(line))

    def columns(self, wanted: Wanted) -> Any:
        """A frame of text with one column for each path; raises Irregular."""
        import polars as pl

        if missing := [path for path in wanted if path not in self.known]:
            found = _decode(self.lines, missing)
            if found is None:
                raise Irregular
            self.known |= found
        return pl.DataFrame([self.known[path].rename(str(number)) for number, path in enumerate(wanted)])

    def frame(self, dtype: Any) -> Any:
        """All columns, as a frame of that struct type. Raises polars' ComputeError where a value is of another."""
        return self.lines.str.json_decode(dtype).struct.unnest()

    @cached_property
    def texts(self) -> Any:
        """What each row asks (`text_of`), as a polars series."""
        return _texts(self)

    def take(self, indices: Any) -> LineBlock:
        places = self.numbers[indices] if isinstance(self.numbers, np.ndarray) else [self.numbers[i] for i in indices]
        return LineBlock(self.name, self.lines.gather(indices), places)


@dataclass
class TableBlock:
    """Rows as a table stores them."""

    name: str
    batch: Batch
    first: int
    """The number of its first row in the file, from 1."""
    _rows: dict[int, Row] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return int(self.batch.data.num_rows)

    def where(self, index: int) -> str:
        return f"{self.name} row {self.first + index}"

    def rows(self, indices: Iterable[int] | None = None) -> Iterator[Row]:
        import pyarrow as pa

        chosen = list(range(len(self)) if indices is None else map(int, indices))
        data = self.batch.data if len(chosen) == len(self) else self.batch.data.take(pa.array(chosen, pa.int64()))
        tree = {"fields": dict(self.batch.table.notes)} if self.batch.table.notes else None
        for index, values in zip(chosen, rows_of(data, self.name), strict=True):
            plain = json_value(decoded(values, tree) if tree else values)
            yield Row(self.where(index), plain, Stored(self.batch, index, plain))

    def columns(self, wanted: Wanted) -> Any:
        import polars as pl

        return pl.DataFrame([self._text(path).rename(str(number)) for number, path in enumerate(wanted)])

    def _text(self, path: Sequence[str]) -> Any:
        """A field as text: `[` where it is a list, an object or of a type that JSON has no word for."""
        import polars as pl
        import pyarrow as pa

        at = self.batch.data.schema.get_field_index(path[0])
        if at < 0:
            return pl.Series([None] * len(self), dtype=pl.String)
        if path[0] in self.batch.table.notes:
            raise Irregular
        array, left = self.batch.data.column(at), list(path[1:])
        while left and pa.types.is_struct(array.type):
            index = array.type.get_field_index(left[0])
            if index < 0:
                return pl.Series([None] * len(self), dtype=pl.String)
            array = array.flatten()[index]
            left.pop(0)
        if left and not pa.types.is_null(array.type):
            raise Irregular
        types = pa.types
        if types.is_string(array.type) or types.is_large_string(array.type):
            return pl.Series(array).cast(pl.String)
        if types.is_integer(array.type) or types.is_null(array.type):
            return pl.Series(array).cast(pl.String)
        if types.is_boolean(array.type):
            return pl.Series(array).replace_strict({True: "true", False: "false"}, return_dtype=pl.String)
        return pl.Series(["[" if one else None for one in array.is_valid().to_pylist()], dtype=pl.String)

    def frame(self, dtype: Any) -> Any:
        """All columns, as a polars frame."""
        import polars as pl

        return pl.from_arrow(self.batch.data)

    @cached_property
    def texts(self) -> Any:
        return _texts(self)

    def take(self, indices: Any) -> TableBlock:
        import pyarrow as pa

        data = self.batch.data.take(pa.array(indices, pa.int64()))
        return TableBlock(self.name, Batch(self.batch.table, data), self.first)


Block = LineBlock | TableBlock


def join(blocks: Sequence[Block]) -> Block | None:
    """Blocks as one, whose rows no longer know their places; None where they are not all lines, or all of one table."""
    import polars as pl
    import pyarrow as pa

    lines = [block for block in blocks if isinstance(block, LineBlock)]
    if lines and len(lines) == len(blocks):
        return LineBlock(
            "", pl.concat([block.lines for block in lines]), np.concatenate([block.numbers for block in lines])
        )
    tables = [block for block in blocks if isinstance(block, TableBlock)]
    schemas = [block.batch.table.schema for block in tables]
    if len(tables) < len(blocks) or any(not one.equals(schemas[0], check_metadata=True) for one in schemas):
        return None
    data = pa.Table.from_batches([block.batch.data for block in tables], schemas[0]).combine_chunks()
    batch = (data.to_batches() or [tables[0].batch.data])[0]
    return TableBlock(tables[0].name, Batch(tables[0].batch.table, batch), tables[0].first)


def count_rows(path: str | Path) -> int:
    """How many rows there are. Raises TaskError at the first bad one. Parquet is not read through."""
    import pyarrow.parquet as pq

    total = 0
    for file in files_of(path):
        if isinstance(file, Path) and file.suffix == ".parquet":
            with explain_errors(file):
                total += int(pq.read_metadata(file).num_rows)
        else:
            total += sum(map(len, read_blocks(file)))
    return total


def _texts(block: Block) -> Any:
    """The first query that says something; rows where no column tells it are looked at one by one."""
    import polars as pl

    try:
        frame = block.columns(QUERIES)
    except Irregular:
        return pl.Series("text", [text_of(row.values) for row in block.rows()], pl.String)
    names = [pl.col(one.name) for one in frame if one.null_count() < len(one)] or [pl.col("0")]
    said = pl.coalesce([pl.when(one.str.contains(r"\S")).then(one) for one in names])
    unclear = pl.any_horizontal([one.str.contains(_UNCLEAR).fill_null(False) for one in names])
    found = frame.select(text=said, unclear=unclear | said.is_null())
    if not len(left := found["unclear"].arg_true()):
        return found["text"]
    return found["text"].scatter(left, [text_of(row.values) for row in block.rows(left)])


def _decode(lines: Any, wanted: Wanted) -> dict[tuple[str, ...], Any] | None:
    """The fields of lines as text, by their paths; None where polars cannot read them so."""
    import polars as pl

    frames: list[list[int]] = []
    for number, path in enumerate(wanted):  # a field and one within it are read in turns
        for group in frames:
            if not any(_overlap(path, wanted[other]) for other in group):
                group.append(number)
                break
        else:
            frames.append([number])
    columns: dict[tuple[str, ...], Any] = {}
    for group in frames or [[]]:
        tree: dict[str, Any] = {}
        for number in group:
            at = tree
            for step in wanted[number][:-1]:
                at = at.setdefault(step, {})
            at[wanted[number][-1]] = None
        try:
            found = lines.str.json_decode(_struct(tree or {"task_id": None}))
        except pl.exceptions.PolarsError:
            return None
        if found.null_count():
            return None
        for number in group:
            column = found
            for step in wanted[number]:
                column = column.struct.field(step)
            columns[wanted[number]] = column
    return columns


def _overlap(one: Sequence[str], other: Sequence[str]) -> bool:
    return all(a == b for a, b in zip(one, other, strict=False))


def _struct(tree: Mapping[str, Any]) -> Any:
    import polars as pl

    return pl.Struct({name: pl.String if below is None else _struct(below) for name, below in tree.items()})


def write_block(writer: Writer, block: Block, indices: Any = None) -> None:
    """Write rows of a block, all or those of a numpy array of indices, as they are stored where that is possible."""
    if indices is not None and not len(indices):
        return
    if isinstance(block, LineBlock) and writer.takes_lines:
        writer.write_lines((block.lines if indices is None else block.lines.gather(indices)).to_list())
        return
    if isinstance(block, TableBlock) and writer.write_batch((block if indices is None else block.take(indices)).batch):
        return
    for row in block.rows(indices):
        writer.write(row.values, row.stored)


def read_blocks(
    path: str | Path,
    *,
    wanted: Wanted = (),
    mapping: Mapping[str, str] | None = None,
    bad: BadRows | None = None,
) -> Iterator[Block]:
    """The rows of what `dataset.files.tables.read` reads, in blocks.

    Args:
        wanted: fields that will be asked for; they are read while lines are checked.
        mapping: as in `read`.
        bad: rows that cannot be read; without it, and where it does not skip, the first raises TaskError.
    """
    bad = bad if bad is not None else BadRows()
    for file in files_of(path):
        if isinstance(file, Path) and is_table(file):
            number = 1
            for batch in table_batches(file, most=_ROWS):
                named = batch.mapped(mapping) if mapping else batch
                if mapping and not all(name in batch.table.schema.names for name in mapping):
                    yield from blocks_of(read_file(file, mapping=mapping, bad=bad), file.name)
                    break
                yield TableBlock(file.name, named, number)
                number += len(batch.data)
        elif isinstance(file, Path) and not mapping and is_lines(file):
            with explain_errors(file), open_text(file) as stream:
                yield from _line_blocks(stream, file.name.removesuffix(".gz"), wanted, bad)
        else:
            yield from blocks_of(read_file(file, mapping=mapping, bad=bad), str(file))


def blocks_of(rows: Iterable[Row], name: str) -> Iterator[Block]:
    """Rows that were read one by one, as lines."""
    import polars as pl

    left = iter(rows)
    while some := list(islice(left, _ROWS)):
        lines = pl.Series("line", [json_line(row.values)[:-1].decode() for row in some], pl.String)
        yield LineBlock(name, lines, [row.where for row in some])


def is_lines(file: Path) -> bool:
    """Its first line is an object of JSON: not one document over many lines, nor an array."""
    if not file.name.removesuffix(".gz").endswith((".jsonl", ".json")):
        return False
    with explain_errors(file), open_text(file) as stream:
        first = next((line for line in stream if line.strip()), b"")
    try:
        return isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        return False


def _line_blocks(stream: IO[bytes], name: str, wanted: Wanted, bad: BadRows) -> Iterator[Block]:
    number = 1
    while data := stream.read(_BYTES):
        data += stream.readline()
        if number == 1:
            data = data.removeprefix(b"\xef\xbb\xbf")
        block, count = _line_block(data, name, number, wanted, bad)
        number += count
        if len(block):
            yield block


def _line_block(data: bytes, name: str, first: int, wanted: Wanted, bad: BadRows) -> tuple[LineBlock, int]:
    import polars as pl

    try:
        lines = pl.read_lines(data, name="line").to_series()
    except pl.exceptions.PolarsError:  # not UTF-8
        return _checked(data.split(b"\n"), name, first, bad), data.count(b"\n")
    count = len(lines)
    numbers = np.arange(first, first + count)
    if any(blank in data for blank in (b"\n\n", b"\n ", b" \n", b"\t", b"\r")) or not data.startswith(b"{"):
        lines = lines.str.strip_chars()
        empty = lines == ""
        lines, numbers = lines.filter(~empty), numbers[~empty.to_numpy()]
    found = _decode(lines, wanted)
    block = _checked(data.split(b"\n"), name, first, bad) if found is None else LineBlock(name, lines, numbers, found)
    return block, count


def _checked(lines: Sequence[bytes], name: str, first: int, bad: BadRows) -> LineBlock:
    """The lines that are objects, looked at one by one."""
    import polars as pl

    good: list[tuple[int, str]] = []
    for number, raw in enumerate(lines, first):
        if not (line := raw.strip()):
            continue
        row = parse_line(line, f"{name} line {number}", number, ended=number < first + len(lines) - 1)
        if row.problem is None and not isinstance(row.value, dict):
            bad.add(row.where, "is no object with keys but " + kind_of(row.value))
        elif row.problem is not None:
            bad.add(row.where, row.problem)
        else:
            good.append((number, line.decode()))
    series = pl.Series("line", [line for _, line in good], pl.String)
    return LineBlock(name, series, np.array([number for number, _ in good], np.int64))
