"""SQL over the rows of a dataset (DuckDB): a WHERE condition, or any SELECT.

What is derived from a text is a function: `chars(main_query) < 500`,
`language(metadata.answer) = 'en'`. In a WHERE, what is derived from the row's question is a column
too (`text`, `chars`, `words`, `language`), and `has('text')` searches it; a text without any
operator is searched for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import reduce
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa

from ajet_sdk.errors import ConfigError
from ajet_sdk.tasks.row_names import is_asking
from ajet_tools.dataset.curation.descent import held_out_block, hides_held_out
from ajet_tools.dataset.curation.fields import unknown_field
from ajet_tools.dataset.curation.language import language_of
from ajet_tools.dataset.files.arrays import batch_of, new_column
from ajet_tools.dataset.files.blocks import Block, TableBlock, encodable
from ajet_tools.dataset.files.columns import JSON, Columns, Shape, merged
from ajet_tools.dataset.files.json_columns import has_private, json_array, with_halves
from ajet_tools.dataset.files.query_tables import QueryTables, stored_column
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
        self._tables = QueryTables.of_path(path, text.casefold())
        columns = {name.casefold() for name in self._tables.schema.names} | {*_DERIVED}
        self._sql = condition(text, {"has": _has}, columns)
        self._asks_text = re.search(rf"\b(?:{'|'.join(_DERIVED)})\b", self._sql, re.I) is not None
        self._connection = _connect()
        with self._explain():
            [kind] = self._rows(self._empty(), 0, []).project(self._sql).types
        if str(kind) not in ("BOOLEAN", '"NULL"'):
            raise ConfigError(
                f"{text!r} is not a condition: its result is {kind}, not true or false"
            )

    def matching(self, block: Block) -> list[int]:
        """Returns the indices of the matching rows of a block."""
        with self._explain():
            columns = self._tables.columns(block)
            texts = block.texts if self._asks_text else []
            rows = self._rows(columns, len(block), texts).filter(self._sql)
            numbers = rows.project(f'"{_ROW}"').order(f'"{_ROW}"').to_arrow_table()
            return numbers.column(0).to_pylist()  # type: ignore[no-any-return]

    def _empty(self) -> list[pa.Array]:
        return [pa.array([], column.type) for column in self._tables.schema]

    def _rows(self, columns: Sequence[pa.Array], count: int, texts: Sequence[str]) -> Any:
        """Returns the columns, derived columns and row numbers."""
        known = {name.casefold() for name in self._tables.schema.names}
        table = pa.table({_ROW: pa.array(range(count), pa.int64())})
        for column, values in zip(self._tables.schema, columns, strict=True):
            table = table.append_column(column, values)
        derived = []
        if self._asks_text and "text" not in known:
            table = table.append_column("text", pa.array(map(encodable, texts), pa.string()))
            derived = [f"{name}(text) AS {name}" for name in _DERIVED[1:] if name not in known]
        return self._connection.from_arrow(table).project(", ".join(["*", *derived]))

    def _explain(self) -> AbstractContextManager[None]:
        return _explain(self.text, lambda: [*self._tables.paths(), *_DERIVED])


@contextmanager
def _explain(text: str, names: Callable[[], Sequence[str]]) -> Iterator[None]:
    """Converts errors of DuckDB and Arrow to a ConfigError that names the nearest column."""
    import duckdb

    try:
        yield
    except (duckdb.Error, pa.ArrowException) as error:
        message = str(error).partition("\n")[0]
        if missing := _MISSING.search(message):
            raise unknown_field(missing[1] or missing[2], names()) from error
        raise ConfigError(
            f"cannot evaluate {text!r}: {message.partition(': ')[2] or message}"
        ) from error


def select(query: str, path: str, out: str) -> int:
    """Writes the result of a SELECT over the rows of a file, the table `rows` or `self`, and
    returns the number of rows.

    Columns that are selected unchanged keep their type and metadata. Raises ConfigError.
    """
    if re.match(r"[\s(]*(?:select|with)\b", query, re.I) is None:
        raise ConfigError(f"--sql takes a SELECT over `rows` (got {query!r})")
    is_all = "*" in _COUNT.sub("", query)
    tables = QueryTables.of_path(path, None if is_all else query.casefold(), raw=True)
    with (
        _explain(query, tables.paths),
        TemporaryDirectory() as folder,
        _connect(Path(folder, "rows.duckdb")) as database,
    ):
        reader = pa.RecordBatchReader.from_batches(tables.schema, tables.batches())
        database.from_arrow(reader).create("rows")
        database.execute("CREATE VIEW self AS FROM rows")
        database.execute(f"CREATE TABLE result AS {query.rstrip().rstrip(';')}")
        result, wide = _plain(database.table("result"))
        json_names = {name for name, shape in tables.shapes.items() if shape.is_json}
        wide |= _unchanged(query, json_names)
        schema = result.limit(0).to_arrow_table().schema
        columns = _columns(query, path, schema, json=wide, read_as_json=tables.shapes)
        no_rows = pa.RecordBatch.from_pylist([], schema)
        hides = any(map(is_asking, result.columns)) and hides_held_out(path, out)
        with Writer(out, tables=[_result_block(no_rows, columns).table]) as writer:
            for batch in result.to_arrow_reader(_ROWS):
                block = _result_block(batch, columns)
                # A count or a mean asks nothing, and has no lineage.
                writer.write_block(held_out_block(block) if hides else block)
    return writer.rows


def _result_block(batch: pa.RecordBatch, columns: Columns) -> TableBlock:
    arrays = []
    shapes = {}
    for array, (name, shape) in zip(batch.columns, columns.shapes.items(), strict=True):
        stored = stored_column(name, array)
        if stored is not None:
            column, shape = stored
        elif shape.is_json:
            column = json_array(array, name)
        elif has_private(array):
            texts = [text and with_halves(text) for text in array.to_pylist()]
            column, shape = new_column(name, texts)
        else:
            column = array.cast(shape.type)
        arrays.append(column)
        shapes[name] = shape
    data, table = batch_of(arrays, Columns(columns.name, shapes, columns.metadata), len(batch))
    return TableBlock(columns.name, table, data)


def _plain(relation: Any) -> tuple[Any, set[str]]:
    """Converts a result to supported types; also returns the columns of JSON, and of integers
    beyond 64 bits, which become text."""
    kinds = []
    wide = set[str]()
    for name, kind in zip(relation.columns, map(str, relation.types), strict=True):
        quoted = '"' + name.replace('"', '""') + '"'
        if kind in ("HUGEINT", "UHUGEINT", "DECIMAL(38,0)"):
            fits = relation.aggregate(
                f"coalesce(bool_and({quoted} BETWEEN {-(1 << 63)} AND {(1 << 63) - 1}), true)"
            )
            kind = "BIGINT" if fits.fetchall()[0][0] else "VARCHAR"
            wide |= {name} if kind == "VARCHAR" else set()
        elif kind == "JSON":
            wide.add(name)
        elif kind in ("INTERVAL", "BIT", "BIGNUM"):
            kind = "VARCHAR"
        kinds.append(
            f"CAST({quoted} AS {kind}) AS {quoted}" if kind in ("BIGINT", "VARCHAR") else quoted
        )
    return relation.project(", ".join(kinds)), wide


def _columns(
    query: str,
    path: str,
    result_schema: pa.Schema,
    *,
    json: Collection[str],
    read_as_json: Collection[str],
) -> Columns:
    """Returns the columns of a result; unchanged columns keep their declaration in the source."""
    columns = Columns.of_schema(path, result_schema)
    tables = tables_of(path)
    shapes = {
        name: Shape(JSON) if name in json else shape for name, shape in columns.shapes.items()
    }
    is_typed = tables and len(tables) == len(files_of(path))
    source = reduce(merged, tables) if is_typed else Columns(path, {})
    unchanged = _unchanged(query, source.shapes) & shapes.keys()
    for name in unchanged.difference(read_as_json):
        try:
            pa.array([], shapes[name].type).cast(source.shapes[name].type)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            continue
        shapes[name] = source.shapes[name]
    has_unchanged = any(shape is source.shapes.get(name) for name, shape in shapes.items())
    return Columns(path, shapes, source.metadata if has_unchanged else {})


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
