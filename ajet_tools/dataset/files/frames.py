"""Datasets as polars frames: `ajet.dataset.read(path)`.

import ajet, polars as pl

ajet.dataset.read("tasks.jsonl").filter(pl.col("metadata").struct["level"] >=
2).collect(engine="streaming")
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import polars as pl
import pyarrow as pa

from ajet_tools.dataset.files.columns import JSON, LINE, LINES
from ajet_tools.dataset.files.json_columns import (
    MARK,
    encoded,
    shapes_of,
    table_of,
)
from ajet_tools.dataset.files.rows import Rows, schema_of
from ajet_tools.dataset.files.sources import explain_errors, is_table


def read(path: str | Path, *, mapping: Mapping[str, str] | None = None) -> pl.LazyFrame:
    """Returns a dataset as a lazy frame. Parquet and Arrow are read when it is collected, all
    other files at once.

    Args:
        path: a file (JSON lines, JSON, CSV, TSV, Parquet, Arrow IPC; `.gz`), a pattern such as
            `data/*.parquet`, a directory (its split train; `DIR:NAME` is another), or `-` for stdin.
        mapping: column -> main_query, init_messages, task_id, env_type or metadata.NAME; the
            column is renamed.

    Types are those of the file; decimals of more than 38 digits are text. CSV cells stay text, also
    empty ones. In JSON, a column of mixed types is text with each value as JSON; mixed numbers are
    floats; half of a surrogate pair is its escape. Raises TaskError, with file and line, for a row
    that cannot be read, and ConfigError if there is no such file.
    """
    rows = Rows(path, mapping=mapping)
    if mapping or not all(isinstance(file, Path) and _has_frame(file) for file in rows.files):
        return _frame_of_rows(rows)
    frames = []
    for file, more in rows.files.items():
        frame = _scan(Path(file))
        names = frame.collect_schema().names()
        types = {int: pl.Int64, str: pl.String}
        for name, value in more.items():
            if name not in names:
                frame = frame.with_columns(pl.lit(value, types.get(type(value))).alias(name))
        frames.append(frame)
    return pl.concat(frames, how="diagonal_relaxed")


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
            if file.name.endswith(".parquet"):
                frame = pl.scan_parquet(file)
            else:
                frame = pl.scan_ipc(file)
            frame.collect_schema()
            return frame
        except pl.exceptions.PolarsError:
            if file.name.endswith(".parquet"):
                raise
            return pl.read_ipc_stream(file).lazy()


def _frame_of_rows(rows: Rows) -> pl.LazyFrame:
    blocks = [block.fitted(LINES).data.column(LINE) for block in rows.blocks()]
    if blocks:
        lines = encoded(pa.concat_arrays(blocks))
    else:
        lines = pa.array([], pa.string())
    shapes = shapes_of(lines, exact=False)
    columns = zip(shapes, table_of(lines, shapes), strict=True)
    frame = pl.DataFrame({name: pl.from_arrow(array) for name, array in columns})
    texts = [name for name, kind in frame.schema.items() if kind == pl.String]
    return frame.with_columns(pl.col(texts).str.replace_all(MARK, "\\u", literal=True)).lazy()
