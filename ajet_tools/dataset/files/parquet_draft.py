"""Writes a table whose columns are known only after the last row.

Rows go into a Parquet file; a new one starts when rows have columns that do not fit. A single file
is the result; several are rewritten with the merged columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path

import pyarrow as pa

from ajet_sdk.errors import TaskError
from ajet_tools.dataset.files.arrays import convert
from ajet_tools.dataset.files.blocks import Block, as_table
from ajet_tools.dataset.files.columns import Columns, merged

_BYTES = 64 << 20
_GROUP = 1 << 16


@dataclass
class Shape:
    """The merged columns of all rows written so far, shared by the writers of several splits."""

    columns: Columns | None = None
    tables: list[Columns] = field(default_factory=list)
    """The columns to write if there is no row."""

    def add(self, columns: Columns) -> Columns:
        self.columns = columns if self.columns is None else merged(self.columns, columns)
        return self.columns


class ParquetDraft:
    """Takes rows by `add`; `finish` returns the files, `abandon` closes the last one."""

    def __init__(self, folder: Path, shape: Shape, shard_bytes: int) -> None:
        """Writes into the existing `folder`, in files of about `shard_bytes` (0: no limit)."""
        self._folder = folder
        self._shape = shape
        self._shard_bytes = shard_bytes
        self._files: list[_TableFile] = []
        self._empty = 0
        """Rows without keys, before the first row with a key."""

    def abandon(self) -> None:
        if self._files:
            self._files[-1].writer.close()

    def add(self, block: Block) -> None:
        """Raises TaskError if the rows do not fit into one table with earlier ones."""
        table = as_table(block)
        columns = self._shape.add(table.table)
        if not columns.shapes:
            self._empty += len(table)
            return
        if self._empty:
            self._write(pa.RecordBatch.from_pylist([{}] * self._empty, columns.schema), columns)
            self._empty = 0
        self._write(convert(table.data, table.table, columns), columns)

    def _write(self, data: pa.RecordBatch, columns: Columns) -> None:
        file = self._files[-1] if self._files else None
        if file is not None and not file.takes(columns, self._shard_bytes):
            file.close()
            file = None
        if file is None:
            file = _TableFile(self._folder / f"{len(self._files)}.parquet", columns)
            self._files.append(file)
        file.write(data)

    def finish(self, path: Path, rows: int) -> list[Path]:
        """Returns the files for `path`, rewritten if some lack columns. Raises TaskError if the
        rows do not fit."""
        columns = self._shape.columns
        if columns is None:
            columns = reduce(merged, self._shape.tables or [Columns(path.name, {})])
        if rows and not columns.shapes:
            raise TaskError(f"all rows for {path} are empty, which Parquet cannot store")
        if self._files:
            self._files[-1].close()
        same = [file.has(columns) for file in self._files]
        if not same or not all(same):
            self._rewrite(columns)
        return [file.path for file in self._files]

    def _rewrite(self, columns: Columns) -> None:
        drafts = self._files
        self._files = []
        self._folder = self._folder / "whole"
        self._folder.mkdir(exist_ok=True)
        for data in _converted(drafts, columns):
            self._write(data, columns)
        if not self._files:
            self._write(pa.RecordBatch.from_pylist([], columns.schema), columns)
        self._files[-1].close()


def _converted(drafts: Iterable[_TableFile], columns: Columns) -> Iterator[pa.RecordBatch]:
    import pyarrow.parquet as pq

    for draft in drafts:
        with pq.ParquetFile(draft.path) as file:
            for data in file.iter_batches(8192):
                yield convert(data, draft.columns, columns)


class _TableFile:
    """A Parquet file, written in large row groups."""

    def __init__(self, path: Path, columns: Columns) -> None:
        import pyarrow.parquet as pq

        self.path = path
        self.columns = columns
        self._size = 0
        self._waiting: list[pa.RecordBatch] = []
        try:
            self.writer = pq.ParquetWriter(
                path, columns.schema, compression="zstd", dictionary_pagesize_limit=1 << 17
            )
        except NotImplementedError as error:  # raised by Arrow for an object without fields
            raise TaskError(f"Parquet cannot store these columns, write .jsonl: {error}") from error

    def has(self, columns: Columns) -> bool:
        return bool(self.columns.schema.equals(columns.schema, check_metadata=True))

    def takes(self, columns: Columns, shard_bytes: int) -> bool:
        return self.has(columns) and not self._size >= shard_bytes > 0

    def write(self, data: pa.RecordBatch) -> None:
        self._waiting.append(data)
        self._size += data.nbytes
        rows = sum(map(len, self._waiting))
        if rows >= _GROUP or sum(each.nbytes for each in self._waiting) >= _BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._waiting:
            self.writer.write_table(pa.Table.from_batches(self._waiting, self.columns.schema))
            self._waiting = []

    def close(self) -> None:
        self._flush()
        self.writer.close()
