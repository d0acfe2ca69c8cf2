"""A dataset's file, written a row at a time: it appears whole, or not at all."""

from __future__ import annotations

import csv
import gzip
import json
import logging
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Literal

from ajet_sdk.errors import ConfigError, TaskError
from ajet_sdk.tasks.rows import decoder
from ajet_sdk.whole_file import remove_draft
from ajet_tools.dataset.files.cells import Columns, Misfit
from ajet_tools.dataset.files.columns import Shape
from ajet_tools.dataset.files.stored import Batch, Stored, Table, json_value, rows_of
from ajet_tools.dataset.files.table_draft import TableDraft

__all__ = ["Writer", "json_line"]

log = logging.getLogger("ajet.dataset")

_Format = Literal["jsonl", "jsonl.gz", "csv", "parquet", "directory"]
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)
_ESCAPING = json.JSONEncoder(allow_nan=False)
_BATCH_ROWS = 1024
_SHARD_BYTES = 500_000_000
_GZIP_LEVEL = 6


def json_line(values: Mapping[str, Any]) -> bytes:
    """A row as one line of JSON in UTF-8; a lone surrogate, which UTF-8 cannot hold, stays as its escape."""
    try:
        return (_ENCODER.encode(values) + "\n").encode()
    except UnicodeEncodeError:
        return (_ESCAPING.encode(values) + "\n").encode()


class Writer:
    """Writes rows to a path, in the format that its name says, and puts the file in its place at the end.

    `.jsonl`, `.jsonl.gz`, `.csv`, `.parquet`, or a name without a suffix: a directory in the Hugging Face layout
    (`data/train-00000-of-0000N.parquet`, `split` in place of train). `-` is stdout, as JSON lines. Memory is constant:
    Parquet and CSV, whose columns are known only with the last row, go through a draft beside the file.
    Writers of several splits share a `shape`, so that all have the same columns: leave them all together.
    Leaving the `with` block by an error removes the draft and leaves what stood there before.

    Parquet keeps rows of mixed shapes whole (see `dataset.files.columns`), and of rows that were read from a table
    the types and what its schema says of them; `tables` are known to it even where no row is left (of
    tables that are not `firm`, types give way to values that don't fit: those of seeds). Text cannot hold
    such types: a log line says which columns are then written as what. CSV holds text: what is not text is
    written as JSON, null and a missing key as nothing, half a surrogate pair as `?`.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        split: str = "train",
        shape: Shape | None = None,
        tables: Iterable[Table] = (),
        firm: bool = True,
        shard_bytes: int = _SHARD_BYTES,
    ) -> None:
        self.path = Path(path)
        self.rows = 0
        """Written so far."""
        self._format = _format(self.path)
        self._split = split
        self._shard_bytes = shard_bytes
        self._draft = self._draft_path("part")
        self._shape = shape if shape is not None else Shape()
        self._columns: dict[str, None] = {}
        self._open = ExitStack()
        self._file: BinaryIO | Any = None
        self._rows: TableDraft | None = None
        self._told: set[str] = set()
        self._copy: Any = None
        """Where batches are copied to, while all rows are of one table."""
        self._copied: list[Path] = []
        self._table: Any = None
        self._size = 0
        for table in tables:
            self._shape.declare(table, firm=firm)

    def __enter__(self) -> Writer:
        if str(self.path) == "-":
            self._file = sys.stdout.buffer
            return self
        try:
            self._begin()
        except BaseException as error:  # `__exit__` is not called
            self._close()
            if isinstance(error, OSError):
                raise self._write_error(error) from error
            raise
        return self

    def _begin(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self._format in ("parquet", "directory"):
            self._draft_path("tables").mkdir()
            self._rows = TableDraft(self._draft_path("tables"))
            self._open.callback(self._rows.close)
            return
        self._file = self._open.enter_context(self._draft.open("w+b"))
        if self._format == "jsonl.gz":
            self._file = self._open.enter_context(
                gzip.GzipFile("", "wb", _GZIP_LEVEL, self._file, mtime=0)  # no name, no time: the same bytes out
            )

    def write(self, values: Mapping[str, Any], stored: Stored | None = None) -> None:
        """Write a row; `stored` is the one that it was made of, where that was read from a table (`Row.stored`).

        Raises TaskError where it has what JSON has not, ConfigError where the disk does not take it.
        """
        try:
            if self._rows is not None:
                self._rows.add(values, stored)
            else:
                self._file.write(json_line(values))
        except (ValueError, TypeError, RecursionError) as error:
            raise TaskError(f"row {self.rows + 1} for {self.path} cannot be written as JSON: {error}") from error
        except BrokenPipeError:  # stdout, and who read it has gone: the caller's affair
            raise
        except OSError as error:
            raise self._write_error(error) from error
        if self._rows is not None:
            self._end_copies()
            if stored is not None:
                self._shape.declare(stored.batch.table)
            self._shape.observe(dict(values))
        elif stored is not None:
            self._log_lost_types(stored.batch.table)
        if self._format == "csv":
            self._columns.update(dict.fromkeys(values))
        self.rows += 1

    @property
    def takes_lines(self) -> bool:
        return self._format in ("jsonl", "jsonl.gz")

    def write_lines(self, lines: Sequence[str]) -> None:
        """Write rows as the lines of JSON that they are, for a writer that `takes_lines`."""
        if not lines:
            return
        try:
            self._file.write(("\n".join(lines) + "\n").encode())
        except BrokenPipeError:
            raise
        except OSError as error:
            raise self._write_error(error) from error
        self.rows += len(lines)

    def write_batch(self, batch: Batch) -> bool:
        """Write the rows of a batch as they are stored; False where they must be written one by one instead.

        That is where this file is no table, or where rows are not all of one table.
        """
        if self._rows is None or self._shape.copies is None or batch.table.is_arranged:
            return False
        if any(not one.schema.equals(batch.table.schema, check_metadata=True) for one in self._shape.tables):
            self._end_copies()
            return False
        if self._copy is None:
            self._shape.copies.append(self._uncopy)
            self._copied = []
            self._copy = self._open.enter_context(ExitStack())
        self._shape.declare(batch.table)
        if self._table is None or (self._size >= self._shard_bytes > 0 and self._format == "directory"):
            self._copy.close()
            self._table, self._size = self._copy.enter_context(self._parquet(self._copied, batch.table.schema)), 0
        self._table.write_batch(batch.data)
        self._size += batch.data.nbytes
        self.rows += batch.data.num_rows
        return True

    def _end_copies(self) -> None:
        """From now on rows are written one by one, those that were copied too."""
        copies, self._shape.copies = self._shape.copies, None
        for end in copies or ():
            end()

    def _uncopy(self) -> None:
        import pyarrow.parquet as pq

        self._copy.close()
        self._copy, self.rows = None, 0
        for path in self._copied:
            with pq.ParquetFile(path) as file:
                table, decode = Table.of(path.name, file.schema_arrow), decoder(file.schema_arrow)
                for data in file.iter_batches(_BATCH_ROWS):
                    batch = Batch(table, data)
                    for index, values in enumerate(rows_of(data, path.name)):
                        plain = json_value(decode(values))
                        self.write(plain, Stored(batch, index, plain))
            path.unlink()

    def declare(self, stored: Stored) -> None:
        """A row that is not written says which columns there are, for the case that none is."""
        if self._rows is not None:
            self._shape.declare(stored.batch.table)

    def _log_lost_types(self, table: Table) -> None:
        if table.name not in self._told:
            self._told.add(table.name)
            if lost := table.beyond_json():
                columns = ", ".join(f"{name} ({type_})" for name, type_ in lost.items())
                log.warning(
                    "%s has columns of types that JSON does not have: %s. They are written as text, bytes as "
"base64; write .parquet to keep them", table.name, columns,
                )  # fmt: skip

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if str(self.path) == "-":
            if kind is None:
                self._file.flush()
            return
        try:
            if kind is None:
                self._finish()
        except OSError as failed:
            raise self._write_error(failed) from failed
        finally:
            self._close()

    def _close(self) -> None:
        with suppress(OSError):  # what is still in the buffer does not fit on a full disk, and is thrown away anyhow
            self._open.close()
        remove_draft(self._draft)
        shutil.rmtree(self._draft_path("tables"), ignore_errors=True)

    def _finish(self) -> None:
        if self._format in ("jsonl", "jsonl.gz"):
            self._open.close()
            _move_into_place(self._draft, self.path)
        elif self._format == "csv":
            self._file.flush()
            self._draft_path("tables").mkdir()
            self._write_csv(self._draft_path("tables") / "csv")
            _move_into_place(self._draft_path("tables") / "csv", self.path)
        elif self._rows is not None:
            self._rows.end()
            if self._copy is not None:
                self._copy.close()
                made = self._copied
            else:
                made = self._write_parquet(self._rows, self._shard_bytes if self._format == "directory" else None)
            if self._format == "parquet":
                _move_into_place(made[0], self.path)
            else:
                self._place_shards(made)

    def _place_shards(self, made: list[Path]) -> None:
        """Put the shards in their places, each whole; then take away those of an earlier, longer dataset."""
        folder = self.path / "data"
        folder.mkdir(parents=True, exist_ok=True)
        names = [f"{self._split}-{number:05d}-of-{len(made):05d}.parquet" for number in range(len(made))]
        for shard, name in zip(made, names, strict=True):
            _move_into_place(shard, folder / name)
        for old in folder.glob(f"{self._split}-*-of-*.parquet"):
            if old.name not in names:
                old.unlink()

    def _write_csv(self, path: Path) -> None:
        names = list(self._columns)
        with path.open("w", encoding="utf-8", errors="replace", newline="") as file:
            table = csv.writer(file, lineterminator="\n")
            table.writerow(names)
            for rows in self._batches():
                table.writerows([_cell(row.get(name)) for name in names] for row in rows)

    def _write_parquet(self, rows: TableDraft, shard_bytes: int | None) -> list[Path]:
        columns = Columns(self._shape, rows.tables)
        if self.rows and not len(columns.schema):
            raise TaskError(f"every row for {self.path} is empty, which Parquet cannot store")
        while True:
            try:
                return self._write_tables(rows, columns, shard_bytes)
            except Misfit as misfit:
                columns.widen(misfit, self.path)

    def _write_tables(self, rows: TableDraft, columns: Columns, shard_bytes: int | None) -> list[Path]:
        import pyarrow as pa

        made: list[Path] = []
        written = 0
        try:
            with ExitStack() as stack:
                table: Any = None
                for chunk in rows.chunks():
                    if table is None or (shard_bytes is not None and written >= shard_bytes):
                        stack.close()
                        table, written = stack.enter_context(self._parquet(made, columns.schema)), 0
                    table.write_table(columns.table(chunk))
                    written += chunk.size
                if table is None:
                    stack.enter_context(self._parquet(made, columns.schema))
        except pa.ArrowNotImplementedError as error:
            raise TaskError(f"{self.path} cannot be written as Parquet: {error}") from error
        return made

    def _parquet(self, made: list[Path], schema: Any) -> Any:
        import pyarrow.parquet as pq

        made.append(self._draft_path("tables") / f"{len(made)}.parquet")
        return pq.ParquetWriter(made[-1], schema, compression="zstd")

    def _batches(self) -> Iterator[list[dict[str, Any]]]:
        """The rows of the draft, some at a time."""
        self._file.seek(0)
        while lines := list(islice(self._file, _BATCH_ROWS)):
            yield [json.loads(line) for line in lines]

    def _draft_path(self, name: str) -> Path:
        return self.path.with_name(f".{self.path.name}.{self._split}.{os.getpid()}.{name}")

    def _write_error(self, error: OSError) -> ConfigError:
        return ConfigError(f"cannot write {self.path}: {error.strerror or error}. An existing file was not changed")


def _format(path: Path) -> _Format:
    name = path.name.lower()
    if str(path) == "-" or name.endswith(".jsonl"):
        return "jsonl"
    if name.endswith(".jsonl.gz"):
        return "jsonl.gz"
    if name.endswith(".csv"):
        return "csv"
    if name.endswith(".parquet"):
        return "parquet"
    if path.is_dir() or not path.suffix:
        return "directory"
    raise ConfigError(
        f"cannot write {path}: datasets are written as .jsonl, .jsonl.gz, .csv, .parquet, or as a directory (a "
        "name without a suffix)"
    )


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _move_into_place(draft: Path, path: Path) -> None:
    with draft.open("rb") as file:
        os.fsync(file.fileno())
    if path.is_file() and _is_trace(path):
        raise ConfigError(f"{path} is a trace, which a dataset never overwrites; choose another file")
    draft.replace(path)


def _is_trace(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(12)[8:] == b"DUCK"
