"""Datasets as polars frames: `ajet.dataset.read(path)`.

import ajet, polars as pl

ajet.dataset.read("tasks.jsonl").filter(pl.col("metadata").struct["level"] >=
2).collect(engine="streaming")
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import cast

import polars as pl
from polars.datatypes import DataTypeClass

from ajet_sdk.errors import TaskError
from ajet_tools.dataset.files.blocks import encodable, json_line
from ajet_tools.dataset.files.delimited import count_regular, dialect_of
from ajet_tools.dataset.files.lines import HALF_PAIR
from ajet_tools.dataset.files.sources import columns_of, explain_errors, is_table, open_text
from ajet_tools.dataset.files.tables import is_lines, schema_of
from ajet_tools.dataset.files.tables import read as rows_of

_BYTES = 4 << 20
_HALF_PAIR = re.compile(HALF_PAIR.pattern.encode())
PolarsType = pl.DataType | DataTypeClass
_FIRST = 1000
"""Rows that determine the order of columns."""


def read(path: str | Path, *, mapping: Mapping[str, str] | None = None) -> pl.LazyFrame:
    """Returns a dataset as a lazy frame; before `collect` or a sink, reads only what it needs to
    find the columns.

    Args:
        path: a file (JSON lines, JSON, CSV, TSV, Parquet, Arrow IPC; `.gz`), a pattern such as `data/*.parquet`, a
            directory (its split train; `DIR:NAME` is another), or `-` for stdin.
        mapping: column -> main_query, init_messages, task_id, env_type or metadata.NAME; the column is renamed.

    Types are those of the file; decimals of more than 38 digits are text. CSV cells stay text, also
    empty ones. In JSON, a column of mixed types is text with each value as JSON; mixed numbers are
    floats. Raises TaskError, with file and line, for a row that cannot be read, and ConfigError if
    there is no such file.
    """
    return _from_rows(path, mapping) if mapping else _frame(path)


def types_of(path: str | Path) -> pl.Schema:
    """Returns the columns of `read` without scanning the texts."""
    return _frame(path, texts=False).collect_schema()


def _frame(path: str | Path, *, texts: bool = True) -> pl.LazyFrame:
    frames = [
        _with_columns(_scan(file, texts=texts), more) for file, more in columns_of(path).items()
    ]
    return frames[0] if len(frames) == 1 else pl.concat(frames, how="diagonal_relaxed")


def _with_columns(frame: pl.LazyFrame, values: Mapping[str, object]) -> pl.LazyFrame:
    names = frame.collect_schema().names() if values else []
    types = {int: pl.Int64, str: pl.String}
    more = {name: value for name, value in values.items() if name not in names}
    return frame.with_columns(
        pl.lit(value, types.get(type(value))).alias(name) for name, value in more.items()
    )


def _scan(file: Path | str, *, texts: bool) -> pl.LazyFrame:
    if not isinstance(file, Path):
        return _from_rows(file)
    with explain_errors(file):
        frame = (
            _scan_table(file)
            if is_table(file) and "decimal256" not in str(schema_of(file))
            else None
        )
        if frame is not None:
            frame.collect_schema()
            return frame
    # reading by rows handles mixed types and names a bad row
    with suppress(pl.exceptions.PolarsError, RecursionError):
        if file.name.endswith((".csv", ".tsv")):
            frame = _scan_csv(file)
        elif is_lines(file):
            frame = _scan_lines(file, texts=texts)
    return _from_rows(file) if frame is None else frame


def _scan_table(file: Path) -> pl.LazyFrame:
    if file.name.endswith(".parquet"):
        return pl.scan_parquet(file)
    try:
        frame = pl.scan_ipc(file)
        frame.collect_schema()
        return frame
    except pl.exceptions.PolarsError:  # stream format
        return pl.read_ipc_stream(file).lazy()


def _scan_csv(file: Path) -> pl.LazyFrame | None:
    """None where polars has other rows than Python's csv: it makes up cells. Raises PolarsError."""
    delimiter, quote = dialect_of(file)
    frame = pl.scan_csv(
        file, separator=delimiter, quote_char=quote, infer_schema=False, empty_string_is_null=False
    )
    rows = frame.select(pl.last().len()).collect(engine="streaming").item()
    return frame if rows == count_regular(file, delimiter, quote) else None


def _scan_lines(file: Path, *, texts: bool) -> pl.LazyFrame | None:
    """None where polars would change one of the texts. Raises PolarsError where columns have
    several types."""
    if texts and _has_half_pair(file):
        return None
    schema = pl.scan_ndjson(file, infer_schema_length=None).collect_schema()
    first = [row.values for row in islice(rows_of(file), _FIRST)]
    return pl.scan_ndjson(
        file, schema=cast(pl.Struct, _in_order(pl.Struct(schema), first)).to_schema()
    )


def _has_half_pair(file: Path) -> bool:
    with open_text(file) as stream:
        while some := stream.read(_BYTES):
            some += stream.readline()
            if (
                b"\\" in some and b"\\u" in some and _HALF_PAIR.search(some)
            ):  # the first test is the fastest
                return True
    return False


def _in_order(dtype: PolarsType, values: Sequence[object]) -> PolarsType:
    """Orders the fields of a type as the values have them; polars may shuffle many fields."""
    if isinstance(dtype, pl.List):
        return pl.List(
            _in_order(
                dtype.inner, [item for value in values if isinstance(value, list) for item in value]
            )
        )
    if not isinstance(dtype, pl.Struct):
        return dtype
    objects = [value for value in values if isinstance(value, dict)]
    places = {
        name: place
        for place, name in enumerate(dict.fromkeys(name for member in objects for name in member))
    }
    fields = sorted(
        dtype.fields, key=lambda field: (places.get(field.name, len(places)), field.name)
    )
    return pl.Struct(
        {f.name: _in_order(f.dtype, [some.get(f.name) for some in objects]) for f in fields}
    )


def _from_rows(file: Path | str, mapping: Mapping[str, str] | None = None) -> pl.LazyFrame:
    rows = [row.values for row in rows_of(file, mapping=mapping)]
    names = dict.fromkeys(name for values in rows for name in values)
    return pl.DataFrame(
        [column(encodable(name), [values.get(name) for values in rows]) for name in names]
    ).lazy()


def column(name: str, values: Sequence[object]) -> pl.Series:
    """Converts JSON values to a series: of their type, or as JSON text if they have several
    types."""
    kinds = {type(value) for value in values} - {type(None)}
    if len(kinds) == 1:
        try:
            series = pl.Series(name, values, strict=True)
            if all(map(_equal, series.to_list(), values)):
                return series
        except (
            TypeError,
            OverflowError,
            UnicodeEncodeError,
            RecursionError,
            pl.exceptions.PolarsError,
        ):
            pass
    elif kinds == {int, float}:
        return pl.Series(name, values, pl.Float64, strict=False)
    try:
        texts = [None if value is None else json_line(value)[:-1].decode() for value in values]
        return pl.Series(name, texts, pl.String)
    except ValueError as error:
        raise TaskError(
            f"{name} has a number that is greater than any float, such as 1e400"
        ) from error


def _equal(actual: object, value: object) -> bool:
    """Compares values; a null field equals a missing one."""
    if isinstance(actual, dict) and isinstance(value, dict):
        return all(_equal(inner, value.get(name)) for name, inner in actual.items())
    if isinstance(actual, list) and isinstance(value, list):
        return len(actual) == len(value) and all(map(_equal, actual, value))
    return type(actual) is type(value) and bool(actual == value)
