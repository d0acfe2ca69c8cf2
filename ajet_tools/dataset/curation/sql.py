"""SQL over the rows of a dataset (DuckDB): a WHERE condition, or any SELECT.

What is derived from a text is a function: `chars(main_query) < 500`,
`language(metadata.answer) = 'en'`. In a WHERE, what is derived from the row's question is a column
too (`text`, `chars`, `words`, `language`), and `has('text')` searches it; a text without any
operator is searched for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa

from ajet_sdk.errors import ConfigError
from ajet_sdk.tasks.row_names import QUERY_COLUMNS, is_asking
from ajet_tools.dataset.curation.descent import held_out_block, hides_held_out
from ajet_tools.dataset.curation.fields import unknown_field
from ajet_tools.dataset.curation.language import language_of
from ajet_tools.dataset.files.blocks import Block, Irregular, TableBlock
from ajet_tools.dataset.files.frames import column, read, types_of
from ajet_tools.dataset.files.places import Columns, Place, merged
from ajet_tools.dataset.files.sources import files_of
from ajet_tools.dataset.files.tables import tables_of
from ajet_tools.dataset.files.writer import Writer
from ajet_tools.text.conditions import condition, literal

_ROWS = 8192
_QUOTED = re.compile(r"'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"")
_DERIVED = ("text", "chars", "words", "language")
_MACROS = {
    "text": "CAST(x AS VARCHAR)",
    "chars": "length(x)",
    "words": r"len(regexp_extract_all(x, '\S+'))",
}
_ROW = "row of ajet"
_LIST = re.compile(r"\s*select\s+(?:distinct\s+)?(.+?)\s+from\s+(?:rows|self)\b", re.I | re.S)
_ALL = re.compile(r"\*(?:$|\s+exclude\b)", re.I)
_COUNT = re.compile(r"\bcount\s*\(\s*\*\s*\)", re.I)
_NESTS = re.compile(r"\b(?:join|union|except|intersect)\b|\(\s*select\b", re.I)
_MISSING = re.compile(
    r'Referenced (?:column|table) "([^"]+)" not found|Could not find key "([^"]+)" in struct'
)


def _connect(path: Path | None = None) -> Any:
    """Opens a database with our functions, in memory or in a file."""
    import duckdb

    def languages(some: pa.Array) -> pa.Array:
        return pa.array(
            [None if text is None else language_of(text) for text in some.to_pylist()], pa.string()
        )

    connection = duckdb.connect(
        str(path or ":memory:"), config={"threads": 1, "memory_limit": "1GB"}
    )
    for name, meaning in _MACROS.items():
        connection.execute(f"CREATE MACRO {name}(x) AS {meaning}")
    connection.create_function("language", languages, ["VARCHAR"], "VARCHAR", type="arrow")
    return connection


def _has(needle: str) -> str:
    return f"contains(lower(text), lower({literal(needle)}))"


class Where:
    """A SQL condition on the columns of a dataset."""

    def __init__(self, text: str, path: str) -> None:
        """`path` is the dataset whose columns are used. Raises ConfigError for an invalid
        condition."""
        self.text = text
        schema = types_of(path)
        columns = {name.casefold() for name in schema} | {*_DERIVED}
        self._sql = condition(text, {"has": _has}, columns)
        self._names = [*_paths(schema), *_DERIVED]
        self._wanted = _named(pl.Struct(schema), self._sql.casefold()) or pl.Struct(
            {"task_id": pl.String}
        )
        self._asks_text = re.search(rf"\b(?:{'|'.join(_DERIVED)})\b", self._sql, re.I) is not None
        self._connection = _connect()
        empty = pl.Schema({field.name: field.dtype for field in self._wanted.fields}).to_frame(
            eager=True
        )
        with _explain(text, self._names):
            [kind] = self._rows(empty, pl.Series([], dtype=pl.String)).project(self._sql).types
        if str(kind) not in ("BOOLEAN", '"NULL"'):
            raise ConfigError(
                f"{text!r} is not a condition: its result is {kind}, not true or false"
            )

    def mask(self, block: Block) -> npt.NDArray[np.bool_]:
        """Marks the matching rows of a block."""
        try:
            frame = block.frame(self._wanted)
        except Irregular:  # values of several types
            rows, fields = [row.values for row in block.rows()], self._wanted.fields
            columns = (
                column(field.name, [values.get(field.name) for values in rows]) for field in fields
            )
            frame = pl.DataFrame(
                [c.cast(f.dtype, strict=False) for c, f in zip(columns, fields, strict=True)]
            )
        fits = np.zeros(len(block), bool)
        with _explain(self.text, self._names):
            rows = self._rows(frame, block.texts if self._asks_text else None).filter(self._sql)
            fits[rows.project(f'"{_ROW}"').to_arrow_table().column(0).to_numpy()] = True
        return fits

    def _rows(self, frame: pl.DataFrame, texts: pl.Series | None) -> Any:
        """Returns the columns, derived columns and row numbers."""
        known = {name.casefold() for name in frame.columns}
        more = [] if texts is None or "text" in known else [texts.alias("text")]
        rows = self._connection.from_arrow(_as_arrow(frame.with_columns(more).with_row_index(_ROW)))
        derived = [f"{name}(text) AS {name}" for name in _DERIVED[1:] if more and name not in known]
        return rows.project(", ".join(["*", *derived]))


def _named(dtype: pl.Struct, text: str) -> pl.Struct | None:
    """Returns the struct type with the fields that a text mentions, or None."""
    fields = {
        member.name: member.dtype for member in dtype.fields if member.name.casefold() in text
    }
    inner = {
        name: _named(member, text) or member if isinstance(member, pl.Struct) else member
        for name, member in fields.items()
    }
    return pl.Struct(inner) if inner else None


def _paths(schema: Mapping[str, object], before: str = "") -> Iterator[str]:
    for name, dtype in schema.items():
        yield before + name
        if isinstance(dtype, pl.Struct):
            yield from _paths(dtype.to_schema(), f"{before}{name}.")


def _as_arrow(frame: pl.DataFrame) -> pa.Table:
    """Converts a frame to types that DuckDB supports. Raises ConfigError if two names differ in
    case only."""
    names = {name.casefold(): name for name in frame.columns}
    if twice := [name for name in frame.columns if names[name.casefold()] != name]:
        raise ConfigError(
            f"SQL has a single column for {twice[0]!r} and {names[twice[0].casefold()]!r} (use"
            " --map)"
        )
    fitting = frame.cast(
        {name: _fitting(kind) for name, kind in frame.schema.items() if _fitting(kind) != kind}
    )
    return fitting.to_arrow(compat_level=pl.CompatLevel.oldest())


def _fitting(kind: Any) -> Any:
    if isinstance(kind, pl.Struct):
        return pl.Struct({member.name: _fitting(member.dtype) for member in kind.fields})
    if isinstance(kind, pl.List):
        return pl.List(_fitting(kind.inner))
    return (
        pl.Decimal(38, 0)
        if kind in (pl.Int128, pl.UInt128)
        else pl.Float32
        if kind == pl.Float16
        else kind
    )


@contextmanager
def _explain(text: str, names: Sequence[str]) -> Iterator[None]:
    """Converts errors of DuckDB and polars to a ConfigError that names the nearest column."""
    import duckdb

    try:
        yield
    except (duckdb.Error, pl.exceptions.PolarsError) as error:
        message = str(error).partition("\n")[0]
        if missing := _MISSING.search(message):
            name = missing[1] or missing[2]
            raise unknown_field(name, names) from error
        raise ConfigError(
            f"cannot evaluate {text!r}: {message.partition(': ')[2] or message}"
        ) from error


def select(query: str, path: str, out: str) -> int:
    """Writes the result of a SELECT over the rows of a file, the table `rows` or `self`, and
    returns the number of rows.

    Columns that are selected unchanged keep their type and metadata. Raises ConfigError.
    """
    frame = read(path)
    schema = frame.collect_schema()
    if re.match(r"[\s(]*(?:select|with)\b", query, re.I) is None:
        raise ConfigError(f"--sql takes a SELECT over `rows` (got {query!r})")
    names = [name for name in schema if name.casefold() in query.casefold()] or schema.names()[:1]
    if "*" in _COUNT.sub("", query):
        names = schema.names()
    with (
        _explain(query, [*_paths(schema)]),
        TemporaryDirectory() as folder,
        _connect(Path(folder, "rows.duckdb")) as database,
    ):
        frame = frame.select(names)
        parts = map(_as_arrow, frame.collect_batches(chunk_size=_ROWS, maintain_order=True))
        empty = _as_arrow(frame.collect_schema().to_frame(eager=True))
        batches = (batch for part in parts for batch in part.to_batches())
        database.from_arrow(pa.RecordBatchReader.from_batches(empty.schema, batches)).create("rows")
        database.execute("CREATE VIEW self AS FROM rows")
        database.execute(f"CREATE TABLE result AS {query.rstrip().rstrip(';')}")
        result, wide = _plain(database.table("result"))
        columns = _columns(query, path, result.limit(0).to_arrow_table().schema, wide)
        with Writer(out, tables=[columns]) as writer:
            for batch in result.to_arrow_reader(_ROWS):
                arrays = [
                    array.cast(field.type)
                    for array, field in zip(batch, columns.schema, strict=True)
                ]
                data = pa.RecordBatch.from_arrays(arrays, schema=columns.schema)
                block: Block = TableBlock(path, columns, data)
                # A count or a mean asks nothing, and has no lineage.
                hides = any(map(_asks, columns.schema.names)) and hides_held_out(path, out)
                writer.write_block(held_out_block(block) if hides else block)
    return writer.rows


def _asks(name: str) -> bool:
    return name in QUERY_COLUMNS or is_asking(name)


def _plain(relation: Any) -> tuple[Any, set[str]]:
    """Converts a result to supported types; also returns the columns of integers beyond 64 bits,
    which become text."""
    kinds, wide = list[str](), set[str]()
    for name, kind in zip(relation.columns, map(str, relation.types), strict=True):
        quoted = '"' + name.replace('"', '""') + '"'
        if kind in ("HUGEINT", "UHUGEINT", "DECIMAL(38,0)"):
            fits = relation.aggregate(
                f"coalesce(bool_and({quoted} BETWEEN {-(1 << 63)} AND {(1 << 63) - 1}), true)"
            )
            kind = "BIGINT" if fits.fetchall()[0][0] else "VARCHAR"
            wide |= {name} if kind == "VARCHAR" else set()
        elif kind in ("INTERVAL", "BIT", "BIGNUM"):
            kind = "VARCHAR"
        kinds.append(
            f"CAST({quoted} AS {kind}) AS {quoted}" if kind in ("BIGINT", "VARCHAR") else quoted
        )
    return relation.project(", ".join(kinds)), wide


def _columns(query: str, path: str, result_schema: pa.Schema, wide: set[str]) -> Columns:
    """Returns the columns of a result; unchanged columns keep their declaration in the source."""
    columns, tables = Columns.of(path, result_schema), tables_of(path)
    fields = {
        name: Place(json=True) if name in wide else place for name, place in columns.fields.items()
    }
    source = (
        merged(tables)
        if tables and len(tables) == len(files_of(path))
        else Columns.of(path, pa.schema([]))
    )
    for name in _unchanged(query, source.fields) & fields.keys():
        try:
            pa.array([], fields[name].type).cast(source.fields[name].type)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            continue
        fields[name] = source.fields[name]
    has_unchanged = any(place is source.fields.get(name) for name, place in fields.items())
    return Columns(
        path, replace(columns.row, fields=fields), source.metadata if has_unchanged else {}
    )


def _unchanged(query: str, names: Iterable[str]) -> set[str]:
    """Returns the columns that a plain SELECT returns unchanged, by `*` or by name."""
    blank = _QUOTED.sub(lambda match: "x" * len(match[0]), query)
    listed = _LIST.match(blank)
    if listed is None or _NESTS.search(blank):
        return set()
    start, end = listed.span(1)
    cuts = [start, *(start + match.start() for match in re.finditer(",", listed[1])), end]
    plain = {query[cut:next_cut].strip(", \n\t").strip('"`') for cut, next_cut in pairwise(cuts)}
    everything = any(_ALL.match(item) for item in plain) and not re.search(
        r"\b(?:replace|rename)\b", blank, re.I
    )
    return set(names) if everything else plain & set(names)
