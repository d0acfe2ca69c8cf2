"""Writes a dataset file in blocks or row by row; it appears complete or not at all."""

from __future__ import annotations

import csv
import gzip
import json
import logging
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import reduce
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Literal

import pyarrow as pa
import pyarrow.compute as pc

from ajet_sdk.errors import ConfigError, TaskError
from ajet_sdk.whole_file import remove_draft
from ajet_tools.dataset.files.blocks import ROWS, Block, block_of_lines, text_of_json
from ajet_tools.dataset.files.columns import LINE, LINES, warn_of_losses
from ajet_tools.dataset.files.delimited import cell_of
from ajet_tools.dataset.files.json_columns import Shape, merged
from ajet_tools.dataset.files.sources import is_duckdb
from ajet_tools.dataset.files.table_draft import TableDraft
from ajet_tools.dataset.files.values import not_finite

log = logging.getLogger("ajet.dataset")
_Format = Literal["jsonl", "jsonl.gz", "csv", "parquet", "directory"]
_SUFFIXES: Sequence[_Format] = ("jsonl", "jsonl.gz", "csv", "parquet")
_SHARD_BYTES = 500_000_000  # as `datasets` writes
_GZIP_LEVEL = 6  # that of the program gzip


class Writer:
    """Writes rows to a path in the format of its suffix, and replaces the file at the end.

    `.jsonl`, `.jsonl.gz`, `.csv`, `.parquet`, or no suffix: a directory in the Hugging Face layout
    (`data/train-00000-of-0000N.parquet`, with `split` in place of train). `-` is stdout, as JSON
    lines. Memory is constant: Parquet and CSV, whose columns are known only after the last row, go
    through drafts beside the file. If an error leaves the `with` block, the draft is removed and
    the existing file stays.

    Parquet keeps the columns of `schema` (`Rows.schema`), and has one for each other key (see
    `dataset.files.json_columns`). Text cannot hold all types: a warning names the columns and how
    they are written. For CSV see `dataset.files.delimited`.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        schema: pa.Schema = LINES,
        split: str = "train",
        siblings: list[Writer] | None = None,
        order: Sequence[str] = (),
        shard_bytes: int = _SHARD_BYTES,
    ) -> None:
        """Opens nothing yet.

        Args:
            schema: the columns of a table that blocks of rows have.
            split: the split of a directory.
            siblings: the writers of all splits, which get the same columns; close them together.
            order: columns that come before the others.
            shard_bytes: size of a file of a directory.
        """
        if not str(path):
            raise ConfigError(
                "the path to write is empty; name a file, a directory, or - for stdout"
            )
        self.path = Path(path)
        self.rows = 0
        self.schema = schema
        self._format = _format(self.path)
        self._split = split
        self._shard_bytes = shard_bytes if self._format == "directory" else 0
        self._draft = self._draft_path("part")
        self._siblings = siblings if siblings is not None else []
        self._siblings.append(self)
        self._order = order
        self._open = ExitStack()
        self._file: BinaryIO | Any = None
        self._table: TableDraft | None = None
        self._waiting: list[str] = []
        self._logged: set[str] = set()

    def __enter__(self) -> Writer:
        if str(self.path) == "-":
            self._file = sys.stdout.buffer
            return self
        try:
            with self._explain_errors():
                self._begin()
        except BaseException:  # `__exit__` won't be called
            self._close()
            raise
        return self

    def _begin(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self._format in ("parquet", "directory"):
            folder = self._draft_path("tables")
            folder.mkdir()
            (folder / "begun").open("w").close()
            self._table = TableDraft(folder, self.schema, shard_bytes=self._shard_bytes)
            self._open.callback(self._table.abandon)
            return
        self._file = self._open.enter_context(self._draft.open("w+b"))
        if self._format == "jsonl.gz":
            # without name and time, output is reproducible
            packed = gzip.GzipFile("", "wb", _GZIP_LEVEL, self._file, mtime=0)
            self._file = self._open.enter_context(packed)

    def write(self, values: Mapping[str, object]) -> None:
        """Writes a row. Raises TaskError for values that JSON lacks, ConfigError if writing
        fails."""
        try:
            line = text_of_json(values)
        except (ValueError, TypeError, RecursionError) as error:
            raise TaskError(
                f"row {self.rows + 1} for {self.path} cannot be written as JSON: {error}"
            ) from error
        if self._table is None:
            self._write(f"{line}\n".encode(), 1)
            return
        self.rows += 1
        self._waiting.append(line)
        if len(self._waiting) >= ROWS:
            self._flush()

    def write_block(self, block: Block) -> None:
        """Writes the rows of a block in their stored form. Raises TaskError if they don't fit the
        schema."""
        if not len(block):
            return
        if self._table is not None:
            if self.schema == LINES:  # text is among the sources
                self._log_losses(block)
            self._flush()
            with self._explain_errors():
                self._table.add(block.fitted(self.schema))
            self.rows += len(block)
            return
        self._log_losses(block)
        lines = block.fitted(LINES).data.column(LINE).cast(pa.binary())
        whole = pa.ListArray.from_arrays([0, len(lines)], lines)
        joined = pc.binary_join(whole, b"\n")[0].as_py()
        self._write(joined + b"\n", len(block))

    def _write(self, lines: bytes, count: int) -> None:
        try:
            self._file.write(lines)
        except OSError:  # entering the context manager for each row would be slower
            with self._explain_errors():
                raise
        self.rows += count

    def _flush(self) -> None:
        """Adds the rows that `write` collected."""
        if self._table is not None and self._waiting:
            first = self.rows - len(self._waiting) + 1
            places = [f"row {n} for {self.path}" for n in range(first, self.rows + 1)]
            block = block_of_lines(self._waiting, "", places)
            self._waiting = []
            with self._explain_errors():
                self._table.add(block.fitted(self.schema))

    def _log_losses(self, block: Block) -> None:
        """Warns once per table about values that text can't represent."""
        if block.is_text:
            return
        if block.name not in self._logged:
            self._logged.add(block.name)
            warn_of_losses(block.data.schema, block.name, "written")
        odd = not_finite(block.data)
        if odd and f"NaN of {block.name}" not in self._logged:
            self._logged.add(f"NaN of {block.name}")
            log.warning(
                "%s has NaN or an infinity in %s, which JSON does not have: written as null; write"
                " .parquet to keep them",
                block.name,
                ", ".join(odd),
            )

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if str(self.path) == "-":
            if kind is None:
                self._file.flush()
            return
        try:
            with self._explain_errors():
                if kind is None:
                    self._finish()
        finally:
            self._close()

    def _close(self) -> None:
        with suppress(OSError):  # on a full disk, flushing fails; the draft is removed anyway
            self._open.close()
        remove_draft(self._draft)
        shutil.rmtree(self._draft_path("tables"), ignore_errors=True)

    def _finish(self) -> None:
        if self._table is not None:
            parts = self._table.finish(str(self.path), self._shapes(), self._order)
            if self._format == "parquet":
                _move_into_place(parts[0], self.path)
            else:
                self._place_shards(parts)
        elif self._format == "csv":
            self._file.flush()
            self._draft_path("tables").mkdir()
            self._write_csv(self._draft_path("tables") / "csv")
            _move_into_place(self._draft_path("tables") / "csv", self.path)
        else:
            self._open.close()
            _move_into_place(self._draft, self.path)

    def _shapes(self) -> dict[str, Shape]:
        """Returns the columns of the lines of all siblings."""
        found = []
        for writer in self._siblings:
            writer._flush()
            if writer._table is not None and writer._table.rows:
                found.append(writer._table.shapes)
        return reduce(merged, found) if found else {}

    def _place_shards(self, made: list[Path]) -> None:
        """Moves the shards into place, then removes those of an earlier, longer dataset."""
        folder = self.path / "data"
        folder.mkdir(parents=True, exist_ok=True)
        names = []
        for number, shard in enumerate(made):
            names.append(f"{self._split}-{number:05d}-of-{len(made):05d}.parquet")
            _move_into_place(shard, folder / names[-1])
        for old in folder.glob(f"{self._split}-*-of-*.parquet"):
            if old.name not in names:
                old.unlink()

    def _write_csv(self, path: Path) -> None:
        columns: dict[str, None] = {}
        for rows in self._drafted():
            for row in rows:
                columns.update(dict.fromkeys(row))
        names = list(columns)
        with path.open("w", encoding="utf-8", errors="replace", newline="") as file:
            table = csv.writer(file, lineterminator="\n")
            table.writerow(names)
            for rows in self._drafted():
                for row in rows:
                    table.writerow([cell_of(name, row.get(name)) for name in names])

    def _drafted(self) -> Iterator[list[dict[str, object]]]:
        self._file.seek(0)
        while lines := list(islice(self._file, ROWS)):
            yield [json.loads(line) for line in lines]

    def _draft_path(self, name: str) -> Path:
        path = self.path if self.path.name else self.path.resolve()  # of `.`
        return path.with_name(f".{path.name}.{self._split}.{os.getpid()}.{name}")

    @contextmanager
    def _explain_errors(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:  # the reader of stdout has gone; the caller handles it
            raise
        except OSError as error:
            why = os.strerror(error.errno) if error.errno else error
            raise ConfigError(
                f"cannot write {self.path}: {why}. An existing file was not changed"
            ) from error


def writes_table(path: str | Path) -> bool:
    """Whether a `Writer` for this path writes Parquet."""
    return _format(Path(path)) in ("parquet", "directory")


def _format(path: Path) -> _Format:
    if str(path) == "-":
        return "jsonl"
    for suffix in _SUFFIXES:
        if path.name.lower().endswith(f".{suffix}"):
            return suffix
    if path.is_dir() or not path.suffix:
        return "directory"
    raise ConfigError(
        f"cannot write {path}: use .jsonl, .jsonl.gz, .csv, .parquet, or a directory (no suffix)"
    )


def _move_into_place(draft: Path, path: Path) -> None:
    with draft.open("rb") as file:
        os.fsync(file.fileno())
    if path.is_file() and is_duckdb(path):
        raise ConfigError(
            f"{path} is a trace, which a dataset never overwrites; choose another file"
        )
    draft.replace(path)
