"""Datasets as polars frames: `ajet.dataset.read(path)`.

import ajet, polars as pl

ajet.dataset.read("tasks.jsonl").filter(pl.col("metadata").struct["level"] >=
2).collect(engine="streaming")
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import polars as pl

from ajet_tools.dataset.files.blocks import as_lines
from ajet_tools.dataset.files.columns import JSON
from ajet_tools.dataset.files.json_columns import (
    column_value,
    encoded,
    restored,
    shapes_of,
    table_of_lines,
)
from ajet_tools.dataset.files.sources import columns_of, explain_errors, is_table
from ajet_tools.dataset.files.tables import read_blocks, schema_of


def read(path: str | Path, *, mapping: Mapping[str, str] | None = None) -> pl.LazyFrame:
    """Returns a dataset as a lazy frame. Parquet and Arrow are read when it is collected, all
    other files at once.

    Args:
        path: a file (JSON lines, JSON, CSV, TSV, Parquet, Arrow IPC; `.gz`), a pattern such as `data/*.parquet`, a
            directory (its split train; `DIR:NAME` is another), or `-` for stdin.
        mapping: column -> main_query, init_messages, task_id, env_type or metadata.NAME; the column is renamed.

    Types are those of the file; decimals of more than 38 digits are text. CSV cells stay text, also
    empty ones. In JSON, a column of mixed types is text with each value as JSON; mixed numbers are
    floats; half of a surrogate pair is its escape. Raises TaskError, with file and line, for a row
    that cannot be read, and ConfigError if there is no such file.
    """
    files = columns_of(path)
    if mapping or not all(isinstance(file, Path) and _has_frame(file) for file in files):
        return _frame_of_rows(path, mapping)
    frames = []
    for file, more in files.items():
        frame = _scan(Path(file))
        names = frame.collect_schema().names()
        new = {name: value for name, value in more.items() if name not in names}
        types = {int: pl.Int64, str: pl.String}
        columns = [pl.lit(value, types.get(type(value))).alias(name) for name, value in new.items()]
        frames.append(frame.with_columns(columns))
    return frames[0] if len(frames) == 1 else pl.concat(frames, how="diagonal_relaxed")


def _has_frame(file: Path) -> bool:
    """Whether polars reads the file itself."""
    if not is_table(file):
        return False
    with explain_errors(file):
        schema = schema_of(file)
        return "decimal256" not in str(schema) and JSON not in schema.types


def _scan(file: Path) -> pl.LazyFrame:
    with explain_errors(file):
        try:
            frame = pl.scan_parquet(file) if file.name.endswith(".parquet") else pl.scan_ipc(file)
            frame.collect_schema()
            return frame
        except pl.exceptions.PolarsError:
            if file.name.endswith(".parquet"):
                raise
            return pl.read_ipc_stream(file).lazy()


def _frame_of_rows(path: str | Path, mapping: Mapping[str, str] | None) -> pl.LazyFrame:
    lines = [as_lines(block).lines for block in read_blocks(path, mapping=mapping)]
    if not lines:
        return pl.LazyFrame()
    whole = encoded(pl.concat(lines))
    shapes = shapes_of(whole, exact=False)
    if not shapes:
        return pl.LazyFrame()
    frame = pl.DataFrame(table_of_lines(whole, shapes, column_value))
    texts = [name for name, kind in frame.schema.items() if kind == pl.String]
    odd = [name for name in texts if frame[name].str.contains("[\U0010f800-\U0010ffff]").any()]
    return frame.with_columns(
        pl.Series(name, [text and restored(text) for text in frame[name]]) for name in odd
    ).lazy()
