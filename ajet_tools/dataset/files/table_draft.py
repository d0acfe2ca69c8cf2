"""Writes Parquet whose columns are known only after the last row.

The draft has the columns that a table declares and the lines of JSON with all other keys; the
types of those keys are found while it is written. The result has them as columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from ajet_sdk.errors import TaskError
from ajet_tools.dataset.files.blocks import Block
from ajet_tools.dataset.files.columns import LINE, stored
from ajet_tools.dataset.files.json_columns import (
    Shape,
    columns_of,
    encoded,
    for_table,
    merged,
    shapes_of,
    too_large,
)

# a group of rows, which is in memory until it is written
_BYTES = 64 << 20
_GROUP = 1 << 16


class TableDraft:
    """Takes blocks of rows by `add`; `finish` returns the files."""

    def __init__(self, folder: Path, schema: pa.Schema, *, shard_bytes: int) -> None:
        """Writes into the existing `folder`, in files of about `shard_bytes` (0: no limit). All
        blocks have the columns of `schema`."""
        self.rows = 0
        self.shapes: dict[str, Shape] = {}
        """The columns of the lines of JSON."""
        self._schema = schema
        self._files = _ParquetFiles(folder, shard_bytes)
        self._path = folder / "lines.arrow"
        self._lines: Any = None
        if LINE in schema.names:
            self._lines = pa.ipc.new_stream(str(self._path), schema)

    def add(self, block: Block) -> None:
        """Raises TaskError for a row that no table holds."""
        if self._lines is None:
            self._files.write(block.data, self._schema)
        else:
            self._add_lines(block)
        self.rows += len(block)

    def _add_lines(self, block: Block) -> None:
        place = self._schema.get_field_index(LINE)
        lines = block.data.column(place)
        index = too_large(lines)
        if index is not None:
            raise TaskError(
                f"{block.where(index)}: a number is larger than any float, such as 1e400; write"
                " .jsonl"
            )
        lines = encoded(lines)
        shapes = shapes_of(lines)
        # a key that only one of two blocks has is absent in the other
        self.shapes = merged(self.shapes, shapes) if self.rows else shapes
        self._lines.write_batch(block.data.set_column(place, self._schema.field(LINE), lines))

    def finish(self, name: str, shapes: Mapping[str, Shape], order: Sequence[str]) -> list[Path]:
        """Returns the files.

        `shapes` are the columns of all splits, and `order` columns that come first. Raises
        TaskError if no column is left.
        """
        if self._lines is not None:
            self._lines.close()
            columns = for_table(shapes)
            if self.rows and not columns and self._schema.names == [LINE]:
                raise TaskError(f"all rows for {name} are empty, which Parquet cannot store")
            for data in self._batches():
                table = self._expanded(data, columns, order)
                self._files.write(table, table.schema)
        elif not self.rows:
            self._files.write(pa.RecordBatch.from_pylist([], self._schema), self._schema)
        return self._files.finish()

    def abandon(self) -> None:
        """Closes all files."""
        if self._lines is not None:
            self._lines.close()
        self._files.abandon()

    def _batches(self) -> Iterator[pa.RecordBatch]:
        """Yields the rows of the draft, at least one batch."""
        if not self.rows:
            yield pa.RecordBatch.from_pylist([], self._schema)
        with pa.OSFile(str(self._path)) as file, pa.ipc.open_stream(file) as batches:
            yield from batches

    def _expanded(
        self, data: pa.RecordBatch, shapes: Mapping[str, Shape], order: Sequence[str]
    ) -> pa.RecordBatch:
        """Returns rows with their lines as columns."""
        arrays = []
        fields = []
        for column, array in zip(self._schema, data.columns, strict=True):
            if column.name == LINE:
                new_arrays, new_fields = columns_of(array, shapes)
                arrays += new_arrays
                fields += new_fields
            else:
                arrays.append(array)
                fields.append(column)
        schema = pa.schema(fields, self._schema.metadata)
        if not arrays:
            return pa.RecordBatch.from_pylist([], schema)
        first = [name for name in order if name in schema.names]
        names = dict.fromkeys([*first, *schema.names])
        return pa.RecordBatch.from_arrays(arrays, schema=schema).select(list(names))


class _ParquetFiles:
    """Parquet files of about the same size, written in large row groups."""

    def __init__(self, folder: Path, shard_bytes: int) -> None:
        self._folder = folder
        self._shard_bytes = shard_bytes
        self._paths: list[Path] = []
        self._writer: Any = None
        self._schema: pa.Schema | None = None
        self._size = 0
        self._waiting: list[pa.RecordBatch] = []

    def write(self, data: pa.RecordBatch, schema: pa.Schema) -> None:
        if self._writer is not None and self._size >= self._shard_bytes > 0:
            self.finish()
        if self._writer is None:
            self._open(stored(schema))
        self._waiting.append(data.cast(self._schema))
        self._size += data.nbytes
        rows = sum(map(len, self._waiting))
        if rows >= _GROUP or sum(each.nbytes for each in self._waiting) >= _BYTES:
            self._flush()

    def _open(self, schema: pa.Schema) -> None:
        import pyarrow.parquet as pq

        path = self._folder / f"{len(self._paths)}.parquet"
        try:
            self._writer = pq.ParquetWriter(
                path, schema, compression="zstd", dictionary_pagesize_limit=1 << 17
            )
        except NotImplementedError as error:  # raised by Arrow for an object without fields
            raise TaskError(f"Parquet cannot store these columns, write .jsonl: {error}") from error
        self._paths.append(path)
        self._schema = schema
        self._size = 0

    def _flush(self) -> None:
        if self._waiting:
            self._writer.write_table(pa.Table.from_batches(self._waiting, self._schema))
            self._waiting = []

    def finish(self) -> list[Path]:
        """Closes the last file, and returns all."""
        self._flush()
        self.abandon()
        return self._paths

    def abandon(self) -> None:
        """Closes the last file without its last rows."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
