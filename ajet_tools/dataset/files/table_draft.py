"""Writes Parquet whose columns are known only after the last row.

The draft has the columns that a table declares and the lines of JSON with all other keys; the
types of those keys are found while it is written. The result has them as columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

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

_BYTES = 64 << 20
_GROUP = 1 << 16
_BATCH = 8192


class TableDraft:
    """Takes blocks of rows by `add`; `finish` returns the files."""

    def __init__(self, folder: Path, schema: pa.Schema) -> None:
        """Writes into the existing `folder`. All blocks have the columns of `schema`."""
        self.shapes: dict[str, Shape] = {}
        """The columns of the lines of JSON."""
        self.rows = 0
        self._folder = folder
        self._schema = schema
        self._has_lines = LINE in schema.names
        self._file = _TableFile(folder / "draft.parquet", schema, is_draft=self._has_lines)

    def add(self, block: Block) -> None:
        """Raises TaskError for a row that no table holds."""
        data = block.data
        if self._has_lines:
            place = data.schema.get_field_index(LINE)
            index = too_large(data.column(place))
            if index is not None:
                raise TaskError(
                    f"{block.where(index)}: a number is larger than any float, such as 1e400; write"
                    " .jsonl"
                )
            lines = encoded(data.column(place))
            shapes = shapes_of(lines)
            self.shapes = merged(self.shapes, shapes) if self.rows else shapes
            data = data.set_column(place, self._schema.field(LINE), lines)
        self._file.write(data)
        self.rows += len(block)

    def close(self) -> None:
        self._file.close()

    def abandon(self) -> None:
        self._file.abandon()

    def finish(
        self, name: str, shapes: dict[str, Shape], order: Sequence[str], shard_bytes: int
    ) -> list[Path]:
        """Returns the files, of about `shard_bytes` each (0: no limit).

        `shapes` are the columns of all splits, and `order` columns that come first. Raises
        TaskError if no column is left.
        """
        self.close()
        if not self._has_lines and not order and not shard_bytes:
            return [self._file.path]
        columns = for_table(shapes)
        files: list[_TableFile] = []
        for data in self._batches():
            table = self._expanded(data, columns, order)
            if self.rows and not table.schema.names:
                raise TaskError(f"all rows for {name} are empty, which Parquet cannot store")
            if files and files[-1].size > shard_bytes > 0:
                files[-1].close()
            if not files or files[-1].is_closed:
                files.append(_TableFile(self._folder / f"{len(files)}.parquet", table.schema))
            files[-1].write(table)
        files[-1].close()
        return [file.path for file in files]

    def _batches(self) -> Iterator[pa.RecordBatch]:
        """Yields the rows of the draft, at least one batch."""
        import pyarrow.parquet as pq

        if not self.rows:
            yield pa.RecordBatch.from_pylist([], self._schema)
            return
        with pq.ParquetFile(self._file.path) as file:
            yield from file.iter_batches(_BATCH)

    def _expanded(
        self, data: pa.RecordBatch, shapes: dict[str, Shape], order: Sequence[str]
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
        names = dict.fromkeys([*(name for name in order if name in schema.names), *schema.names])
        return pa.RecordBatch.from_arrays(arrays, schema=schema).select(list(names))


class _TableFile:
    """A Parquet file, written in large row groups."""

    def __init__(self, path: Path, schema: pa.Schema, *, is_draft: bool = False) -> None:
        import pyarrow.parquet as pq

        self.path = path
        self.size = 0
        self.is_closed = False
        self._schema = stored(schema)
        self._waiting: list[pa.RecordBatch] = []
        try:
            self._writer = pq.ParquetWriter(
                path,
                self._schema,
                compression="lz4" if is_draft else "zstd",
                use_dictionary=not is_draft,
                dictionary_pagesize_limit=1 << 17,
            )
        except NotImplementedError as error:  # raised by Arrow for an object without fields
            raise TaskError(f"Parquet cannot store these columns, write .jsonl: {error}") from error

    def write(self, data: pa.RecordBatch) -> None:
        self._waiting.append(data.cast(self._schema))
        self.size += data.nbytes
        rows = sum(map(len, self._waiting))
        if rows >= _GROUP or sum(each.nbytes for each in self._waiting) >= _BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._waiting:
            self._writer.write_table(pa.Table.from_batches(self._waiting, self._schema))
            self._waiting = []

    def close(self) -> None:
        self._flush()
        self.abandon()

    def abandon(self) -> None:
        """Closes the file without its last rows."""
        self._writer.close()
        self.is_closed = True
