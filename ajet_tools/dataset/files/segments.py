"""Writes a table whose columns are known only after the last row.

Rows go into a Parquet file; a new one starts when a block has columns that do not fit. A single
file is the result; several are rewritten with the merged columns.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from ajet_sdk.errors import TaskError
from ajet_tools.dataset.files.arrays import convert, with_statistics
from ajet_tools.dataset.files.blocks import Block, as_table
from ajet_tools.dataset.files.places import Columns, Place, merged

_BYTES = 64 << 20
_GROUP = 1 << 16


@dataclass
class Shape:
    """The merged columns of all rows written so far, shared by the writers of several splits."""

    columns: Columns | None = None
    tables: list[Columns] = field(default_factory=list)
    """The columns to write if there is no row."""

    def add(self, columns: Columns) -> Columns:
        self.columns = columns if self.columns is None else merged([self.columns, columns])
        return self.columns


class Segments:
    """Takes rows by `add`; `finish` returns the files, `abandon` closes the last one."""

    def __init__(self, folder: Path, shape: Shape, shard_bytes: int) -> None:
        """Writes into the existing `folder`, in files of about `shard_bytes` (0: no limit)."""
        self._folder, self._shape, self._shard_bytes = folder, shape, shard_bytes
        self._made: list[tuple[Path, Columns]] = []
        self._file: _TableFile | None = None
        self._empty = 0
        """Rows without keys, before the first row with a key."""

    def abandon(self) -> None:
        if self._file is not None:
            self._file.writer.close()

    def add(self, block: Block) -> None:
        """Raises TaskError if the rows do not fit into one table with earlier ones."""
        table = as_table(block)
        columns = table.table if table is not block else with_statistics(table.data, table.table)
        to = self._shape.add(columns)
        if not len(to.schema):
            self._empty += len(table)
            return
        if self._empty:
            self._write(pa.RecordBatch.from_pylist([{}] * self._empty, to.schema), to)
            self._empty = 0
        self._write(convert(table.data, columns, to), to)

    def _write(self, data: pa.RecordBatch, columns: Columns) -> None:
        file = self._file
        if file is not None and (
            file.size >= self._shard_bytes > 0
            or not file.columns.schema.equals(columns.schema, check_metadata=True)
        ):
            file.close()
            file = None
        if file is None:
            path = self._folder / f"{len(self._made)}.parquet"
            self._made.append((path, columns))
            file = self._file = _TableFile(path, columns)
        file.write(data)

    def finish(self, path: Path, rows: int) -> list[Path]:
        """Returns the files for `path`, rewritten if some lack columns. Raises TaskError if the
        rows do not fit."""
        import pyarrow.parquet as pq

        columns = self._shape.columns
        if columns is None:
            columns = (
                merged(self._shape.tables)
                if self._shape.tables
                else Columns(path.name, Place(fields={}))
            )
        if rows and not len(columns.schema):
            raise TaskError(f"all rows for {path} are empty, which Parquet cannot store")
        if self._file is not None:
            self._file.close()
            self._file = None
        same = [made.schema.equals(columns.schema, check_metadata=True) for _, made in self._made]
        if same and all(same):
            return [path for path, _ in self._made]
        parts, self._made = self._made, []
        folder, self._folder = self._folder, self._folder / "whole"
        self._folder.mkdir(exist_ok=True)
        try:
            with ExitStack() as stack:
                for path, part_columns in parts:
                    for data in stack.enter_context(pq.ParquetFile(path)).iter_batches(8192):
                        self._write(convert(data, part_columns, columns), columns)
            if not self._made:
                self._write(pa.RecordBatch.from_pylist([], columns.schema), columns)
            if self._file is not None:
                self._file.close()
            return [path for path, _ in self._made]
        finally:
            self._made, self._folder, self._file = parts, folder, None


class _TableFile:
    """A Parquet file, written in large row groups."""

    def __init__(self, path: Path, columns: Columns) -> None:
        import pyarrow.parquet as pq

        self.columns, self.size = columns, 0
        self._waiting: list[pa.RecordBatch] = []
        self._rows = self._bytes = 0
        try:
            self.writer = pq.ParquetWriter(
                path, columns.schema, compression="zstd", dictionary_pagesize_limit=1 << 17
            )
        except NotImplementedError as error:  # raised by Arrow for an object without fields
            raise TaskError(f"Parquet cannot store these columns, write .jsonl: {error}") from error

    def write(self, data: pa.RecordBatch) -> None:
        self._waiting.append(data)
        self.size += data.nbytes
        self._rows, self._bytes = self._rows + data.num_rows, self._bytes + data.nbytes
        if self._rows >= _GROUP or self._bytes >= _BYTES:
            self._flush()

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        self._rows = self._bytes = 0
        if waiting:
            self.writer.write_table(pa.Table.from_batches(waiting, self.columns.schema))

    def close(self) -> None:
        self._flush()
        self.writer.close()
