"""Datasets as polars frames: `ajet.dataset.read(path)`.

import ajet, polars as pl

ajet.dataset.read("tasks.jsonl").filter(pl.col("metadata").struct["level"] >= 2).collect(engine="streaming")
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ajet_sdk.errors import TaskError
from ajet_tools.dataset.files.delimited import dialect_of
from ajet_tools.dataset.files.sources import files_of, is_table
from ajet_tools.dataset.files.tables import is_lines
from ajet_tools.dataset.files.tables import read as rows_of

if TYPE_CHECKING:
    import polars as pl

__all__ = ["column", "read"]


def read(path: str | Path, *, mapping: Mapping[str, str] | None = None) -> pl.LazyFrame:
    """The rows of a dataset as a lazy frame: nothing is read before `collect` or a sink, but to find the columns.

    Args:
        path: a file (JSON lines, JSON, CSV, TSV, Parquet, Arrow IPC; `.gz`), a pattern such as `data/*.parquet`, a
            directory (its split train; `DIR:NAME` is another), or `-` for stdin.
        mapping: column -> main_query, init_messages, task_id, env_type or metadata.NAME; the column is renamed.

    Types are those of the file. Cells of CSV stay text. In JSON a column of several types is text: each value as JSON,
    and numbers of several kinds are floats. Raises TaskError, with file and line, for a row that cannot be read, and
    ConfigError where there is no such file.
    """
    import polars as pl

    frames = [_scan(file, mapping) for file in files_of(path)]
    return frames[0] if len(frames) == 1 else pl.concat(frames, how="diagonal_relaxed")


@contextmanager
def _explain_errors(what: str) -> Iterator[None]:
    """An error of polars as a TaskError in one line."""
    import polars as pl

    try:
        yield
    except pl.exceptions.PolarsError as error:
        raise TaskError(f"{what}: {str(error).partition(chr(10))[0]}") from error


def _scan(file: Path | str, mapping: Mapping[str, str] | None) -> pl.LazyFrame:
    import polars as pl

    if mapping or not isinstance(file, Path):
        return _from_rows(file, mapping)
    with _explain_errors(f"cannot read {file}"):
        if file.name.endswith(".parquet"):
            return pl.scan_parquet(file)
        if is_table(file):
            try:
                found = pl.scan_ipc(file)
                found.collect_schema()
                return found
            except pl.exceptions.PolarsError:  # the stream format
                return pl.read_ipc_stream(file).lazy()
        if file.name.endswith((".csv", ".tsv")):
            delimiter, quote = dialect_of(file)
            return pl.scan_csv(file, separator=delimiter, quote_char=quote, infer_schema=False)
    if is_lines(file):
        found = pl.scan_ndjson(file, infer_schema_length=None)
        try:
            found.collect_schema()
            return found
        except pl.exceptions.PolarsError:  # values of several types, or a bad row
            pass
    return _from_rows(file, mapping)


def _from_rows(file: Path | str, mapping: Mapping[str, str] | None) -> pl.LazyFrame:
    """Rows that are read one by one, in memory."""
    import polars as pl

    rows = [row.values for row in rows_of(file, mapping=mapping)]
    names = dict.fromkeys(name for values in rows for name in values)
    return pl.DataFrame([column(name, [values.get(name) for values in rows]) for name in names]).lazy()


def column(name: str, values: list[Any]) -> pl.Series:
    """Values as JSON has them, as a series: of their type, or as the JSON text of each where they have several."""
    import polars as pl

    kinds = {type(value) for value in values} - {type(None)}
    if len(kinds) == 1:
        try:
            found = pl.Series(name, values, strict=True)
            if _same(found.to_list(), values):
                return found
        except (TypeError, OverflowError, pl.exceptions.PolarsError):
            pass
    elif kinds == {int, float}:
        return pl.Series(name, values, pl.Float64, strict=False)
    made = [None if value is None else json.dumps(value, ensure_ascii=False) for value in values]
    return pl.Series(name, made, pl.String)


def _same(found: list[Any], values: list[Any]) -> bool:
    """But for keys that are null where a value lacks them."""
    return all(map(_equal, found, values))


def _equal(found: Any, value: Any) -> bool:
    if isinstance(found, dict) and isinstance(value, dict):
        return all(_equal(inner, value.get(name)) for name, inner in found.items())
    if isinstance(found, list) and isinstance(value, list):
        return len(found) == len(value) and all(map(_equal, found, value))
    return type(found) is type(value) and bool(found == value)
